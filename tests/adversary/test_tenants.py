"""Callers without a key, with half of one, with somebody else's: what they can reach and learn."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, ScriptedStream
from helpers_runtime import short_dir
from helpers_scheduler import Ring, config
from helpers_served import Served
from helpers_tenants import (
    ADMIN,
    ANN,
    BOB,
    Answer,
    ask,
    bearer,
    key_file,
    packed,
    parsed,
    raw,
    tenants,
)
from starlette.requests import Request
from starlette.responses import Response

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.gateway import app as app_module
from actorium.actors.gateway.app import build_app, handlers_of
from actorium.actors.gateway.http import api_keys as keys
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.routes import ROUTES, Access, find
from actorium.actors.gateway.served_engine import ServedEngine
from actorium.actors.runtime.inflight_journal import SIZE, InflightJournal

CANARY = "xyzzy-of-ann-31d8"
CHAT = "/v1/chat/completions"


# --- keys -----------------------------------------------------------------------------------------

def wrong_keys(draw: random.Random, right: bytes) -> Iterator[bytes]:
    """Authorization headers that are nearly right, without an end."""
    yield from (b"", b"Bearer", b"Bearer ", b"Bearer \t ", b"Bearer\t" + right, b"Basic " + right,
                b"Token " + right, b"Digest " + right, b"bearer:" + right, right,
                b"Bearer Bearer " + right, b"Bearer\x00" + right, b"Bearer " + right + b"\x00",
                b"Bearer \x00" + right, b"Bearer " + right + b"," + right, b"Bearer =" + right,
                b'Bearer "' + right + b'"', b"Bearer " + right.swapcase(), b"Bearer null",
                b"Bearer None", b"Bearer " + hashlib.sha256(right).hexdigest().encode(),
                b"Bearer sha256:" + hashlib.sha256(right).hexdigest().encode(),
                b"Bearer " + b"a" * (1 << 20), b"Bearer " + right * 1000, b"\xff\xfe" + right,
                b"Bearer " + right.decode().encode("utf-16"), b"Bearer \xc2\xa0" + right,
                b"Bearer " + right.replace(b"-", "\u2010".encode()), b"Bearer #" + right)
    for cut in range(1, len(right)):
        yield b"Bearer " + right[:cut]
        yield b"Bearer " + right[cut:]
    while True:
        data = bytearray(right)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            kind = draw.randrange(3)
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                data.insert(at, draw.randrange(256))
            elif len(data) > 1:
                del data[at]
        if bytes(data).strip() != right:
            yield b"Bearer " + bytes(data)


def test_only_the_whole_key_opens(tmp_path: Path, amount: Any, tried: Any) -> None:
    guard = keys.Keys(GatewayConfig(api_keys_file=key_file(tmp_path), api_key="sk-one-9a",
                                    admin_key=ADMIN))
    draw = random.Random(7)
    for key in (ANN, BOB, ADMIN, "sk-one-9a"):
        given = wrong_keys(draw, key.encode())
        for _ in range(amount(1_000, 30_000)):
            header = next(given)
            with pytest.raises(HttpError) as caught:
                guard.check("/v1/models", header)
            assert caught.value.status == 401 and not guard.is_admin(header)
            tried()
    assert guard.check("/v1/models", f"Bearer {ANN}".encode()) == "ann"
    assert guard.check("/v1/models", b"bEARER  sk-one-9a ") == ""


def test_every_digest_is_compared_whichever_fits(tmp_path: Path, tried: Any,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    usual = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((len(one), len(other)))
        return usual(one, other)

    guard = keys.Keys(GatewayConfig(api_keys_file=key_file(tmp_path), admin_key=ADMIN))
    monkeypatch.setattr("actorium.actors.gateway.http.api_keys.hmac.compare_digest", compare)
    for key in (ANN, BOB, ADMIN, "", "x", ANN[:-1]):
        seen.clear()
        with contextlib.suppress(HttpError):
            guard.check("/v1/models", f"Bearer {key}".encode())
        assert seen == [(32, 32)] * 3, key
        tried()


def test_time_tells_nothing_of_a_key(tmp_path: Path, amount: Any, tried: Any) -> None:
    """Medians of headers that share nothing, half and all but one character with a key."""
    guard = keys.Keys(GatewayConfig(api_keys_file=key_file(tmp_path), admin_key=ADMIN))
    rounds = amount(0, 60_000)
    half = len(ANN) // 2
    near = [ANN[:-1] + "0", ANN[:half] + "0" * (len(ANN) - half), "0" * len(ANN)]
    times: list[list[int]] = [[] for _ in near]
    for _ in range(rounds):
        for each, key in zip(times, near, strict=True):
            header = f"Bearer {key}".encode()
            began = time.perf_counter_ns()
            try:
                guard.check("/v1/models", header)
            except HttpError:
                each.append(time.perf_counter_ns() - began)
            tried()
    if rounds:
        medians = [statistics.median(each) for each in times]
        assert max(medians) < 1.15 * min(medians), medians


GOOD_FILES: dict[str, tuple[bytes, set[str]]] = {
    "blank lines": (b"\n\n  \t\nann ka\n\n\n", {"ka"}),
    "CRLF": (b"ann ka\r\n\r\nbob kb\r\n", {"ka", "kb"}),
    "BOM": (b"\xef\xbb\xbfann ka\nbob kb\n", {"ka", "kb"}),
    "BOM and comment": (b"\xef\xbb\xbf# keys of all\nann ka\n", {"ka"}),
    "comments": (b"#ann no\n # bob no\nann ka\n", {"ka"}),
    "no end of line": (b"ann ka\nbob kb", {"ka", "kb"}),
    "tabs": (b"ann\tka\n\tbob\t\tkb\t\n", {"ka", "kb"}),
    "the same line twice": (b"ann ka\nann ka\n", {"ka"}),
    "two keys of one": (b"ann ka\nann kb\n", {"ka", "kb"}),
    "hashed": (b"ann sha256:" + hashlib.sha256(b"ka").hexdigest().upper().encode(), {"ka"}),
}
BAD_FILES: dict[str, bytes] = {
    "empty": b"", "blank": b"\n \n\r\n", "only comments": b"# ann ka\n",
    "a name alone": b"ann\n", "a name and a blank": b"ann \n", "three words": b"ann ka kb\n",
    "comment behind": b"ann ka # hers\n", "not UTF-8": b"ann \xff\xfe\n",
    "UTF-16": "ann ka\n".encode("utf-16"), "a long name": b"a" * 65 + b" ka\n",
    "a strange name": "\u00e4nn ka\n".encode(), "NUL in a name": b"a\0n ka\n",
    "half a hash": b"ann sha256:abcd\n", "no hash": b"ann sha256:\n",
    "another's key": b"ann ka\nbob ka\n", "another's, hashed": b"ann ka\nbob sha256:"
    + hashlib.sha256(b"ka").hexdigest().encode(),
    "the flag's key": b"ann sk-one\n", "the administrator's": b"ann sk-root\n",
    "cut off": b"#" * ((4 << 20) - 7) + b"\nann ka-and-more\n",
}


@pytest.mark.mended("a key file above 4 MiB was cut off, and half a key in its last line was a key")
@pytest.mark.mended("one key under two names belonged to the last one, without a word")
@pytest.mark.mended("a key file with a byte-order mark was refused")
def test_key_files(tmp_path: Path, tried: Any) -> None:
    path = tmp_path / "keys"
    settings = GatewayConfig(api_keys_file=str(path), api_key="sk-one", admin_key="sk-root")
    for name, (data, wanted) in GOOD_FILES.items():
        path.write_bytes(data)
        guard = keys.Keys(settings)
        for key in wanted:
            assert guard.check("/v1/models", f"Bearer {key}".encode()) in ("ann", "bob"), name
        for key in ("", " ", "#", "ann", "no", "\ufeff", "k", "ka\r"):
            if key.strip() not in wanted:
                with pytest.raises(HttpError):
                    guard.check("/v1/models", f"Bearer {key}".encode())
            tried()
    for name, data in BAD_FILES.items():
        path.write_bytes(data)
        with pytest.raises(BadConfig, match="api_keys_file: ") as caught:
            keys.Keys(settings)
        assert "ka" not in caught.value.message.replace(str(path), ""), name
        tried()


@pytest.mark.mended("an empty --api-key, as of a variable that is not set, left all doors open")
@pytest.mark.mended("an administrator's key equal to --api-key made everybody administrator")
def test_keys_that_nobody_could_mean(tried: Any) -> None:
    for key in ("", " ", "\n", "secret-a ", " secret-a", "secret-a\n", "secret\0a", "secret\ta"):
        for field in ("api_key", "admin_key"):
            with pytest.raises(BadConfig, match=f"^{field}: must be") as caught:
                validate(Config(gateway=GatewayConfig(**{field: key})))
            assert "secret" not in caught.value.message
            tried()
    with pytest.raises(BadConfig, match="^admin_key: must be another") as caught:
        validate(Config(gateway=GatewayConfig(api_key="secret-a", admin_key="secret-a")))
    assert "secret" not in caught.value.message


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
        engine = ServedEngine(Config(gateway=settings), Path("none"))
        engine.client = Scripted(["ok"])  # type: ignore[assignment]
        names = handlers_of(engine)
        with monkeypatch.context() as patch:
            patch.setattr(app_module, "handlers_of",
                          lambda _: {name: self._handler(name) for name in names})
            self._app = build_app(engine)

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


# --- an engine ------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Two gateways, so that half of all calls go to the other one."""
    with short_dir() as where, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        with tenants(where, port=port, gateways=2, responses_store=str(where / "store"),
                     tenant_weights={"ann": 2.0, "bob": 1.0}) as made:
            yield made


