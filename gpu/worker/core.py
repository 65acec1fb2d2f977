"""The GPU worker's actor: plans in, results out.

The actor's thread only moves messages. Importing torch, loading and computing happen on the compute
thread, so heartbeats go on meanwhile and report the phase. torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actorium.actors.core import Context, Core, Health, Send
from actorium.actors.messages import ToWorker
from actorium.gpu.worker.compute import ComputeThread

SCHEDULER = "scheduler"
STEP_BUDGET = 60.0
"""Seconds a step may take before it counts as hung."""


class WorkerCore(Core):
    """The actor's logic (see `core.Core`)."""

    inbox = ToWorker
    client_inbox = None

    def __init__(self, ctx: Context) -> None:
        self._compute = ComputeThread(ctx)
        self._start_budget = ctx.config.runtime.start_timeout
        self._draining = False

    def on_start(self, post: Callable[[], None]) -> None:
        """The shell runs: begin to load. `post` wakes the core, from any thread."""
        self._compute.start(post)

    def on_message(self, message: ToWorker, now: float) -> None:
        """Pass a plan, its masks or a reset to the compute thread."""
        self._compute.submit(message)

    def on_wake(self, now: float) -> Sequence[Send]:
        """Send what the compute thread has produced. Raises the error that ended it, if any."""
        compute = self._compute
        if compute.failure is not None:
            raise compute.failure
        out: list[Send] = []
        while compute.results:
            out.append(Send(SCHEDULER, compute.results.popleft()))
        return out

    def next_timer(self) -> float | None:
        """Nothing is timed."""
        return None

    def drain(self, now: float) -> None:
        """Finish the plans that are queued. The scheduler has ended before, so a step that waits
        for masks is abandoned."""
        self._draining = True
        self._compute.submit(None)

    @property
    def done(self) -> bool:
        return self._draining and not self._stepping and not self._compute.results

    @property
    def _stepping(self) -> bool:
        compute = self._compute
        return compute.plans_received > compute.steps + compute.plans_dropped

    def health(self) -> Health:
        """Phase and progress of the compute thread, and its gauges."""
        compute = self._compute
        phase, budget = compute.phase, self._start_budget
        if compute.updating:
            phase = "waking"
        elif phase == "ready":
            budget = STEP_BUDGET
            if self._stepping:
                phase = "stepping"
            elif compute.steps:
                phase = "idle"
        return Health("draining" if self._draining else phase, compute.steps, budget,
                      {"steps": float(compute.steps), **compute.memory,
                       "kernels_compiled": float(compute.compilations.count),
                       **{f"steps_{mode}": float(n) for mode, n in compute.served.items()}},
                      compute.detail)


def build(ctx: Context) -> WorkerCore:
    """The worker of an engine."""
    return WorkerCore(ctx)
