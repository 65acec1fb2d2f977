"""Delayed commit: states and outputs under windows of drafts are those of one token after the
other, to the bit; and what the known ways to get this wrong do to them is seen."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers_configs import BIG, CONFIGS, name_of, shape_of
from helpers_delayed import (
    DRAFTS,
    ROWS,
    Case,
    OneByOne,
    Speculation,
    check,
    delta,
    mamba,
)
from helpers_pairs import pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actorium.actors.messages import StepPlan
from actorium.gpu.models.forward_context import StatePlan
from actorium.gpu.plan.memory_plan import Demand, state_bytes
from actorium.gpu.step.batch import StateRows
from actorium.gpu.step.states import StatePool
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.kernels.ragged import ExtendRun
from actorium.kernels.reference.delta_rule import Heads
from actorium.kernels.reference.ssd import SSDSizes
from actorium.kernels.reference.state_rows import NOBODY

pytestmark = pytest.mark.usefixtures("all_threads")
FLOAT, HALF = torch.float32, torch.bfloat16
GROUPED = Heads(2, 6, 16, 8)
"""Several value heads for each key head."""

Steps = list[tuple[int, list[int]]]


@st.composite
def schedules(draw: st.DrawFn) -> Steps:
    """Steps of 0 to K drafts, and what each sequence emits."""
    steps: Steps = []
    for drafts in draw(st.lists(st.integers(0, DRAFTS), min_size=1, max_size=8)):
        steps.append((drafts, [draw(st.integers(1, drafts + 1)) for _ in ROWS]))
    return steps


# --- equality ------------------------------------------------------------------------------------

@pytest.mark.parametrize("state_dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "width"), [
    (GROUPED, 4), (Heads(1, 1, 8, 24), 2), (Heads(4, 4, 12, 12), 3), (Heads(1, 2, 64, 64), 4)])
def test_torch_windows_equal_steps(heads: Heads, width: int, state_dtype: torch.dtype) -> None:
    case = delta(heads, width, FLOAT, state_dtype)

    @settings(max_examples=10, deadline=None)
    @given(schedules())
    def run(steps: Steps) -> None:
        check(Speculation(case), steps)

    run()


def test_torch_windows_of_a_bf16_model() -> None:
    case = delta(GROUPED, 4, HALF, FLOAT)
    check(Speculation(case), [(2, [3, 1, 2]), (4, [5, 5, 1]), (0, [1, 1, 1]), (1, [2, 1, 2])])


@pytest.mark.parametrize(("heads", "width", "state_dtype"), pairs(
    [(GROUPED, 4), (Heads(2, 4, 128, 128), 4), (Heads(1, 2, 256, 20), 2), (Heads(3, 3, 12, 9), 3)],
    [FLOAT, HALF]))
def test_c_windows_equal_steps(heads: Heads, width: int, state_dtype: torch.dtype) -> None:
    case = delta(heads, width, HALF, state_dtype, native=True)

    @settings(max_examples=20, deadline=None)
    @given(schedules())
    def run(steps: Steps) -> None:
        check(Speculation(case), steps)

    run()


@pytest.mark.parametrize(("sizes", "width", "state_dtype"), pairs(
    [(SSDSizes(6, 2, 8, 16), 4), (SSDSizes(4, 1, 12, 12), 2), (SSDSizes(2, 2, 16, 64), 3)],
    [FLOAT, HALF]))
def test_mamba_windows_equal_steps(sizes: SSDSizes, width: int, state_dtype: torch.dtype) -> None:
    case = mamba(sizes, width, FLOAT, state_dtype)

    @settings(max_examples=10, deadline=None)
    @given(schedules())
    def run(steps: Steps) -> None:
        check(Speculation(case), steps)

    run()


@pytest.mark.parametrize("state_dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
def test_c_windows_are_near_torch(state_dtype: torch.dtype) -> None:
    """Not to the bit: sums run in another order."""
    ours = Speculation(delta(GROUPED, 4, HALF, state_dtype, native=True))
    theirs = Speculation(delta(GROUPED, 4, FLOAT, state_dtype))
    for drafts, emitted in [(3, [4, 2, 1]), (2, [1, 3, 2]), (4, [5, 1, 3]), (0, [1, 1, 1])]:
        for one in (ours, theirs):
            one.step(drafts, emitted)
    rounding, rows = 2**-6 if state_dtype is HALF else 1e-5, list(ROWS)
    torch.testing.assert_close(ours.states.state[rows].float(), theirs.states.state[rows].float(),
                               atol=rounding, rtol=rounding)
    assert torch.equal(ours.states.columns[rows].float(), theirs.states.columns[rows])
    for mine, other in zip(ours.outs, theirs.outs, strict=True):
        torch.testing.assert_close(torch.stack(mine).float(), torch.stack(other),
                                   atol=max(2e-3, rounding), rtol=2**-6)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "c"])
def test_counts_below_zero_take_in_nothing(native: bool) -> None:
    """As of a sequence that had ended before the last step."""
    case = delta(GROUPED, 4, HALF, FLOAT, native)
    some, none = Speculation(case), Speculation(case)
    p = case.rows(len(ROWS), 2)
    for one in (some, none):
        one.run(case.rows(len(ROWS), 3) if one is some else p)
    for one, count in ((some, -1), (none, 0)):
        one.states.state[list(ROWS)] = 0
        one.states.columns[list(ROWS)] = 0
        one.accepted[:] = count
    assert torch.equal(some.run(p), none.run(p))
    assert torch.equal(some.states.state[list(ROWS)], none.states.state[list(ROWS)])


@pytest.mark.parametrize("native", [False, True], ids=["torch", "c"])
def test_windows_leave_the_others_alone(native: bool) -> None:
    case = delta(GROUPED, 4, HALF, FLOAT, native)
    one = Speculation(case)
    for drafts, emitted in [(4, [5, 2, 1]), (1, [1, 2, 2])]:
        one.step(drafts, emitted)
    others = [row for row in range(len(one.states.state)) if row not in ROWS]
    assert all(part[others].isnan().all() for part in one.states.committed)
    assert one.states.pending[[row for row in others if row < len(one.accepted)]].isnan().all()


# --- bytes ---------------------------------------------------------------------------------------

RECURRENT = [config for config in CONFIGS if shape_of(config).state]


@pytest.mark.parametrize("config", RECURRENT, ids=name_of)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_the_pool_takes(config: dict[str, Any], state_dtype: str) -> None:
    shape = shape_of(config)
    assert shape.state is not None
    for drafts in range(DRAFTS + 1):
        each = state_bytes(shape, Demand(3, drafts=drafts, state_dtype=state_dtype))
        pool = StatePool(shape.state, len(shape.recurrent), 4, 3, TORCH_DTYPES[state_dtype],
                         TORCH_DTYPES[shape.dtype], torch.device("cpu"), drafts)
        assert pool.bytes == 3 * sum(each) + 3 * each.checkpoint
        parts = [[layer[i].nbytes for layer in pool.layers] for i in range(3)]
        assert [sum(part) for part in parts] == [6 * each.state, 6 * each.columns, 3 * each.window]


@pytest.mark.parametrize("config", RECURRENT, ids=name_of)
def test_drafts_cost_their_inputs_and_nothing_else(config: dict[str, Any]) -> None:
    shape = shape_of(config)
    none, *more = (state_bytes(shape, Demand(3, drafts=drafts)) for drafts in range(DRAFTS + 1))
    assert none.window == 0 and shape.state is not None
    row = len(shape.recurrent) * shape.state.inputs * shape.itemsize
    for drafts, each in enumerate(more, 1):
        assert each == (none.state, none.columns, drafts * row)


def test_windows_of_the_27b_shape_are_small_beside_its_state() -> None:
    shape = shape_of(json.loads(BIG.read_text()))
    each = state_bytes(shape, Demand(32, drafts=2))
    assert each.window < each.state / 70


# --- the known bugs ------------------------------------------------------------------------------

MIXED: Steps = [(2, [3, 1, 2]), (3, [2, 4, 1]), (1, [2, 2, 1]), (0, [1, 1, 1]), (2, [2, 3, 1])]


class NeverCleared(Speculation):
    """A step without drafts leaves the count of the one before."""

    def learn(self, emitted: Tensor) -> None:
        self.accepted[self.slots] = torch.maximum(self.accepted[self.slots], emitted - 1)


class ColumnsNotRolledBack(Speculation):
    """The convolution's columns go on with drafts that nobody has accepted yet."""

    def run(self, p: Tensor) -> Tensor:
        out = super().run(p)
        columns = self.states.columns
        channels, width = columns.shape[2], columns.shape[1]
        drafts = p[:, 1:, :channels]
        columns[self.slots] = torch.cat((columns[self.slots], drafts), 1)[:, -width:]
        return out


