"""The rows of stops: SIGTERM in the middle of streams, which all must complete; a killed launcher,
which must leave no process behind; whole engines that are killed, whose streams must be continued
by the next one, of the same name and ledger; engines that give up, whose unread answers it has. And
of probes: how soon they report a hang and its end, that they answer while the engine is saturated,
and that no actor is killed that only waits for a processor."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway import actor as gateway
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime import roles
from actorium.actors.runtime.http import listening
from actorium.actors.watchdog.probe_server import where
from actorium.tools.chaos.checked_streams import Gaps, RequestMaker, Traffic, quantile
from actorium.tools.chaos.faults import Fault, actors, busy_processes, strike, wait_ended
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, engine, leftovers, rig
from actorium.tools.chaos.running_trials import GATEWAY

STREAMS = 24
GONE = 5.0


async def _drained(made: Rig, seed: int) -> Traffic:
    maker = RequestMaker(seed, (10, 30), prompt=40)
    traffic = Traffic(maker)
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        tasks = [asyncio.create_task(traffic.send(client, maker.make())) for _ in range(STREAMS)]
        while sum(want.count > 0 for want in traffic.live.values()) < STREAMS:
            await asyncio.sleep(0.01)
            if all(task.done() for task in tasks):
                break
        assert made.engine.pid is not None
        os.kill(made.engine.pid, signal.SIGTERM)
        await asyncio.gather(*tasks)
    return traffic


def stops(seed: int, times: int) -> dict[str, Any]:
    """Sends SIGTERM so many times, to engines in mid-stream."""
    wrong: list[str] = []
    complete, longest = 0, 0.0
    for turn in range(times):
        began = monotonic()
        with rig(debug_memory=False) as made:
            tally = asyncio.run(_drained(made, seed + turn)).tally
        complete += tally.complete
        longest = max(longest, monotonic() - began)
        wrong += tally.wrong + made.left + [
            f"{count} requests failed with {code}" for code, count in tally.failed.items()]
    dropped = times * STREAMS - complete
    if dropped:
        wrong.append(f"{dropped} streams were dropped")
    return {"stops": times, "streams": times * STREAMS, "complete": complete,
            "longest_s": round(longest, 2), "wrong": wrong}


def orphans(times: int) -> dict[str, Any]:
    """Kills the launcher: its actors must end with it and hold nothing."""
    wrong: list[str] = []
    spent: list[float] = []
    for _ in range(times):
        with rig(debug_memory=False) as made:
            pids = [actor.pid for actor in actors(made.run_dir).values()]
            assert made.engine.pid is not None
            began = monotonic()
            os.kill(made.engine.pid, signal.SIGKILL)
            alive = wait_ended(pids, GONE)
            spent.append(monotonic() - began)
            wrong += [f"{pid} outlives its launcher" for pid in alive]
            name, base = made.engine.name, made.base
            try:
                Engine(name=name, run_dir=str(base), null_worker=True, skip_tokenizer=True).close()
            except ActoriumError as error:
                wrong.append(f"no engine can take its place: {error.message}")
        wrong += made.left
    return {"kills": times, "longest_s": round(max(spent), 3), "wrong": wrong}


NAME = "reboot"
REBOOT_STREAMS = 40
RESUME = 30.0


@contextmanager
def _short_folder() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="ac-", dir="/tmp"))
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _start(base: Path) -> Rig:
    return Rig(engine(base / "run", name=NAME, ledger_dir=str(base / "ledger")), base / "run")


def _kill(made: Rig) -> None:
    """Kills the launcher and all actors at once."""
    pids = [actor.pid for actor in actors(made.run_dir).values()]
    assert made.engine.pid is not None
    os.kill(made.engine.pid, signal.SIGKILL)
    wait_ended(pids, 5.0)
    made.engine.close()


async def _drive_reboots(base: Path, traffic: Traffic, maker: RequestMaker, times: int,
                         stack: ExitStack) -> list[str]:
    made = await asyncio.to_thread(_start, base)
    closing = stack.enter_context(ExitStack())
    closing.callback(made.engine.close)
    wrong: list[str] = []
    async with AsyncClient(NAME, str(base / "run"), resume_timeout=RESUME) as client:
        for _ in range(times):
            tasks = [asyncio.create_task(traffic.send(client,
                                                     maker.make())) for _ in range(REBOOT_STREAMS)]
            while sum(want.count > 5 for want in traffic.live.values()) < REBOOT_STREAMS:
                await asyncio.sleep(0.01)
                if any(task.done() for task in tasks):
                    break
            traffic.gaps.fault("kill engine", monotonic())
            _kill(made)
            made = await asyncio.to_thread(_start, base)
            closing.callback(made.engine.close)
            await asyncio.gather(*tasks)
    made.close()
    wrong += made.left
    return wrong


def reboot(seed: int, times: int) -> dict[str, Any]:
    """Kills so many whole engines, one after the other."""
    maker = RequestMaker(seed, (40, 80), prompt=60)
    traffic = Traffic(maker, Gaps())
    with _short_folder() as base, ExitStack() as stack:
        wrong = asyncio.run(_drive_reboots(base, traffic, maker, times, stack))
        wrong += leftovers(base / "run")
    tally = traffic.tally
    wrong += tally.wrong + [f"{n} requests failed with {code}" for code, n in tally.failed.items()]
    wrong += [f"{n} requests were refused with {code}" for code, n in tally.refused.items()]
    return {"engines_killed": times, "requests": tally.requests, "complete": tally.complete,
            "tokens": tally.tokens, "gaps": traffic.gaps.summary()["all"], "wrong": wrong}


BODY: dict[str, Any] = {
    "prompt": [5, 6, 7], "max_tokens": 40, "seed": 3, "ignore_eos": True, "stream": True,
    "return_token_ids": True}


def _received(made: Rig, key: str, last: str = "") -> tuple[list[str], list[int]]:
    """The ids of the events of a stream under a key, or of those behind its event `last`, and their
    tokens; none where it is refused."""
    address = listening.read_address(made.run_dir / gateway.FILE)
    assert address is not None
    call = http.client.HTTPConnection(address.host, address.port, timeout=RESUME)
    headers = {"Idempotency-Key": key} | ({"Last-Event-ID": last} if last else {})
    call.request("POST", "/v1/completions", json.dumps(BODY), headers)
    answer = call.getresponse()
    fields = [line.partition(": ") for line in answer.read().decode().splitlines()]
    call.close()
    tokens = [json.loads(value)["choices"][0]["token_ids"] for field, _, value in fields
              if field == "data" and value.startswith('{"id"')]
    return [value for field, _, value in fields if field == "id"], sum(tokens, [])


def _give_up(made: Rig) -> None:
    """Kills the gateway of an engine that starts none again."""
    os.kill(actors(made.run_dir)[GATEWAY].pid, signal.SIGKILL)
    wait_ended([found.pid for found in actors(made.run_dir).values()], GONE)
    made.close()


def unread(times: int) -> dict[str, Any]:
    """Ends so many engines by their gateway: what has come to its end, and was not read, can be
    asked for at the next one. After a clean end nothing is left."""
    wrong: list[str] = []

    def start(base: Path) -> Rig:
        return Rig(engine(base / "run", SHORT_WORKER, {GATEWAY: roles.GATEWAY}, name=NAME, port=0,
                          ledger_dir=str(base / "ledger"), max_restarts=0), base / "run")

    for turn in range(times):
        with _short_folder() as base, ExitStack() as stack:
            made = start(base)
            stack.callback(made.engine.close)
            events, tokens = _received(made, f"k{turn}")
            _give_up(made)
            made = start(base)
            stack.callback(made.engine.close)
            _, rest = _received(made, f"k{turn}", events[0])
            if not rest or rest != tokens[-len(rest):] or len(tokens) != BODY["max_tokens"]:
                wrong.append(f"of {len(tokens)} tokens {len(rest)} are left to be read: {rest}")
            made.close()
            wrong += made.left + [f"left: {path.name}" for path in (base / "ledger").iterdir()]
    return {"engines_given_up": times, "wrong": wrong}


PATHS = ("/readyz", "/livez", "/load", "/metrics")
REPORTED, REPLACED = 2.0, 10.0
"""Seconds within which a stopped worker must be reported, and replaced."""
ANSWER = 0.050
"""Seconds that an answer may take (p99), beside a saturated engine."""
PATIENCE = 20.0


def _get(port: int, path: str) -> tuple[int, float]:
    """Returns the status code and the seconds it took, on a new connection, as a kubelet's is."""
    began = perf_counter()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as link:
        link.request("GET", path)
        found = link.getresponse()
        found.read()
        return found.status, perf_counter() - began


