"""The policy that changes the number of replicas: by hand, and against a cluster of a few lines
with random loads, starts and deaths."""

from __future__ import annotations

import random
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from helpers_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.cluster.cluster_control import AutoscaleState
from actorium.actors.cluster.scaling.autoscale import MARGIN, AutoscaleAims, Autoscaler, LoadReading

AIMS = AutoscaleAims(queue=4.0, first_token=2.0, up_delay=3.0, down_delay=60.0, slots=8)
BOUNDS = AutoscaleState(1, 8)
TICK = 0.5


def reading(staying: int, **other: Any) -> LoadReading:
    """Of replicas that are all ready, idle unless said otherwise."""
    idle = {"coming": 0, "running": 0, "waiting": 0, "sequences": 0, "first_token": 0.0,
            "pages": 0.0}
    return LoadReading(**{"staying": staying, "ready": staying} | idle | other)


class Held:
    """The same reading again and again."""

    def __init__(self, bounds: AutoscaleState = BOUNDS, aims: AutoscaleAims = AIMS) -> None:
        self.policy, self.bounds, self.now = Autoscaler(aims), bounds, 1000.0

    def hold(self, seconds: float, now_is: LoadReading) -> int:
        """What is wanted after so long; the first change ends it."""
        until = self.now + seconds
        while True:
            wanted = self.policy.wanted(now_is, self.bounds, self.now)
            self.now += TICK
            if wanted != now_is.staying or self.now > until:
                return wanted


BUSY = {"running": 16, "waiting": 9, "sequences": 25, "first_token": 0.1}
"""Of two replicas with 8 slots each."""


def test_more_come_when_too_many_have_waited_for_a_while() -> None:
    held = Held()
    assert held.hold(2.0, reading(2, **BUSY)) == 2
    assert held.hold(2.0, reading(2, **BUSY)) == 4, "25 sequences, 8 a replica, at most twice two"
    assert held.policy.counts["queue"] == 1
    assert "2 -> 4 (queue: 2 ready, 25 sequences, 9 wait where 8 may" in \
        held.policy.text(BOUNDS, held.now)


def test_a_moment_without_a_queue_begins_anew() -> None:
    held = Held()
    for _ in range(5):
        assert held.hold(2.0, reading(2, **BUSY)) == 2
        assert held.hold(TICK, reading(2, **BUSY | {"waiting": 8})) == 2
    assert held.policy.counts.total() == 0


def test_more_come_when_first_tokens_are_late() -> None:
    held = Held()
    assert held.hold(4.0, reading(4, sequences=12, first_token=2.6)) == 6
    assert held.policy.counts["ttft"] == 1
    assert Held(aims=AIMS._replace(first_token=0.0)).hold(
        9.0, reading(4, sequences=12, first_token=99.0)) == 4, "it is not looked at"


def test_a_long_prompt_that_has_a_replica_to_itself_is_no_reason() -> None:
    assert Held().hold(90.0, reading(2, sequences=2, first_token=9.0)) == 2


def test_those_that_are_coming_are_not_asked_for_again() -> None:
    held = Held()
    assert held.hold(4.0, reading(2, **BUSY)) == 4
    assert held.hold(300.0, reading(4, ready=2, coming=2, **BUSY)) == 4
    assert held.hold(300.0, reading(3, ready=2, coming=1, **BUSY)) == 4
    assert held.hold(10.0, reading(4, running=32, waiting=17, sequences=49)) == 7


def test_none_is_asked_for_that_would_come_when_all_is_over() -> None:
    """The last one took 30 s to start; the queue would be gone in 20, or would not."""
    for each, wanted in ((1.0, 4), (0.1, 8)):  # in half a second
        held = Held()
        assert held.hold(4.0, reading(2, **BUSY)) == 4
        assert held.hold(30.0, reading(4, ready=2, coming=2, **BUSY)) == 4
        waiting = 40.0
        found = []
        for _ in range(10):
            found.append(held.policy.wanted(
                reading(4, running=32, waiting=int(waiting), sequences=70), BOUNDS, held.now))
            held.now += TICK
            waiting -= each
        assert max(found) == wanted


