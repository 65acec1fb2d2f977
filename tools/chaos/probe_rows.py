"""The rows of probes: how soon they report a hang and its end, that they answer while the engine is
saturated, and that no actor is killed that only waits for a processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from time import monotonic, perf_counter
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.watchdog.probe_server import where
from actorium.tools.chaos.checked_streams import RequestMaker, Traffic, quantile
from actorium.tools.chaos.faults import Fault, actors, busy_processes, strike
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, rig

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
