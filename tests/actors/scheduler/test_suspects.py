"""Who kills the worker: every killer is convicted, no innocent ever, within the bound."""

from __future__ import annotations

from math import ceil, log2

from helpers_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.scheduler.recovery.suspects import MOST_STEPS, Suspects


class World:
    """Sequences that run; some kill the worker in a certain decode step of each of its lives."""

    def __init__(self, count: int, killers: dict[int, int], room: int = 10**6) -> None:
        """killers: sid -> steps that it lets pass in each life of the worker; room: sequences that
        run at once."""
        self.suspects = Suspects()
        self.alive = list(range(1, count + 1))
        self.killers, self.room = killers, room
        self.convicted: list[int] = []
        self.deaths = 0
        self.age: dict[int, int] = {}

    def running(self) -> list[int]:
        trial = self.suspects.trial
        return [sid for sid in self.alive if trial is None or sid in trial][:self.room]

    def step(self) -> None:
        """One step; who has run for `room` steps ends, so that others get in."""
        running = self.running()
        self.age = {sid: self.age.get(sid, 0) for sid in running}
        if any(self.age[sid] >= self.killers.get(sid, 10**9) for sid in running):
            self.deaths += 1
            self.age = {}
            found = self.suspects.died(running, self.alive)
            if found is not None:
                self.convicted.append(found)
                self.alive.remove(found)
            return
        for sid in running:
            self.age[sid] += 1
        self.suspects.decoded(running)
        for sid in running:
            if self.age[sid] > 3 * MOST_STEPS and sid not in self.killers:
                self.alive.remove(sid)
        self.suspects.settle(self.alive)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[int]]:
    count = draw(st.integers(1, 300))
    killers = draw(st.lists(st.integers(1, count), max_size=min(count, 12), unique=True))
    return count, killers


@settings(max_examples=examples(60), deadline=None)
@given(worlds())
def test_every_killer_and_nobody_else(world: tuple[int, list[int]]) -> None:
    count, killers = world
    w = World(count, dict.fromkeys(killers, 0))
    for _ in range(100_000):
        if not w.alive:
            break
        w.step()
    assert not w.alive and sorted(w.convicted) == sorted(killers)
    assert w.suspects.convictions == len(killers) and w.suspects.trial is None
    assert w.deaths <= len(killers) * (3 + ceil(log2(count)))


@settings(max_examples=examples(25), deadline=None)
@given(worlds(), st.integers(1, 9))
def test_with_little_room(world: tuple[int, list[int]], room: int) -> None:
    """Not all of a group fit in at once."""
    count, killers = world
    w = World(count, dict.fromkeys(killers, 0), room)
    for _ in range(100_000):
        if not w.alive:
            break
        w.step()
    assert not w.alive and sorted(w.convicted) == sorted(killers)
    assert w.deaths <= len(killers) * (3 + ceil(log2(count)))


@settings(max_examples=examples(25), deadline=None)
@given(worlds(), st.data())
def test_killers_that_let_some_steps_pass(world: tuple[int, list[int]],
                                          data: st.DataObject) -> None:
    count, killers = world
    late = {sid: data.draw(st.integers(0, MOST_STEPS - 1)) for sid in killers}
    w = World(count, late)
    for _ in range(100_000):
        if not w.alive:
            break
        w.step()
    assert not w.alive and sorted(w.convicted) == sorted(killers)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.sets(st.integers(1, 30))), max_size=40))
def test_deaths_that_nobody_is_to_blame_for(deaths: list[tuple[int, set[int]]]) -> None:
    """Two deaths, a decode step of everybody in between: nobody is convicted; and all are cleared
    in the end."""
    w = World(30, {})
    for steps, gone in deaths:
        running = w.running()
        assert w.suspects.died(running, w.alive) is None
        w.alive = [sid for sid in w.alive if sid not in gone] or w.alive
        w.suspects.settle(w.alive)
        for _ in range(MOST_STEPS + steps):
            w.suspects.decoded(w.running())
            w.suspects.settle(w.alive)
    for _ in range(100 * MOST_STEPS):
        w.suspects.decoded(w.running())
    assert w.suspects.trial is None and w.suspects.convictions == 0


def test_a_death_without_plans_suspects_none() -> None:
    suspects = Suspects()
    assert suspects.died([], [1, 2]) is None and suspects.trial is None
    suspects.died([1, 2, 3], [1, 2, 3])
    before = suspects.trial
    assert suspects.died([], [1, 2, 3]) is None and suspects.trial == before == {1, 2, 3}
    assert suspects.circle == 3


def test_after_one_death_all_go_on_together_and_halves_are_made_of_who_dies_again() -> None:
    suspects = Suspects()
    alive = list(range(1, 101))
    suspects.died(alive[:80], alive)
    assert suspects.trial == set(range(1, 81)), "those that were not there wait"
    suspects.decoded(alive[:80])
    assert suspects.trial is None, "one step of all of them clears all"
    for expected in (80, 40, 20):
        suspects.died(alive[:80], alive)
        assert suspects.circle == expected


def test_alone_twice_but_not_in_a_row() -> None:
    suspects = Suspects()
    assert suspects.died([7], [7]) is None
    suspects.decoded([7])
    assert suspects.trial is None
    assert suspects.died([7], [7]) is None
    suspects.decoded([7])
    assert suspects.trial == {7}, "it needs two steps now"
    assert suspects.died([7], [7]) == 7


def test_a_cleared_suspect_does_not_isolate_another() -> None:
    suspects = Suspects()
    suspects.died([1, 2], [1, 2])
    suspects.died([1, 2], [1, 2])
    suspects.decoded([1])
    assert suspects.trial == {2}
    for _ in range(3):
        assert suspects.died([1, 2], [1, 2]) is None, "2 was never alone in the plans"


def test_a_request_that_ends_during_a_trial_is_forgotten() -> None:
    suspects = Suspects()
    assert suspects.died([1, 2], [1, 2, 3]) is None
    assert suspects.died([1], [1, 3]) is None, "2 has ended meanwhile"
    suspects.decoded([1])
    suspects.decoded([3])  # of the step after, before anybody asked who may run
    assert suspects.trial is None
