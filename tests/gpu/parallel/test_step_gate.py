"""The gate before a step: all ranks begin it, or none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest

from actorium.actors.launcher.preflight import MOST_RANKS
from actorium.gpu.parallel.rank_group import (
    ALONE,
    MAX_RANKS,
    STEPS,
    GroupTimeout,
    RankPlace,
    StepGate,
)


def gates(path: Path, size: int = 2, timeout_s: float = 10.0) -> list[StepGate]:
    return [StepGate(RankPlace(rank, size), path, timeout_s) for rank in range(size)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def test_a_start_refuses_more_ranks_than_a_group_has() -> None:
    assert MOST_RANKS == MAX_RANKS


def test_alone_it_is_open(tmp_path: Path) -> None:
    gate = StepGate(ALONE, tmp_path, 0.0)
    assert gate.opens(1, 1) and gate.opens(1, 1, late=True)
    gate.pass_by(2)
    gate.leave()
    assert not list(tmp_path.iterdir())


def test_it_opens_when_all_have_come(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    one, two, three = gates(tmp_path, 3)
    waiting = [pool.submit(gate.opens, 1, 1) for gate in (one, two)]
    sleep(0.05)
    assert not any(wait.done() for wait in waiting)
    assert three.opens(1, 1) and all(wait.result() for wait in waiting)
    late = pool.submit(one.opens, 1, 1, True)
    sleep(0.02)
    assert not late.done(), "the plan is no sign of its masks"
    for gate in (two, three):
        gate.leave()
    assert late.result() is False


def test_who_hears_of_the_next_scheduler_lets_the_others_drop_the_plan(
        tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    one, two = gates(tmp_path)
    waiting = pool.submit(one.opens, 1, 7)
    sleep(0.02)
    two.pass_by(2)
    assert waiting.result() is False
    one.pass_by(2)
    again = pool.submit(one.opens, 2, 1)
    assert two.opens(2, 1) and again.result()
    two.leave()
    assert one.opens(2, 2) is False


def test_a_step_that_another_one_began_is_begun_by_all(tmp_path: Path) -> None:
    one, two = gates(tmp_path)
    one._write(0, 1 << STEPS | 14)  # it has come, and was not scheduled since
    assert two.opens(1, 7)
    two.pass_by(2)
    assert one.opens(1, 7)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    gate = gates(tmp_path, 3, 0.05)[1]
    gates(tmp_path, 3)[0]._write(0, 1 << STEPS | 10)
    with pytest.raises(GroupTimeout, match="rank 2 of 3 has not come to step 5 within 0.05") as why:
        gate.opens(1, 5)
    assert why.value.missing == 2


@pytest.mark.parametrize("seed", range(20))
def test_all_begin_the_same_steps(tmp_path: Path, pool: ThreadPoolExecutor, seed: int) -> None:
    """Schedulers die when some ranks have more of their plans than others."""
    chance, size = random.Random(seed), 3
    plans = [[(epoch, step) for epoch in range(1, 6) for step in
              range(1, 1 + chance.choice((3, 3, 4)))] for _ in range(size)]

    def run(gate: StepGate) -> list[tuple[int, int]]:
        begun, epoch = [], 0
        for plan in plans[gate.place.rank]:
            if plan[0] > epoch:
                epoch = plan[0]
                gate.pass_by(epoch)
            if gate.opens(*plan):
                begun.append(plan)
        gate.leave()
        return begun
    first, *others = pool.map(run, gates(tmp_path, size))
    assert all(other == first for other in others)
    shortest = [plan for plan in plans[0] if all(plan in each for each in plans)]
    assert first == shortest
