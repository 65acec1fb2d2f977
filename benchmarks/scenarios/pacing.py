"""Gaps between tokens and times to the first token by `--target-itl`, on a machine of known speed.

The whole scheduler serves a worker without a model whose steps take what a formula says, with some
noise, so that figures are the same on a busy machine as on an idle one, and differ by the target
alone. `run.py serving --vary target-itl` measures real models.

Machines: of the order of two cores with AMX at Qwen3-0.6B's shape, one for a model a quarter as
large, and that shape with weights of 4 bits on slow cores, where rows of a decode cost more than
its weights; none is a measurement. Loads: 32 streams of 128 tokens in and 64 out, all the time; 16
of 1,500 in; and requests of 128 in that come at random.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from harness import Row, Rows, scenario
from scenarios.loop import Loop

from actorium.actors.config.tree import Config, MemoryConfig, SchedulerConfig
from actorium.actors.params import ResolvedParams, ResolvedPooling


class Machine(NamedTuple):
    """Microseconds of a step: with decodes, of each of them beyond four, with a prompt, of each of
    its tokens."""

    decode: int
    row: int
    prompt: int
    token: int

    def cost(self, decoded: int, window: int, drafts: int, extended: int) -> int:
        """Returns the cost in the form of `null_worker.Cost`."""
        beside = self.decode + self.row * max(decoded - 4, 0) if decoded else self.decode
        return beside + (self.prompt + self.token * extended if extended else 0)


class Load(NamedTuple):
    """`streams` at a time, or, of 0, `rate` a second at random."""

    requests: int
    tokens_in: int
    tokens_out: int
    streams: int
    rate: float = 0.0


MACHINES = {"0.6B": Machine(33_000, 700, 8_000, 560), "135M": Machine(6_000, 700, 3_000, 300),
            "0.6B, slow": Machine(28_000, 3_100, 8_000, 2_200)}
ALL = [*MACHINES]
LOADS = {"32 streams, 128 in": Load(300, 128, 64, 32),
         "16 streams, 1,500 in": Load(80, 1500, 64, 16),
         "at random, 128 in": Load(200, 128, 64, 0, 0.5)}

TARGETS = ["0", "default", "50", "100", "150"]


def run(target: float | None, machine: Machine, load: Load) -> Row:
    """Serves a load; milliseconds, and tokens a second."""
    loop, dice = Loop(Config(
        memory=MemoryConfig(max_total_tokens=1 << 18, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=64, target_itl=target)), cost=machine.cost
        ), random.Random(2)
    alone = machine.token * load.tokens_in + machine.row * load.tokens_out
    gap = alone / 1e6 / load.rate if load.rate else 0.0
    sent: list[float] = []
    first: list[float] = []
    gaps: list[float] = []
    due = 0.0
    while len(first) < load.requests:
        while len(sent) < load.requests and (
                loop.now >= due if load.rate else len(sent) - len(first) < load.streams):
            prompt = np.full(load.tokens_in, len(sent) + 1, np.int32).tobytes()
            loop.submit(str(len(sent)), prompt, ResolvedParams(max_tokens=load.tokens_out),
                        len(sent))
            sent.append(loop.now)
            due += dice.expovariate(1 / gap) if gap else 0.0
        if loop.idle:
            loop.now = max(loop.now, due)
        for heard in loop.step() if not loop.idle else ():
            first.append(heard.came[0] - sent[int(heard.rid)])
            gaps += [b - a for a, b in pairwise(heard.came)]
    gauges = loop.gauges()
    mixed = gauges.get("mixed_step_us")
    return {"tokens_per_s": round(load.requests * load.tokens_out / loop.now, 1),
            **spread("itl", gaps), **spread("ttft", first), "predicted_over_measured":
            round(gauges["mixed_step_predicted_us"] / mixed, 3) if mixed else None}


def spread(name: str, seconds: list[float]) -> Row:
    """Median, p99 and longest, in milliseconds."""
    found = sorted(seconds)
    return {f"{name}_{part}_ms": round(1e3 * found[min(int(share * len(found)), len(found) - 1)], 1)
            for part, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


@scenario
def targets(targets: list[str] = TARGETS, machines: list[str] = ALL) -> Rows:
    """Tokens a second, gaps and first tokens by target: ms, 0 = off, default = a CPU's."""
    for machine in machines:
        for name, load in LOADS.items():
            for target in targets:
                yield {"machine": machine, "load": name, "target_itl": f"{target} ms",
                       **run(None if target == "default" else float(target), MACHINES[machine],
                             load)}


