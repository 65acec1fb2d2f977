"""Probes: what they judge, over what paths, and at which port."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.config.tree import Config, ProbeConfig, RecoveryConfig, SchedulerConfig
from actorium.actors.config.validation import validate
from actorium.actors.core import Context
from actorium.actors.errors import BadConfig
from actorium.actors.watchdog import probe_routes as web
from actorium.actors.watchdog import probe_server as probes
from actorium.actors.watchdog.core import WatchdogCore
from actorium.actors.watchdog.metrics import MetricsInput
from actorium.actors.watchdog.readiness import EngineCondition, judge
from actorium.actors.watchdog.supervised import Supervised, starting

ROLES = ("worker-0", "scheduler")
READY = EngineCondition(True, True, True, "", 0)


# --- the judgement --------------------------------------------------------------------------------

def known(error: str | None = None, draining: bool = False, started: bool = True,
          **changes: Any) -> WatchdogCore:
    """Two actors at rest, heard of at 100.0; `changes` are fields of the scheduler's actor."""
    actors = {role: starting(role, 10, 1, 100.0) for role in ROLES}
    for actor in actors.values():
        actor.phase, actor.budget = "idle", 5.0
    for name, value in changes.items():
        setattr(actors["scheduler"], name, value)
    core = WatchdogCore("e", 1, 10, 60.0)
    core.actors, core.expected = actors, frozenset(ROLES)
    core.error, core.draining, core.was_ready = error, draining, started
    return core


def test_all_at_work_is_ready() -> None:
    assert judge(known(), Config(), 100.4) == READY


@pytest.mark.parametrize(("changes", "why"), [
    ({"phase": "loading", "detail": "3/5 shards"}, "scheduler is loading (3/5 shards)"),
    ({"phase": "exited"}, "scheduler is exited"),
    ({"phase": "draining"}, "scheduler is draining"),
    ({"seen": 98.0}, "scheduler is silent"),
    ({"loop_age": 6.0}, "scheduler: its loop has not turned for 6.0 s (idle, 5 s allowed)"),
    ({"phase": "stepping", "moved": 80.0, "budget": 1.0, "gauges": {}},
     "scheduler: no progress for 20.4 s (stepping, 1 s allowed)"),
    ({"gauges": {"waiting_requests": 4.0}}, "the queue is full: 4 requests wait, 4 may"),
    ({"gauges": {"ledger_full": 1.0}}, "the ledger takes no more")])
def test_reasons_for_not_being_ready(changes: dict[str, Any], why: str) -> None:
    config = Config(scheduler=SchedulerConfig(max_num_queued_reqs=4))
    facts = known(**changes)
    facts.actors["worker-0"].moved = 80.0
    judged = judge(facts, config, 100.4)
    assert judged == EngineCondition(True, True, False, why, 1)


@pytest.mark.parametrize("started", [True, False])
def test_a_tracer_that_starts_again_keeps_no_request_away(started: bool) -> None:
    facts = known(started=started)
    facts.actors["tracer"] = starting("tracer", 11, 2, 100.0)
    facts.expected = frozenset((*ROLES, "tracer"))
    assert judge(facts, Config(), 100.4).ready is started


def test_a_long_step_within_its_budget_is_ready() -> None:
    assert judge(known(phase="stepping", moved=80.0, budget=60.0), Config(), 100.4).ready


def test_alive_until_recovery_is_impossible() -> None:
    dead = judge(known(error="worker-0 was killed"), Config(), 100.0)
    assert dead == EngineCondition(False, True, False, "worker-0 was killed", 0)
    ending = judge(known(error="the engine is stopping", draining=True), Config(), 100.0)
    assert (ending.live, ending.ready) == (True, False)


def test_nothing_is_ready_before_it_was_started() -> None:
    assert not judge(WatchdogCore("e", 1, 10, 60.0), Config(), 0.0).ready
    assert not judge(known(started=False), Config(), 100.0).ready
    once = Config(recovery=RecoveryConfig(restart=False))
    assert judge(known(started=False), once, 100.0).started


# --- the paths ------------------------------------------------------------------------------------

class FakeEngine:
    def __init__(self, condition: EngineCondition = READY) -> None:
        self.is_ = condition
        self.actors: dict[str, Supervised] = {}

    def condition(self, now: float) -> EngineCondition:
        return self.is_

    def metrics_input(self, now: float) -> MetricsInput:
        return MetricsInput(self.actors, {}, {}, self.is_.ready, Config(), "m", "1", now)


