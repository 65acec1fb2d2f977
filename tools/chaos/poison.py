"""The row of poison: requests that kill the worker, among others that must not suffer for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from time import monotonic
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.tools.chaos.checked_streams import Maker, Traffic
from actorium.tools.chaos.fault_injection import actors
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, rig

AT_ONCE = 64
QUARANTINED = "quarantined"


async def drive(made: Rig, traffic: Traffic, requests: int, maker: Maker,
                tokens: Sequence[int]) -> dict[str, Any]:
    """So many requests, `AT_ONCE` at a time; some have one of these tokens in their prompts, and
    are to end with `quarantined`, the others to be complete."""
    places = random.Random(requests).sample(range(requests), len(tokens))
    bad = dict(zip(places, tokens, strict=True))
    gate = asyncio.Semaphore(AT_ONCE)
    codes: dict[bool, list[str]] = {True: [], False: []}

    async with AsyncClient(made.engine.name, str(made.base)) as client:
        async def one(number: int) -> None:
            async with gate:
                code = await traffic.one(client, maker.make(bad.get(number)))
                codes[number in bad].append(code or "complete")
        await asyncio.gather(*(one(number) for number in range(requests)))
    return {"quarantined": codes[True].count(QUARANTINED),
            "complete": codes[False].count("complete"),
            "wrong": [f"a poisoned request: {code}" for code in codes[True] if code != QUARANTINED]
            + [f"an innocent request: {code}" for code in codes[False] if code != "complete"]}


def poison(seed: int, requests: int, poisoned: int, latest: float) -> dict[str, Any]:
    """`poisoned` of the requests kill the worker: they alone end with `quarantined`. latest:
    seconds that a request may take."""
    from actorium.tools.chaos.paced_worker import POISON

    maker = Maker(seed, (10, 40), prompt=60)
    traffic, began = Traffic(maker, latest=latest), monotonic()
    with rig(SHORT_WORKER) as made:
        row = asyncio.run(drive(made, traffic, requests, maker, [POISON] * poisoned))
        deaths = actors(made.run_dir)["worker-0"].epoch - 1
    wrong = traffic.tally.wrong + row.pop("wrong") + made.left
    return {"requests": requests, "poisoned": poisoned, **row, "deaths": deaths,
            "seconds": round(monotonic() - began, 1), "wrong": wrong}
