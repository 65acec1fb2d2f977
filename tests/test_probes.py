"""Probes: what they judge, over what paths, and that a real engine's answer in time."""

from __future__ import annotations

import asyncio
import http.client as http_client
import json
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_runtime import LauncherProcess, make_config, roles, short_dir, status

from actorium import Client, Engine, SamplingParams
from actorium.actors.client_requests import Request
from actorium.actors.config import Config, ProbeConfig, RecoveryConfig, SchedulerConfig
from actorium.actors.core import Context
from actorium.actors.errors import BadConfig
from actorium.actors.watchdog import probes, web
from actorium.actors.watchdog.condition import Condition, Known, judge
from actorium.actors.watchdog.metrics import Facts
from actorium.actors.watchdog.wards import Ward, born

ROLES = ("worker-0", "scheduler")
READY = Condition(True, True, True, "", 0)


# --- the judgement --------------------------------------------------------------------------------

def known(error: str | None = None, draining: bool = False, started: bool = True,
          **changes: Any) -> Known:
    """Two actors at rest, heard of at 100.0; `changes` are fields of the scheduler's ward."""
    wards = {role: born(role, 10, 1, 100.0) for role in ROLES}
    for ward in wards.values():
        ward.phase, ward.budget = "idle", 5.0
    for name, value in changes.items():
        setattr(wards["scheduler"], name, value)
    return Known(wards, frozenset(ROLES), error, draining, started)


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
def test_what_keeps_an_engine_from_being_ready(changes: dict[str, Any], why: str) -> None:
    config = Config(scheduler=SchedulerConfig(max_num_queued_reqs=4))
    facts = known(**changes)
    facts.wards["worker-0"].moved = 80.0
    judged = judge(facts, config, 100.4)
    assert judged == Condition(True, True, False, why, 1)


def test_a_long_step_within_its_budget_is_ready() -> None:
    assert judge(known(phase="stepping", moved=80.0, budget=60.0), Config(), 100.4).ready


def test_alive_until_recovery_is_impossible() -> None:
    dead = judge(known(error="worker-0 was killed"), Config(), 100.0)
    assert dead == Condition(False, True, False, "worker-0 was killed", 0)
    ending = judge(known(error="the engine is stopping", draining=True), Config(), 100.0)
    assert (ending.live, ending.ready) == (True, False)


def test_nothing_is_ready_before_it_was_started() -> None:
    assert not judge(Known({}, frozenset(), None, False, False), Config(), 0.0).ready
    assert not judge(known(started=False), Config(), 100.0).ready
    once = Config(recovery=RecoveryConfig(restart=False))
    assert judge(known(started=False), once, 100.0).started


# --- the paths ------------------------------------------------------------------------------------

class FakeEngine:
    def __init__(self, condition: Condition = READY) -> None:
        self.is_ = condition
        self.wards: dict[str, Ward] = {}

    def condition(self, now: float) -> Condition:
        return self.is_

    def facts(self, now: float) -> Facts:
        return Facts(self.wards, {}, {}, self.is_.ready, Config(), "m", "1", now)


