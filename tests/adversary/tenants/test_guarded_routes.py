"""Callers without a key at every route, however it is written."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from helpers_gateway import Scripted
from helpers_served import Served
from helpers_tenants import (
    ADMIN,
    ANN,
    BOB,
    ask,
    bearer,
    first_of,
    key_file,
    packed,
    parsed,
    raw,
)
from starlette.requests import Request
from starlette.responses import Response

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.gateway import app as app_module
from actorium.actors.gateway.app import build_app, handlers_of
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.routes import ROUTES, Access, find

# --- routes ---------------------------------------------------------------------------------------

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get",
           "PROPFIND", "X")
SHOWN: dict[str, list[tuple[bytes, bytes]]] = {
    "none": [], "wrong": [(b"authorization", b"Bearer sk-ann")],
    "tenant": [(b"authorization", f"Bearer {BOB}".encode())],
    "anthropic": [(b"x-api-key", BOB.encode())],
    "both": [(b"authorization", f"Bearer {BOB}".encode()), (b"x-api-key", ADMIN.encode())],
    "none first": [(b"authorization", b""), (b"x-api-key", BOB.encode())],
    "doubled": [(b"authorization", b"Bearer no"), (b"authorization", f"Bearer {ADMIN}".encode())]}
MAY: dict[str, set[Access]] = {name: {Access.OPEN} for name in ("none", "wrong", "doubled")} | {
    name: {Access.OPEN, Access.KEY} for name in ("tenant", "anthropic", "both", "none first")}


def disguised(path: str) -> list[str]:
    """Ways to write a path, percent-encoded, that some matcher might take for it."""
    first = f"/%{ord(path[1]):02x}{path[2:]}" if len(path) > 1 else path
    every = "/" + "".join(f"%{ord(c):02X}" for c in path[1:])
    return [path, path + "/", path + "//", "/" + path, "//" + path, path.replace("/", "//"),
            "/v1" + path, "/v1//" + path, "/V1" + path, "//v1" + path, path.upper(), path.title(),
            first, every, path.replace("/", "/%2F"), "/%2e" + path, "/./" + path[1:],
            "/x/.." + path, "/livez/.." + path, "/livez/%2e%2e" + path, "/livez;" + path,
            "/docs/" + path[1:], path + "%0A", path + "%0a%0a", path + "%0D", path + "%0D%0A",
            path + "%00", path + "%20", "%20" + path, path + "%09", path + "%0B", path + "%C2%85",
            path + "%E2%80%A8", path + ";a", path + ".json", path + "/.", path + "%3Fx", path + "?",
            path + "?key=" + ADMIN, path + "?api_key=" + ADMIN, path + "#", path + "%23",
            path.replace("e", "%ef%bd%85"), path + "%FF", path + "\\", path.replace("/", "\\")]


def meant(path: str) -> str:
    """The path that somebody might have taken it for."""
    parts = [part for part in path.strip().lower().split("/") if part]
    return "/" + "/".join(parts)


class Doors:
    """A gateway whose handlers tell who got in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: GatewayConfig) -> None:
        self.reached: list[tuple[str, str]] = []
        gateway = GatewayState(Config(gateway=settings), Path("none"))
        gateway.engine.client = Scripted(["ok"])  # type: ignore[assignment]
        names = handlers_of(gateway)
        with monkeypatch.context() as patch:
            patch.setattr(app_module, "handlers_of",
                          lambda _: {name: self._handler(name) for name in names})
            self._app = build_app(gateway)

    def _handler(self, name: str) -> Any:
        async def reached(http: Request) -> Response:
            self.reached.append((name, http.scope["path"]))
            return Response(b"in")

        return reached

    async def knock(self, method: str, target: str, headers: list[tuple[bytes, bytes]]) -> int:
        """As uvicorn hands it on. The status; 0 = none."""
        path, _, query = target.partition("?")
        statuses = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def receive() -> Any:
            await asyncio.Event().wait()

        await self._app({"type": "http", "method": method, "path": unquote(path),
                         "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
                         "headers": headers, "http_version": "1.1", "scheme": "http",
                         "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}, receive, send)
        return statuses[0] if statuses else 0


def demanded(name: str, path: str) -> Access:
    """The strictest of what the handler's route and the path that was meant ask for."""
    routes = [route for route in ROUTES if route.name == name]
    found = {route.access for route in routes} if name != "probe" else {find(meant(path)).access}
    return next(access for access in (Access.ADMIN, Access.KEY, Access.OPEN) if access in found)


@pytest.mark.mended("/flush_cache%0A was answered to anybody with any key: the router took it for "
                    "/flush_cache, the guard did not")
@pytest.mark.mended("of two Authorization headers the last one counted, though a proxy "
                    "may have judged the other")
def test_no_way_of_writing_a_path_leads_past_the_guard(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amount: Any, tried: Any) -> None:
    doors = Doors(monkeypatch, GatewayConfig(api_keys_file=key_file(tmp_path), admin_key=ADMIN))
    admin_alone = Doors(monkeypatch, GatewayConfig(admin_key=ADMIN))
    paths = [path.replace("{name:path}", "a").replace("{id}", "resp_1")
             for route in ROUTES for path in route.paths]
    all_of_them = [(method, way, shown) for path in paths for way in disguised(path)
                   for method in METHODS for shown in SHOWN]
    draw = random.Random(3)
    some = draw.sample(all_of_them, amount(6_000, 120_000))
    some += [(method, way, "tenant") for route in ROUTES if route.access is Access.ADMIN
             for path in route.paths for way in disguised(path) for method in route.methods]

    async def run() -> None:
        for method, way, shown in some:
            doors.reached.clear()
            status = await doors.knock(method, way, SHOWN[shown])
            for name, path in doors.reached:
                assert demanded(name, path) in MAY[shown], (method, way, shown)
            assert status in (200, 204, 400, 401, 404, 405), (method, way, status)
            admin_alone.reached.clear()
            if shown in ("none", "tenant"):
                await admin_alone.knock(method, way, SHOWN[shown])
                for name, path in admin_alone.reached:
                    assert demanded(name, path) is not Access.ADMIN, (method, way)
            tried()

    asyncio.run(run())


def test_the_right_key_opens_every_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing."""
    doors = Doors(monkeypatch, GatewayConfig(api_keys_file=key_file(tmp_path), admin_key=ADMIN))

    async def run() -> None:
        for route in ROUTES:
            for path in route.paths:
                for method in route.methods:
                    doors.reached.clear()
                    target = path.replace("{name:path}", "a").replace("{id}", "resp_1")
                    key = ADMIN if route.access is Access.ADMIN else BOB
                    await doors.knock(method, target,
                                      [(b"authorization", f"Bearer {key}".encode())])
                    assert doors.reached == [(route.name, target)]

    asyncio.run(run())


# --- headers, bodies and what leads elsewhere -----------------------------------------------------

def test_headers_by_hand(served: Served, tried: Any) -> None:
    good, bad, admin = bearer(ANN), bearer("sk-no"), bearer(ADMIN)
    refused: list[tuple[str, Any]] = [
        ("doubled, good first", [good, bad]), ("doubled, good last", [bad, good]),
        ("doubled, both good", [good, bearer(BOB)]), ("the same twice", [good, good]),
        ("three", [bad, good, admin]), ("two of Anthropic's", [("x-api-key", ANN)] * 2),
        ("an empty one besides", [("Authorization", ""), good]),
        ("not Bearer", [("Authorization", f"Basic {ANN}")]),
        ("a wrong one, and Anthropic's", [bad, ("x-api-key", ANN)]),
        ("nothing", []), ("empty", [("Authorization", "")]), ("spaces", [("Authorization", "  ")]),
        ("not latin", [("Authorization", b"Bearer \xf0\x9f\x94\x91")]),
        ("NUL", [("Authorization", f"Bearer {ANN}\0".encode())]),
        ("folded", [("Authorization", f"Bearer\r\n {ANN}".encode())]),
        ("a megabyte", [("Authorization", "Bearer " + "k" * (1 << 20))]),
        ("other names", [("X-Authorization", f"Bearer {ANN}"), ("Api-Key", ANN),
                         ("Proxy-Authorization", f"Bearer {ANN}"), ("Cookie", f"api_key={ANN}")]),
        ("underscores", [("x_api_key", ANN)])]
    for name, headers in refused:
        answer = parsed(raw(served, packed("GET", "/v1/models", headers)))
        # Of a connection cut off in a flood of headers nothing may come.
        assert answer.status in (400, 401, 431) or name == "a megabyte", (name, answer)
        assert b'"data"' not in answer.body, name
        tried()
    for headers in ([good], [("x-api-key", ANN)], [("AUTHORIZATION", f"bEaReR   {ANN}")],
                    [good, ("x-api-key", "sk-no")], [("Authorization", ""), ("x-api-key", ANN)]):
        assert parsed(raw(served, packed("GET", "/v1/models", headers))).status == 200, headers
    for query in (f"api_key={ANN}", f"key={ANN}", f"authorization=Bearer%20{ANN}",
                  f"x-api-key={ANN}", f"access_token={ANN}"):
        assert ask(served, "GET", f"/v1/models?{query}").status == 401
        tried()


@pytest.mark.mended("a probe's path was made of the Host header: with the oldest Starlette, "
                    "`Host: x/metrics?` at /livez told /metrics to anybody")
def test_what_leads_elsewhere_at_the_door(served: Served, tried: Any) -> None:
    hosts = ("x/metrics?", "x/metrics#", "x/load?", "x/metrics", "@x/metrics?", "x:1/metrics?",
             "[::1]/metrics?", "x%2Fmetrics?")
    for host in hosts:
        for target in ("/livez", "/readyz", "/ping", "http://x/livez", f"http://{host}/livez"):
            data = packed("GET", target).replace(b"Host: localhost", b"Host: " + host.encode())
            assert b"vllm:" not in raw(served, data), (host, target)
            tried()
    for headers in ([("X-Original-URL", "/metrics")], [("X-Rewrite-URL", "/metrics")],
                    [("X-HTTP-Method-Override", "POST")], [("X-Forwarded-Prefix", "/metrics")],
                    [("X-Forwarded-For", "127.0.0.1")], [("Upgrade", "h2c")],
                    [("Connection", "Upgrade"), ("Upgrade", "websocket"),
                     ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
                     ("Sec-WebSocket-Version", "13")]):
        for target in ("/v1/models", "/metrics", "/dashboard/events", "/flush_cache"):
            plain = [one for one in headers if one[0] != "Connection"]
            for way in (headers, plain):
                data = packed("GET", target, [*way, ("Connection", "close")] if way is plain
                              else way)
                answer = first_of(served, data)
                assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400")), (target, answer)
                tried()


def test_invocations_ask_for_a_key_whatever_they_lead_to(served: Served, tried: Any) -> None:
    bodies = [{"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}, {"input": "a"},
              {"text": "a"}, {"input_ids": [1]}, {}, {"rid": "x", "abort_all": True}]
    for body in bodies:
        assert ask(served, "POST", "/invocations", body=body).status == 401
        assert ask(served, "POST", "/invocations", "sk-no", body).status == 401
        tried(2)
    stored = ask(served, "POST", "/invocations", ANN, {"input": "a", "max_output_tokens": 2}).json
    for method in ("GET", "DELETE"):
        assert ask(served, method, f"/v1/responses/{stored['id']}", BOB).status == 404
        tried()
