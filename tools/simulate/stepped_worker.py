"""A worker of a real engine whose steps take just the time that a `StepSeconds` says: what a
simulation is held against."""

from __future__ import annotations

from actorium.actors.core import Context
from actorium.tools.chaos.fault_injection import PacedWorker
from actorium.tools.simulate.modelled_worker import ModelledWorker
from actorium.tools.simulate.step_model import StepSeconds

STEP_SECONDS = StepSeconds(0.012, 5e-5, 4e-4, 2e-7, about="steps of exact length")
SLOW_SECONDS = StepSeconds(0.048, 2e-4, 1.6e-3, 8e-7, about="four times as long")
"""For machines on which processes wait for a processor."""


def stepped_worker(context: Context, model: StepSeconds) -> PacedWorker:
    """Returns a worker whose results are held back for as long as their step takes."""
    return PacedWorker(ModelledWorker(context, model), lambda result: result.busy_us / 1e6,
                       deadly=False)


def build(context: Context) -> PacedWorker:
    return stepped_worker(context, STEP_SECONDS)


def build_slow(context: Context) -> PacedWorker:
    return stepped_worker(context, SLOW_SECONDS)
