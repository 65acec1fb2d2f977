"""Scheduler cost of a step in microseconds, for 1 to 1024 running sequences.

    python benchmarks/steps.py [--json FILE] [--repeat N] [--ring]

A step is everything the scheduler does for it: decode the worker's result, enter it into the books,
make and encode the next plan, encode the detokenizer's batch. The null worker's own time is not
counted. Context 512 and more, page size 16, two plans on their way, one steady batch. Timings are
medians over all steps of a repetition, then over repetitions. Each batch is measured with the
prefix cache, without it, with it for a model with recurrent layers, and for both kinds of models
with two drafts a step, accepted with probabilities 0.8 and 0.6; and with a ledger in a tmpfs, to
which each step is committed. Prompts have nothing in common; at
the admission of a single prompt, its first half is cached already.

--ring runs the real processes with the null worker instead: steps a second from request to last
token as a client sees it, the scheduler process's own CPU time a step (sockets and loop included),
and the time from request to first token of a lone request.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actorium.actors.client.client import Client, SamplingParams
from actorium.actors.config.tree import (
    Config,
    MemoryConfig,
    RecoveryConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.core import Context, Send
from actorium.actors.launcher.engine import Engine
from actorium.actors.ledger.committer import LedgerCommitter
from actorium.actors.messages import ActorStatus, Submit, ToScheduler, ToWorker
from actorium.actors.params import Resolved, TextParams
from actorium.actors.runtime.roles import WORKER
from actorium.actors.scheduler import scheduler_actor
from actorium.tools.null import null_worker

RUNNING = (1, 16, 64, 256, 1024)
CONTEXT = 512
TARGETS = {1: 30, 16: 40, 64: 60, 256: 150, 1024: 450}
WARMUP = 20
SHM = Path("/dev/shm")
DRAFTS, ACCEPTANCE = 2, (0.8, 0.6)
RING_TOKENS = {1: 4000, 16: 3000, 64: 2000, 256: 800, 1024: 300}
"""Tokens that each request of --ring asks for: about a second or two of steps."""


class Bench:
    """A scheduler and a null worker in one process, exchanging encoded messages."""

    def __init__(self, running: int, cache: bool, recurrent: bool = False, drafts: int = 0,
                 ledger: Path | None = None) -> None:
        speculative = f"mtp:{drafts},fixed" if drafts else "off"
        config = Config(
            memory=MemoryConfig(max_total_tokens=(running + 1) * 8 * CONTEXT, prefix_cache=cache),
            scheduler=SchedulerConfig(max_num_seqs=running + 1, max_num_batched_tokens=1 << 20),
            speculation=SpeculationConfig(speculative=speculative),
            recovery=RecoveryConfig(restart=False,
                                    ledger_dir=None if ledger is None else str(ledger)))
        self._run_dir = tempfile.TemporaryDirectory()
        directory = Path(self._run_dir.name)
        self.scheduler = scheduler_actor.build(Context(config, directory, "scheduler", 1, 0))
        self.worker = null_worker.NullWorker(Context(config, directory, "worker-0", 1, 0),
                                             checkpoints=64 if recurrent else None,
                                             acceptance=ACCEPTANCE)
        self._commits = None if self.scheduler.ledger is None else LedgerCommitter(
            self.scheduler, self.scheduler.ledger, patience=2.0)
        self._encoder = msgspec.msgpack.Encoder()
        self._to_scheduler = msgspec.msgpack.Decoder(ToScheduler)
        self._to_worker = msgspec.msgpack.Decoder(ToWorker)
        self.results = self._answers()
        self.plan_bytes: list[int] = []

    def submit(self, number: int, shared: int = 0) -> bytes:
        """A request whose first `shared` tokens are those of every other such request."""
        own = np.arange(number * CONTEXT + shared, (number + 1) * CONTEXT, dtype=np.int32)
        prompt = np.arange(shared, dtype=np.int32).tobytes() + own.tobytes()
        return self._encoder.encode(Submit(
            rid=f"r{number}", client=b"bench", prompt=prompt, n=1, text=TextParams(), seed=number,
            params=Resolved(max_tokens=100_000)))

    def wake(self, frames: Sequence[bytes]) -> tuple[float, list[bytes]]:
        """One wake of the scheduler: (microseconds, the plans it sent)."""
        start = time.perf_counter_ns()
        for frame in frames:
            self.scheduler.on_message(self._to_scheduler.decode(frame), 0.0)
        sends = self.scheduler.on_wake(0.0)
        if self._commits is not None:
            sends = self._commits.commit(sends, 0.0)
        sent = [(send.to, self._encoder.encode(send.message)) for send in sends]
        spent = (time.perf_counter_ns() - start) / 1000
        return spent, [frame for to, frame in sent if to == WORKER]

    def work(self, plans: Sequence[bytes]) -> None:
        """Let the worker run the plans; their results queue up."""
        for frame in plans:
            self.worker.on_message(self._to_worker.decode(frame), 0.0)
        self.results += self._answers()

    def _answers(self) -> list[bytes]:
        sends: Sequence[Send] = self.worker.on_wake(0.0)
        return [self._encoder.encode(send.message) for send in sends]

    def step(self) -> float:
        """Hand over the oldest result; two plans stay on their way."""
        spent, plans = self.wake([self.results.pop(0)])
        self.plan_bytes += map(len, plans)
        self.work(plans)
        return spent


def steady(running: int, steps: int, cache: bool = True, recurrent: bool = False,
           drafts: int = 0, ledger: bool = False) -> tuple[float, int]:
    """Median microseconds a step, and the longest plan in bytes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if SHM.is_dir() else None) as directory:
        bench = Bench(running, cache, recurrent, drafts, Path(directory) if ledger else None)
        return _steady(bench, running, steps)


