"""Keys and tenants, a full queue, other origins, the probes: over an engine."""

from __future__ import annotations

import hashlib
import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers_served import Served, serving

from actorium.actors.config import tree as configs
from actorium.actors.config.sources import from_toml
from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.actor import connections
from actorium.actors.gateway.http import api_keys as keys
from actorium.actors.gateway.http.guard import Cors
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.runtime.http.http_server import OTHER_FILES
from actorium.actors.runtime.rundir import engine_dir

LONG = {"prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True, "stream": True,
        "stream_options": {"resumable": True}}
SHORT = LONG | {"max_tokens": 300}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# ours\nann ann-key\nbob sha256:"
                    + hashlib.sha256(b"bob-key").hexdigest() + "\n\n")
    with serving(max_num_seqs=1, max_num_queued_reqs=1, api_keys_file=str(file),
                 admin_key="root-key", cors_origins="https://a.example") as found:
        yield found


def ask(served: Served, path: str, body: Any = None, key: str = "ann-key", method: str = "",
        **headers: str) -> Answer:
    connection = http.client.HTTPConnection(served.host, served.port, timeout=30)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method or ("GET" if body is None else "POST"), path,
                           None if body is None else json.dumps(body),
                           {"Authorization": f"Bearer {key}"} | given)
        found = connection.getresponse()
        raw = found.read()
        with suppress(ValueError):
            raw = json.loads(raw)
        return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, raw)
    finally:
        connection.close()


class Stream:
    """An answer that is being read."""

    def __init__(self, served: Served, body: Any, key: str = "ann-key", **headers: str) -> None:
        self._connection = http.client.HTTPConnection(served.host, served.port, timeout=30)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("POST", "/v1/completions", json.dumps(body),
                                 {"Authorization": f"Bearer {key}"} | given)
        self.answer = self._connection.getresponse()
        assert self.answer.status == 200, self.answer.read()

    def id(self) -> str:
        """Of the next event."""
        while not (line := self.answer.readline()).startswith(b"id: "):
            assert line
        return line[4:].decode().strip()

    def close(self) -> None:
        self._connection.close()
        self.answer.close()


def gauges(served: Served) -> dict[str, float]:
    return next(one.gauges for one in served.engine.client.status().actors
                if one.role == "scheduler")


def idle(served: Served) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        now = gauges(served)
        if not now["running"] and not now["waiting"]:
            return
        time.sleep(0.02)
    raise AssertionError("still at work")


def test_only_the_listed_keys_are_accepted(served: Served) -> None:
    assert [ask(served, "/v1/models", key=key).status for key in
            ("ann-key", "bob-key", "root-key", "nobody", "", "ann")] == [200] * 3 + [401] * 3
    assert ask(served, "/version", key="").status == 200
    assert [ask(served, "/flush_cache", {}, key=key).status for key in
            ("ann-key", "root-key")] == [401, 200]


def test_no_key_is_disclosed(served: Served) -> None:
    told = json.dumps(ask(served, "/server_info", key="root-key").body)
    assert "root-key" not in told and '"admin_key": "***"' in told
    assert "root-key" not in json.dumps(served.engine.client.server_info())
    tree = configs.with_secrets_hidden(Config(gateway=GatewayConfig(api_key="k1", admin_key="k2")))
    assert (tree["gateway"]["api_key"], tree["gateway"]["admin_key"]) == ("***", "***")
    directory = engine_dir(served.engine.name)
    assert isinstance(directory, Path)
    for file in directory.glob("*.log"):
        assert b"root-key" not in file.read_bytes() and b"ann-key" not in file.read_bytes()


def test_prefixes_are_shared_within_a_tenant_alone(served: Served) -> None:
    body = {"prompt": list(range(100, 400)), "max_tokens": 1}
    cached = [ask(served, "/v1/completions", body, key=key).body["usage"]["prompt_tokens_details"]
              ["cached_tokens"] for key in ("ann-key", "bob-key", "ann-key", "bob-key")]
    assert cached[:2] == [0, 0] and min(cached[2:]) > 200


def test_a_tenant_cannot_resume_anothers_stream(served: Served) -> None:
    stream = Stream(served, SHORT, Idempotency_Key="one")
    mark = stream.id()
    theirs = ask(served, "/v1/completions", SHORT, key="bob-key", Last_Event_ID=mark)
    assert (theirs.status, theirs.body["error"]["param"]) == (400, "Last-Event-ID")
    own = ask(served, "/v1/completions", SHORT | {"max_tokens": 1, "stream": False,
                                                  "stream_options": None}, key="bob-key",
              Idempotency_Key="one")
    assert own.status == 200 and own.body["usage"]["completion_tokens"] == 1
    again = Stream(served, SHORT, Last_Event_ID=mark)
    assert again.id() != mark
    again.close()
    stream.close()
    idle(served)


