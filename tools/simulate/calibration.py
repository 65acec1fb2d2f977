"""Measures an engine for a simulation: its step model, and how long a request takes beside its
steps.

Steps: a few loads, whose number of steps and times come from the scheduler's own counters, and a
fit.

Delays: on the way in, from its client to a scheduler, and on the way out, from the scheduler to its
client. The scheduler's histograms hold the times between: `queued`, from the tokenizer to the
admission, which is the way in where nothing else runs; and `first_token`, from the tokenizer to the
first token's result. The client's own time to the first token, less that, is the way out (and the
hop from the client to the tokenizer, which nobody stamps). It is measured while other sequences
decode, because that is when it matters: processes that have slept for long answer later.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
from collections.abc import Awaitable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.client import Client
from actorium.actors.errors import BadModel, EngineUnavailable
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.rundir import engine_dir
from actorium.actors.watchdog.probe_server import SOCKET
from actorium.tools.bench.datasets.sample import TokenVocabulary
from actorium.tools.simulate.step_model import StepSeconds, StepSums, fit_step_model

PROMPTS = ((64, 12), (256, 8), (1024, 4))
"""(tokens of a prompt, how many, one after the other)"""
DECODES = ((1, 32), (1, 768), (4, 32), (8, 256), (16, 32), (16, 256))
"""(sequences at once, tokens of each prompt)"""
OUTPUT = 48
"""Tokens that each of these decodes."""
SHORT = 16
"""Tokens of the prompts that come before all others."""


class StepCalibration:
    """The loads, through a client of an engine that does nothing else."""

    def __init__(self, client: Client, settle: float) -> None:
        """settle: seconds after which the counters are complete. Raises `BadModel` where the
        context is too short."""
        info = client.server_info()
        self._client, self._settle = client, settle
        self._vocabulary, self._chance = TokenVocabulary(info["vocab_size"]), random.Random(1)
        self._longest = int(info["max_model_len"]) - OUTPUT
        if self._longest < SHORT:
            raise BadModel("--measure: the model's context is too short", "measure")

    def measure(self, about: str, rounds: int = 3) -> tuple[StepSeconds, float]:
        """The model, without what lies beside steps (`LinkDelays`), and the mean relative error
        with which it gives the loads' own times."""
        self._ask(4, SHORT, 8)  # what is made once is made now
        sums: list[StepSums] = []
        for _ in range(rounds):
            sums += [self._counted(1, min(length, self._longest), 1, count)
                     for length, count in PROMPTS]
            sums += [self._counted(number, min(length, self._longest), OUTPUT)
                     for number, length in DECODES]
        model = fit_step_model(sums, about)
        return model, fit_error(model, sums)

    def _counted(self, number: int, length: int, output: int, times: int = 1) -> StepSums:
        """What so many requests at once did, so many times, and how long it took."""
        before = self._counters()
        for _ in range(times):
            self._ask(number, length, output)
        done = {name: value - before[name] for name, value in self._counters().items()}
        decoded = times * number * (output - 1)
        context = times * number * sum(length + i for i in range(1, output))
        return StepSums(int(done["steps"]), times * number * length, decoded, context,
                        times * number * length**2 / 2, done["busy_us"] / 1e6)

    def _ask(self, number: int, length: int, output: int) -> None:
        prompts: list[Any] = [self._vocabulary.draw(self._chance, length) for _ in range(number)]
        self._client.generate(prompts, SamplingParams(max_tokens=output, ignore_eos=True))

    def _counters(self) -> dict[str, float]:
        sleep(self._settle)
        actors = self._client.status().actors
        gauges = next(actor.gauges for actor in actors if actor.role == "scheduler")
        return {name: gauges[name] for name in ("steps", "busy_us")}


def fit_error(model: StepSeconds, sums: list[StepSums]) -> float:
    """Mean relative error of the model for these."""
    return statistics.fmean(abs(
        (model.base * each.steps + model.prompt * each.prompt + model.sequence * each.sequences
         + model.context * each.context + model.pair * each.pairs) / each.seconds - 1)
        for each in sums)


