"""A worker of a real engine whose steps take just the time that a `StepSeconds` says: what a
simulation is held against."""

from __future__ import annotations

from actorium.actors.core import Context
from actorium.actors.messages import StepPlan, StepResult
from actorium.tools.chaos.fault_injection import PacedWorker
from actorium.tools.simulate.modelled_worker import ModelledWorker
from actorium.tools.simulate.step_model import StepSeconds

STEP_SECONDS = StepSeconds(0.012, 5e-5, 4e-4, 2e-7, about="steps of exact length")
SLOW_SECONDS = StepSeconds(0.048, 2e-4, 1.6e-3, 8e-7, about="four times as long")
"""For machines on which processes wait for a processor."""


class SteppedWorker(ModelledWorker, PacedWorker):
    """Results are held back for as long as their step takes."""

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        self._seconds = result.busy_us / 1e6
        return result

    def _kill_on_poison(self, plan: StepPlan) -> None:
        """No prompt is deadly here."""


def build(context: Context) -> SteppedWorker:
    return SteppedWorker(context, STEP_SECONDS)


def build_slow(context: Context) -> SteppedWorker:
    return SteppedWorker(context, SLOW_SECONDS)
