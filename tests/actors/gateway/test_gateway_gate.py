"""New requests while the engine recovers: they wait, and are refused where that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from helpers_runtime import child_env
from helpers_served import Served, late_roles, serving

from actorium.actors.errors import EngineUnavailable
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.served_engine import AGAIN, FRESH, RecoveryGate, obstacle
from actorium.actors.health import SILENT_AFTER
from actorium.actors.launcher.engine import Engine
from actorium.actors.messages import ActorStatus, Status

ROLES = ("worker-0", "tokenizer", "detokenizer", "scheduler", "gateway-0", "watchdog")


def status(error: str | None = None, age: float = 0.0, **phases: str) -> Status:
    return Status("-", not phases, error, [
        ActorStatus("e", role, 1, 1, phases.get(role.replace("-", "_"), "idle"), 0, 0.0,
                    age if role == "worker-0" else 0.0) for role in ROLES])


class Watchdog:
    """Says what it is told to say."""

    def __init__(self) -> None:
        self.says: Status | Exception = status()
        self.asked = 0

    async def __call__(self) -> Status:
        self.asked += 1
        await asyncio.sleep(0)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


def run(what: Callable[[Watchdog], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(what(Watchdog()))


async def seconds(entering: Awaitable[None]) -> float:
    began = time.monotonic()
    await entering
    return time.monotonic() - began


def at_once(entering: Coroutine[Any, Any, None]) -> bool:
    """Whether it is let in without being suspended."""
    try:
        entering.send(None)
    except StopIteration:
        return True
    entering.close()
    return False


async def at_last(gate: RecoveryGate) -> None:
    """Ask until it is let in."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(HttpError):
                return await gate.enter()
            await asyncio.sleep(AGAIN)


def test_obstacles_to_serving_are_named() -> None:
    assert obstacle(status()) == "" and obstacle(status(scheduler="stepping")) == ""
    assert obstacle(status(worker_0="exited")) == "worker-0 is exited"
    assert obstacle(status(gateway_0="exited", watchdog="starting")) == ""
    assert obstacle(status(age=SILENT_AFTER + 1)) == "worker-0 is silent"
    assert obstacle(status("it is all over", worker_0="loading")) == "it is all over"
    assert obstacle(status(worker_0="loading", tokenizer="loading")) == \
        "worker-0 is loading, tokenizer is loading"


def test_requests_wait_while_the_engine_recovers() -> None:
    async def check(watchdog: Watchdog) -> None:
        gate = RecoveryGate(watchdog, 60.0)
        watchdog.says = status(worker_0="starting")
        waiting = [asyncio.ensure_future(seconds(gate.enter())) for _ in range(3)]
        await asyncio.sleep(0.3)
        watchdog.says = status()
        took = await asyncio.gather(*waiting)
        assert all(0.2 < one < 30.0 for one in took)
        assert at_once(gate.enter())

    run(check)


def test_requests_are_refused_at_once_when_recovery_takes_too_long() -> None:
    async def check(watchdog: Watchdog) -> None:
        gate = RecoveryGate(watchdog, 0.3)
        watchdog.says = status(worker_0="loading")
        with pytest.raises(HttpError, match="not ready: worker-0 is loading") as caught:
            await gate.enter()
        assert (caught.value.status, caught.value.retry_after) == (503, 1)
        began = time.monotonic()
        for _ in range(20):
            with pytest.raises(HttpError):
                await gate.enter()
        assert time.monotonic() - began < 10 * 0.3, "each has waited anew"
        watchdog.says = status()
        await at_last(gate)

    run(check)


def test_an_engine_that_has_given_up_is_not_waited_for() -> None:
    async def check(watchdog: Watchdog) -> None:
        gate = RecoveryGate(watchdog, 600.0)
        watchdog.says = status(tokenizer="exited")
        waiting = asyncio.ensure_future(gate.enter())
        await asyncio.sleep(0.3)
        assert not waiting.done(), "its restart is due, however late"
        watchdog.says = status("tokenizer died too often", tokenizer="exited")
        for entering in (waiting, gate.enter()):
            with pytest.raises(HttpError, match="not ready: tokenizer died too often") as caught:
                await asyncio.wait_for(entering, 20)
            assert caught.value.status == 503

    run(check)


