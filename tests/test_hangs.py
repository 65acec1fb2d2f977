"""Who hangs and who does not, in virtual time."""

from __future__ import annotations

import pytest

from actorium.actors.messages import Beat
from actorium.actors.watchdog.hangs import HUNG, MARGIN, SILENT, STARTING_SILENCE, Hang, find_hang
from actorium.actors.watchdog.wards import READY_PHASES, Ward, born

SILENCE, HEARTBEAT, TICK = 3.0, 0.25, 0.25


class Actor:
    """Beats into its ward as its phase has it."""

    def __init__(self, role: str, phase: str = "idle", budget: float = 60.0) -> None:
        self.ward = born(role, 7, 1, 0.0)
        self.phase, self.budget = phase, budget
        self.step = 0
        self.beats, self.loops, self.steps = True, True, False
        self._looped = 0.0

    def turn(self, now: float) -> None:
        self._looped = now if self.loops else self._looped
        self.step += self.steps
        if self.beats:
            age = now - self._looped
            self.ward.hear(Beat(self.ward.role, 7, 1, self.phase, self.step, self.budget,
                                loop_age=age), now)


def run(*actors: Actor, start: float = 0.0, seconds: float) -> dict[str, tuple[float, Hang]]:
    """Who was found hanging, when (seconds after `start`), and how."""
    wards: dict[str, Ward] = {actor.ward.role: actor.ward for actor in actors}
    found: dict[str, tuple[float, Hang]] = {}
    for tick in range(int(seconds / TICK) + 1):
        now = start + tick * TICK
        for actor in actors:
            actor.turn(now)
        for ward in wards.values():
            hang = find_hang(ward, wards, now, SILENCE, HEARTBEAT)
            if hang is not None:
                ward.condemned = hang.cause
                found[ward.role] = (now - start, hang)
    return found


@pytest.mark.parametrize("phase", sorted(READY_PHASES) + ["draining"])
def test_a_stopped_process_is_found_by_its_silence(phase: str) -> None:
    actor, sibling = Actor("a", phase), Actor("b", "idle")
    assert run(actor, sibling, seconds=30.0) == {}
    actor.beats = False
    found = run(actor, sibling, start=30.0, seconds=10.0)
    assert found.keys() == {"a"}
    when, hang = found["a"]
    assert hang.cause == SILENT and SILENCE - TICK <= when <= SILENCE + TICK


@pytest.mark.parametrize("phase", ["starting", "loading", "warming"])
def test_who_loads_may_be_silent_for_longer(phase: str) -> None:
    actor = Actor("a", phase, budget=600.0)
    run(actor, seconds=0.0)
    actor.beats = False
    when, hang = run(actor, seconds=100.0)["a"]
    assert hang.cause == SILENT and abs(when - STARTING_SILENCE) <= TICK
    assert "no sign of life for 60." in hang.text and phase in hang.text


def test_one_that_never_says_a_word_is_found() -> None:
    actor = Actor("a")
    actor.beats = False
    assert run(actor, seconds=59.0) == {}
    assert run(actor, seconds=61.0)["a"][1].cause == SILENT


@pytest.mark.parametrize("phase", sorted(READY_PHASES) + ["draining"])
def test_a_stuck_loop_is_found_though_beats_come(phase: str) -> None:
    actor = Actor("a", phase, budget=5.0)
    actor.steps = phase == "stepping"
    assert run(actor, seconds=20.0) == {}
    actor.loops = actor.steps = False
    when, hang = run(actor, start=20.0, seconds=20.0)["a"]
    assert hang.cause == HUNG and abs(when - 5.0) <= 2 * TICK
    assert "5 s allowed" in hang.text


def test_a_long_step_within_its_budget_is_no_hang() -> None:
    """A long prefill: beats come, the loop turns, no step ends for 59 s; twice."""
    worker = Actor("worker-0", "stepping", budget=60.0)
    for start in (0.0, 59.0):
        worker.step += 1
        assert run(worker, start=start, seconds=58.75) == {}
    worker.step += 1
    when, hang = run(worker, start=118.0, seconds=100.0)["worker-0"]
    assert hang.cause == HUNG and abs(when - 60.0) <= 2 * TICK
    assert hang.text.startswith("no progress for 60.")


@pytest.mark.parametrize("phase", ["loading", "warming"])
def test_loading_and_graph_capture_take_what_they_declare(phase: str) -> None:
    worker = Actor("worker-0", phase, budget=600.0)
    worker.loops = False  # where it all happens on the loop
    assert run(worker, seconds=599.0) == {}
    assert run(worker, start=599.0, seconds=2.0)["worker-0"][1].cause == HUNG


def test_the_idle_need_not_move() -> None:
    actors = [Actor("worker-0", "idle"), Actor("scheduler", "ready"), Actor("tokenizer", "ready")]
    assert run(*actors, seconds=4000.0) == {}


def test_who_waits_is_not_to_blame_for_whom_it_waits() -> None:
    """The worker's step takes for ever. Scheduler and detokenizer make no progress either, and
    would have less patience."""
    worker = Actor("worker-0", "stepping", budget=60.0)
    scheduler = Actor("scheduler", "stepping", budget=60.0)
    detokenizer = Actor("detokenizer", "stepping", budget=30.0)
    found = run(worker, scheduler, detokenizer, seconds=200.0)
    assert found.keys() == {"worker-0"}
    # It is killed, starts and loads for five minutes, while the others go on to wait.
    worker.ward = born("worker-0", 8, 2, 200.0)
    worker.phase, worker.budget = "loading", 600.0
    assert run(worker, scheduler, detokenizer, start=200.0, seconds=300.0) == {}


def test_who_has_no_excuse_is_found() -> None:
    """The worker rests, yet the scheduler has work and makes no step."""
    worker, scheduler = Actor("worker-0", "idle"), Actor("scheduler", "stepping", budget=60.0)
    when, hang = run(worker, scheduler, seconds=200.0)["scheduler"]
    assert hang.cause == HUNG and 60.0 <= when <= 60.0 + MARGIN + 2 * TICK


def test_a_slow_heartbeat_is_no_silence() -> None:
    ward = born("a", 7, 1, 0.0)
    ward.hear(Beat("a", 7, 1, "idle", 0, 5.0), 0.0)
    assert find_hang(ward, {"a": ward}, 39.0, SILENCE, 10.0) is None
    assert find_hang(ward, {"a": ward}, 41.0, SILENCE, 10.0) is not None


def test_the_dead_and_the_condemned_are_left_alone() -> None:
    for phase, condemned in (("exited", ""), ("idle", SILENT)):
        ward = born("a", 7, 1, 0.0)
        ward.phase, ward.condemned = phase, condemned
        assert find_hang(ward, {"a": ward}, 1000.0, SILENCE, HEARTBEAT) is None