def _port(made: Rig) -> int:
    found = where(made.run_dir)
    if found is None:
        raise RuntimeError("the engine has no probes")
    return found.port


def _until(port: int, code: int) -> float:
    """Returns seconds until /readyz answers so; `PATIENCE` if it does not."""
    began = monotonic()
    while monotonic() - began < PATIENCE:
        if _get(port, "/readyz")[0] == code:
            return monotonic() - began
    return PATIENCE


def _ask(port: int, times: int) -> list[float]:
    return [_get(port, path)[1] for _ in range(times) for path in PATHS]


async def _saturated(made: Rig, streams: int, times: int, seed: int) -> tuple[Traffic, list[float]]:
    """Returns the seconds of each answer while so many streams run."""
    traffic, over = Traffic(RequestMaker(seed, (50, 100), prompt=60)), asyncio.Event()
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        running = asyncio.create_task(traffic.keep(client, streams, over))
        while sum(want.count > 0 for want in traffic.live.values()) < streams // 2:
            await asyncio.sleep(0.01)
        took = await asyncio.to_thread(_ask, _port(made), times)
        over.set()
        await running
    return traffic, took


def probes(seed: int, stops: int, streams: int, times: int) -> dict[str, Any]:
    """Stops the worker so many times; then probes in rounds beside so many streams."""
    wrong: list[str] = []
    reported: list[float] = []
    back: list[float] = []
    with rig(SHORT_WORKER, probe_port=0, debug_memory=False) as made:
        port = _port(made)
        for _ in range(stops):
            strike(Fault(0.0, "stop", ("worker-0",)), made.run_dir)
            reported.append(_until(port, 503))
            back.append(_until(port, 200))
        traffic, took = asyncio.run(_saturated(made, streams, times, seed))
    if max(reported) > REPORTED or max(back) > REPLACED:
        wrong.append(f"a stopped worker: reported after {max(reported):.2f} s, "
                     f"replaced {max(back):.2f} s later")
    if quantile(took, 0.99) > ANSWER:
        wrong.append(f"a probe takes {quantile(took, 0.99):.3f} s (p99) beside {streams} streams")
    wrong += traffic.tally.wrong + made.left
    return {"stops": stops, "unready_after_s": [round(s, 2) for s in reported],
            "ready_again_s": [round(s, 2) for s in back], "streams": streams,
            "answers": len(took), "answer_p50_s": quantile(took, 0.5),
            "answer_p99_s": quantile(took, 0.99), "answer_max_s": quantile(took, 1.0),
            "wrong": wrong}