def test_those_that_are_missing_for_long_are_replaced() -> None:
    """Or drained: neither takes requests, and neither is expected to."""
    assert Held().hold(4.0, reading(4, ready=2, coming=0, **BUSY)) == 6
    assert Held(AutoscaleState(1, 5)).hold(4.0, reading(4, ready=2, coming=0, **BUSY)) == 5


def test_one_goes_after_a_long_time_with_room_and_then_again_only_after_as_long() -> None:
    held = Held()
    easy = {"sequences": 5, "first_token": 0.2}
    assert held.hold(59.0, reading(4, **easy)) == 4
    assert held.hold(2.0, reading(4, **easy)) == 3
    assert held.hold(59.0, reading(3, **easy)) == 3
    assert held.hold(2.0, reading(3, **easy)) == 2
    assert held.hold(70.0, reading(2, **easy)) == 1
    assert held.hold(200.0, reading(1, **easy)) == 1
    assert held.policy.counts["room"] == 3


@pytest.mark.parametrize("much", [
    {"sequences": 17}, {"waiting": 9, "sequences": 9}, {"pages": 0.6},
    {"first_token": 1.2, "sequences": 9}])
def test_none_goes_where_the_others_had_no_room(much: dict[str, Any]) -> None:
    assert Held().hold(300.0, reading(4, **much)) == 4
    assert Held().hold(300.0, reading(4, **dict.fromkeys(much, 0))) == 3


def test_what_was_too_much_once_is_too_much_again() -> None:
    """First tokens were late with 3 sequences a replica, though there are 8 slots."""
    held = Held()
    assert held.hold(4.0, reading(2, running=6, sequences=6, first_token=2.2)) == 3
    assert held.hold(200.0, reading(3, sequences=6, first_token=0.5)) == 3
    assert held.hold(200.0, reading(3, sequences=4, first_token=0.5)) == 2
    held = Held()
    assert held.hold(4.0, reading(2, running=6, sequences=6, first_token=2.2)) == 3
    held.now += 6 * AIMS.down_delay
    assert held.hold(200.0, reading(3, sequences=6, first_token=0.5)) == 2, "it is forgotten"


def test_bounds_are_kept_at_once() -> None:
    assert Held(AutoscaleState(3, 8)).hold(0.0, reading(1)) == 3
    assert Held(AutoscaleState(1, 2)).hold(0.0, reading(5, **BUSY)) == 2
    assert Held(AutoscaleState(1, 3)).hold(9.0, reading(2, **BUSY)) == 3
    assert Held(AutoscaleState(2, 3)).hold(900.0, reading(2)) == 2
    assert Held().hold(900.0, reading(2, ready=0, coming=2, waiting=50, sequences=50)) == 2


def test_what_people_read() -> None:
    policy = Autoscaler(AIMS)
    assert policy.text(AutoscaleState(1, 0), 5.0) == policy.short_text(AutoscaleState(1, 0)) == ""
    assert policy.text(AutoscaleState(1, 4, True), 5.0) == \
        "autoscaling from 1 to 4 is suspended: the number was set by hand"
    policy.wanted(reading(2, ready=1, coming=1), AutoscaleState(1, 4), 5.0)
    assert policy.text(AutoscaleState(1, 4), 5.0) == (
        "autoscaling from 1 to 4: 1 ready, 1 coming, 0 sequences, 0 wait where 4 may, first token "
        "0.0 of 2 s")
    assert policy.short_text(AutoscaleState(1, 4)) == "; 1 to 4 by load"
    policy.wanted(reading(1), AutoscaleState(3, 4), 5.0)
    assert policy.short_text(AutoscaleState(3, 4)) == "; 3 to 4 by load, last 1 -> 3 (min)"
    assert policy.short_text(AutoscaleState(3, 4, True)) == "; suspended, last 1 -> 3 (min)"


