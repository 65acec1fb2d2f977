"""The row of LoRA adapters: streams with adapters that are loaded, replaced and unloaded meanwhile,
while actors die.

The null worker's tokens depend on the adapter, so a stream that got another adapter than its name
stood for, or half of each, is wrong at its first token.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import UnknownAdapter
from actorium.actors.models.adapter_files import CONFIG, PREFIX, WEIGHTS, read_adapter
from actorium.actors.params import SamplingParams
from actorium.tools.chaos.faults import actors
from actorium.tools.chaos.rig import Rig, held_at_rest, resources, rig
from actorium.tools.null.null_worker import VOCAB, adapted_seed, next_token

REPLACED, GOING = ("a", "b", "c"), "d"
"""Names that are always there, and one that comes and goes."""
CONTENTS = 2
"""Of each name: loads take turns."""
TOKENS = (5, 60)
CLIENTS = 3
SETTLE = 100
"""Cycles after which memory counts as settled."""
CYCLES_AN_ANSWER = 20
"""Most cycles for each answer that has come: else they could all be over before the streams are."""
LONG = 60.0
"""Seconds that an order may take, deaths included."""


class AdapterTraffic:
    """Streams whose tokens follow from their adapters, and what went wrong."""

    def __init__(self, seed: int, digests: dict[tuple[str, int], bytes]) -> None:
        """digests: by name and number of the content."""
        self._chance, self._digests = random.Random(seed), digests
        self.over = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def keep(self, client: AsyncClient) -> None:
        """One request after the other."""
        while not self.over.is_set():
            name = self._chance.choice(("", *REPLACED, *REPLACED, GOING))
            params = SamplingParams(max_tokens=self._chance.randint(*TOKENS),
                                    seed=self._chance.randrange(1 << 30), ignore_eos=True)
            prompt = list(range(self._chance.randint(1, 70)))  # whose prefixes are shared
            try:
                completion = await client.generate(prompt, params, adapter=name or None)
            except UnknownAdapter as error:
                self.counts["unknown"] += 1
                if name != GOING:
                    self.wrong.append(f"{name}: {error.message}")
                continue
            except Exception as error:
                self.wrong.append(f"{name or 'the model'}: {type(error).__name__}: {error}")
                continue
            self.counts["adapted" if name else "base"] += 1
            if not any(completion.token_ids == self._tokens(prompt, params, digest)
                       for digest in self._contents(name)):
                self.wrong.append(f"{name or 'the model'}: tokens of none of its contents")

    async def answered(self, count: int) -> None:
        """Waits until so many answers with adapters have come."""
        until = monotonic() + LONG
        while self.counts["adapted"] < count and monotonic() < until:
            await asyncio.sleep(0.01)

    def _contents(self, name: str) -> list[bytes]:
        return [self._digests[name, i] for i in range(CONTENTS)] if name else [b""]

    @staticmethod
    def _tokens(prompt: Sequence[int], params: SamplingParams, digest: bytes) -> list[int]:
        assert params.seed is not None and params.max_tokens is not None
        seed = adapted_seed(params.seed, digest)
        return [next_token(seed, len(prompt) + i, VOCAB) for i in range(params.max_tokens)]


def write_adapters(base: Path) -> dict[tuple[str, int], bytes]:
    """Writes small adapters; returns their digests by name and number of the content."""
    digests = {}
    for name in (*REPLACED, GOING):
        for content in range(CONTENTS):
            folder = base / f"{name}{content}"
            folder.mkdir()
            (folder / CONFIG).write_text(json.dumps(
                {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "note": folder.name}))
            module = f"{PREFIX}model.layers.0.self_attn.q_proj"
            save_file({f"{module}.lora_A.weight": np.ones((2, 4), np.float32),
                       f"{module}.lora_B.weight": np.ones((4, 2), np.float32)}, folder / WEIGHTS)
            digests[name, content] = read_adapter(folder, 2).digest
    return digests


async def _cycles(made: Rig, base: Path, traffic: AdapterTraffic, count: int,
                  kills: Sequence[str]) -> list[int]:
    """Loads and unloads so often, in turns; kills an actor now and then. Returns resident bytes of
    all actors, once they have settled and at the end."""
    memory: list[int] = []
    due = {count * (i + 1) // (len(kills) + 1): role for i, role in enumerate(kills)}
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        for cycle in range(count):
            await traffic.answered(cycle // CYCLES_AN_ANSWER)
            name = (*REPLACED, GOING)[cycle % 4]
            path = base / f"{name}{cycle // 4 % CONTENTS}"
            if (role := due.get(cycle)) is not None:
                os.kill(actors(made.run_dir)[role].pid, signal.SIGKILL)
                traffic.counts["kills"] += 1
            try:
                if name == GOING and cycle // 4 % 2:
                    await client.unload_adapter(name, timeout=LONG)
                else:
                    await client.load_adapter(name, path, replace=True, timeout=LONG)
            except Exception as error:
                traffic.wrong.append(f"cycle {cycle}: {name}: {type(error).__name__}: {error}")
            if cycle in (SETTLE, count - 1):
                pids = [actor.pid for actor in actors(made.run_dir).values()]
                memory.append(resources(pids)[0])
        names = {each["name"] for each in await client.adapters()}
        if not {*REPLACED} <= names:
            traffic.wrong.append(f"at the end there are {sorted(names)}")
    return memory


def adapters(seed: int, cycles: int, streams: int, kills: Sequence[str] = ()) -> dict[str, Any]:
    """Runs streams through so many loads and unloads. kills: roles, spread over them."""
    async def run(made: Rig, base: Path, traffic: AdapterTraffic) -> tuple[list[int], list[str]]:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(
                AsyncClient(made.engine.name, str(made.base))) for _ in range(CLIENTS)]
            running = asyncio.gather(*(traffic.keep(clients[i % CLIENTS]) for i in range(streams)))
            try:
                memory = await _cycles(made, base, traffic, cycles, kills)
            finally:
                traffic.over.set()
            await running
            return memory, await held_at_rest(clients[0], 10.0, names=(
                "running", "waiting", "held_pages", "adapters_running"))

    with TemporaryDirectory(prefix="ac-", dir="/tmp") as where:
        base, began = Path(where), monotonic()
        traffic = AdapterTraffic(seed, write_adapters(base))
        modules = tuple(f"{name}={base / f'{name}0'}" for name in REPLACED)
        with rig(enable_lora=True, lora_modules=modules, max_loras=2, max_cpu_loras=3,
                 max_num_seqs=8) as made:
            memory, rest = asyncio.run(run(made, base, traffic))
            gauges = made.gauges()
    return {"cycles": cycles, "streams": streams, **traffic.counts, "seconds": round(
        monotonic() - began, 1), "memory": memory, "wrong": [*traffic.wrong, *rest, *made.left],
        **{name: gauges.get(name) for name in ("adapter_loads", "adapter_evictions")}}
