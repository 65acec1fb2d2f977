"""What checkpoints of recurrent states buy: measured, by the number that is kept.

`benchmarks/run.py checkpoints` runs three workloads through the scheduler (policy auto, pages
enough for everything): chat, 200 conversations with one system prompt; agents, 20 with long
instructions of their own; few-shot, 10 tasks with long examples. In all of them little is saved
before there is a checkpoint for each shared prefix, and little more beyond one for each sequence
that is continued later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from actorium.actors.errors import BadConfig
from actorium.gpu.plan.memory_plan import MemoryPlan, make_plan


class Reuse(NamedTuple):
    """Shares of their prompt tokens that the workloads compute, be it again or for the first time.
    """

    checkpoints: int
    chat: float
    agents: float
    few_shot: float


MEASURED = (
    Reuse(0, 1.0, 1.0, 1.0),
    Reuse(2, 0.71, 0.99, 0.91),
    Reuse(4, 0.70, 0.97, 0.80),
    Reuse(8, 0.70, 0.91, 0.60),
    Reuse(16, 0.70, 0.68, 0.33),
    Reuse(32, 0.70, 0.22, 0.13),
    Reuse(64, 0.68, 0.14, 0.06),
    Reuse(128, 0.57, 0.12, 0.05),
    Reuse(256, 0.21, 0.12, 0.05),
)
SHOWN = (0, 8, 16, 32, 64)


class CheckpointChoice(NamedTuple):
    """A number of checkpoints, and what would come of it."""

    reuse: Reuse
    """As measured; its number is that of the choice."""
    token_capacity: int


def reuse(checkpoints: int) -> Reuse:
    """What was measured with so many or, where that was not measured, the next smaller number."""
    found = [row for row in MEASURED if row.checkpoints <= checkpoints][-1]
    return found._replace(checkpoints=checkpoints)


def choices(plan: MemoryPlan) -> Iterator[CheckpointChoice]:
    """The plan's own number of checkpoints and others, as far as they fit; none of a model without
    recurrent layers."""
    for number in sorted({*SHOWN, plan.checkpoints} if plan.shape.recurrence else ()):
        try:
            other = make_plan(plan.shape, plan.demand._replace(checkpoints=number), plan.budget)
        except BadConfig:
            return
        yield CheckpointChoice(reuse(number), other.token_capacity)
