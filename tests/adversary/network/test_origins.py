"""Pages of other sites: names, origins, and what a browser might take for markup."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted, scripted_app
from helpers_network import (
    BODY,
    NAME,
    PATHS,
    POSTS,
    VERSION,
    ask,
    say,
)
from helpers_served import Served

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.http import routes
from actorium.actors.gateway.page import documents
from actorium.actors.runtime.http import allowed_hosts as hosts

# --- pages of other sites -------------------------------------------------------------------------

FOREIGN = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
           "0.0.0.0", "10.0.0.1", "[::]", "notlocalhost", "127.1", "2130706433", "0x7f000001",
           "localhost@evil.example", "evil.example/localhost", "xn--lcalhost-x1a", "[::2]:80",
           "localhost:80:90", "localhost,evil.example", "", "localhost#", "128.0.0.1",
           "localhost\\.evil.example", "%6cocalhost"]
OWN = ["localhost", "LOCALHOST:1", "a.localhost:80", "127.0.0.1", "127.9.9.9:80", "[::1]:8000",
       "localhost.", "localhost:"]


@pytest.mark.mended("a page of any site could call the server by letting its own name point at "
                    "127.0.0.1 (DNS rebinding): no Host was looked at")
def test_other_names_are_refused_everywhere(served: Served, probe_port: int, tried: Any,
                                            amount: Any) -> None:
    every = amount(0, 1)
    for name, path in itertools.product(FOREIGN, PATHS if every else PATHS[::6]):
        tried()
        found = ask(served, path, BODY if path in POSTS else None, Host=name)
        assert found.status in (400, 403) and found.headers["content-type"] == "application/json"
        assert found.status == 400 or b"--allowed-hosts" in found.body
    for name, path in itertools.product(FOREIGN, ("/livez", "/metrics", "/health_generate", "/x")):
        tried()
        assert ask(served, path, port=probe_port, Host=name).status in (400, 403)
    for name, port in itertools.product(OWN, (served.port, probe_port)):
        tried()
        assert ask(served, "/version", port=port, Host=name).status == 200, name
    for port in (served.port, probe_port):
        assert say(served, b"GET /version HTTP/1.1\r\n\r\n", port).statuses == [400]
        assert say(served, VERSION + b"Host: evil.example\r\n\r\n", port).statuses == [400]
        assert say(served, b"GET /version HTTP/1.0\r\n\r\n", port).statuses == [200]
        assert say(served, b"GET http://localhost/version HTTP/1.1\r\nHost: evil.example\r\n\r\n",
                   port).statuses == [403]


@pytest.mark.parametrize(("setting", "bound", "address", "good", "bad"), [
    (None, "127.0.0.1", "127.0.0.1", "localhost", "a.b"),
    (None, "0.0.0.0", "0.0.0.0", "a.b", "a/b"), (None, "box", "127.0.1.1", "box:80", "bo.x"),
    ("*", "127.0.0.1", "127.0.0.1", "evil", "e@vil"), ("a.b,*.c.d", "::", "::", "A.B:1", "c.d"),
    ("a.b,*.c.d", "::", "::", "x.c.d", "xc.d"), ("a.b", "::1", "::1", "[::1]", "b.a.b"),
    ("a.b", "0.0.0.0", "0.0.0.0", "192.0.2.7:80", "192.0.2.8")])
def test_names_that_are_allowed(setting: str | None, bound: str, address: str, good: str, bad: str
                                ) -> None:
    scope: dict[str, Any] = {"http_version": "1.1", "server": ("192.0.2.7", 80)}
    found = hosts.AllowedHosts(setting, bound, address)
    assert found.check(scope, {b"host": good.encode()}) is None
    assert found.check(scope, {b"host": bad.encode()}) is not None
    assert found.check(scope | {"server": ("/a/socket", None)}, {b"host": bad.encode()}) is None


@pytest.mark.parametrize("setting", ["", "http://a", "a b", "a.b:80", "*a", "a.*", "a,,b"])
def test_a_wrong_list_of_names_is_named(setting: str) -> None:
    with pytest.raises(BadConfig, match="allowed_hosts"):
        validate(Config(gateway=GatewayConfig(allowed_hosts=setting)))


CROSS: list[dict[str, str]] = [
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://localhost:1", "Sec-Fetch-Site": "same-site"},
    {"Origin": "http://localhost"}, {"Origin": "https://localhost.evil.example"},
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}]


@pytest.mark.mended("a form or a fetch of any page could generate, abort, flush and delete at a "
                    "server without keys")
def test_pages_of_other_sites_change_nothing(served: Served, tried: Any) -> None:
    acting = [(path, method) for route in routes.ROUTES for path in route.paths
              for method in route.methods if route.changes(method)]
    assert ("/flush_cache", "GET") in acting and ("/abort_request", "POST") in acting
    for (path, method), given in itertools.product(acting, CROSS):
        tried()
        headers = {name.replace("-", "_"): value for name, value in given.items()}
        found = ask(served, path, BODY, method, Content_Type="text/plain", **headers)
        assert found.status == 403 and b"--cors-origins" in found.body, (path, found.body)
        assert "access-control-allow-origin" not in found.headers
    own = f"http://{served.host}:{served.port}"
    for given in ({"Origin": own}, {"Origin": "https://proxied", "Sec_Fetch_Site": "same-origin"},
                  {"Sec_Fetch_Site": "none"}, {}):
        tried()
        assert ask(served, "/v1/completions", BODY, **given).status == 200
    for path, method in acting:
        tried()
        asked = ask(served, path, None, "OPTIONS", Origin="http://evil.example",
                    Access_Control_Request_Method=method)
        assert asked.status in (404, 405)
        assert not [name for name in asked.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("settings", "origin", "key", "status"), [
    ({}, "http://evil", "", 403), ({"cors_origins": "http://evil"}, "http://evil", "", 200),
    ({"cors_origins": "http://good"}, "http://evil", "", 403),
    ({"cors_origins": "*"}, "http://evil", "", 200), ({"api_key": "k"}, "http://evil", "k", 200),
    ({"api_key": "k"}, "http://evil", "", 401), ({"admin_key": "k"}, "http://evil", "", 403)])
def test_keys_and_named_origins_open(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str],
                                     origin: str, key: str, status: int) -> None:
    app = scripted_app(monkeypatch, Scripted(["hi"]), Config(gateway=GatewayConfig(**settings)))

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app),
                                     base_url="http://testserver") as client:
            return await client.post("/v1/completions", json={"prompt": "a"}, headers={
                "Origin": origin} | ({"Authorization": f"Bearer {key}"} if key else {}))

    found = asyncio.run(run())
    assert found.status_code == status, found.text
    assert "access-control-allow-credentials" not in found.headers


# --- what a browser might take for markup ---------------------------------------------------------

def test_pages_may_run_nothing_but_their_own(served: Served, tried: Any) -> None:
    for path in ("/", "/status", "/docs", "/redoc"):
        tried()
        found = ask(served, path)
        policy = dict(one.split(" ", 1) for one in found.headers["content-security-policy"]
                      .split("; "))
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert "unsafe" not in policy["script-src"] and policy["trusted-types"] == "'none'"
        assert found.headers["x-frame-options"] == "DENY" and NAME.encode() not in found.body
    markup = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|"
                        r"\beval\(|new Function|setTimeout\(['\"`]|createContextualFragment")
    files = [file for kind in ("js", "html") for file in documents.API.parent.rglob(f"*.{kind}")]
    assert {"vendor", "shared", "playground", "status", "api_docs"} == {
        file.parent.name for file in files}
    for file in files:
        assert not markup.search(file.read_text()), file


def test_nothing_said_by_others_is_a_document(served: Served, probe_port: int, tried: Any) -> None:
    bad = f"/{NAME}?{NAME}"
    asked = [(bad, None, {}), ("/v1/models", None, {}), ("/v1/models/" + NAME, None, {}),
             ("/v1/completions", json.dumps({"prompt": "a", "model": NAME + "x"}).encode(), {}),
             ("/v1/completions", NAME.encode(), {}), ("/metrics", None, {}),
             ("/version", None, {"Host": NAME}), ("/generate", BODY, {"Origin": NAME}),
             ("/v1/completions", BODY, {"X_Request_Id": NAME}),
             ("/v1/completions", BODY, {"Content_Encoding": NAME}),
             ("/v1/completions", BODY, {"Last_Event_ID": NAME}),
             ("/v1/completions", json.dumps({"prompt": "a", NAME: 1, "stop": {NAME: 1}}).encode(),
              {})]
    for path, body, headers in asked:
        for port in (served.port, probe_port) if body is None else (served.port,):
            tried()
            found = ask(served, path.replace(" ", "%20"), body, port=port, **headers)
            assert found.headers["x-content-type-options"] == "nosniff"
            assert found.headers["content-type"].split(";")[0] in (
                "application/json", "text/plain", "application/openmetrics-text"), path