def ask(app: web.App, path: str, method: str = "GET",
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


def make_app(condition: Condition = READY) -> tuple[web.App, FakeEngine]:
    engine = FakeEngine(condition)
    return web.App(engine, Path("/nowhere"), lambda: 100.0), engine


@pytest.mark.parametrize(("condition", "codes"), [
    (READY, (200, 200, 200)),
    (Condition(True, True, False, "worker-0 is silent", 1), (200, 503, 200)),
    (Condition(True, False, False, "worker-0 is loading", 1), (200, 503, 503)),
    (Condition(False, True, False, "worker-0 was killed", 0), (503, 503, 200))])
def test_codes(condition: Condition, codes: tuple[int, int, int]) -> None:
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


def test_what_is_no_probe_is_refused() -> None:
    app, _ = make_app()
    status, _, body = ask(app, "/v1/models")
    assert status == 404 and json.loads(body)["error"]["message"] == "no such path: /v1/models"
    status, headers, _ = ask(app, "/readyz", "POST")
    assert status == 405 and headers["allow"] == "GET, HEAD"
    assert ask(app, "/ping", "POST")[0] == 200
    status, headers, body = ask(app, "/readyz", "HEAD")
    assert (status, body) == (200, b"") and int(headers["content-length"]) > 0


def test_startup_tells_the_phases() -> None:
    app, engine = make_app(Condition(True, False, False, "worker-0 is loading", 1))
    engine.wards["worker-0"] = born("worker-0", 1, 1, 97.0)
    engine.wards["worker-0"].phase, engine.wards["worker-0"].detail = "loading", "3/5 shards"
    told = json.loads(ask(app, "/startupz")[2])
    assert told["actors"] == {"worker-0": {"phase": "loading", "detail": "3/5 shards",
                                           "seconds": 3.0}}


def test_load_counts() -> None:
    app, engine = make_app()
    engine.wards["scheduler"] = born("scheduler", 1, 1, 97.0)
    engine.wards["scheduler"].gauges = {"running": 3.0, "waiting": 4.0, "free_pages": 9.0}
    told = json.loads(ask(app, "/load")[2])
    assert (told["server_load"], told["running"], told["free_pages"]) == (7, 3, 9)


def test_no_token_is_asked_of_an_engine_that_is_not_ready() -> None:
    app, _ = make_app(Condition(True, True, False, "worker-0 is silent", 1))
    status, _, body = ask(app, "/health_generate")
    assert status == 503 and json.loads(body)["why"] == "worker-0 is silent"


def test_an_engine_that_is_gone_generates_nothing() -> None:
    app, _ = make_app()
    status, _, body = ask(app, "/health_generate")
    assert status == 503 and "no engine 'nowhere' is running" in json.loads(body)["why"]


# --- the port -------------------------------------------------------------------------------------

def context(run_dir: Path, port: int | None, epoch: int = 1, host: str = "127.0.0.1") -> Context:
    config = Config(probes=ProbeConfig(probe_port=port, probe_host=host))
    return Context(config, run_dir, "watchdog", epoch, 0)


def test_a_free_port_is_written_down_and_taken_again(tmp_path: Path) -> None:
    assert probes.build(context(tmp_path, None)) is None and probes.where(tmp_path) is None
    first = probes.build(context(tmp_path, 0))
    assert first is not None and probes.where(tmp_path) == first.where
    assert first.where.url == f"http://127.0.0.1:{first.where.port}"
    first.stop()
    second = probes.build(context(tmp_path, 0, epoch=2))
    assert second is not None and second.where == first.where
    assert probes.build(context(tmp_path, 0, epoch=3)) is None, "taken: the engine goes on without"
    second.stop()
    assert [entry.name for entry in tmp_path.iterdir()] == ["probes.json"]


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
        Config(probes=ProbeConfig(probe_port=65536)).check()


# --- real engines ---------------------------------------------------------------------------------

class Http:
    """Requests to one port, each on a connection of its own, as a kubelet's are."""

    def __init__(self, run_dir: Path) -> None:
        found = probes.where(run_dir)
        assert found is not None
        self.port = found.port

    def get(self, path: str, timeout: float = 20.0) -> tuple[int, Any]:
        connection = http_client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        is_json = answer.getheader("content-type") == "application/json"
        return answer.status, json.loads(body) if is_json else body.decode()

    def until(self, path: str, code: int, timeout: float) -> float:
        """Seconds until it answers with `code`."""
        began = time.monotonic()
        while time.monotonic() - began < timeout:
            if self.get(path)[0] == code:
                return time.monotonic() - began
        raise AssertionError(f"{path} did not say {code} within {timeout} s")

    def until_running(self, timeout: float) -> None:
        """Until /load tells of running sequences; it knows what the scheduler's last beat said."""
        began = time.monotonic()
        while self.get("/load")[1]["running"] == 0:
            assert time.monotonic() - began < timeout, "/load tells of nothing that runs"
            time.sleep(0.02)


@contextmanager
def serving(**settings: Any) -> Iterator[tuple[Engine, Http]]:
    with short_dir() as base, Engine(
            "", null_worker=True, skip_tokenizer=True, device="cpu", run_dir=str(base), name="e",
            probe_port=0, **settings) as engine:
        yield engine, Http(base / "e")


@contextmanager
def load(client: Client, streams: int) -> Iterator[None]:
    """So many streams at a time, as fast as they go."""
    over, begun = threading.Event(), threading.Event()

    def run() -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        requests = (Request(prompt=[7, 8, 9, i], params=params) for i in range(10**6))
        for _ in client.run(requests, window=streams):
            begun.set()
            if over.is_set():
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(20)
        yield
    finally:
        over.set()
        thread.join()


def test_probes_answer_at_once_while_the_engine_is_saturated() -> None:
    with serving(max_num_seqs=64) as (engine, http), load(engine.client, 64):
        http.until_running(timeout=5.0)
        for path in ("/readyz", "/livez", "/load", "/metrics"):
            took = []
            for _ in range(60):
                began = time.perf_counter()
                code, _ = http.get(path)
                took.append(time.perf_counter() - began)
                assert code == 200
            assert statistics.quantiles(took, n=10)[-1] < 0.050, (path, sorted(took)[-5:])
        code, told = http.get("/health_generate")
        assert (code, told["tokens"]) == (200, 1)
        text = http.get("/metrics")[1]
        gaps = next(line for line in text.splitlines()
                    if line.startswith("vllm:inter_token_latency_seconds_count"))
        assert float(gaps.split()[-1]) > 1000


def test_a_stopped_worker_is_told_of_within_two_seconds_and_forgiven() -> None:
    with serving(restart=False) as (engine, http):
        assert http.get("/readyz") == (200, {"ready": True})
        assert engine.status is not None
        worker = next(a.pid for a in engine.status.actors if a.role == "worker-0")
        os.kill(worker, signal.SIGSTOP)
        try:
            assert http.until("/readyz", 503, 10.0) < 2.0
            assert http.get("/health_generate") == (503, {"ready": False,
                                                          "why": "worker-0 is silent"})
            assert http.get("/livez")[0] == 200
        finally:
            os.kill(worker, signal.SIGCONT)
        assert http.until("/readyz", 200, 10.0) < 2.0
        assert http.get("/health_generate")[0] == 200


def test_tokens_asked_for_together_are_one() -> None:
    with serving() as (_, http):
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(http.get("/health_generate")))
                   for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [code for code, _ in found] == [200] * 8
        assert len({told["seconds"] for _, told in found}) == 1
        code, told = http.get("/metrics")
        ended = sum(float(line.split()[-1]) for line in told.splitlines()
                    if line.startswith("vllm:request_success_total"))
        assert ended <= 1  # the beat that tells of it may be on its way


