"""Several replicas behind a router: what it costs, and what of prompts comes from a cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import mean, median
from time import perf_counter
from typing import Any

from harness import Processors, Row, Rows, scenario

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.cluster_settings import ROUTINGS
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams
from actorium.tools.chaos.faults import processes_naming

PROMPT, TOKENS = 200, 400
"""Tokens of a prompt (twelve pages, none of which any other prompt shares), and of a stream."""
WARM = 30
WATCHED = ("scheduler", "detokenizer")
"""In a cluster the first one is the router."""
COUNTS = [1, 8, 64]


class Asked:
    def __init__(self, engine: Engine, seed: int) -> None:
        self.client = AsyncClient(engine.name)
        self.chance = random.Random(seed)
        self.processors = Processors({str(pid): pid
                                      for pid in processes_naming(f"/{engine.name}")})

    def prompt(self) -> list[int]:
        return [self.chance.randrange(500) for _ in range(PROMPT)]

    async def first_token(self) -> float:
        """Milliseconds from a request to its only token."""
        prompt, began = self.prompt(), perf_counter()
        await self.client.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        return 1e3 * (perf_counter() - began)

    async def streams(self, count: int) -> dict[str, float]:
        """Microseconds of a processor for a token of `count` streams at once, by role."""
        watched = Processors({actor.role: actor.pid
                              for actor in (await self.client.status()).actors
                              if actor.role in WATCHED})
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

        async def request() -> None:
            async for _ in self.client.stream(self.prompt(), params):
                pass

        await asyncio.gather(*(request() for _ in range(count)))
        return {role: 1e6 * spent / (count * TOKENS) for role, spent in watched.spent().items()}


async def round_of(asked: Sequence[Asked], count: int) -> tuple[float, float]:
    """Measures so many requests one after the other, alternating between engines: (median
    milliseconds, CPU milliseconds per request over all processes)."""
    for each in asked:
        each.processors.spent()
    found = [await asked[i % len(asked)].first_token() for i in range(count)]
    spent = sum(sum(each.processors.spent().values()) for each in asked)
    return median(found), 1e3 * spent / count


async def measured(engines: Sequence[Asked], cluster: Asked, rounds: int, requests: int,
                   streams: Sequence[int]) -> list[Row]:
    asked = {"engine": engines[:1], "engines by turns": engines, "cluster": [cluster]}
    for each in asked.values():
        await round_of(each, WARM * len(engines))
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in asked}
    costs: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(rounds):
        turn = number % len(asked)
        for name in [*asked][turn:] + [*asked][:turn]:
            turns[name].append(await round_of(asked[name], requests))
        for count in streams:
            for name in ("engine", "cluster"):
                costs.setdefault((name, count), []).append(await asked[name][0].streams(count))
    for one in (*engines, cluster):
        await one.client.close()
    first = {name: [ms for ms, _ in own] for name, own in turns.items()}
    rows: list[Row] = [{"asked": name, "first_token_ms": own, "processor_ms_per_request":
                        median(spent for _, spent in turns[name])} for name, own in first.items()]
    rows += [{"asked": name, "streams": count, "us_per_token": {
        role: median(cost[role] for cost in own) for role in own[0]}}
        for (name, count), own in costs.items()]
    return [*rows, {f"{what}_adds_ms": median(
        b - a for a, b in zip(first[name], first["cluster"], strict=True))
        for what, name in (("router", "engines by turns"), ("cluster", "engine"))}]


@scenario
def router(replicas: int = 4, rounds: int = 5, requests: int = 200, streams: list[int] = COUNTS
           ) -> Rows:
    """What a cluster's router adds to the first token of as many engines, and to a streamed one.

    Workers without a model, so that all that is measured is the ring. A cluster, as many engines as
    it has replicas, and one of these alone run side by side and are asked by turns: requests of one
    token, one after the other, then streams at once. The engines get a request each in turn, as
    replicas do: processes that see one request in four find less of themselves in the processor's
    caches, with a router or without.
    """
    shared = {"null_worker": True, "skip_tokenizer": True}
    with ExitStack() as stack:
        engines = [Asked(stack.enter_context(Engine("", **shared)), 1 + i)
                   for i in range(replicas)]
        cluster = stack.enter_context(Engine("", replicas=replicas, **shared))
        yield from asyncio.run(measured(engines, Asked(cluster, 0), rounds, requests, streams))


# --- routing --------------------------------------------------------------------------------------

IDS = 500
"""Token ids of prompts are below this."""
SYSTEM, ASKED, ANSWER = 192, (16, 64), 32
"""Tokens of a system prompt, of a turn (from, to), and of an answer."""
SHARING = 4
"""Conversations with the same system prompt."""
PAUSE = (0.2, 1.0)
"""Seconds between an answer and the next turn."""


async def converse(name: str, conversations: int, turns: int, seed: int) -> Row:
    """All of them at once; what was cached, and how long first tokens took."""
    prompts = cached = 0
    waits: list[float] = []
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0.0)

    async def request(client: AsyncClient, number: int) -> None:
        nonlocal prompts, cached
        shared, chance = random.Random(number // SHARING), random.Random(1000 * seed + number)
        said = [shared.randrange(IDS) for _ in range(SYSTEM)]
        for _ in range(turns):
            await asyncio.sleep(chance.uniform(*PAUSE))
            said += [chance.randrange(IDS) for _ in range(chance.randint(*ASKED))]
            prompts += len(said)
            began, first = perf_counter(), 0.0
            answer: list[int] = []
            async for delta in client.stream(said, params):
                first = first or perf_counter() - began
                answer += delta.token_ids
                if delta.usage is not None:
                    cached += delta.usage.cached_tokens
            waits.append(first)
            said += answer

    async with AsyncClient(name) as client:
        await asyncio.gather(*(request(client, number) for number in range(conversations)))
    return {"prompt_tokens": prompts, "cached": cached / prompts, "computed": prompts - cached,
            "ttft_mean_ms": 1e3 * mean(waits), "ttft_p50_ms": 1e3 * median(waits)}


@scenario
def routing(model: str = "", replicas: int = 4, conversations: int = 24, turns: int = 6,
            pool_tokens: int = 4096, rounds: int = 2) -> Rows:
    """Share of prompts from a cache by each routing, and of one engine with as many pages.

    model: default the demo model. The same conversations each time, from a seed: some with the same
    system prompt, each turn a while after the answer before it. Pages are --pool-tokens for a
    replica, and as many times that for the one engine as there are replicas.
    """
    for seed in range(rounds):
        for routing in ("", *ROUTINGS):
            shared: dict[str, Any] = (
                {"replicas": replicas, "routing": routing, "max_total_tokens": pool_tokens}
                if routing else {"max_total_tokens": pool_tokens * replicas})
            with Engine(model, device="cpu", skip_tokenizer=True, **shared) as engine:
                yield {"round": seed, "routing": routing or "one engine",
                       **asyncio.run(converse(engine.name, conversations, turns, seed))}
