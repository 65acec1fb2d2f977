"""Rollouts while the weights change under them: streams all the time, another version every so many
seconds, and each token held against the weights that it is said to be of."""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Row, Rows, scenario
from safetensors.torch import load_file, save_file
from scenarios.soak import Sample, look, slope
from scenarios.soak_mixed import pids_of
from transformers import AutoModelForCausalLM

from actorium import AsyncClient, Engine, SamplingParams
from actorium.actors.errors import ActoriumError
from actorium.actors.models.model_dir import resolve

STARTS = tuple(f"Once upon a time, there was a {kind} named" for kind in (
    "lazy frog", "tiny bear", "clever mole", "lonely robin", "sleepy turkey", "lazy shark"))
CHECKPOINTS, NOISE = 3, 0.02
"""Checkpoints that take turns, and how far they are from the model: the noise on each matrix, as a
share of its standard deviation."""
BOUND = {"float32": 1e-4, "bfloat16": 0.15}
"""The most that a log-probability may differ from that of transformers' forward in float32."""
GROWTH = 1.0
"""MB a minute by which an actor may grow in the second half."""


class Rollout(NamedTuple):
    """What a stream brought."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    """As `StreamDelta.weight_versions`."""
    gap: float
    """The longest time between two of its deltas, in seconds."""

    def version_of(self, index: int) -> int:
        """The version that made a token."""
        return next((version for first, version in reversed(self.versions) if first <= index), 0)


class Streams:
    """Streams, so many at once, each of a fixed number of tokens."""

    def __init__(self, client: AsyncClient, prompts: list[list[int]], tokens: int,
                 seed: int) -> None:
        self._client, self._prompts, self._tokens = client, prompts, tokens
        self._chance, self._going_on = random.Random(seed), True
        self.found, self.lost = list[Rollout](), list[str]()

    def stop(self) -> None:
        """Begins no stream any more."""
        self._going_on = False

    async def run(self, at_once: int) -> None:
        await asyncio.gather(*(self._caller() for _ in range(at_once)))

    async def _caller(self) -> None:
        while self._going_on:
            try:
                rollout = await self._stream(self._chance.choice(self._prompts))
            except ActoriumError as error:
                self.lost.append(str(error))
                continue
            self.found.append(rollout)
            if len(rollout.tokens) != self._tokens:
                self.lost.append(f"{len(rollout.tokens)} of {self._tokens} tokens")

    async def _stream(self, prompt: list[int]) -> Rollout:
        params = SamplingParams(max_tokens=self._tokens, ignore_eos=True, temperature=1.0, top_k=0,
                                top_p=1.0, logprobs=0, seed=self._chance.getrandbits(32))
        tokens, logprobs, versions, times = [], [], [], []
        async for delta in self._client.stream(prompt, params):
            times.append(time.monotonic())
            tokens += delta.token_ids
            logprobs += [own.logprob for own in delta.logprobs or []]
            versions = delta.weight_versions or versions
        return Rollout(prompt, tokens, logprobs, versions,
                       max((b - a for a, b in pairwise(times)), default=0.0))


def write_checkpoint(base: Path, path: Path, seed: int) -> Path:
    """Writes the model with noise on each matrix, of what drafts as well."""
    path.mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, path)
            continue
        tensors, draw = load_file(file), torch.Generator().manual_seed(seed)
        save_file({name: (own.float() + NOISE * own.float().std(correction=0) * torch.randn(
            own.shape, generator=draw)).to(own.dtype) if own.dim() > 1 else own
            for name, own in tensors.items()}, path / file.name)
    return path


@torch.inference_mode()
def differences(rollout: Rollout, models: list[Any]) -> list[float]:
    """How far each log-probability is from that of the whole text so far by the version that is
    told; `models`: of versions 1, 2, ..., and then again."""
    text = torch.tensor([rollout.prompt + rollout.tokens])
    whole = {}
    for version in {rollout.version_of(i) for i in range(len(rollout.tokens))}:
        logits = models[(version - 1) % len(models)](text[:, :-1]).logits[0]
        whole[version] = logits.log_softmax(-1).gather(1, text[0, 1:, None])[:, 0]
    first = len(rollout.prompt) - 1
    return [abs(float(whole[rollout.version_of(i)][first + i]) - told)
            for i, told in enumerate(rollout.logprobs)]


async def drive(engine: Engine, streams: Streams, paths: list[Path], at_once: int, seconds: float,
                every: float) -> tuple[list[Row], list[Sample]]:
    """Streams for so long; another checkpoint every so many seconds. Returns (what each update
    told, memory by seconds since the start)."""
    updates, samples = [], []
    pids = await asyncio.to_thread(pids_of, engine)
    async with AsyncClient(engine.name) as client:
        updates.append(await client.update_weights(paths[0]))
        work = asyncio.create_task(streams.run(at_once))
        began = time.monotonic()
        while (left := began + seconds - time.monotonic()) > 0:
            await asyncio.sleep(min(every, left))
            updates.append(await client.update_weights(paths[len(updates) % len(paths)], "retract"))
            samples.append(look(pids, round(time.monotonic() - began)))
        streams.stop()
        await work
    return updates, samples


@scenario
def updates(model: str = "", minutes: float = 10.0, at_once: int = 64, every: float = 30.0,
            tokens: int = 256, dtype: str = "float32", checked: int = 100, seed: int = 1) -> Rows:
    """Streams for so many minutes, and other weights every so many seconds (mode retract); fails
    where a stream is lost or a log-probability is not that of the version that is told.

    checked: streams whose tokens are computed again, those across an update first.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_checkpoint(resolve(model), Path(folder) / str(number), seed + number)
                 for number in range(CHECKPOINTS)]
        models: list[Any] = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
                             for path in paths]
        with Engine(model, dtype=dtype, max_num_seqs=at_once) as engine:
            prompts = [engine.client.tokenize(start) for start in STARTS]
            bound = BOUND[dtype]

            async def run() -> tuple[Streams, list[Row], list[Sample]]:
                async with AsyncClient(engine.name) as client:
                    streams = Streams(client, prompts, tokens, seed)
                    return streams, *await drive(engine, streams, paths, at_once,
                                                 60 * minutes, every)

            streams, told, samples = asyncio.run(run())
    across = sorted(streams.found, key=lambda own: -len(own.versions))[:checked]
    far = [own for rollout in across for own in differences(rollout, models)]
    gaps = sorted(own.gap for own in streams.found)
    later = samples[len(samples) // 2:]
    growth = {role: 60 * slope([(one.requests, one.roles[role][0]) for one in later]) / 1e6
              for role in samples[0].roles}
    yield {"streams": len(streams.found), "tokens": sum(len(o.tokens) for o in streams.found),
           "lost": streams.lost, "updates": len(told),
           "streams_across_updates": sum(len(o.versions) > 1 for o in streams.found),
           "update_pause_s": round(max(own["seconds"] for own in told), 3),
           "update_read_s_median": round(statistics.median(own["read_seconds"] for own in told), 2),
           "longest_gap_s": round(gaps[-1], 2), "median_of_longest_gaps_s": round(
               statistics.median(gaps), 3)}
    yield {"streams_checked": len(across), "tokens_checked": len(far),
           "largest_difference": round(max(far), 6), "mean_difference": round(
               statistics.fmean(far), 7), "bound": bound}
    for role, own in growth.items():
        yield {"actor": role, "first_mb": samples[0].roles[role][0] / 1e6,
               "last_mb": samples[-1].roles[role][0] / 1e6, "mb_a_minute": round(own, 3)}
    wrong = [f"{len(streams.lost)} streams lost"] if streams.lost else []
    wrong += [f"a log-probability is {max(far):.3g} off"] if max(far) > bound else []
    wrong += [f"{role} grows by {own:.2f} MB a minute" for role, own in growth.items()
              if own > GROWTH]
    if wrong:
        raise SystemExit("; ".join(wrong))
