"""What of prompts comes from a cache where conversations are shared out among replicas: by prefix,
in turns, at random, and beside one engine with one cache of the same size.

    python benchmarks/routing.py [MODEL] [--replicas 4] [--conversations 24] [--turns 6]
        [--pool-tokens 4096] [--json FILE]

MODEL: default the demo model. The same conversations each time, from a seed: some with the same
system prompt, each turn a while after the answer before it. Pages are `--pool-tokens` for a
replica, and as many times that for the one engine as there are replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.cluster_settings import ROUTINGS
from actorium.actors.launcher.engine import Engine
from actorium.actors.params import SamplingParams

IDS = 500
"""Token ids of prompts are below this."""
SYSTEM, ASKED, ANSWER = 192, (16, 64), 32
"""Tokens of a system prompt, of a turn (from, to), and of an answer."""
SHARING = 4
"""Conversations with the same system prompt."""
PAUSE = (0.2, 1.0)
"""Seconds between an answer and the next turn."""


async def converse(client: AsyncClient, conversations: int, turns: int, seed: int
                   ) -> dict[str, float]:
    """All of them at once; what was cached, and how long first tokens took."""
    prompts = cached = 0
    waits: list[float] = []

    async def one(number: int) -> None:
        nonlocal prompts, cached
        shared, chance = random.Random(number // SHARING), random.Random(1000 * seed + number)
        said = [shared.randrange(IDS) for _ in range(SYSTEM)]
        for _ in range(turns):
            await asyncio.sleep(chance.uniform(*PAUSE))
            said += [chance.randrange(IDS) for _ in range(chance.randint(*ASKED))]
            params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0.0)
            began, first = perf_counter(), 0.0
            answer: list[int] = []
            async for delta in client.stream(said, params):
                first = first or perf_counter() - began
                answer += delta.token_ids
                if delta.usage is not None:
                    cached += delta.usage.cached_tokens
            prompts += len(said)
            waits.append(first)
            said += answer

    await asyncio.gather(*map(one, range(conversations)))
    return {"prompt_tokens": prompts, "cached": cached / prompts, "computed": prompts - cached,
            "ttft_mean_ms": 1e3 * mean(waits), "ttft_p50_ms": 1e3 * median(waits)}


async def asked(name: str, options: argparse.Namespace, seed: int) -> dict[str, float]:
    async with AsyncClient(name) as client:
        return await converse(client, options.conversations, options.turns, seed)


def measured(options: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """By routing, and of one engine."""
    found = {}
    for routing in ("", *ROUTINGS):
        shared: dict[str, Any] = (
            {"replicas": options.replicas, "routing": routing,
             "max_total_tokens": options.pool_tokens} if routing
            else {"max_total_tokens": options.pool_tokens * options.replicas})
        with Engine(options.model, device="cpu", skip_tokenizer=True, **shared) as engine:
            found[routing or "one engine"] = asyncio.run(asked(engine.name, options, seed))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pool-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rounds = [measured(options, seed) for seed in range(options.rounds)]
    for number, found in enumerate(rounds):
        print(f"round {number}")
        for name, row in found.items():
            print(f"  {name:<12} cached {row['cached']:6.1%}  computed {row['computed']:7,.0f} of "
                  f"{row['prompt_tokens']:,.0f}  first token p50 {row['ttft_p50_ms']:.0f} ms, "
                  f"mean {row['ttft_mean_ms']:.0f} ms")
    if options.json:
        options.json.write_text(json.dumps(
            {"rounds": rounds, "cores": os.cpu_count(), "load": [load, os.getloadavg()[0]],
             "replicas": options.replicas, "pool_tokens": options.pool_tokens}, indent=1) + "\n")


if __name__ == "__main__":
    main()
