"""Probes of real engines: that they answer in time, and what of."""

from __future__ import annotations

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
from helpers_speed import slowness

from actorium import Client, Engine, SamplingParams
from actorium.actors.client.requests import Request
from actorium.actors.config.tree import ProbeConfig
from actorium.actors.watchdog import probe_server as probes


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


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, Http]]:
    """What dies in it is started again."""
    with serving(max_num_seqs=64) as found:
        yield found


def test_probes_answer_at_once_while_the_engine_is_saturated(served: tuple[Engine, Http]) -> None:
    engine, http = served
    with load(engine.client, 64):
        http.until_running(timeout=5.0)
        for path in ("/readyz", "/livez", "/load", "/metrics"):
            took = []
            for _ in range(60):
                began = time.perf_counter()
                code, _ = http.get(path)
                took.append(time.perf_counter() - began)
                assert code == 200
            assert statistics.median(took) < 0.05 * slowness(), (path, sorted(took)[-5:])
        code, told = http.get("/health_generate")
        assert (code, told["tokens"]) == (200, 1)
        text = http.get("/metrics")[1]
        gaps = next(line for line in text.splitlines()
                    if line.startswith("vllm:inter_token_latency_seconds_count"))
        assert float(gaps.split()[-1]) > 1000


def test_a_stopped_worker_is_reported_and_recovers() -> None:
    with serving(restart=False) as (engine, http):
        assert http.get("/readyz") == (200, {"ready": True})
        assert engine.status is not None
        worker = next(a.pid for a in engine.status.actors if a.role == "worker-0")
        os.kill(worker, signal.SIGSTOP)
        try:
            http.until("/readyz", 503, 10.0)  # two seconds; figures are `make chaos`'s
            assert http.get("/health_generate") == (503, {"ready": False,
                                                          "why": "worker-0 is silent"})
            assert http.get("/livez")[0] == 200
        finally:
            os.kill(worker, signal.SIGCONT)
        http.until("/readyz", 200, 10.0)
        assert http.get("/health_generate")[0] == 200


def test_simultaneous_generation_probes_share_one_request(served: tuple[Engine, Http]) -> None:
    _, http = served
    before, found = ended(http), list[Any]()
    threads = [threading.Thread(target=lambda: found.append(http.get("/health_generate")))
               for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [code for code, _ in found] == [200] * 8
    assert len({told["seconds"] for _, told in found}) == 1
    assert ended(http) <= before + 1  # the beat that tells of it may be on its way


def ended(http: Http) -> float:
    """How many requests have ended, as metrics tell it while nothing runs."""
    found = -1.0
    while True:
        last, told = found, http.get("/metrics")[1]
        found = sum(float(line.split()[-1]) for line in told.splitlines()
                    if line.startswith("vllm:request_success_total"))
        if found == last and http.get("/load")[1]["running"] == 0:
            return found
        time.sleep(0.6)  # an idle scheduler's beats are half a second apart


def test_probes_answer_while_starting_and_stopping() -> None:
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


def test_a_killed_watchdog_listens_again_where_it_did(served: tuple[Engine, Http]) -> None:
    engine, http = served
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


def test_a_restart_is_counted_and_the_engine_ready_again(served: tuple[Engine, Http]) -> None:
    engine, http = served
    os.kill(pid_of(engine, "worker-0"), signal.SIGKILL)
    http.until("/readyz", 503, 5.0)
    assert http.get("/livez")[0] == 200
    http.until("/readyz", 200, 20.0)
    assert http.get("/health_generate")[0] == 200
    text = http.get("/metrics")[1]
    assert 'actorium:restarts_total{cause="killed",role="worker-0"} 1.0' in text
    assert 'actorium:actor_epoch{role="worker-0"} 2.0' in text
