"""The application before all routes, as pure ASGI: it checks callers, bounds requests and writes
errors.

Every path needs a key (where there are any) but the probes and the page.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from time import monotonic
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.http.access_log import GONE, AccessRecord
from actorium.actors.gateway.http.api_keys import Keys, shown
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, http_error
from actorium.actors.gateway.http.request_task import AnswerSender, in_journal, until_disconnected
from actorium.actors.gateway.http.routes import Access, ErrorStyle, allowed_methods, canonical, find
from actorium.actors.gateway.served_engine import ServedEngine
from actorium.actors.runtime.http.allowed_hosts import AllowedHosts, check_head
from actorium.actors.runtime.http.http_server import OVER_LIMIT

CLOSING = frozenset({"too_many_connections", "unsupported_framing"})
"""Codes of refusals after which a connection is of no use."""
_NOSNIFF = (b"x-content-type-options", b"nosniff")
Headers = list[tuple[bytes, bytes]]
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class HttpExchange:
    """One request and the state of its answer."""

    __slots__ = ("answer", "began", "call", "given_id", "headers", "request_id", "route", "scope",
                 "stayed", "tenant")

    def __init__(self, engine: ServedEngine, scope: Scope, send: Send) -> None:
        self.scope = scope
        scope["path"] = canonical(scope["path"])
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.route = find(scope["path"])
        self.answer = AnswerSender(send)
        self.call = EngineCall(engine)
        """A call of the gateway itself until the caller is admitted."""
        self.given_id = _request_id(self.headers.get(b"x-request-id", b""))
        self.tenant = ""
        self.stayed = True
        """The caller waited for the answer."""
        self.began = monotonic()
        self.answer.headers.append((b"x-request-id", b""))
        self.identify(self.given_id or os.urandom(12).hex())

    def identify(self, request_id: str) -> None:
        """Sets the id that the answer, its errors and the log show."""
        self.request_id = request_id
        self.answer.headers[0] = b"x-request-id", request_id.encode()

    async def refuse(self, error: HttpError) -> None:
        """Answers with the error, unless an answer has begun."""
        if not self.answer.status:
            body = error.body() if self.route.errors is ErrorStyle.OPENAI \
                else error.anthropic_body(self.request_id)
            await self.answer.json(error.status, msgspec.json.encode(body), _headers_of(error))

    def record(self) -> AccessRecord:
        """Returns its line of the access log."""
        return AccessRecord(self.scope, self.route, self.answer.status or GONE, self.stayed,
                            self.request_id, self.tenant, self.call.usage, self.call.rids,
                            self.began)


class Guard:
    """The outermost application."""

    def __init__(self, app: ASGIApp, engine: ServedEngine,
                 hosts: AllowedHosts | None = None) -> None:
        """hosts: None = whoever calls has not come over a network. Raises `BadConfig`, naming the
        field."""
        self._app, self._engine, self._hosts = app, engine, hosts
        self._keys = Keys(engine.settings)
        self._cors = Cors(engine.settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        engine, exchange = self._engine, HttpExchange(self._engine, scope, send)
        exchange.answer.headers += [_NOSNIFF, *self._cors.headers(exchange.headers)]
        engine.requests += 1
        engine.open += 1
        try:
            self._check_head(scope)
            if self._cors.is_preflight(scope["method"], exchange.headers):
                await exchange.answer.no_content()
            else:
                self._admit(exchange)
                await self._serve(exchange, receive)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            await exchange.refuse(_refusal(exchange, error))
        finally:
            engine.calls.discard(exchange.call)
            engine.open -= 1
            engine.access.answered(exchange.record())

    def _admit(self, exchange: HttpExchange) -> None:
        """Checks the caller and gives the exchange its call. Raises `HttpError`."""
        scope, headers = exchange.scope, exchange.headers
        path, method = scope["path"], scope["method"]
        if OVER_LIMIT in scope:
            raise HttpError(503, "too many connections", None, SERVER, "too_many_connections")
        key = shown(scope["headers"])
        exchange.tenant = self._keys.check(path, key)
        if exchange.route.changes(method) and not self._keys.guard(path):
            self._cors.check(scope, headers)
        call = exchange.call = EngineCall(self._engine, headers, exchange.tenant, path,
                                          self._keys.is_admin(key))
        exchange.identify(exchange.given_id or call.resume_id)
        if not call.resumable:  # else the next connection may bring another id
            call.answer_id = exchange.request_id

    async def _serve(self, exchange: HttpExchange, receive: Receive) -> None:
        """Sends the route's answer. Raises what the route raises, and `HttpError`."""
        engine, route, call = self._engine, exchange.route, exchange.call
        engine.calls.add(call)
        exchange.scope["app"] = call  # also has the router raise what it refuses
        if engine.draining and route.access is not Access.OPEN:
            raise HttpError(503, "the engine is stopping", None, SERVER, "unavailable")
        if route.generates and call.position is None:
            await engine.gate.enter()
        exchange.stayed = await until_disconnected(
            in_journal(self._app, call), exchange.scope, receive, exchange.answer)
        if exchange.stayed:
            call.finished()

    def _check_head(self, scope: Scope) -> None:
        """Raises `HttpError` for other hosts, ambiguous framing and oversized headers."""
        if (wrong := check_head(scope, self._hosts)) is not None:
            raise HttpError(wrong.status, wrong.message, wrong.param, code=wrong.code)


