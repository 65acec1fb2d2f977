"""What a cluster's router costs, beside an engine of one: the first token, and a streamed one.

    python benchmarks/router.py [--replicas 4] [--rounds 5] [--requests 200] [--streams 1,8,64]
        [--json FILE]

Workers without a model, so that all that is measured is the ring. A cluster, as many engines as it
has replicas, and one of these alone run side by side and are asked by turns: requests of one token,
one after the other, whose times are compared round by round, and what they take of a processor in
all processes together. The engines get a request each in turn, as replicas do: processes that see
one request in four find less of themselves in the processor's caches, with a router or without.
Then streams at once, by the cluster and by one engine, while the processor time of the router, of a
scheduler and of the detokenizer is read from /proc, threads and all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams
from actorium.tools.chaos.faults import processes_naming

PROMPT = 200
"""Tokens: twelve pages, none of which any other prompt shares."""
TOKENS = 400
"""Of a stream."""
WARM = 30
WATCHED = ("scheduler", "detokenizer")
"""In a cluster the first one is the router."""


def scheduled_seconds(pid: int) -> float:
    """Processor time of all threads of a process, in user mode and in the kernel."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


class Asked:
    """An engine that is asked."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.client = AsyncClient(engine.name)
        self.chance = random.Random(seed)
        self.pids = processes_naming(f"/{engine.name}")

    def spent(self) -> float:
        """Seconds of a processor, of all its processes so far."""
        return sum(map(scheduled_seconds, self.pids))

    def prompt(self) -> list[int]:
        return [self.chance.randrange(500) for _ in range(PROMPT)]

    async def first_token(self) -> float:
        """Milliseconds from a request to its only token."""
        prompt, began = self.prompt(), perf_counter()
        await self.client.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        return 1e3 * (perf_counter() - began)

    async def streams(self, count: int) -> Mapping[str, float]:
        """Microseconds of a processor for a token of `count` streams at once, by role."""
        pids = {actor.role: actor.pid for actor in (await self.client.status()).actors
                if actor.role in WATCHED}
        before = {role: scheduled_seconds(pid) for role, pid in pids.items()}
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

        async def one() -> None:
            async for _ in self.client.stream(self.prompt(), params):
                pass

        await asyncio.gather(*(one() for _ in range(count)))
        return {role: 1e6 * (scheduled_seconds(pid) - before[role]) / (count * TOKENS)
                for role, pid in pids.items()}


async def first_tokens(asked: Sequence[Asked], count: int) -> list[float]:
    """Milliseconds of so many requests, one after the other, by turns of who is asked."""
    return [await asked[i % len(asked)].first_token() for i in range(count)]


async def measured(engines: Sequence[Asked], cluster: Asked, rounds: int, requests: int,
                   streams: list[int]) -> dict[str, Any]:
    """See the module."""
    asked = {"engine": engines[:1], "engines by turns": engines, "cluster": [cluster]}
    for each in asked.values():
        await first_tokens(each, WARM * len(engines))
    first: dict[str, list[float]] = {name: [] for name in asked}
    spent: dict[str, list[float]] = {name: [] for name in asked}
    costs: dict[str, dict[str, list[Mapping[str, float]]]] = {"engine": {}, "cluster": {}}
    for number in range(rounds):
        turn = number % len(asked)
        for name in [*asked][turn:] + [*asked][:turn]:
            before = sum(each.spent() for each in asked[name])
            first[name].append(median(await first_tokens(asked[name], requests)))
            after = sum(each.spent() for each in asked[name])
            spent[name].append(1e3 * (after - before) / requests)
        for count in streams:
            for name, found in costs.items():
                found.setdefault(str(count), []).append(await asked[name][0].streams(count))
    for one in (*engines, cluster):
        await one.client.close()

    def added(name: str) -> float:
        return median(b - a for a, b in zip(first[name], first["cluster"], strict=True))

    return {
        "first_token_ms": first,
        "processor_ms_per_request": spent,
        "router_adds_ms": added("engines by turns"),
        "cluster_adds_ms": added("engine"),
        "us_per_token": {name: {count: {role: median(cost[role] for cost in found)
                                        for role in found[0]} for count, found in own.items()}
                         for name, own in costs.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", default="1,8,64")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = [int(count) for count in options.streams.split(",")]
    shared = {"null_worker": True, "skip_tokenizer": True}
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        engines = [Asked(stack.enter_context(Engine("", **shared)), 1 + i)
                   for i in range(options.replicas)]
        cluster = stack.enter_context(Engine("", replicas=options.replicas, **shared))
        found = asyncio.run(measured(engines, Asked(cluster, 0), options.rounds,
                                     options.requests, counts))
    for name, own in found["first_token_ms"].items():
        print(f"{name:<16} first token, median of {options.requests}: "
              + ", ".join(f"{value:.2f}" for value in own) + " ms")
    for name, own in found["processor_ms_per_request"].items():
        print(f"{name:<16} all processes, ms of a processor for a request: {median(own):.2f}")
    print(f"the router adds {found['router_adds_ms']:.2f} ms to what as many engines take, "
          f"the cluster {found['cluster_adds_ms']:.2f} ms to what one takes")
    for count in counts:
        parts = [f"{name} {role} {cost:.1f}" for name, own in found["us_per_token"].items()
                 for role, cost in own[str(count)].items()]
        print(f"{count} streams, us of a processor for a token: {', '.join(parts)}")
    if options.json:
        found |= {"cores": os.cpu_count(), "load": [load, os.getloadavg()[0]],
                  "replicas": options.replicas}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