def test_an_engine_that_has_given_up_and_is_started_again_is_waited_for() -> None:
    async def main(watchdog: Watchdog) -> None:
        gate = RecoveryGate(watchdog, 600.0, comes_back=True)
        watchdog.says = status("worker-0 was killed")
        waits = asyncio.ensure_future(gate.enter())
        await asyncio.sleep(2 * AGAIN)
        assert not waits.done()
        watchdog.says = EngineUnavailable("no engine is running")
        await asyncio.sleep(2 * AGAIN)
        assert not waits.done()
        watchdog.says = status()
        await waits
        watchdog.says = status("worker-0 was killed")
        await asyncio.sleep(FRESH)
        await gate.enter()  # that it has given up again is not known yet
        await asyncio.sleep(2 * AGAIN)
        waits = asyncio.ensure_future(gate.enter())
        await asyncio.sleep(0)
        gate.give_up("it has ended three times")
        for late in (waits, gate.enter()):
            with pytest.raises(HttpError, match="it has ended three times"):
                await late

    run(main)


def test_a_watchdog_that_does_not_answer_changes_nothing() -> None:
    async def check(watchdog: Watchdog) -> None:
        gate = RecoveryGate(watchdog, 0.1)
        watchdog.says = EngineUnavailable("x")
        await gate.enter()
        watchdog.says = status(worker_0="exited")
        await asyncio.sleep(2 * FRESH)
        await gate.enter()  # nobody knew yet
        await asyncio.sleep(0.3)
        watchdog.says = EngineUnavailable("x")
        with pytest.raises(HttpError):
            await gate.enter()
        watchdog.says = status()
        await at_last(gate)

    run(check)


def test_the_watchdog_is_asked_rarely() -> None:
    async def check(watchdog: Watchdog) -> None:
        gate = RecoveryGate(watchdog, 0.1)
        until = time.monotonic() + 4 * FRESH
        while time.monotonic() < until:
            await gate.enter()
            await asyncio.sleep(0.005)
        assert 2 <= watchdog.asked <= 5
        asked = watchdog.asked
        await asyncio.sleep(2 * FRESH)
        assert watchdog.asked == asked, "nobody came"

    run(check)


# --- an engine ------------------------------------------------------------------------------------

def ask(served: Served, **more: Any) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection(served.host, served.port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(
            {"prompt": [1, 2], "max_tokens": 2, "ignore_eos": True} | more))
        answer = connection.getresponse()
        return answer.status, answer.getheader("retry-after"), answer.read()
    finally:
        connection.close()


def stopped_worker(engine: Engine) -> None:
    """It hangs: it is killed and started again, in some seconds."""
    os.kill(worker(engine).pid, signal.SIGSTOP)


def worker(engine: Engine) -> ActorStatus:
    return next(one for one in engine.client.status().actors if one.role == "worker-0")


def test_without_recovery_wait_new_requests_are_refused_and_streams_go_on(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"])
    with serving(null_worker=True, max_num_seqs=8, recovery_patience=0.0,
                 roles=late_roles()) as served:
        assert ask(served)[0] == 200
        begun: list[tuple[int, str | None, bytes]] = []
        stream = threading.Thread(target=lambda: begun.append(
            ask(served, max_tokens=1500, stream=True)))
        stream.start()
        time.sleep(0.1)
        stopped_worker(served.engine)
        # Of one that was sent before anybody knew, the answer comes when the engine is back.
        threads, answers = [], []
        until = time.monotonic() + 60
        while not any(code == 503 for code, _, _ in answers) and time.monotonic() < until:
            threads.append(threading.Thread(target=lambda: answers.append(ask(served))))
            threads[-1].start()
            time.sleep(0.1)
        for thread in [*threads, stream]:
            thread.join()
        refused = [one for one in answers if one[0] != 200]
        assert refused and all(code == 503 and after == "1" for code, after, _ in refused)
        assert b"the engine is not ready" in refused[0][2] and b"worker-0" in refused[0][2]
        assert begun[0][0] == 200 and begun[0][2].endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in begun[0][2]
        while ask(served)[0] != 200:
            assert time.monotonic() < until


def test_with_recovery_wait_no_request_is_refused() -> None:
    with serving(null_worker=True, max_num_seqs=8, recovery_patience=60.0) as served:
        assert ask(served)[0] == 200
        stopped_worker(served.engine)
        answers: list[int] = []
        threads, until = [], time.monotonic() + 60
        while worker(served.engine).epoch == 1 and time.monotonic() < until:
            threads.append(threading.Thread(target=lambda: answers.append(ask(served)[0])))
            threads[-1].start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        assert answers == [200] * len(threads) and len(threads) > 2
        assert ask(served)[0] == 200