async def _crowded(made: Rig, seconds: float, streams: int, seed: int
                   ) -> tuple[Traffic, dict[str, float]]:
    """Runs traffic for so long; returns the longest silence of each actor."""
    traffic, over = Traffic(RequestMaker(seed, (20, 60), prompt=60)), asyncio.Event()
    longest: dict[str, float] = {}
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        running = asyncio.create_task(traffic.keep(client, streams, over))
        until = monotonic() + seconds
        while monotonic() < until:
            for actor in (await client.status()).actors:
                longest[actor.role] = max(longest.get(actor.role, 0.0), round(actor.beat_age, 3))
            await asyncio.sleep(0.1)
        over.set()
        await running
    return traffic, longest


def starved(seed: int, seconds: float, spinners: int, streams: int) -> dict[str, Any]:
    """Runs far more work than there are processors: everything is late, and no actor may be killed.
    """
    with rig(debug_memory=False) as made:
        before = actors(made.run_dir)
        with busy_processes(spinners):
            traffic, longest = asyncio.run(_crowded(made, seconds, streams, seed))
        after = actors(made.run_dir)
    wrong = traffic.tally.wrong + made.left + [
        f"{role} was killed" for role, actor in before.items() if after.get(role) != actor]
    return {"seconds": seconds, "spinners": spinners, "requests": traffic.tally.requests,
            "complete": traffic.tally.complete, "longest_silence_s": longest, "wrong": wrong}