PROBE_TOKENS = 16
"""Tokens."""
ALONE, PAUSE = 40, 0.03
"""Requests that are asked one after the other, and seconds between them."""
PROBES, STREAMED = 80, 32
"""Requests that are asked while others decode, and tokens of each of these."""
HISTOGRAMS = {"queued": "vllm:request_queue_time_seconds",
              "first_token": "vllm:time_to_first_token_seconds"}
SETTLE = 1.0
"""Seconds after which reports and heartbeats have brought the last counters."""
PATIENCE = 15.0
"""Seconds within which counters must include all requests."""


class LinkDelays(NamedTuple):
    inward: float
    """Delay from the tokenizer to the scheduler."""
    outward: float
    """From the scheduler to the client, while others decode; and from the client to the tokenizer.
    """
    alone: float
    """From the scheduler to the client and from there to the tokenizer where nothing else runs."""


def sums_of(metrics: str) -> dict[str, tuple[float, int]]:
    """(sum, count) of each of `HISTOGRAMS`, of a page in Prometheus' text format."""
    found = {}
    for name, family in HISTOGRAMS.items():
        total, count = (sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines()
                            if re.match(re.escape(family + part) + r"[{ ]", line))
                        for part in ("_sum", "_count"))
        found[name] = total, round(count)
    return found


async def engine_delays(name: str, run_dir: str | None, replicas: int = 1) -> LinkDelays:
    """Measures an otherwise idle engine, or a cluster of so many replicas. Raises
    `EngineUnavailable` if its counters stay incomplete."""
    async with AsyncClient(name, run_dir) as client:
        vocabulary = (await client.server_info())["vocab_size"]
        probe = DelayProbe(client, engine_dir(name, run_dir), vocabulary)
        await probe.asked(4, 8)  # what is made once is made now
        alone = await probe.during(probe.one_by_one())
        loaded = await probe.during(probe.among_others(2 * replicas))
    return LinkDelays(alone["queued"], max(0.0, loaded["client"] - loaded["first_token"]),
                      max(0.0, alone["client"] - alone["first_token"]))


class DelayProbe:
    def __init__(self, client: AsyncClient, directory: Path, vocabulary: int) -> None:
        """directory: the engine's."""
        self._client, self._chance = client, random.Random(1)
        self._socket = directory / SOCKET
        self._vocabulary = TokenVocabulary(vocabulary)
        self._took: list[float] = []

    async def during(self, load: Awaitable[None]) -> dict[str, float]:
        """Means over a load: of the client's times to the first token, and of the scheduler's."""
        before, self._took = await self._sums(), []
        await load
        until = perf_counter() + PATIENCE
        while perf_counter() < until:
            after = await self._sums()
            if all(after[name][1] - before[name][1] == len(self._took) for name in HISTOGRAMS):
                return {"client": statistics.fmean(self._took),
                        **{name: (after[name][0] - before[name][0]) / len(self._took)
                           for name in HISTOGRAMS}}
        raise EngineUnavailable("the scheduler's counters do not tell of all requests")

    async def asked(self, count: int, tokens: int) -> None:
        """So many at once, each for so many tokens."""
        await asyncio.gather(*(self._ask(tokens) for _ in range(count)))

    async def one_by_one(self) -> None:
        """Nothing else runs."""
        for _ in range(ALONE):
            await self._ask(1)
            await asyncio.sleep(PAUSE)

    async def among_others(self, streams: int) -> None:
        """While so many others decode."""
        over = asyncio.Event()

        async def stream() -> None:
            while not over.is_set():
                await self._ask(STREAMED)

        others = [asyncio.create_task(stream()) for _ in range(streams)]
        for _ in range(PROBES):
            await asyncio.sleep(self._chance.expovariate(1 / PAUSE))
            await self._ask(1)
        over.set()
        await asyncio.gather(*others)

    async def _ask(self, tokens: int) -> None:
        prompt = self._vocabulary.draw(self._chance, PROBE_TOKENS)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        began, first = perf_counter(), 0.0
        async for delta in self._client.stream(prompt, params):
            if delta.token_ids and not first:
                first = perf_counter()
        self._took.append(first - began)

    async def _sums(self) -> dict[str, tuple[float, int]]:
        await asyncio.sleep(SETTLE)
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: probe\r\nconnection: close\r\n\r\n")
            return sums_of((await reader.read()).decode())
        finally:
            writer.close()