OFF_AND_DEFAULT = ["0", "default"]
STREAMS, VECTORS = Load(40, 128, 64, 8), 64
"""Streams that go on all the time, and prompts of as many tokens that wait for a vector."""


def beside_vectors(target: float | None, machine: Machine, vectors: int) -> Row:
    """Serves streams while so many requests for vectors are always under way; milliseconds, and
    vectors a second."""
    loop = Loop(Config(
        memory=MemoryConfig(max_total_tokens=1 << 18, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=128, target_itl=target)), cost=machine.cost)
    gaps: list[float] = []
    ended, sent, streams, pooled = 0, 0, 0, 0
    while ended < STREAMS.requests:
        for own, most, now in ((None, STREAMS.streams, streams - ended),
                               (ResolvedPooling("embed"), vectors, sent - streams - pooled)):
            for _ in range(most - now):
                prompt = np.full(STREAMS.tokens_in, sent + 1, np.int32).tobytes()
                params = ResolvedParams(max_tokens=1 if own else STREAMS.tokens_out)
                loop.submit(str(sent), prompt, params, sent, pooling=own)
                sent, streams = sent + 1, streams + (own is None)
        for heard in loop.step():
            if heard.tokens:
                ended += 1
                gaps += [b - a for a, b in pairwise(heard.came)]
            else:
                pooled += 1
    return {"vectors_per_s": round(pooled / loop.now, 1), **spread("itl", gaps)}


@scenario
def vectors(targets: list[str] = OFF_AND_DEFAULT, machines: list[str] = ALL) -> Rows:
    """Gaps between tokens of 8 streams with and without 64 requests for vectors beside them."""
    for machine in machines:
        for target in targets:
            for count in (0, VECTORS):
                yield {"machine": machine, "vectors": count, "target_itl": f"{target} ms",
                       **beside_vectors(None if target == "default" else float(target),
                                        MACHINES[machine], count)}


BURSTS, AT_ONCE = 8, 32
"""Prompts of a burst come at once, the next burst when all of them are done."""


def beside_bursts(target: float | None, machine: Machine, own: ResolvedPooling | None) -> Row:
    """Gaps of 4 streams beside bursts of prompts that are pooled, or (None) get a token each;
    milliseconds."""
    loop = Loop(Config(
        memory=MemoryConfig(max_total_tokens=1 << 18, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=128, target_itl=target)), cost=machine.cost)
    sent = 0

    def submit(count: int, tokens: int, own: ResolvedPooling | None = None) -> None:
        nonlocal sent
        for _ in range(count):
            sent += 1
            prompt = np.full(STREAMS.tokens_in, sent, np.int32).tobytes()
            loop.submit(str(sent), prompt, ResolvedParams(max_tokens=tokens), sent, pooling=own)

    submit(4, 1 << 14)
    while not (streams := list(loop.live.values())) or min(len(own.came) for own in streams) < 32:
        loop.step()
    begun, done = loop.now, 0
    for burst in range(BURSTS):
        submit(AT_ONCE, 1, own)
        while done < (burst + 1) * AT_ONCE:
            done += len(loop.step())
    gaps = [b - a for each in streams for a, b in pairwise(each.came) if a >= begun]
    return {"prompts_per_s": round(done / (loop.now - begun), 1), **spread("itl", gaps),
            "target_ms": round(loop.gauges().get("target_itl_us", 0) / 1e3, 1)}


@scenario
def bursts(targets: list[str] = ["0", "default", "75"],  # noqa: B006
           machines: list[str] = ALL) -> Rows:
    """Gaps between tokens of 4 streams beside bursts of 32 prompts, by task and target."""
    for machine in machines:
        for task, own in (("embed", ResolvedPooling("embed")), ("generate", None)):
            for target in targets:
                yield {"machine": machine, "task": task, "target_itl": f"{target} ms",
                       **beside_bursts(None if target == "default" else float(target),
                                       MACHINES[machine], own)}
