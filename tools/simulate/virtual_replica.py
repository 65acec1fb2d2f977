"""A replica on a virtual clock: a real scheduler behind the real link to its router, and of its
worker the time that its steps take. Pure.

What happens within a replica are results of steps and reports to the router. Most are never
observed, so they are applied lazily: `advance` brings the replica to a time, and
`next_event` says by when that must be done at the latest, since the router would act on
what it reports. Steady steps are then taken many at once (`fast_forward`), and reports that say
nothing new of the speed at which prompts are computed are not made.
"""

from __future__ import annotations

from collections import Counter, deque
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actorium.actors.cluster.replica_link import REPORT_EVERY
from actorium.actors.config.cluster_settings import ClusterConfig, replica_name
from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.messages import StepResult
from actorium.actors.runtime.roles import WORKER
from actorium.actors.scheduler.scheduler_actor import SchedulerActor
from actorium.tools.simulate.fast_forward import SteadyRun, SteadyScheduler
from actorium.tools.simulate.modelled_worker import ModelledWorker
from actorium.tools.simulate.step_model import StepSeconds

NOTHING = Path("/nonexistent")
COUNTED = ("computed_prompt_tokens", "preemptions", "steps", "busy_us", "evicted_pages")
"""Counters of replicas, summed over them and their lives."""
Said = list[tuple[float, Any]]
"""Messages to the router, and when they were sent."""


def replica_context(config: Config, index: int, launch: int) -> Context:
    """What a replica's scheduler is built with. config: the cluster's; launch: how often the
    replica was started."""
    cluster = config.runtime.name
    own = msgspec.structs.replace(
        config, cluster=ClusterConfig(replica_of=f"{cluster}:{index}:{launch}"),
        runtime=msgspec.structs.replace(config.runtime, name=replica_name(cluster, index)))
    return Context(own, NOTHING, "scheduler", 1, 0)


class VirtualReplica:
    def __init__(self, config: Config, index: int, launch: int, model: StepSeconds,
                 single_steps: bool = False) -> None:
        """config: the cluster's; single_steps: none are taken at once, for comparison."""
        context = replica_context(config, index, launch)
        self.index, self.launch = index, launch
        self.bare = SteadyScheduler(context, single_steps)
        self._scheduler = SchedulerActor(self.bare, context)
        assert self._scheduler.link is not None
        self._link = self._scheduler.link
        self._worker = ModelledWorker(context._replace(role=WORKER), model)
        self._due: deque[tuple[float, StepResult]] = deque()
        """Results to come, and when."""
        self._run: SteadyRun | None = None
        """What lies ahead."""
        self._evicted = False
        """The steps taken last have changed the prefix cache."""
        self._free_at = 0.0
        """When the worker has nothing more to do."""
        self._reported = 0
        """Computed prompt tokens, as the router knows."""
        self._reports = False
        """The last report is made that is due, although it has no news."""
        self.scheduled = inf
        """The last `next_event`, for the cluster."""

    def start(self, now: float) -> Said:
        """The worker has said what it can hold."""
        for answer in self._worker.on_wake(now):
            self._scheduler.on_message(answer.message, now)
        return self.wake(now)

    def take(self, message: Any, now: float) -> Said:
        """A message of the router. To be brought to that time before."""
        self._scheduler.on_message(message, now)
        return self.wake(now)

    def next_event(self) -> float:
        """Seconds of the clock by which `advance` must be called."""
        if self._run is not None:
            run = self._run
            event = float(run.times[run.steps - 1 if run.evicts else run.steps])
        else:
            event = self._due[0][0] if self._due else inf
        return min(event, self._link.report_at) if self._has_news else event

    def report(self, now: float) -> Said:
        """Brings it to that time; the last report that is due by then is made, news or not."""
        self._reports = True
        said = self.advance(now)
        self._reports = False
        return said + self.wake(now)

    def advance(self, until: float) -> Said:
        """Lets everything happen that happens by then."""
        said: Said = []
        while True:
            if self._run is not None:
                horizon = min(until, float(self._run.times[self._run.steps - 1]))
                if (report := self._report_due(horizon)) is not None:
                    self._take_run(self._run, report)
                    said += self.wake(report, looks=False)
                elif not self._take_run(self._run, horizon):
                    return said
                elif self._evicted:
                    said += self.wake(horizon, looks=False)
            elif self._due and (when := self._due[0][0]) <= until:
                if (report := self._report_due(when)) is not None:
                    said += self.wake(report)
                else:
                    self._scheduler.on_message(self._due.popleft()[1], when)
                    said += self.wake(when)
            elif (report := self._report_due(until)) is not None:
                said += self.wake(report)
            else:
                return said

    def wake(self, now: float, looks: bool = True) -> Said:
        """Lets the scheduler say what it has to say. looks: what lies ahead may have changed."""
        said: Said = []
        due = self._link.report_at
        for send in self._scheduler.on_wake(now):
            if send.to == WORKER:
                self._worker.on_message(send.message, now)
            else:
                said.append((now, send.message))
        for answer in self._worker.on_wake(now):
            if isinstance(answer.message, StepResult):
                self._due.append(self._timed(answer.message, now))
        if due != self._link.report_at:  # a report was among that
            self._reported = self.bare.counters.prompts.tokens
        if looks:
            self._look()
        return said

    def counts(self) -> Counter[str]:
        gauges = self.bare.health().gauges
        return Counter({name: int(gauges[name]) for name in COUNTED})

    @property
    def _has_news(self) -> bool:
        """The next report includes the speed at which prompts were computed."""
        return self._reported != self.bare.counters.prompts.tokens

    def _report_due(self, until: float) -> float | None:
        """When the next report is to be made, if one is by then. Those without news are passed
        over, at the times at which they would have been made."""
        link = self._link
        while (due := link.report_at) <= until:
            if self._has_news or (self._reports and due + REPORT_EVERY > until):
                return due
            link.report_at = due + REPORT_EVERY
        return None

    def _look(self) -> None:
        self._run = self.bare.steady_run(
            self._worker, [(when, result.busy_us) for when, result in self._due])

    def _take_run(self, run: SteadyRun, until: float) -> bool:
        """Takes the steps of the run that are over by then; whether there were any."""
        steps = min(run.steps, int(np.searchsorted(run.times, until, "right")))
        self._evicted = False
        if not steps:
            return False
        results = self.bare.apply_run(run, steps, self._worker, [each for _, each in self._due])
        self._due = deque(zip(run.times[steps:].tolist(), results, strict=False))
        self._free_at = self._due[-1][0]
        if steps == run.steps:
            self._evicted, self._run = run.evicts, None
            self._look()
        else:
            self._run = run.after(steps)
        return True

    def _timed(self, result: StepResult, now: float) -> tuple[float, StepResult]:
        idle = max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at) + result.busy_us / 1e6
        if idle:
            result = msgspec.structs.replace(result, idle_us=round(idle * 1e6))
        return self._free_at, result
