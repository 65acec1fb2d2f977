"""What an answer of the watchdog says of an engine, for all who ask it."""

from __future__ import annotations

import pytest

from actorium.actors.health import (
    READY_PHASES,
    SILENT_AFTER,
    WORKING_PHASES,
    CounterReading,
    growth,
    not_at_work,
    read_counters,
    state_of,
    why_not_ready,
)
from actorium.actors.messages import ActorStatus, Status


def actor(role: str, phase: str = "idle", beat_age: float = 0.1, **gauges: float) -> ActorStatus:
    return ActorStatus("e", role, 1, 3, phase, 5, 0.0, beat_age, "", gauges)


def test_an_overdue_actor_is_silent_unless_it_never_worked() -> None:
    for phase in WORKING_PHASES:
        assert state_of(actor("a", phase, SILENT_AFTER)) == phase
        assert state_of(actor("a", phase, SILENT_AFTER + 0.1)) == "silent"
    assert state_of(actor("a", "loading", 60.0)) == "loading"
    assert state_of(actor("a", "exited", 60.0)) == "exited"


def test_which_actors_are_not_working_depends_on_the_phases() -> None:
    actors = [actor("a", "draining"), actor("b"), actor("c", "warming")]
    assert not_at_work(actors) == "a is draining, c is warming"
    assert not_at_work(actors, WORKING_PHASES) == "c is warming"
    assert not_at_work([actor("b", phase) for phase in READY_PHASES]) == ""


def test_why_an_engine_is_not_ready() -> None:
    assert why_not_ready(Status("r", True, None, [actor("a", "warming")])) == ""
    assert why_not_ready(Status("r", False, "it is over", [actor("a")])) == "it is over"
    assert why_not_ready(Status("r", False, None, [actor("a", "warming")])) == "a is warming"
    assert why_not_ready(Status("r", False, None, [actor("a")])) == \
        "not every actor has been heard of"


def test_counters_grow_within_one_incarnation() -> None:
    names = ["tokens", "steps"]
    before = read_counters(actor("a", beat_age=0.5, tokens=10.0), names, 100.0)
    after = read_counters(actor("a", beat_age=0.0, tokens=40.0, steps=3.0), names, 101.5)
    grown = growth(before, after)
    assert grown is not None and grown.seconds == pytest.approx(2.0)
    assert grown.counts == {"tokens": 30.0, "steps": 3.0}
    assert grown.rate("tokens") == pytest.approx(15.0)
    assert growth(None, after) is None
    assert growth(before._replace(epoch=2), after) is None
    assert growth(after, before) is None, "a counter that falls is somebody else's"
    same = growth(before, before)
    assert same is not None and same.rate("tokens") == 0.0


def test_missing_counters_count_as_none() -> None:
    assert read_counters(actor("a"), ["tokens"], 1.0) == CounterReading(3, 0.9, {"tokens": 0.0})
