"""The row of patience: steady traffic, and neither memory nor files that grow."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.tools.chaos.checked_streams import Maker, Traffic
from actorium.tools.chaos.fault_injection import actors
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, resources, rig

WARM = 2 / 3
"""Part of the run that does not count: meanwhile what is remembered of requests reaches its bounds,
of which the tokenizer's, 65,536 requests, is the farthest."""
EVERY = 2.0
RETAIN = 5.0
POOL = 32_768
"""Tokens of the page pool: small, so that the prefix cache is full before counting begins."""
MOST_MEMORY, MOST_FILES = 8.0, 2.0
"""Growth of an actor over the part that counts, by the line through its samples: MB, files. A dict
of the tokenizer's size grows in steps of megabytes until it has seen twice its bound."""


def slope(points: list[tuple[float, float]]) -> float:
    """Of the line of least squares through (x, y)."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def _watch(made: Rig, seconds: float) -> dict[str, list[tuple[float, int, int]]]:
    """Samples of (time, bytes, files) by role."""
    samples: dict[str, list[tuple[float, int, int]]] = {}
    began = monotonic()
    while (now := monotonic() - began) < seconds:
        for role, actor in actors(made.run_dir).items():
            samples.setdefault(role, []).append((now, *resources([actor.pid])))
        await asyncio.sleep(EVERY)
    return samples


async def _drive(made: Rig, seconds: float, streams: int, seed: int
                 ) -> tuple[Traffic, dict[str, list[tuple[float, int, int]]]]:
    traffic, over = Traffic(Maker(seed, (1, 6), prompt=60), aborts=0.05), asyncio.Event()
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        running = asyncio.create_task(traffic.keep(client, streams, over))
        samples = await _watch(made, seconds)
        over.set()
        await running
    return traffic, samples


def soak(seed: int, seconds: float, streams: int) -> dict[str, Any]:
    """Steady traffic for so long."""
    with rig(SHORT_WORKER, debug_memory=False, retain=RETAIN, max_total_tokens=POOL) as made:
        traffic, samples = asyncio.run(_drive(made, seconds, streams, seed))
    tally, grown = traffic.tally, {}
    wrong = tally.wrong + made.left + [f"{n} requests: {code}" for code, n in tally.failed.items()]
    for role, rows in samples.items():
        counted = [row for row in rows if row[0] >= WARM * seconds]
        span = counted[-1][0] - counted[0][0]
        memory = slope([(at, size / 2**20) for at, size, _ in counted])
        files = slope([(at, float(count)) for at, _, count in counted])
        grown[role] = {"mb_per_minute": round(memory * 60, 3), "files_per_minute":
                       round(files * 60, 3), "mb": round(counted[-1][1] / 2**20, 1)}
        if memory * span > MOST_MEMORY:
            wrong.append(f"{role} grew by {memory * span:.1f} MB in {span:.0f} s")
        if files * span > MOST_FILES:
            wrong.append(f"{role} opened {files * span:.0f} files in {span:.0f} s")
    return {"seconds": seconds, "requests": tally.requests, "tokens": tally.tokens,
            "actors": grown, "wrong": wrong}