def _headers_of(error: HttpError) -> Headers:
    headers: Headers = []
    if error.retry_after:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.code in CLOSING:
        headers.append((b"connection", b"close"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def _refusal(exchange: HttpExchange, error: BaseException) -> HttpError:
    """Returns the answer to an error, which ends the call unless there is no such route or the
    body is nested too deeply."""
    call = exchange.call
    if isinstance(error, ActoriumError):
        call.finished()
        return http_error(error, call.fields)
    if isinstance(error, HttpError):
        call.finished()
        return error
    if isinstance(error, HTTPException):
        return _router_refusal(exchange, error)
    if isinstance(error, RecursionError):
        return HttpError(400, "body: nested too deeply", code="invalid_json")
    return call.failed(error)


def _router_refusal(exchange: HttpExchange, error: HTTPException) -> HttpError:
    """Returns the error for an unknown path or a method that is not allowed."""
    scope, status = exchange.scope, error.status_code
    if status == 405:
        allowed = ", ".join(allowed_methods(scope["path"]))
        exchange.answer.headers.append((b"allow", allowed.encode()))
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    return HttpError(status, f"{scope['method'][:20]} {scope['path'][:200]}: {error.detail}",
                     code=code)


def _request_id(given: bytes) -> str:
    """Returns the caller's id, if it can be echoed; else an empty one."""
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else ""


_GRANTED: Headers = [
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"authorization, content-type, idempotency-key, "
                                      b"last-event-id, x-api-key, x-request-id"),
    (b"access-control-max-age", b"600")]


class Cors:
    """Cross-origin resource sharing (the Fetch standard), without credentials."""

    def __init__(self, origins: str) -> None:
        self._any = origins.strip() == "*"
        self._origins = {one.strip().rstrip("/").encode() for one in origins.split(",")} - {b""}

    def headers(self, request_headers: Mapping[bytes, bytes]) -> Headers:
        """Returns the headers of every answer to this request."""
        if not self._origins:
            return []
        origin = request_headers.get(b"origin", b"")
        granted: Headers = [] if self._any else [(b"vary", b"origin")]
        if origin and (self._any or origin in self._origins):
            granted += [(b"access-control-allow-origin", b"*" if self._any else origin),
                     (b"access-control-expose-headers",
                      b"x-request-id, retry-after, x-actorium-tools, x-actorium-passed-over")]
            if b"access-control-request-method" in request_headers:
                granted += _GRANTED
        return granted

    def check(self, scope: Mapping[str, Any], request_headers: Mapping[bytes, bytes]) -> None:
        """Raises `HttpError` 403 if the browser says that a page of another site asks: forms and
        simple `fetch` calls need no preflight, and take effect though the page cannot read the
        answer."""
        site = request_headers.get(b"sec-fetch-site", b"")
        origin = request_headers.get(b"origin", b"")
        if self._any or not (site or origin) or site in (b"same-origin", b"none"):
            return
        own = scope["scheme"].encode() + b"://" + request_headers.get(b"host", b"")
        if origin in self._origins or (not site and origin.lower() == own.lower()):
            return
        who = f" of {origin[:100].decode('latin-1')!r}" if origin else ""
        raise HttpError(403, f"origin: pages{who} may not call this server without a key; if they "
                        "are to, start it with --cors-origins ORIGIN", "origin",
                        code="origin_not_allowed")

    def is_preflight(self, method: str, request_headers: Mapping[bytes, bytes]) -> bool:
        """Returns whether the request is a preflight."""
        return (bool(self._origins) and method == "OPTIONS"
                and b"access-control-request-method" in request_headers)