def test_a_full_queue_answers_with_retry_after(served: Served) -> None:
    streams = [Stream(served, LONG)]
    streams[0].id()
    waiting = threading.Thread(target=lambda: streams.append(Stream(served, LONG)))
    waiting.start()
    until = time.monotonic() + 10
    while not gauges(served)["waiting_requests"]:
        assert time.monotonic() < until
    found = ask(served, "/v1/completions", LONG)
    assert found.status == 429
    assert found.headers["retry-after"] == "1" and found.body["error"]["code"] == "queue_full"
    streams[0].close()
    waiting.join()
    streams[1].close()
    idle(served)


def test_only_listed_origins_may_call(served: Served) -> None:
    good = ask(served, "/version", Origin="https://a.example")
    assert good.headers["access-control-allow-origin"] == "https://a.example"
    bad = ask(served, "/version", Origin="https://evil.example")
    assert "access-control-allow-origin" not in bad.headers and bad.headers["vary"] == "origin"
    asked = ask(served, "/v1/completions", key="", method="OPTIONS", Origin="https://a.example",
                Access_Control_Request_Method="POST")
    assert asked.status == 204 and "authorization" in asked.headers["access-control-allow-headers"]
    assert Cors("").headers({b"origin": b"https://a.example"}) == []
    assert Cors("*").headers({b"origin": b"https://x"})[0][1] == b"*"