def _steady(bench: Bench, running: int, steps: int) -> tuple[float, int]:
    bench.step()
    _, plans = bench.wake([bench.submit(i) for i in range(running)])
    bench.work(plans)
    for _ in range(WARMUP):
        bench.step()
    bench.plan_bytes.clear()
    spent = statistics.median(bench.step() for _ in range(steps))
    assert bench.scheduler.health().gauges["running"] == running
    return spent, max(bench.plan_bytes)


def admission(rounds: int) -> float:
    """Median microseconds that one 512-token request adds to a step: Submit to plan."""
    bench = Bench(rounds + 1, cache=True)
    bench.step()
    bench.work(bench.wake([bench.submit(0, CONTEXT // 2)])[1])
    for _ in range(WARMUP):
        bench.step()
    extra = []
    for number in range(1, rounds + 1):
        plain = statistics.median(bench.step() for _ in range(5))
        spent, plans = bench.wake([bench.submit(number, CONTEXT // 2), bench.results.pop(0)])
        bench.work(plans)
        extra.append(spent - plain)
        for _ in range(3):
            bench.step()
    return statistics.median(extra)


KINDS: dict[str, dict[str, Any]] = {
    "us_per_step": {}, "us_per_step_without_cache": {"cache": False},
    "us_per_step_recurrent": {"recurrent": True}, "us_per_step_drafts": {"drafts": DRAFTS},
    "us_per_step_recurrent_drafts": {"recurrent": True, "drafts": DRAFTS},
    "us_per_step_ledger": {"ledger": True}}


def in_process(repeat: int) -> dict[str, Any]:
    """Measure every batch size `repeat` times; print as it goes."""
    rows = []
    heads = ("us/step", "no cache", "recurrent", f"k={DRAFTS}", f"rec. k={DRAFTS}", "ledger")
    print(f"{'running':>8}" + "".join(f" {head:>9}" for head in heads)
          + f" {'target':>7} {'plan bytes (max, k)':>20}")
    for running in RUNNING:
        runs = [{kind: steady(running, 100, **how) for kind, how in KINDS.items()}
                for _ in range(repeat)]
        spent = {kind: round(statistics.median(run[kind][0] for run in runs), 1) for kind in KINDS}
        plain, windows = (max(run[kind][1] for run in runs)
                          for kind in ("us_per_step", "us_per_step_drafts"))
        rows.append({"running": running, **spent, "plan_bytes_max": plain,
                     "plan_bytes_max_drafts": windows, "target_us": TARGETS[running]})
        print(f"{running:>8}" + "".join(f" {spent[kind]:>9.1f}" for kind in KINDS)
              + f" {TARGETS[running]:>7} {plain:>10} {windows:>9}")
    admit = statistics.median(admission(40) for _ in range(repeat))
    print(f"admission of a {CONTEXT}-token prompt, half of it cached: {admit:.1f} us")
    return {"steps": rows, "admission_us": round(admit, 1)}


def idle_scheduler(client: Client) -> ActorStatus:
    """What the watchdog knows of the scheduler, once it has told that it is idle."""
    while True:
        (scheduler,) = [a for a in client.status().actors if a.role == "scheduler"]
        if scheduler.phase in ("idle", "ready"):
            return scheduler
        time.sleep(0.05)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ring_batch(client: Client, running: int) -> dict[str, Any]:
    """`running` requests at once through all processes."""
    before = idle_scheduler(client)
    cpu, start = cpu_seconds(before.pid), time.perf_counter()
    done = client.generate([[1, 2, 3]] * running,
                           SamplingParams(max_tokens=RING_TOKENS[running], ignore_eos=True))
    wall, cpu = time.perf_counter() - start, cpu_seconds(before.pid) - cpu
    tokens = sum(len(completion.token_ids) for completion in done)
    assert tokens == running * RING_TOKENS[running]
    steps = idle_scheduler(client).gauges["steps"] - before.gauges.get("steps", 0)
    return {"running": running, "steps_per_s": round(steps / wall, 1),
            "tokens_per_s": round(tokens / wall), "us_per_step": round(wall / steps * 1e6, 1),
            "scheduler_cpu_us_per_step": round(cpu / steps * 1e6, 1)}


def first_token_ms(client: Client, rounds: int) -> dict[str, float]:
    """Milliseconds from request to first token, nothing else running."""
    spent = []
    for _ in range(rounds):
        start = time.perf_counter()
        client.generate([1, 2, 3], SamplingParams(max_tokens=1))
        spent.append((time.perf_counter() - start) * 1e3)
    spent.sort()
    return {"p50": round(spent[rounds // 2], 2), "p99": round(spent[rounds * 99 // 100], 2)}


def through_the_ring() -> dict[str, Any]:
    """Real processes with the null worker; prints as it goes."""
    rows = []
    with tempfile.TemporaryDirectory(dir="/tmp") as directory, \
            Engine("", null_worker=True, skip_tokenizer=True, run_dir=directory,
                   max_num_seqs=max(RUNNING)) as engine:
        print(f"{'running':>8} {'steps/s':>9} {'tokens/s':>9} {'us/step':>9} {'scheduler CPU':>14}")
        for running in RUNNING:
            row = ring_batch(engine.client, running)
            rows.append(row)
            print(f"{running:>8} {row['steps_per_s']:>9} {row['tokens_per_s']:>9} "
                  f"{row['us_per_step']:>9} {row['scheduler_cpu_us_per_step']:>14}")
        first = first_token_ms(engine.client, 300)
        print(f"request to first token: p50 {first['p50']} ms, p99 {first['p99']} ms")
    return {"ring": rows, "first_token_ms": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ring", action="store_true", help="through real processes")
    options = parser.parse_args()
    figures = through_the_ring() if options.ring else in_process(options.repeat)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
