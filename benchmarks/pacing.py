"""Gaps between tokens and times to the first token by `--target-itl`, on a machine of known speed.

    python benchmarks/pacing.py [--targets "0;default;100"] [--json FILE]

The whole scheduler serves a worker without a model whose steps take what a formula says, with 5 %
of noise, so that figures are the same on a busy machine as on an idle one, and differ by the target
alone. `benchmarks/serve.py --vary target-itl` measures real models.

Machines: of the order of two cores with AMX at Qwen3-0.6B's shape (README), one for a model a
quarter as large, and that shape with weights of 4 bits on slow cores, where rows of a decode cost
more than its weights; none is a measurement. Loads: 32 streams of 128 tokens in and 64 out, all the
time; 16 of 1,500 in; and requests of 128 in that come at random.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from actorium.actors.config.tree import Config, MemoryConfig, RecoveryConfig, SchedulerConfig
from actorium.actors.core import Context
from actorium.actors.messages import StepResult, Submit, TokenBatch
from actorium.actors.params import Resolved, TextParams
from actorium.actors.runtime.roles import WORKER
from actorium.actors.scheduler import scheduler_actor
from actorium.tools.null.null_worker import NullWorker

NOISE = 0.05
PARTS = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
Cost = Callable[[int, int, int, int], int]


class Machine(NamedTuple):
    """Microseconds of a step: with decodes, of each of them beyond four, with a prompt, of each of
    its tokens."""

    decode: int
    row: int
    prompt: int
    token: int

    def cost(self, decoded: int, window: int, drafts: int, extended: int) -> int:
        """As `null_worker.Cost`."""
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
LOADS = {"32 streams, 128 in": Load(300, 128, 64, 32),
         "16 streams, 1,500 in": Load(80, 1500, 64, 16),
         "at random, 128 in": Load(200, 128, 64, 0, 0.5)}


class Simulation:
    """The scheduler and its clock, which goes on by what steps take."""

    def __init__(self, target: float | None, machine: Machine) -> None:
        config = Config(memory=MemoryConfig(max_total_tokens=1 << 18, prefix_cache=False),
                        scheduler=SchedulerConfig(max_num_seqs=64, target_itl=target),
                        recovery=RecoveryConfig(restart=False))
        self.scheduler = scheduler_actor.build(Context(config, Path("/nowhere"), "scheduler", 1, 0))
        self._worker = NullWorker(Context(config, Path("/nowhere"), "worker-0", 1, 0),
                                  cost=machine.cost)
        self._worker.ready = msgspec.structs.replace(self._worker.ready, device="cpu")
        self._worker.on_wake(0.0)
        self.now, self._dice, self._results = 0.0, random.Random(1), list[StepResult]()
        self.sent: dict[int, float] = {}
        """When each sequence was submitted, by sid."""
        self.last: dict[int, float] = {}
        """When its last token came."""
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.ended = 0
        self.scheduler.on_message(self._worker.ready, 0.0)
        self._wake()

    def submit(self, load: Load) -> None:
        """One more request."""
        self.sent[self.scheduler.next_sid] = self.now
        number = len(self.sent)
        prompt = np.full(load.tokens_in, number, np.int32).tobytes()
        self.scheduler.on_message(Submit(
            rid=f"r{number}", client=b"c", prompt=prompt, n=1,
            params=Resolved(max_tokens=load.tokens_out), text=TextParams(), seed=number), 0.0)

    def step(self) -> bool:
        """One step of the worker; False if there is nothing to do."""
        self._wake()
        if not self._results:
            return False
        result = self._results.pop(0)
        spent = int(result.busy_us * self._dice.gauss(1, NOISE))
        self.now += spent / 1e6
        self.scheduler.on_message(msgspec.structs.replace(result, busy_us=spent), self.now)
        self._wake()
        return True

    def _wake(self) -> None:
        for send in self.scheduler.on_wake(self.now):
            if send.to == WORKER:
                self._worker.on_message(send.message, 0.0)
            elif isinstance(send.message, TokenBatch):
                self._note(send.message)
        self._results += [send.message for send in self._worker.on_wake(0.0)
                          if isinstance(send.message, StepResult)]

    def _note(self, batch: TokenBatch) -> None:
        for sid in np.frombuffer(batch.sids, np.int64).tolist():
            if sid in self.last:
                self.gaps.append(self.now - self.last[sid])
            else:
                self.first.append(self.now - self.sent[sid])
            self.last[sid] = self.now
        self.ended += sum(event.finish_reason is not None for event in batch.events)


def run(target: float | None, machine: Machine, load: Load) -> dict[str, Any]:
    """Serve a load; milliseconds, and tokens a second."""
    simulation, dice = Simulation(target, machine), random.Random(2)
    alone = machine.token * load.tokens_in + machine.row * load.tokens_out
    gap = alone / 1e6 / load.rate if load.rate else 0.0
    submitted, due = 0, 0.0
    while simulation.ended < load.requests:
        while submitted < load.requests and (simulation.now >= due if load.rate else
                                             submitted - simulation.ended < load.streams):
            simulation.submit(load)
            submitted += 1
            due += dice.expovariate(1 / gap) if gap else 0.0
        if not simulation.step():
            simulation.now = max(simulation.now, due)
    gauges = simulation.scheduler.health().gauges
    return {"tokens_per_s": round(load.requests * load.tokens_out / simulation.now, 1),
            **{f"itl_{name}_ms": _part(simulation.gaps, part) for name, part in PARTS},
            **{f"ttft_{name}_ms": _part(simulation.first, part) for name, part in PARTS},
            "predicted_over_measured": round(gauges["mixed_step_predicted_us"]
                                             / gauges["mixed_step_us"], 3)
            if gauges.get("mixed_step_us") else None}


def _part(seconds: Sequence[float], part: float) -> float:
    found = sorted(seconds)
    return round(1e3 * found[min(int(part * len(found)), len(found) - 1)], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="0;default;50;100;150",
                        help="milliseconds, 0 = off, default = a CPU's")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    rows = []
    for machine, speeds in MACHINES.items():
        for name, load in LOADS.items():
            for target in options.targets.split(";"):
                found = run(None if target == "default" else float(target), speeds, load)
                rows.append({"machine": machine, "load": name, "target_itl": target, **found})
                print(f"{machine:<10} {name:<21} {target:>8} ms: {found['tokens_per_s']:>7} "
                      f"tokens/s, gap p50 {found['itl_p50_ms']:>6} p99 {found['itl_p99_ms']:>7} "
                      f"max {found['itl_max_ms']:>7}, first p50 {found['ttft_p50_ms']:>8} p99 "
                      f"{found['ttft_p99_ms']:>8} ms", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
