"""A worker that waits for the masks of a step hears what else may come."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.messages import Masks, PageGroup, Ready, Reset, RowMask, StepPlan
from actorium.gpu.parallel.rank_group import ALONE, StepGate
from actorium.gpu.worker.compute import ComputeThread, StepAbandoned
from actorium.gpu.worker.core import WorkerCore

PLAN = StepPlan(epoch=3, step=7, masks_follow=True)
MASKS = [RowMask(1, 0, b"\1\0\0\0")]


@pytest.fixture
def compute() -> ComputeThread:
    """One that has taken up the scheduler of epoch 3; nothing runs."""
    made = ComputeThread(Context(Config(), Path("/nowhere"), "worker-0", 2, 0))
    made._ready = Ready(epoch=2, groups=[PageGroup(9)], page_size=16, slots=3, max_model_len=64,
                        vocab_size=32, device="none")
    made._gate = StepGate(ALONE, Path(), 1.0)
    assert made._apply_reset(Reset(3, 2))
    return made


def test_masks_of_other_steps_are_passed_over(compute: ComputeThread) -> None:
    for message in (Masks(3, 6, []), Masks(2, 7, []), Masks(3, 7, MASKS)):
        compute.submit(message)
    assert compute._wait_for_masks(PLAN) == MASKS


def test_another_scheduler_ends_the_wait(compute: ComputeThread) -> None:
    compute.submit(Reset(2))  # of one that is gone: nobody minds
    compute.submit(Reset(4))
    with pytest.raises(StepAbandoned):
        compute._wait_for_masks(PLAN)
    assert [type(message) for message in compute.results] == [Ready]
    assert compute._epoch == 4 and not compute._adopted


def test_slots_are_free_before_another_scheduler_knows_it(compute: ComputeThread) -> None:
    """What the one before had under way touches nothing of its any more."""
    known = list[int]()
    compute._forget = lambda: known.append(len(compute.results))
    assert compute._apply_reset(Reset(4)) and known == [0] and len(compute.results) == 1
    assert not compute._apply_reset(Reset(3)) and known == [0]


def test_the_end_ends_the_wait() -> None:
    core = WorkerCore(Context(Config(), Path("/nowhere"), "worker-0", 2, 0))
    core._compute._gate = StepGate(ALONE, Path(), 1.0)
    core.drain(0.0)
    with pytest.raises(StepAbandoned):
        core._compute._wait_for_masks(PLAN)


def test_a_plan_instead_is_a_fault(compute: ComputeThread) -> None:
    compute.submit(PLAN)
    with pytest.raises(ValueError, match="a plan came instead of those of step 7"):
        compute._wait_for_masks(PLAN)
