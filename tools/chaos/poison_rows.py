"""The rows of poison and of quarantine: requests that kill the worker, or make an actor fail, among
others that must complete.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import Any

import msgspec

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import EngineUnavailable
from actorium.actors.gateway.actor import where
from actorium.tools.bench.http_client import Http
from actorium.tools.chaos import plants
from actorium.tools.chaos.checked_streams import CheckedRequest, RequestMaker, Traffic
from actorium.tools.chaos.faults import actors
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, held_at_rest, rig

AT_ONCE = 64
QUARANTINED = "quarantined"


async def drive_poisoned(made: Rig, traffic: Traffic, requests: int, maker: RequestMaker,
                tokens: Sequence[int]) -> dict[str, Any]:
    """Runs so many requests, `AT_ONCE` at a time. Those with one of these tokens in their prompts
    must end with `quarantined`, the others must complete."""
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
    """Runs requests of which `poisoned` kill the worker: they alone must end with `quarantined`.
    latest: seconds that a request may take."""
    from actorium.tools.chaos.paced_worker import POISON

    maker = RequestMaker(seed, (10, 40), prompt=60)
    traffic, began = Traffic(maker, latest=latest), monotonic()
    with rig(SHORT_WORKER) as made:
        row = asyncio.run(drive_poisoned(made, traffic, requests, maker, [POISON] * poisoned))
        deaths = actors(made.run_dir)["worker-0"].epoch - 1
    wrong = traffic.tally.wrong + row.pop("wrong") + made.left
    return {"requests": requests, "poisoned": poisoned, **row, "deaths": deaths,
            "seconds": round(monotonic() - began, 1), "wrong": wrong}


FAILING = ("tokenizer", "scheduler", "detokenizer", "gateway")
SHARES = (plants.KILL, plants.EXCEPTION, plants.HANG, plants.KILL, plants.EXCEPTION)
"""Two fifths kill, two fifths raise, one fifth hangs."""
BUDGET = 2.0
"""Seconds after which a request counts as hanging."""
AGAIN = 0.2
"""Seconds until an HTTP client tries again."""


def quarantine(actor: str, seed: int, requests: int, poisoned: int, latest: float
               ) -> dict[str, Any]:
    """Runs requests of which `poisoned` make the actor fail: they alone must end with
    `quarantined`, and the engine must go on within its default number of restarts. latest: seconds
    that a request may take."""
    role = "gateway-0" if actor == "gateway" else actor
    modes = [SHARES[i % len(SHARES)] for i in range(poisoned)]
    maker, began = RequestMaker(seed, (10, 40), prompt=60), monotonic()
    traffic = Traffic(maker, latest=latest)
    more = {"port": 0} if actor == "gateway" else {}
    with rig(SHORT_WORKER, {role: f"{plants.__name__}:{actor}"}, max_restarts=5,
             request_budget=BUDGET, **more) as made:
        if actor == "gateway":
            row = asyncio.run(_over_http(made, maker, requests, modes, latest))
        else:
            row = asyncio.run(drive_poisoned(made, traffic, requests, maker, modes))
        wrong = traffic.tally.wrong + row.pop("wrong") + asyncio.run(_afterwards(made, maker))
        deaths = actors(made.run_dir)[role].epoch - 1
    expected = 2 * modes.count(plants.KILL) + modes.count(plants.HANG)
    if deaths > expected:
        wrong.append(f"{deaths} deaths, {expected} at the most were to be expected")
    return {"requests": requests, "poisoned": poisoned, **row, "deaths": deaths,
            "modes": {name: modes.count(getattr(plants, name.upper()))
                      for name in ("kill", "exception", "hang")},
            "seconds": round(monotonic() - began, 1), "wrong": wrong + made.left}


async def _afterwards(made: Rig, maker: RequestMaker) -> list[str]:
    """Checks that the engine serves and holds nothing."""
    traffic = Traffic(maker)
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        code = await traffic.one(client, maker.make())
        wrong = traffic.tally.wrong + await held_at_rest(client, 5.0)
    if code is not None:
        wrong.append(f"a request at the end: {code}")
    if pages := made.gauges().get("quarantined_pages"):
        wrong.append(f"at rest: quarantined_pages is {pages:g}")
    return wrong


# --- over HTTP -----------------------------------------------------------------------------------

async def _over_http(made: Rig, maker: RequestMaker, requests: int, modes: list[int], latest: float
                     ) -> dict[str, Any]:
    """Runs HTTP clients that resend the same body when their connection breaks."""
    found = where(made.run_dir)
    assert found is not None
    http, gate = Http(found.url), asyncio.Semaphore(AT_ONCE)
    bad = dict(zip(random.Random(requests).sample(range(requests), len(modes)), modes,
                   strict=True))
    ends: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}

    async def one(number: int) -> None:
        async with gate:
            want = maker.make(bad.get(number))
            ends[number in bad][await post(http, want, latest)] += 1

    await asyncio.gather(*(one(number) for number in range(requests)))
    http.close()
    wrong = [f"{count} poisoned requests: {end}" for end, count in ends[True].items()
             if end != QUARANTINED]
    wrong += [f"{count} innocent requests: {end}" for end, count in ends[False].items()
              if end != "complete"]
    return {"quarantined": ends[True][QUARANTINED], "complete": ends[False]["complete"],
            "wrong": wrong}


async def post(http: Http, want: CheckedRequest, latest: float) -> str:
    """Returns how a request ends: "complete", "quarantined", or an error."""
    params = want.params
    body = {"prompt": want.prompt, "max_tokens": params.max_tokens, "seed": params.seed,
            "n": params.n, "ignore_eos": True, "return_token_ids": True}
    until, last = monotonic() + latest, ""
    while monotonic() < until:
        try:
            async for answer in http.events("/v1/completions", body):
                choices = msgspec.json.decode(answer)["choices"]
                right = all((choice["token_ids"], choice["finish_reason"]) == (
                    want._expected[choice["index"]], "length") for choice in choices)
                return "complete" if right and len(choices) == params.n else "another answer"
        except EngineUnavailable as error:
            last = error.message
            if QUARANTINED in last:
                return QUARANTINED
            if last[:3].isdecimal() and not last.startswith("503"):
                return last
        await asyncio.sleep(AGAIN)
    return f"no answer: {last}"