def ask(app: web.ProbeApp, path: str, method: str = "GET",
        **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers, body, by ASGI."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path,
             "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    asyncio.run(app(scope, receive, send))
    assert [m["type"] for m in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}, \
        sent[1]["body"]


def make_app(condition: EngineCondition = READY) -> tuple[web.ProbeApp, FakeEngine]:
    engine = FakeEngine(condition)
    return web.ProbeApp(engine, Path("/nowhere"), lambda: 100.0), engine


@pytest.mark.parametrize(("condition", "codes"), [
    (READY, (200, 200, 200)),
    (EngineCondition(True, True, False, "worker-0 is silent", 1), (200, 503, 200)),
    (EngineCondition(True, False, False, "worker-0 is loading", 1), (200, 503, 503)),
    (EngineCondition(False, True, False, "worker-0 was killed", 0), (503, 503, 200))])
def test_codes(condition: EngineCondition, codes: tuple[int, int, int]) -> None:
    app, _ = make_app(condition)
    live, ready, started = codes
    for path, code in (("/livez", live), ("/v2/health/live", live), ("/readyz", ready),
                       ("/health", ready), ("/ping", ready), ("/v2/health/ready", ready),
                       ("/startupz", started), ("/version", 200), ("/load", 200),
                       ("/metrics", 200)):
        status, headers, body = ask(app, path)
        assert status == code, path
        assert headers["content-length"] == str(len(body)) and body
        if headers["content-type"] == "application/json":
            found = json.loads(body)
            assert status == 200 or found["why"] == condition.why
    assert ask(app, "/readyz")[1].get("retry-after") == ("1" if condition.retry_after else None)


def test_unknown_probe_paths_are_refused() -> None:
    app, _ = make_app()
    status, _, body = ask(app, "/v1/models")
    assert status == 404 and json.loads(body)["error"]["message"] == "no such path: /v1/models"
    status, headers, _ = ask(app, "/readyz", "POST")
    assert status == 405 and headers["allow"] == "GET, HEAD"
    assert ask(app, "/ping", "POST")[0] == 200
    status, headers, _ = ask(app, "/ping", "DELETE")
    assert status == 405 and headers["allow"] == "GET, HEAD, POST"
    status, headers, body = ask(app, "/readyz", "HEAD")
    assert (status, body) == (200, b"") and int(headers["content-length"]) > 0


def test_startup_reports_the_phases() -> None:
    app, engine = make_app(EngineCondition(True, False, False, "worker-0 is loading", 1))
    engine.actors["worker-0"] = starting("worker-0", 1, 1, 97.0)
    engine.actors["worker-0"].phase, engine.actors["worker-0"].detail = "loading", "3/5 shards"
    told = json.loads(ask(app, "/startupz")[2])
    assert told["actors"] == {"worker-0": {"phase": "loading", "detail": "3/5 shards",
                                           "seconds": 3.0}}


def test_load_counts() -> None:
    app, engine = make_app()
    engine.actors["scheduler"] = starting("scheduler", 1, 1, 97.0)
    engine.actors["scheduler"].gauges = {"running": 3.0, "waiting": 4.0, "free_pages": 9.0}
    told = json.loads(ask(app, "/load")[2])
    assert (told["server_load"], told["running"], told["free_pages"]) == (7, 3, 9)


def test_an_unready_engine_gets_no_generation_probe() -> None:
    app, _ = make_app(EngineCondition(True, True, False, "worker-0 is silent", 1))
    status, _, body = ask(app, "/health_generate")
    assert status == 503 and json.loads(body)["why"] == "worker-0 is silent"


def test_the_generation_probe_fails_without_an_engine() -> None:
    app, _ = make_app()
    status, _, body = ask(app, "/health_generate")
    assert status == 503 and "no engine 'nowhere' is running" in json.loads(body)["why"]


# --- the port -------------------------------------------------------------------------------------

def context(run_dir: Path, port: int | None, epoch: int = 1, host: str = "127.0.0.1") -> Context:
    config = Config(probes=ProbeConfig(probe_port=port, probe_host=host))
    return Context(config, run_dir, "watchdog", epoch, 0)


def test_a_free_port_is_written_down_and_taken_again(tmp_path: Path) -> None:
    none = probes.build(context(tmp_path, None))
    assert none.where is None and probes.where(tmp_path) is None
    none.stop()
    first = probes.build(context(tmp_path, 0))
    assert first.where is not None and probes.where(tmp_path) == first.where
    assert first.where.url == f"http://127.0.0.1:{first.where.port}"
    first.stop()
    second = probes.build(context(tmp_path, 0, epoch=2))
    assert second.where == first.where
    third = probes.build(context(tmp_path, 0, epoch=3))
    assert third.where is None, "taken: the engine goes on without"
    second.stop()
    third.stop()
    assert {entry.name for entry in tmp_path.iterdir()} == {"probes.json", probes.SOCKET}


class Loop:
    """Stands for the actor's loop and its engine: `post` runs a call on the loop's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def post(self, call: Any) -> None:
        self._loop.call_soon_threadsafe(call)


async def get(path: Path, request: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(request + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


def test_the_web_server_starts_with_the_first_request(tmp_path: Path) -> None:
    async def run() -> None:
        served = probes.build(context(tmp_path, None))
        served.start(Loop().post, FakeEngine())
        await asyncio.sleep(0.05)
        assert served._server is None, "nobody has asked"
        for _ in range(2):
            answer = await asyncio.wait_for(get(tmp_path / probes.SOCKET, b"GET /readyz"), 20)
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b'{"ready":true}')
        served.stop()
        with pytest.raises(OSError):
            await get(tmp_path / probes.SOCKET, b"GET /readyz")

    asyncio.run(run())


def test_an_engine_that_stops_before_any_request_closes_its_port(tmp_path: Path) -> None:
    async def run() -> None:
        served = probes.build(context(tmp_path, None))
        served.start(Loop().post, FakeEngine())
        await asyncio.sleep(0)
        served.stop()
        await asyncio.sleep(0.01)
        with pytest.raises(OSError):
            await get(tmp_path / probes.SOCKET, b"GET /readyz")

    asyncio.run(run())


def test_a_port_that_is_taken_is_a_bad_configuration(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(BadConfig, match=f"probe_port: cannot listen at 127.0.0.1:{port}: "):
            probes.build(context(tmp_path, port))
    with pytest.raises(BadConfig, match="probe_host: 'no such host'"):
        probes.build(context(tmp_path, 0, host="no such host"))


def test_bad_fields_are_named() -> None:
    with pytest.raises(BadConfig, match="probe_port: must be between 0 and 65535, got 65536"):
        validate(Config(probes=ProbeConfig(probe_port=65536)))