def test_a_starting_engine_answers_and_a_stopping_one_says_so() -> None:
    with short_dir() as base:
        config = msgspec.structs.replace(make_config(base), probes=ProbeConfig(probe_port=0))
        table = roles(worker_0="helpers_runtime:build_never")
        with LauncherProcess(config, table) as launcher:
            assert launcher.started()
            status(launcher.dir)  # the watchdog is there
            http = Http(launcher.dir)
            code, told = http.get("/startupz")
            assert code == 503 and told["started"] is False
            assert http.get("/readyz")[0] == 503 and http.get("/livez")[0] == 200
            launcher.process.send_signal(signal.SIGTERM)
            assert launcher.finish()[0] == 0
        assert list(base.iterdir()) == []


def test_a_taken_port_ends_the_engine_with_one_line() -> None:
    with short_dir() as base, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = msgspec.structs.replace(make_config(base), probes=ProbeConfig(probe_port=port))
        with LauncherProcess(config, roles()) as launcher:
            code, error = launcher.finish()
        assert (code, error) == (2, f"actorium: probe_port: cannot listen at 127.0.0.1:{port}: "
                                    "Address already in use\n")


def pid_of(engine: Engine, role: str) -> int:
    return next(a.pid for a in engine.client.status().actors if a.role == role)


def test_a_killed_watchdog_listens_again_where_it_did() -> None:
    with serving(restart=True) as (engine, http):
        os.kill(pid_of(engine, "watchdog"), signal.SIGKILL)
        until = time.monotonic() + 20
        code = 0
        while code != 200 and time.monotonic() < until:
            try:
                code = http.get("/readyz", timeout=5)[0]
            except (ConnectionError, http_client.HTTPException):
                continue
        assert code == 200
        assert 'actorium:actor_epoch{role="watchdog"} 2.0' in http.get("/metrics")[1]


def test_a_restart_is_counted_and_the_engine_ready_again() -> None:
    with serving(restart=True) as (engine, http):
        os.kill(pid_of(engine, "worker-0"), signal.SIGKILL)
        http.until("/readyz", 503, 5.0)
        assert http.get("/livez")[0] == 200
        http.until("/readyz", 200, 20.0)
        assert http.get("/health_generate")[0] == 200
        text = http.get("/metrics")[1]
        assert 'actorium:restarts_total{cause="killed",role="worker-0"} 1.0' in text
        assert 'actorium:actor_epoch{role="worker-0"} 2.0' in text