class SmallCluster:
    """Sequences that take a while each, replicas that take a while to start, and some that die."""

    def __init__(self, bounds: AutoscaleState, start: float, lasts: float) -> None:
        """lasts: seconds that a sequence takes."""
        self.policy, self.bounds = Autoscaler(AIMS), bounds
        self.start, self.lasts = start, lasts
        self.now = 0.0
        self.ready_at = [0.0] * bounds.least
        self.waiting = 0
        self.running: list[float] = []
        """When each ends."""
        self.changes: list[tuple[float, int, int]] = []
        """Time, replicas before, after."""

    def tick(self, arrivals: int, dies: bool = False) -> None:
        self.now += TICK
        if dies:
            self.ready_at[-1] = self.now + self.start
        ready = sum(at <= self.now for at in self.ready_at)
        self.running = [end for end in self.running if end > self.now]
        self.waiting += arrivals
        free = max(0, ready * AIMS.slots - len(self.running))
        begins = min(free, self.waiting)
        self.waiting -= begins
        self.running += [self.now + self.lasts] * begins
        staying = len(self.ready_at)
        wanted = self.policy.wanted(LoadReading(
            staying, ready, staying - ready, len(self.running), self.waiting,
            self.waiting + len(self.running), 0.1, 0.0), self.bounds, self.now)
        if wanted != staying:
            self.changes.append((self.now, staying, wanted))
        if wanted < staying:
            assert len(self.running) <= MARGIN * AIMS.slots * (ready - 1), "what runs has room"
        self.ready_at = sorted(self.ready_at)[:wanted]
        self.ready_at += [self.now + self.start] * (wanted - len(self.ready_at))


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_any_load_any_starts_any_deaths(data: st.DataObject) -> None:
    least = data.draw(st.integers(1, 3))
    bounds = AutoscaleState(least, data.draw(st.integers(least, 12)))
    cluster = SmallCluster(bounds, data.draw(st.sampled_from([0.5, 5.0, 40.0, 200.0])),
                           data.draw(st.sampled_from([0.5, 4.0, 15.0])))
    chance = random.Random(data.draw(st.integers(0, 1 << 30)))
    for rate, seconds, deaths in data.draw(st.lists(st.tuples(
            st.sampled_from([0.0, 0.3, 2.0, 9.0, 40.0]), st.integers(5, 200),
            st.sampled_from([0.0, 0.0, 0.05])), max_size=6)):
        for _ in range(int(seconds / TICK)):
            cluster.tick(sum(chance.random() < rate * TICK / 20 for _ in range(20)),
                         chance.random() < deaths)
            assert bounds.least <= len(cluster.ready_at) <= bounds.most
    for at, before, after in cluster.changes:
        assert after <= 2 * before and after >= before - 1, (at, before, after)
    for (before, was, _), (at, is_now, then) in pairwise(cluster.changes):
        assert then > is_now or at - before >= AIMS.down_delay, "one goes at a time, and slowly"
        assert at - before >= AIMS.up_delay
        assert was >= 1


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(1, 60), st.sampled_from([0.5, 10.0]), st.sampled_from([2.0, 8.0]))
def test_a_steady_load_is_met_once_and_then_nothing_changes(
        concurrent: int, start: float, lasts: float) -> None:
    """From one replica up to what it takes, and to what has waited meanwhile; then down to what has
    a margin, and never up again."""
    cluster = SmallCluster(AutoscaleState(1, 12), start, lasts)
    owed = 0.0
    for _ in range(int(1500 / TICK)):
        owed += concurrent / lasts * TICK
        cluster.tick(int(owed))
        owed -= int(owed)
    enough = ceil(concurrent / AIMS.slots)
    downs = [at for at, before, after in cluster.changes if after < before]
    last_up = max((at for at, before, after in cluster.changes if after > before), default=0.0)
    assert all(at > last_up for at in downs), "it went up again after it had gone down"
    assert enough <= len(cluster.ready_at) <= ceil(concurrent / AIMS.slots / MARGIN) + 1
    assert cluster.waiting <= AIMS.queue * len(cluster.ready_at)


def test_a_replica_that_keeps_dying_does_not_make_it_flap() -> None:
    """One of two dies every 20 s and takes 10 s to start; the load is more than one can do."""
    cluster = SmallCluster(AutoscaleState(1, 8), 10.0, 4.0)
    for step in range(int(1200 / TICK)):
        cluster.tick(1 if step % 2 else 2, dies=len(cluster.ready_at) > 1 and step % 40 == 0)
    assert len(cluster.changes) <= 3, cluster.changes
    assert all(after > before for _, before, after in cluster.changes)