class StaleSlot(Speculation):
    """A step without drafts does not look at what waits."""

    def run(self, p: Tensor) -> Tensor:
        if p.shape[1] > 1:
            return super().run(p)
        return self.case.layer.step(p.flatten(0, 1), self.states, self.slots)


class Rehearsed(Speculation):
    """Between steps a rehearsal runs, as a warm-up or the capture of a graph would, over `rows`."""

    rows: tuple[int, ...] = (NOBODY,) * 3

    def learn(self, emitted: Tensor) -> None:
        super().learn(emitted)
        rows = torch.tensor(self.rows)
        p = torch.ones(3 * len(rows), self.case.width, dtype=self.case.dtype)
        self.case.layer.window(p, self.states, rows, self.accepted[rows])


class RehearsedOnLiveSlots(Rehearsed):
    """And the rows are somebody's."""

    rows = ROWS


class NeverCommitted(Speculation):
    """What reads the state next does so while accepted drafts wait."""

    def commit(self) -> None:
        for i, tokens in enumerate(self.tokens):
            waiting = int(self.accepted_before[i])
            tokens += self.drafts[i][:waiting]


@pytest.fixture(params=["torch", "c", "mamba"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "mamba":
        return mamba(SSDSizes(6, 2, 8, 16), 4, FLOAT, FLOAT)
    if request.param == "c":
        return delta(GROUPED, 4, HALF, FLOAT, native=True)
    return delta(GROUPED, 4, FLOAT, FLOAT)


def test_the_mixed_steps_pass(case: Case) -> None:
    check(Speculation(case), MIXED)
    check(Rehearsed(case), MIXED)


@pytest.mark.parametrize("broken", [
    NeverCleared, ColumnsNotRolledBack, StaleSlot, RehearsedOnLiveSlots, NeverCommitted])
def test_a_bug_is_seen(broken: type[Speculation], case: Case) -> None:
    with pytest.raises(AssertionError):
        check(broken(case), MIXED)


def test_a_step_without_accepted_counts_is_refused() -> None:
    shape = delta(GROUPED, 4, FLOAT, FLOAT).shape
    pool, rows = StatePool(shape, 1, 4, 0, FLOAT, FLOAT, torch.device("cpu"), 2), torch.tensor([1])
    accepted = torch.tensor([0])
    with pytest.raises(ValueError, match="the step does not tell"):
        pool.rows(StepPlan(1, 1), [], rows)
    with pytest.raises(ValueError, match="drafts: 3 are more than the 2"):
        pool.rows(StepPlan(1, 1), [], rows, 4, accepted)
    found = pool.rows(StepPlan(1, 1), [], rows, 3, accepted)
    assert found.q_len == 3 and found.accepted is accepted


def test_a_commit_comes_before_an_extend(case: Case) -> None:
    """A sequence that has drafted goes on with a chunk of tokens, as after a preemption it would:
    right behind a step without drafts, wrong behind one whose drafts wait."""
    def extended(commit: bool) -> tuple[Tensor, Tensor]:
        one, other = Speculation(case), OneByOne(case)
        one.step(2, [3, 3, 3])
        if commit:
            one.commit()
            other.follow(one)
        else:
            NeverCommitted.commit(one)  # type: ignore[arg-type]
            for t in range(3):
                case.layer.step(torch.stack([tokens[t] for tokens in one.tokens]), other.states,
                                one.slots)
        chunk = case.rows(5)
        rows = StateRows([ExtendRun(ROWS[0], 5)], one.slots[:0])
        plan = StatePlan(rows, case.shape.columns[0] + 1, torch.device("cpu"))
        return (case.layer.extend(chunk, one.states, plan),
                case.layer.extend(chunk, other.states, plan))

    assert torch.equal(*extended(commit=True))
    assert not torch.equal(*extended(commit=False))
