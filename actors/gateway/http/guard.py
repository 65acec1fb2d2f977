"""The application before all routes, as pure ASGI: it checks callers, bounds requests, writes
errors, cancels the work for clients that disconnect, and has each step of a request in the journal
of in-flight requests.

Every path needs a key (where there are any) but the probes and the page.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Coroutine, Mapping
from time import monotonic
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.batch.batch_lines import BATCH
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http import load_report
from actorium.actors.gateway.http.access_log import GONE, AccessRecord
from actorium.actors.gateway.http.answer_sender import AnswerSender
from actorium.actors.gateway.http.api_keys import Keys, shown
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, http_error
from actorium.actors.gateway.http.replies import DONE, json_line, sse_event
from actorium.actors.gateway.http.routes import (
    Access,
    ErrorStyle,
    allowed_methods,
    asks_an_engine,
    canonical,
    find,
)
from actorium.actors.runtime.http.allowed_hosts import AllowedHosts, check_head
from actorium.actors.runtime.http.http_connection import OVER_LIMIT, RECORD

WATCH_AFTER = 0.05
"""Seconds after which a connection is watched: for most faster requests watching would cost more
than the answer."""
CLOSING = frozenset({"too_many_connections", "unsupported_framing"})
"""Codes of refusals after which a connection is of no use."""
_NOSNIFF = (b"x-content-type-options", b"nosniff")
Headers = list[tuple[bytes, bytes]]
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class HttpExchange:
    """One request and the state of its answer."""

    __slots__ = ("answer", "began", "call", "given_id", "headers", "request_id", "route", "scope",
                 "stayed", "tenant")

    def __init__(self, gateway: GatewayState, scope: Scope, send: Send) -> None:
        self.scope = scope
        scope["path"] = canonical(scope["path"])
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.route = find(scope["path"])
        self.answer = AnswerSender(send, scope.get(RECORD), scope["method"] != "HEAD")
        self.call = EngineCall(gateway)
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
        if not self.answer.status or self.answer.only_comments:
            style = self.route.errors
            continued = self.answer.continued or self.answer.only_comments
            body = error.body_in(style, None if continued else self.request_id)
            if continued:
                self.answer.status = 200
                await self.answer.last_part(_last_event(body, style))
                return
            await self.answer.json(error.status, msgspec.json.encode(body), _headers_of(error))

    def record(self) -> AccessRecord:
        """Returns its line of the access log."""
        return AccessRecord(self.scope, self.route, self.answer.status or GONE, self.stayed,
                            self.request_id, self.tenant, self.call.usage, self.call.rids,
                            self.began)


class Guard:
    """The outermost application."""

    def __init__(self, app: ASGIApp, gateway: GatewayState,
                 hosts: AllowedHosts | None = None) -> None:
        """hosts: None = whoever calls has not come over a network. Raises `BadConfig`, naming the
        field."""
        self._app, self._gateway, self._hosts = app, gateway, hosts
        self._keys = Keys(gateway.settings)
        self._cors = Cors(gateway.settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        gateway, exchange = self._gateway, HttpExchange(self._gateway, scope, send)
        exchange.answer.headers += [_NOSNIFF, *self._cors.headers(exchange.headers)]
        gateway.requests += 1
        gateway.open += 1
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
            gateway.calls.discard(exchange.call)
            exchange.call.release()
            gateway.open -= 1
            record = exchange.record()
            gateway.access.answered(record)
            if gateway.traces is not None and (trace := exchange.call.trace) is not None:
                gateway.traces.end(trace, record, exchange.call.created, exchange.call.taken_over)

    def _admit(self, exchange: HttpExchange) -> None:
        """Checks the caller and gives the exchange its call. Raises `HttpError`."""
        scope, headers = exchange.scope, exchange.headers
        path, method = scope["path"], scope["method"]
        if OVER_LIMIT in scope:
            raise HttpError(503, "too many connections", None, SERVER, "too_many_connections")
        key, line = shown(scope["headers"]), scope.get(BATCH)
        exchange.tenant = self._keys.check(path, key) if line is None else line.tenant
        changes = exchange.route.changes(method) or self._starts_engine(scope)
        if changes and not self._keys.guard(path):
            self._cors.check(scope, headers)
        call = exchange.call = EngineCall(self._gateway, headers, exchange.tenant, path,
                                          self._keys.is_admin(key), scope.get(RECORD),
                                          None if line is None else line.seconds)
        if exchange.route.generates and (form := headers.get(load_report.ASKED)):
            exchange.answer.load = lambda: load_report.load_header(call, form)
        if self._gateway.traces is not None and exchange.route.generates:
            call.trace = self._gateway.traces.begin(headers, call.token)
        exchange.identify(exchange.given_id or call.resume_id)
        if not call.resumable:  # else the next connection may bring another id
            call.answer_id = exchange.request_id

    async def _serve(self, exchange: HttpExchange, receive: Receive) -> None:
        """Sends the route's answer. Raises what the route raises, and `HttpError`."""
        gateway, route, call = self._gateway, exchange.route, exchange.call
        gateway.calls.add(call)
        exchange.scope["app"] = call  # also has the router raise what it refuses
        if gateway.draining and route.access is not Access.OPEN:
            raise HttpError(503, "the engine is stopping", None, SERVER, "unavailable")
        app, waits_for_recovery = self._app, route.generates and call.position is None
        if gateway.models is not None:
            app = self._with_queried_engine
            if route.errors is not ErrorStyle.OLLAMA:  # lines of JSON have no comments
                call.chosen.comment = exchange.answer.comment
            call.chosen.waits_for_recovery = waits_for_recovery
        elif waits_for_recovery:
            await gateway.engine.gate.enter()
        exchange.stayed = await until_disconnected(
            in_journal(app, call), exchange.scope, receive, exchange.answer)
        if exchange.stayed:
            call.finished()

    async def _with_queried_engine(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application once the model that the query names has its engine, if it names
        one: how callers of a server of several models say which of them a question is about."""
        call: EngineCall = scope["app"]
        if self._starts_engine(scope):
            query = QueryParams(scope["query_string"])
            await call.chosen.choose(query.get("model", ""))
        await self._app(scope, receive, send)

    def _starts_engine(self, scope: Scope) -> bool:
        """Returns whether the query names a model whose engine the request starts, even a GET."""
        return (self._gateway.models is not None and b"model=" in scope["query_string"]
                and asks_an_engine(scope["path"], scope["method"]))

    def _check_head(self, scope: Scope) -> None:
        """Raises `HttpError` for other hosts, ambiguous framing and oversized headers."""
        if (wrong := check_head(scope, self._hosts)) is not None:
            raise HttpError(wrong.status, wrong.message, wrong.param, code=wrong.code)


# --- one request ----------------------------------------------------------------------------------

async def until_disconnected(app: ASGIApp, scope: Scope, receive: Receive,
                             answer: AnswerSender) -> bool:
    """Runs `app` for one request, in this task, and cancels it when the client disconnects: whether
    it waits for the engine's first token, for the whole answer, or for the client to read. When
    cancelled, the SDK's calls abort their requests, unless those may outlive their connection.

    Returns False if the client has disconnected; raises what `app` raises. The connection is
    watched once the body has been read, since both use `receive`.
    """
    body_read, disconnected = asyncio.Event(), False
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    watcher: asyncio.Task[None] | None = None
    assert task is not None

    async def reading() -> Message:
        message = await receive()
        if not message.get("more_body", False):
            body_read.set()
        return message

    async def watch() -> None:
        nonlocal disconnected
        if scope["method"] not in ("GET", "HEAD"):
            await body_read.wait()
        while (await receive())["type"] != "http.disconnect":
            pass
        if not answer.ended:
            disconnected = True
            task.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(watch())

    timer = loop.call_later(WATCH_AFTER, begin)
    try:
        await app(scope, reading, answer)
    except asyncio.CancelledError:
        if not disconnected or task.uncancel():  # another task cancels as well
            raise
        return False
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
    return True


def in_journal(app: ASGIApp, call: EngineCall) -> ASGIApp:
    """Wraps the application so that each of its steps for this request is in the journal."""
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        await JournaledSteps(app(scope, receive, send), call)  # type: ignore[arg-type]
    return run


class JournaledSteps:
    """An awaitable that runs a coroutine; while it has the processor, from one of its waits to the
    next, its request is in the journal (for decoding, conversion, parsing, writing). If the process
    dies or hangs meanwhile, the next incarnation knows which request it worked on."""

    __slots__ = ("_call", "_coroutine", "_journal")

    def __init__(self, coroutine: Coroutine[Any, Any, None], call: EngineCall) -> None:
        self._coroutine, self._call, self._journal = coroutine, call, call.gateway.journal

    def __await__(self) -> JournaledSteps:
        return self

    def __iter__(self) -> JournaledSteps:
        return self

    def __next__(self) -> Any:
        return self._run(self._coroutine.send, None)

    def send(self, value: Any) -> Any:
        """As a generator's."""
        return self._run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """As a generator's."""
        return self._run(self._coroutine.throw, *error)

    def close(self) -> None:
        """As a generator's."""
        self._coroutine.close()

    def _run(self, step: Callable[..., Any], *args: Any) -> Any:
        journal_id = self._call.journal_id
        if journal_id:
            self._journal.put(journal_id)
        try:
            return step(*args)
        finally:
            self._journal.clear()


# --- refusals -------------------------------------------------------------------------------------

def _last_event(body: dict[str, Any], style: ErrorStyle) -> bytes:
    """Returns the end of a stream that a gateway which has died has begun: an error."""
    if style is ErrorStyle.OLLAMA:
        return json_line(body)
    return sse_event(body) + DONE if style is ErrorStyle.OPENAI else sse_event(body, "error")


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


# --- other origins --------------------------------------------------------------------------------

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