def completion(served: Served, key: str, *headers: tuple[str, str], **more: Any) -> Answer:
    return ask(served, "POST", "/v1/completions", key,
               {"prompt": f"{CANARY} " * 30, "max_tokens": 4, "ignore_eos": True} | more, headers)


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
                answer = raw_for(served, data)
                assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400")), (target, answer)
                tried()


def raw_for(served: Served, data: bytes) -> bytes:
    """What comes first: of a connection that may stay open."""
    with socket.create_connection((served.host, served.port), timeout=60) as connection:
        connection.sendall(data)
        return connection.recv(1 << 16)


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


# --- another tenant's prompts ---------------------------------------------------------------------

def cached_of(answer: Answer) -> int:
    """Of any route's answer."""
    assert answer.status == 200, answer
    told = answer.json
    usage = told.get("usage") or {}
    found = [told.get("meta_info", {}).get("cached_tokens"),
             (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
             (usage.get("input_tokens_details") or {}).get("cached_tokens"),
             usage.get("cache_read_input_tokens")]
    known = [one for one in found if one is not None]
    assert known, told
    return int(known[0])


def asked_of(route: str, text: str, salt: str) -> tuple[str, dict[str, Any]]:
    turn = [{"role": "user", "content": text}]
    salted = {"cache_salt": salt} if salt else {}
    return {
        "chat": (CHAT, {"messages": turn, "max_tokens": 2} | salted),
        "completions": ("/v1/completions", {"prompt": text, "max_tokens": 2} | salted),
        "generate": ("/generate", {"text": text,
                                   "sampling_params": {"max_new_tokens": 2}} | salted),
        "responses": ("/v1/responses", {"input": text, "max_output_tokens": 2} | salted),
        "messages": ("/v1/messages", {"messages": turn, "max_tokens": 2} | salted),
        "invocations": ("/invocations", {"prompt": text, "max_tokens": 2} | salted)}[route]


SALTED = ("chat", "completions", "generate")


@pytest.mark.parametrize("route", [*SALTED, "responses", "messages", "invocations"])
def test_what_a_tenant_has_cached_no_other_finds(served: Served, route: str, tried: Any) -> None:
    salts = ("", "s1", "ann", "\0") if route in SALTED else ("",)
    for number, salt in enumerate(salts):
        # Different from its first page on, since one's own other prompts may be found.
        path, body = asked_of(route, f"{number}{route[::-1]} {CANARY} " * 20, salt)
        mine = cached_of(ask(served, "POST", path, ANN, body))
        assert cached_of(ask(served, "POST", path, ANN, body)) > mine, "it is cached at all"
        assert cached_of(ask(served, "POST", path, BOB, body)) == 0
        assert cached_of(ask(served, "POST", path, ADMIN, body)) == 0
        tried(2)
        if route not in SALTED:
            continue
        guesses = {"ann", "ann\0", f"ann\0{salt}", f"\0ann\0{salt}", salt + "\0", "\0", "s1 "}
        for guess in guesses - {salt}:
            other = body | {"cache_salt": guess}
            assert cached_of(ask(served, "POST", path, BOB, other)) == 0, guess
            tried()


def test_an_idempotency_key_is_a_tenants_own(served: Served, tried: Any) -> None:
    key = ("Idempotency-Key", "ann-only-1")
    mine = completion(served, ANN, key)
    assert completion(served, ANN, key).json["id"] == mine.json["id"]
    assert completion(served, ANN, key, max_tokens=5).status in (400, 422)
    other = completion(served, BOB, key)
    assert other.status == 200 and other.json["id"] != mine.json["id"] and cached_of(other) == 0
    # A refusal would tell that the key is in use.
    for theirs in (("Idempotency-Key", "ann-only-2"), ("Idempotency-Key", mine.json["id"]),
                   ("Idempotency-Key", mine.json["id"].removeprefix("cmpl-"))):
        completion(served, ANN, theirs)
        assert completion(served, BOB, theirs, max_tokens=5).status == 200
        tried()
    tried(2)


def events(answer: Answer) -> list[str]:
    return [line[4:] for line in answer.body.decode().split("\n") if line.startswith("id: ")]


def test_a_stream_is_taken_up_by_its_tenant_alone(served: Served, tried: Any) -> None:
    body = {"prompt": f"{CANARY} streamed", "max_tokens": 8, "ignore_eos": True, "stream": True,
            "stream_options": {"resumable": True}}
    path = "/v1/completions"
    mine = ask(served, "POST", path, ANN, body)
    marks = events(mine)
    assert marks
    again = ask(served, "POST", path, ANN, body, [("Last-Event-ID", marks[0])])
    assert again.status == 200 and events(again)
    name, _, rest = marks[0].partition(":")
    own = events(ask(served, "POST", path, BOB, body))[0].partition(":")[0]
    forged = [marks[0], f"{name.partition('.')[0]}.{own.partition('.')[2]}:{rest}",
              f"{own.partition('.')[0]}.{name.partition('.')[2]}:{rest}",
              f"{name.partition('.')[0]}-0.{own.partition('.')[2]}:{rest}", f"{name}:{rest}"]
    texts = set()
    for mark in forged:
        for headers in ([], [("Idempotency-Key", "x")],
                        [("Idempotency-Key", name.partition(".")[0])]):
            answer = ask(served, "POST", path, BOB, body, [("Last-Event-ID", mark), *headers])
            assert answer.status in (400, 404), (mark, answer)
            texts.add((answer.status, answer.json["error"]["message"]))
            tried()
    assert not [text for _, text in texts if CANARY in text or "ann" in text.lower().split()]


class Streaming:
    """A long completion of ann's under a name, in a thread."""

    def __init__(self, served: Served, name: str, path: str = "/v1/completions",
                 tokens: int = 3000) -> None:
        body: dict[str, Any] = {"prompt": CANARY, "max_tokens": tokens, "ignore_eos": True,
                                "stream": True}
        if path == "/generate":
            body = {"text": CANARY, "rid": name, "stream": True,
                    "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        self._data = packed("POST", path, [bearer(ANN), ("X-Request-Id", name)], body)
        self._begun = threading.Event()
        self.found = b""
        self._thread = threading.Thread(target=self._read, args=(served,))
        self._thread.start()
        assert self._begun.wait(60)

    def _read(self, served: Served) -> None:
        with socket.create_connection((served.host, served.port), timeout=120) as connection:
            connection.sendall(self._data)
            while part := connection.recv(1 << 16):
                self.found += part
                if b"data: " in self.found:
                    self._begun.set()
        self._begun.set()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> bytes:
        self._thread.join(120)
        return self.found


def test_nobody_ends_anothers_request(served: Served, amount: Any, tried: Any) -> None:
    for number in range(amount(1, 6)):
        for path in ("/v1/completions", "/generate"):
            name = f"mine-{number}-{path[-4:]}"
            stream = Streaming(served, name, path)
            for rid in (name, f"cmpl-{name}", f"{name}_0", "", f"chatcmpl-{name}", "%", "*"):
                body = {"rid": rid} if rid else {"abort_all": True}
                answer = ask(served, "POST", "/abort_request", BOB, body)
                assert answer.status == 200 and answer.json == {"aborted": []}, rid
                for way in ("/v1/responses/{}/cancel", "/responses/resp_{}/cancel"):
                    assert ask(served, "POST", way.format(rid or name), BOB).status in (404, 405)
                tried(3)
            # Its name again, by another tenant, and that one's end.
            completion(served, BOB, ("X-Request-Id", name), max_tokens=2)
            assert not stream.over, "it was still under way"
            found = stream.end()
            assert b'"length"' in found and b'"abort"' not in found
    stream = Streaming(served, "ended", tokens=3900)
    assert ask(served, "POST", "/abort_request", ANN, {"rid": "ended"}).json["aborted"]
    stream.end()
    stream = Streaming(served, "ended-2", tokens=3900)
    assert ask(served, "POST", "/abort_request", ADMIN, {"abort_all": True}).json["aborted"]
    stream.end()


def test_a_stored_response_is_its_tenants_alone(served: Served, amount: Any, tried: Any) -> None:
    for number in range(amount(2, 20)):
        body = {"input": f"{CANARY} {number}", "max_output_tokens": 3, "user": CANARY,
                "background": bool(number % 2)}
        mine = ask(served, "POST", "/v1/responses", ANN, body,
                   [("X-Request-Id", f"kept-{number}")]).json["id"]
        none = "resp_none"
        for method, way in (("GET", "/v1/responses/{}"), ("DELETE", "/v1/responses/{}"),
                            ("POST", "/v1/responses/{}/cancel"), ("GET", "/responses/{}"),
                            ("GET", "/v1/responses/{}/input_items"), ("HEAD", "/v1/responses/{}"),
                            ("GET", "/v1/responses/{}?stream=false")):
            theirs, nobodys = (ask(served, method, way.format(name), BOB) for name in (mine, none))
            assert theirs.status == nobodys.status == 404, (method, way)
            assert theirs.body.replace(mine.encode(), b"") == \
                nobodys.body.replace(none.encode(), b"")
            tried()
        follow = [ask(served, "POST", path, BOB, {"input": "and?", "previous_response_id": name})
                  for path in ("/v1/responses", "/v1/responses/input_tokens", "/invocations")
                  for name in (mine, none)]
        for theirs, nobodys in zip(follow[::2], follow[1::2], strict=True):
            assert theirs.status == nobodys.status == 404
            assert theirs.body.replace(mine.encode(), b"") == \
                nobodys.body.replace(none.encode(), b"")
            tried()
        # One of the same name, which its owner deletes.
        ask(served, "POST", "/v1/responses", BOB, {"input": "x", "max_output_tokens": 1},
            [("X-Request-Id", f"kept-{number}")])
        assert ask(served, "DELETE", f"/v1/responses/{mine}", BOB).status == 200
        kept = ask(served, "GET", f"/v1/responses/{mine}/input_items", ANN)
        assert kept.status == 200 and CANARY in kept.body.decode()
        assert ask(served, "GET", f"/v1/responses/{mine}", ADMIN).status == 404
        tried(3)


@pytest.mark.mended("/server_info told each tenant the names and weights of all the others")
def test_what_all_may_read_says_nothing_of_a_tenant(served: Served, tried: Any) -> None:
    more = {"user": CANARY, "stop": [f"{CANARY}-stop"], "cache_salt": f"{CANARY}-salt",
            "request_id": f"{CANARY}-id"}
    for _ in range(3):
        completion(served, ANN, ("Idempotency-Key", f"{CANARY}-key"), **more)
        completion(served, ANN, max_tokens=CANARY)
        ask(served, "POST", f"/{CANARY}", ANN, {})
        ask(served, CANARY.upper(), "/v1/models", ANN)
        completion(served, ANN, model=CANARY)
    stream = Streaming(served, f"{CANARY}-running")
    for path in ("/metrics", "/load", "/server_info", "/get_server_info", "/v1/models", "/health",
                 "/v1/health", "/model_info", "/readyz", "/livez", "/startupz", "/health_generate",
                 "/version", "/ping", "/openapi.json"):
        for _ in range(2):
            answer = ask(served, "GET", path, BOB)
            assert answer.status == 200, path
            assert CANARY.encode() not in answer.body.lower(), path
            assert b'"ann"' not in answer.body and ANN.encode() not in answer.body, path
            tried()
    watched = raw_for(served, packed("GET", "/dashboard/events", [bearer(BOB)]))
    assert watched.startswith(b"HTTP/1.1 200") and CANARY.encode() not in watched
    assert ask(served, "GET", "/server_info", ADMIN).json["config"]["scheduler"][
        "tenant_weights"] == {"ann": 2.0, "bob": 1.0}
    stream.end()


# --- floods, and what kills ---------------------------------------------------------------------

PLACES = 4


@pytest.mark.mended("under the fair policy one tenant's flood filled the queue, and all others "
                    "were refused with queue_full")
def test_a_full_queue_has_a_place_for_each_tenant(amount: Any, tried: Any) -> None:
    """Under the fair policy; and never are there twice as many places as there should be."""
    for queued in range(2, amount(10, 30)):
        for policy in ("fair", "fcfs"):
            ring = Ring(config(seqs=1, queued=queued, policy=policy))
            names = ["ann"] * 3 * queued + ["bob", "bob", "ann"] + \
                [f"t{number}" for number in range(3 * queued)]
            rids = [ring.submit(4, max_tokens=2, tenant=name) for name in names]
            ring.run()
            codes = [ring.of(rid)[0].error_code for rid in rids]
            assert codes[:queued + 1] == [None] * (queued + 1)
            assert set(codes[queued + 1:3 * queued]) == {"queue_full"}
            owed = codes[3 * queued] is None
            assert owed == (policy == "fair") and codes[3 * queued + 2] == "queue_full"
            assert codes.count(None) <= 2 * queued + 1
            tried(len(names))


def test_a_flood_of_one_tenant_does_not_keep_another_waiting(amount: Any, tried: Any) -> None:
    """Its request is served while most of the flood that came before still waits."""
    with short_dir() as where, tenants(where, schedule_policy="fair",
                                       max_num_seqs=PLACES) as served:
        flood = amount(100, 300)
        for _ in range(amount(1, 5)):
            assert asyncio.run(flooded(served, flood)) < flood / 2, "bob waited for it"
            tried(flood + 1)


async def flooded(served: Served, size: int) -> int:
    """How many of ann's were answered while bob waited."""
    count = 0
    begun = asyncio.Event()

    async def one(key: str, tokens: int) -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection(served.host, served.port)
        body = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
        writer.write(packed("POST", "/v1/completions", [bearer(key)], body))
        assert parsed(await reader.read()).status == 200
        writer.close()
        if key == ANN:
            count += 1
            begun.set()

    flood = [asyncio.ensure_future(one(ANN, 40)) for _ in range(size)]
    await begun.wait()
    before = count
    await one(BOB, 4)
    meanwhile = count - before
    await asyncio.gather(*flood)
    return meanwhile


def test_a_tenants_poison_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     tried: Any) -> None:
    """What has killed a gateway is refused to who sent it, and to nobody else."""
    monkeypatch.setattr("actorium.actors.gateway.engine_call.AsyncDeltaStream", ScriptedStream)
    settings = Config(gateway=GatewayConfig(api_keys_file=key_file(tmp_path), admin_key=ADMIN))
    buffer = bytearray(SIZE)

    def start() -> Any:
        engine = ServedEngine(settings, Path("none"), InflightJournal(buffer, actor="gateway"))
        engine.client = Scripted(["hello there"])  # type: ignore[assignment]
        return engine, build_app(engine)

    def post(app: Any, key: str, path: str = "/v1/completions") -> httpx.Response:
        async def run() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app),
                                         base_url="http://gateway") as client:
                return await client.post(path, json={"prompt": f"poison {CANARY}"},
                                         headers=dict([bearer(key)]))

        return asyncio.run(run())

    for _ in range(2):  # two deaths with this body in hand
        engine, app = start()
        seen: list[bytes] = []

        def never(place: int = 0, seen: list[bytes] = seen) -> None:
            seen.append(bytes(buffer))

        engine.journal.clear = never
        post(app, ANN)
        buffer[:] = next(state for state in seen if state != bytes(SIZE))
    _, app = start()
    refused = post(app, ANN)
    assert refused.status_code == 500 and refused.json()["error"]["code"] == "quarantined"
    assert CANARY not in refused.text
    for key in (BOB, ADMIN):
        for path in ("/v1/completions", "/completions", "/invocations"):
            assert post(app, key, path).status_code == 200
            tried()