def test_probes_need_no_port_of_their_own_and_metrics_a_key(served: Served) -> None:
    assert ask(served, "/health").body == {"ready": True, "status": "ok", "state": "running"}
    for path in ("/livez", "/readyz", "/startupz", "/ping"):
        assert ask(served, path, key="").status == 200, path
    for path in ("/metrics", "/load", "/health_generate"):
        assert ask(served, path, key="").status == 401, path
    assert b"vllm:num_requests_running" in ask(served, "/metrics").body
    assert ask(served, "/load").body["server_load"] == 0
    assert ask(served, "/get_load").body == [
        {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
    for method in ("GET", "POST"):
        assert ask(served, "/health_generate", method=method).body["tokens"] == 1
        assert ask(served, "/ping", method=method).body == {"ready": True}
    assert ask(served, "/load", method="POST").status == 405


def test_what_is_got_has_the_type_that_the_document_tells(served: Served) -> None:
    told = ask(served, "/openapi.json").body
    kinds, seen = {"object": dict, "array": list}, dict[str, str]()
    for path, methods in told["paths"].items():
        if "get" not in methods or "{" in path:
            continue
        answer = ask(served, path)
        content = methods["get"]["responses"]["200"]["content"]
        if answer.status == 200 and "application/json" in content:
            schema = content["application/json"]["schema"]
            if "$ref" in schema:
                schema = told["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            seen[path] = schema["type"]
            assert isinstance(answer.body, kinds[seen[path]]), path
    assert len(seen) > 15
    assert {path for path, kind in seen.items() if kind == "array"} >= {"/get_load", "/slots"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_reports_the_load_to_who_asks_for_it(served: Served, stream: bool) -> None:
    """In vLLM's two forms. An error, a route that generates nothing and an unknown form do not."""
    body = {"prompt": [1, 2], "max_tokens": 2, "stream": stream}
    name = "endpoint-load-metrics"

    def told(path: str = "/v1/completions", asked: Any = body, form: str = "json") -> str | None:
        answer = ask(served, path, asked, **{"endpoint-load-metrics-format": form})
        found: str | None = answer.headers.get(name)
        return found

    assert name not in ask(served, "/v1/completions", body).headers
    kind, _, report = str(told()).partition(" ")
    metrics = json.loads(report)["named_metrics"]
    assert kind == "JSON" and 0 <= metrics.pop("kv_cache_usage_perc") <= 1
    assert metrics.keys() == {"num_requests_waiting", "num_requests_running"}
    kind, _, report = str(told(form="TEXT")).partition(" ")
    pairs = dict(part.split("=") for part in report.split(", "))
    assert kind == "TEXT" and float(pairs["named_metrics.num_requests_waiting"]) == 0
    assert told(form="BIN") is None and told("/version", None) is None
    assert told(asked={"prompt": "", "max_tokens": -1}) is None


def test_connections_are_counted_and_idle_ones_make_room() -> None:
    with serving(null_worker=True, skip_tokenizer=True, probe_port=0, max_connections=3) as other:
        held = [http.client.HTTPConnection(other.host, other.port) for _ in range(3)]
        for one in held:
            one.request("GET", "/version")
            assert one.getresponse().read()
        assert ask(other, "/version").status == 200
        busy = [socket.create_connection((other.host, other.port)) for _ in range(3)]
        for sock in busy:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                         b"content-length: 9\r\n\r\n")
        until = time.monotonic() + 20
        while (refused := ask(other, "/version")).status != 503:
            assert time.monotonic() < until
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.body["error"]["code"] == "too_many_connections"
        assert refused.headers["connection"] == "close"
        for sock in busy:
            sock.close()


@pytest.mark.parametrize(("text", "what"), [
    ("ann", "line 1: must be a name and a key"), ("ann a b", "must be a name and a key"),
    ("# nothing\n", "no key in it"), ("ann sha256:12", "64 hexadecimal"),
    ("\u00e4nn key-x", "64 ASCII"), ("a" * 65 + " key-x", "64 ASCII")])
def test_errors_in_a_key_file_disclose_no_key(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(BadConfig, match=what) as caught:
        keys.read(tmp_path / "keys")
    assert "key-x" not in str(caught.value) and caught.value.param == "gateway.api_keys_file"


@pytest.mark.parametrize(("mode", "parent"), [(0o602, 0o700), (0o620, 0o700), (0o600, 0o777)])
def test_a_key_file_that_others_could_change_is_refused(tmp_path: Path, mode: int, parent: int
                                                        ) -> None:
    (tmp_path / "keys").write_text("ann key-x\n")
    (tmp_path / "keys").chmod(mode)
    tmp_path.chmod(parent)
    with pytest.raises(BadConfig, match="^api_keys_file: others could .*chmod go-w"):
        keys.Keys(GatewayConfig(api_keys_file=str(tmp_path / "keys")))


def test_what_is_written_down_of_a_key_does_not_open(tmp_path: Path) -> None:
    """The run directory's copy of the configuration outlives a launcher that is killed."""
    settings = GatewayConfig(api_key="sk-one", admin_key="sk-root")
    data = configs.dump(Config(gateway=settings))
    assert b"sk-" not in data
    again = configs.load(configs.dump(configs.load(data)))
    for read in (settings, again.gateway):
        guard = keys.Keys(read)
        assert guard.check("/v1/models", b"Bearer sk-one") == "" == guard.check(
            "/flush_cache", b"Bearer sk-root")
        assert not guard.is_admin(b"Bearer sk-one") and guard.is_admin(b"Bearer sk-root")
        with pytest.raises(HttpError):
            guard.check("/v1/models", f"Bearer {again.gateway.api_key}".encode())
    with pytest.raises(BadConfig, match="admin_key: must be another key"):
        validate(Config(gateway=GatewayConfig(api_key="sk-one", admin_key=again.gateway.api_key)))


def test_a_configuration_with_a_key_that_others_could_change_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[gateway]\nport = 8000\n")
    file.chmod(0o666)
    assert from_toml(str(file)).keys() == {"port"}
    file.write_text("[gateway]\napi_key = 'sk-one'\n")
    with pytest.raises(BadConfig, match=r"--config: there is a key in it, and others could change"):
        from_toml(str(file))
    file.chmod(0o644)
    assert from_toml(str(file)).keys() == {"api_key"}


def test_few_open_files_are_warned_of(monkeypatch: pytest.MonkeyPatch,
                                      caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    assert connections(GatewayConfig(max_connections=800)) == 800 and not caplog.records
    assert connections(GatewayConfig(max_connections=4096)) == 1024 - OTHER_FILES
    assert "max_connections: 896 instead of 4096" in caplog.text


def test_more_callers_than_the_usual_number_of_open_files() -> None:
    """The engine raises the soft limit that it is started with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1024:
        pytest.skip("the system allows no 1,024 open files")
    few, idle = 256, list[socket.socket]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with serving(device="cpu", null_worker=True) as found:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            idle += [socket.create_connection((found.host, found.port)) for _ in range(2 * few)]
            body = {"prompt": [1, 2, 3], "max_tokens": 3}
            assert ask(found, "/v1/completions", body, key="").status == 200
            for one in idle:
                one.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
