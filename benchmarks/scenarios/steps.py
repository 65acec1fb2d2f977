"""Scheduler cost of a step in microseconds, for 1 to 1,024 running sequences."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from harness import SHM, Rows, scenario

from actorium.actors.config.tree import (
    Config,
    MemoryConfig,
    RecoveryConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.core import Context
from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.ledger.committer import LedgerCommitter
from actorium.actors.messages import (
    Attach,
    Submit,
    ToDetokenizer,
    ToScheduler,
    ToWorker,
    TraceContext,
)
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.runtime.roles import WORKER
from actorium.actors.scheduler import scheduler_actor
from actorium.actors.scheduler.outgoing import DETOKENIZER
from actorium.tools.null import null_worker

RUNNING = [1, 16, 64, 256, 1024]
CONTEXT = 512
WARMUP = 20
ACCEPTANCE = (0.8, 0.6)
DRAFTS, METHODS = "mtp:2,fixed", "mtp:2+suffix:8"
KINDS: dict[str, dict[str, Any]] = {
    "us_per_step": {}, "us_per_step_without_cache": {"cache": False},
    "us_per_step_recurrent": {"recurrent": True}, "us_per_step_drafts": {"speculative": DRAFTS},
    "us_per_step_recurrent_drafts": {"recurrent": True, "speculative": DRAFTS},
    "us_per_step_methods": {"speculative": METHODS}, "us_per_step_ledger": {"ledger": True}}


class Bench:
    """A scheduler and a null worker in one process, exchanging encoded messages."""

    def __init__(self, running: int, cache: bool = True, recurrent: bool = False,
                 speculative: str = "off", ledger: str | None = None) -> None:
        config = Config(
            memory=MemoryConfig(max_total_tokens=(running + 1) * 8 * CONTEXT, prefix_cache=cache),
            scheduler=SchedulerConfig(max_num_seqs=running + 1, max_num_batched_tokens=1 << 20),
            speculation=SpeculationConfig(speculative=speculative),
            recovery=RecoveryConfig(restart=False, ledger_dir=ledger))
        self._run_dir = tempfile.TemporaryDirectory()
        directory = Path(self._run_dir.name)
        self.scheduler = scheduler_actor.build_core(Context(config, directory, "scheduler", 1, 0))
        self.worker = null_worker.NullWorker(Context(config, directory, "worker-0", 1, 0),
                                             checkpoints=64 if recurrent else None,
                                             acceptance=ACCEPTANCE)
        self._commits = None if self.scheduler.ledger is None else LedgerCommitter(
            self.scheduler, self.scheduler.ledger, patience=2.0)
        self._encoder = msgspec.msgpack.Encoder()
        self._to_scheduler = msgspec.msgpack.Decoder(ToScheduler)
        self._to_worker = msgspec.msgpack.Decoder(ToWorker)
        self.results: list[bytes] = []
        self.reports: list[bytes] = []
        """What the last wake has sent to the detokenizer."""
        self.work([])
        self.plan_bytes: list[int] = []

    def submit(self, number: int, tokens: int = 100_000, trace: TraceContext | None = None
               ) -> bytes:
        """A request that has nothing in common with others."""
        prompt = np.arange(number * CONTEXT, (number + 1) * CONTEXT, dtype=np.int32).tobytes()
        return self._encoder.encode(Submit(
            rid=f"r{number}", client=b"bench", prompt=prompt, n=1, text=TextParams(), seed=number,
            params=ResolvedParams(max_tokens=tokens), trace=trace))

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
        self.reports = [frame for to, frame in sent if to == DETOKENIZER]
        return spent, [frame for to, frame in sent if to == WORKER]

    def work(self, plans: Sequence[bytes]) -> None:
        """Lets the worker run the plans; their results queue up."""
        for frame in plans:
            self.worker.on_message(self._to_worker.decode(frame), 0.0)
        self.results += [self._encoder.encode(send.message) for send in self.worker.on_wake(0.0)]

    def step(self) -> float:
        """Hands over the oldest result; two plans stay on their way."""
        spent, plans = self.wake([self.results.pop(0)])
        self.plan_bytes += map(len, plans)
        self.work(plans)
        return spent


def steady(running: int, steps: int, cache: bool = True, recurrent: bool = False,
           speculative: str = "off", ledger: bool = False) -> tuple[list[float], int]:
    """Microseconds of each step, and the longest plan in bytes."""
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        bench = Bench(running, cache, recurrent, speculative, directory if ledger else None)
        bench.step()
        bench.work(bench.wake([bench.submit(i) for i in range(running)])[1])
        for _ in range(WARMUP):
            bench.step()
        bench.plan_bytes.clear()
        spent = [bench.step() for _ in range(steps)]
        assert bench.scheduler.health().gauges["running"] == running
        return spent, max(bench.plan_bytes)


def least(runs: Sequence[Sequence[float]]) -> float:
    """Mean of what each step took in the run in which it took least: runs do the same in the same
    step, and what disturbs one only adds. f8[runs, steps]."""
    return float(np.min(runs, axis=0).mean())


@scenario
def core(running: list[int] = RUNNING, repeat: int = 5) -> Rows:
    """Microseconds of a step in the scheduler's core, by kind of model.

    A step is everything the scheduler does for it: decode the worker's result, enter it into the
    books, make and encode the next plan, encode the detokenizer's batch; the worker's own time is
    not counted. Context 512 and more, page size 16, two plans on their way, prompts that have
    nothing in common. With and without the prefix cache, for a model with recurrent layers, with
    two drafts a step, accepted with probabilities 0.8 and 0.6, with two methods of drafts to choose
    from, and with a ledger in memory. Steps differ, with drafts every other one allocates pages: so
    the figure is a mean over steps, of each the least of all runs.
    """
    for count in running:
        runs = [{kind: steady(count, 100, **how) for kind, how in KINDS.items()}
                for _ in range(repeat)]
        spent = {kind: round(least([run[kind][0] for run in runs]), 1) for kind in KINDS}
        plain, drafts = (max(run[kind][1] for run in runs)
                         for kind in ("us_per_step", "us_per_step_drafts"))
        yield {"running": count, **spent, "plan_bytes_max": plain, "plan_bytes_max_drafts": drafts}


class TextBench:
    """A detokenizer that takes encoded messages."""

    def __init__(self) -> None:
        config = Config(recovery=RecoveryConfig(restart=False))
        self._core = DetokenizerCore(Context(config, Path("/nonexistent"), DETOKENIZER, 1, 0))
        self._decode = msgspec.msgpack.Decoder(ToDetokenizer).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._core.on_wake(0.0)
        self._core.on_wake(0.0)
        self._core.on_client(b"bench", Attach(), 0.0)

    def wake(self, frames: Sequence[bytes]) -> float:
        """One wake: microseconds."""
        start = time.thread_time_ns()
        for frame in frames:
            self._core.on_message(self._decode(frame), 0.0)
        for send in self._core.on_wake(0.0):
            self._encode(send.message)
        return (time.thread_time_ns() - start) / 1000


def short_requests(running: int, tokens: int, steps: int, trace: TraceContext | None
                   ) -> tuple[Any, int]:
    """Microseconds of processor time in the scheduler and in the detokenizer, f8[steps, 2], and how
    many requests have ended. Each is followed by another; as many end in one step as in any."""
    bench, texts = Bench(running, cache=False), TextBench()
    first = [bench.submit(i, 1 + tokens * (i + 1) // running, trace) for i in range(running)]
    bench.step()
    bench.work(bench.wake(first)[1])
    texts.wake(bench.reports)
    spent, number = np.zeros((steps, 2)), running
    for step in range(steps):
        fresh = running - int(bench.scheduler.health().gauges["open_sequences"])
        frames = [bench.submit(number + i, tokens, trace) for i in range(fresh)]
        number += fresh
        if bench.results:  # none while a request alone begins
            frames.append(bench.results.pop(0))
        start = time.thread_time_ns()
        plans = bench.wake(frames)[1]
        spent[step, 0] = (time.thread_time_ns() - start) / 1000
        bench.work(plans)
        spent[step, 1] = texts.wake(bench.reports)
    return spent, number - running


@scenario
def traces(running: list[int] = [1, 64], tokens: int = 256, repeat: int = 9) -> Rows:  # noqa: B006
    """Microseconds of processor time that traces (--otlp-traces-endpoint) add to a step.

    In the cores of the scheduler and the detokenizer, with what they decode and encode, for
    requests of `tokens` tokens of which one follows another. With traces and without by turns; all
    runs do the same in the same step, and of each step the least counts: what disturbs a run only
    adds. A step by itself costs nothing: what is added belongs to begins and ends of requests, so
    it grows with the requests that end a step.
    """
    trace = TraceContext(bytes(range(16)), bytes(range(8)), operation="chat")
    for count in running:
        steps = max(1000, 4 * tokens)
        rounds = [[short_requests(count, tokens, steps, each) for each in (None, trace)]
                  for _ in range(repeat)]
        off, on = (np.min([each[which][0] for each in rounds], axis=0).mean(axis=0)
                   for which in (0, 1))
        ends, added = rounds[0][0][1] / steps, on - off
        yield {"running": count, "tokens": tokens, "requests_per_step": round(ends, 4),
               "scheduler_us_per_step": round(off[0], 2),
               "detokenizer_us_per_step": round(off[1], 2),
               "traces_scheduler_us_per_step": round(added[0], 2),
               "traces_detokenizer_us_per_step": round(added[1], 2),
               "traces_us_per_request": round(added.sum() / ends, 1)}
