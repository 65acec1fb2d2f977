"""The table of routes: every alias has the rules of what it stands for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.api_keys import Keys
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.routes import ROUTES, Access, ErrorStyle, canonical, find

TURN = [{"role": "user", "content": "Hi"}]


def filled(path: str) -> str:
    """The path as a caller writes it."""
    return path.replace("{name:path}", "a/b").replace("{id}", "resp_1")


def ask(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None,
        content: bytes | None = None, **settings: Any) -> httpx.Response:
    """One request to a gateway whose engine says "ok"."""
    gateway = GatewayState(Config(gateway=GatewayConfig(**settings)), Path("none"))
    gateway.engine.client = Scripted(["ok"])  # type: ignore[assignment]

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, headers=headers,
                                        **({"json": body} if content is None
                                           else {"content": content}))

    return asyncio.run(run())


@pytest.mark.parametrize("path", [path for route in ROUTES for path in route.paths])
def test_each_path_has_the_rules_of_its_route(path: str) -> None:
    route = next(route for route in ROUTES if path in route.paths)
    found = find(filled(path))
    assert (found.access, found.generates, found.errors) == \
        (route.access, route.generates, route.errors)
    keys = Keys(GatewayConfig(api_key="secret", admin_key="root"))
    if route.access is not Access.OPEN:
        with pytest.raises(HttpError):
            keys.check(filled(path), b"")
        with pytest.raises(HttpError):
            keys.check(filled(path), b"Bearer wrong")
    keys.check(filled(path), b"Bearer root")


@pytest.mark.parametrize("path", [path for route in ROUTES for path in route.paths
                                  if ":path" not in path and path != "/"])
def test_slashes_too_many_change_no_route(path: str) -> None:
    path = filled(path)
    for other in (f"{path}/", f"/{path}/", f"/{path}", path.replace("/", "//")):
        assert canonical(other) == path
    assert canonical(path) == path


@pytest.mark.parametrize("path", ["/v1/models//models/x", "/v1/models/a/b/", "/v1/none/", "/x//y",
                                  "/flush_cache\n", "/flush_cache\n/", "/flush_cache/\n", ""])
def test_a_path_of_another_meaning_stays_as_it_is(path: str) -> None:
    """Names of models may be paths."""
    assert canonical(path) == path


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1/chat/completions",
                                  "/v1//chat/completions"])
def test_a_body_comes_with_slashes_too_many(path: str) -> None:
    found = ask("POST", path, {"messages": TURN}, {"authorization": "Bearer k"}, api_key="k")
    assert found.status_code == 200, found.text
    assert ask("POST", path, {"messages": TURN}, api_key="k").status_code == 401
    assert ask("POST", "/flush_cache/", {}, {"authorization": "Bearer k"}, api_key="k",
               admin_key="root").status_code == 401
    lacks = ask("POST", "/v1/messages/", {"messages": TURN})
    assert lacks.status_code == 400 and lacks.json()["type"] == "error", "in Anthropic's words"


def test_a_byte_order_mark_before_a_body_is_none_of_it() -> None:
    body = b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "Hi"}]}'
    for path in ("/v1/chat/completions", "/invocations"):
        assert ask("POST", path, content=body).status_code == 200
    twice = ask("POST", "/v1/chat/completions", content=body[:3] + body)
    assert twice.status_code == 400 and twice.json()["error"]["code"] == "invalid_json"


def test_an_unknown_path_needs_a_key() -> None:
    assert find("/v2/none").access is Access.KEY and not find("/v2/none").generates
    assert find("/v1/messages/batches").errors is ErrorStyle.ANTHROPIC
    assert find("/v1/chat/completions/").access is Access.KEY


@pytest.mark.parametrize(("path", "body"), [
    ("/chat/completions", {"messages": TURN}), ("/completions", {"prompt": "Hi"}),
    ("/responses", {"input": "Hi"}), ("/messages", {"messages": TURN, "max_tokens": 5})])
def test_unprefixed_paths_answer_as_the_prefixed_ones(path: str, body: Any) -> None:
    plain, prefixed = ask("POST", path, body), ask("POST", f"/v1{path}", body)
    assert (plain.status_code, prefixed.status_code) == (200, 200)
    assert set(plain.json()) == set(prefixed.json())


MESSAGE = {"model": "demo", "max_tokens": 5, "messages": TURN}


@pytest.mark.parametrize(("status", "kind", "call"), [
    (401, "authentication_error", {"api_key": "secret"}),
    (400, "invalid_request_error", {"content": b"{"}),
    (404, "not_found_error", {"body": MESSAGE | {"model": "other"}}),
    (413, "request_too_large", {"body": MESSAGE | {"system": "x" * 2000}, "max_body_bytes": 1024}),
    (405, "invalid_request_error", {"method": "GET"}),
    (404, "not_found_error", {"path": "/v1/messages/batches"}),
    (431, "invalid_request_error", {"headers": {"x-long": "a" * 70_000}})])
def test_every_error_of_messages_is_in_anthropics_format(status: int, kind: str,
                                                         call: dict[str, Any]) -> None:
    made = {"method": "POST", "path": "/v1/messages", "body": MESSAGE} | call
    answer = ask(**made)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert told["error"]["message"] and told["request_id"] == answer.headers["x-request-id"]


def test_other_routes_keep_openais_format() -> None:
    told = ask("POST", "/v1/chat/completions", {"messages": []}).json()
    assert set(told) == {"error"} and told["error"]["param"] == "messages"


@pytest.mark.parametrize(("method", "path", "allowed"), [
    ("GET", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET, HEAD"),
    ("DELETE", "/v1/models/a/b", "GET, HEAD"), ("DELETE", "/generate", "POST, PUT"),
    ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"), ("GET", "/v1/messages", "POST"),
    ("PUT", "/flush_cache", "GET, HEAD, POST")])
def test_a_wrong_method_gets_the_allowed_ones(method: str, path: str, allowed: str) -> None:
    answer = ask(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (405, allowed)


def test_allowed_methods_are_answered() -> None:
    assert "allow" not in ask("GET", "/nowhere").headers
    for path in ("/v1/models", "/version", "/v1/responses/resp_1"):
        assert ask("HEAD", path).status_code != 405
