"""The watchdog's core where the dead are started again: orders, readiness, a watchdog's own end."""

from __future__ import annotations

from typing import Any

import msgspec
from test_watchdog import answer, ask, beat, line

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.core import CLIENT, Send
from actorium.actors.messages import (
    Child,
    Children,
    Exited,
    Fatal,
    GetStatus,
    Kill,
    Recovered,
    Restarted,
    Spawn,
    Up,
)
from actorium.actors.runtime.process import ProcessActivity
from actorium.actors.watchdog.core import WatchdogCore


def make(epoch: int = 1, stopped: bool = False, **recovery: Any) -> WatchdogCore:
    """stopped: so every process looks; else nothing is known of any."""
    return WatchdogCore("e", epoch, 99, 100.0, RecoveryConfig(**recovery), 0.25, 7,
                        lambda pid: ProcessActivity(True, False, 1.0) if stopped else None)


def up(stopped: bool = False, **recovery: Any) -> WatchdogCore:
    """Of an engine of "a" and "b" that is ready at second 1."""
    core = make(stopped=stopped, **recovery)
    core.on_message(Children([Child("a", 10, 1), Child("b", 11, 1)]), 0.0)
    both(core, 1.0)
    assert orders(core, 1.0) == [Up()]
    core.on_message(Children([Child("a", 10, 1), Child("b", 11, 1)], True), 1.0)
    return core


def both(core: WatchdogCore, now: float) -> None:
    core.on_message(beat("a", "idle"), now)
    core.on_message(beat("b", "idle", pid=11), now)


def orders(core: WatchdogCore, now: float) -> list[Any]:
    """What it orders the launcher to do."""
    sends = core.on_wake(now)
    assert all(isinstance(send, Send) and send.to in ("launcher", CLIENT) for send in sends)
    told = [send.message for send in sends if send.to == "launcher"]
    return [message for message in told if not isinstance(message, Restarted | Recovered)]


def test_up_is_reported_once_and_before_any_status() -> None:
    core = make()
    core.on_message(Children([Child("a", 10, 1)]), 0.0)
    core.on_client(b"c", GetStatus("r", True), 0.0)
    assert core.on_wake(0.5) == []
    core.on_message(beat("a"), 1.0)
    assert core.on_wake(1.0) == [Send("launcher", Up())]
    assert core.on_wake(1.1) == [], "the launcher has not heard it yet"
    core.on_message(Children([Child("a", 10, 1)], True), 1.2)
    [told] = core.on_wake(1.2)
    assert told.to == CLIENT and told.message.ready
    assert core.on_wake(1.3) == []


def test_a_death_before_the_engine_was_ready_is_its_end() -> None:
    core = make()
    core.on_message(Children([Child("a", 10, 1)]), 0.0)
    core.on_message(Exited("a", 10, 1, -9), 1.0)
    assert orders(core, 50.0) == []
    report = ask(core, 50.0)
    assert report is not None and report.error == "a was killed by SIGKILL"


def test_a_dead_actor_comes_back_and_the_engine_is_not_ready_meanwhile() -> None:
    core = up()
    core.on_message(Fatal("a", 10, 1, "ValueError: x"), 1.9)
    core.on_message(Exited("a", 10, 1, 1), 2.0)
    core.on_message(beat("a", "idle"), 2.0)  # was on its way
    assert orders(core, 2.0) == []
    now = line(core, "a", 2.0)
    assert (now.phase, now.detail) == ("exited", "ValueError: x")
    assert ask(core, 2.0, wait=True) is None, "waits for the recovery"
    due = core.next_timer()
    assert due is not None and 2.07 <= due <= 2.13
    assert orders(core, due) == [Spawn("a", 2)]
    core.on_message(Children([Child("a", 20, 2), Child("b", 11, 1)], True), 2.2)
    core.on_message(beat("b", "idle", pid=11), 2.5)
    assert answer(core.on_wake(2.5)) is None
    core.on_message(beat("a", "idle", epoch=2, pid=20), 2.6)
    report = answer([send for send in core.on_wake(2.6) if send.to == CLIENT])
    assert report is not None and report.ready and report.error is None
    assert line(core, "a", 2.6).gauges == {"g": 1.0, "restarts": 1.0}
    assert core.health().gauges == {"restarts.a.fault": 1.0}
    assert orders(core, 2.7) == []


def test_the_launcher_learns_when_a_successor_is_ready() -> None:
    def recovered(core: WatchdogCore, now: float) -> list[Any]:
        return [send.message for send in core.on_wake(now)
                if isinstance(send.message, Recovered)]

    core = up()
    core.on_message(Exited("a", 10, 1, -9), 2.0)
    core.on_message(Children([Child("a", 20, 2), Child("b", 11, 1)], True), 2.2)
    core.on_message(beat("a", "loading", epoch=2, pid=20), 2.3)
    assert recovered(core, 2.3) == []
    core.on_message(beat("a", "idle", epoch=2, pid=20), 2.4)
    assert recovered(core, 2.4) == [Recovered("a", 2)]
    assert recovered(core, 2.5) == []
    heir = make(epoch=2)  # the next watchdog reports it again, but not those of the first life
    heir.on_message(Children([Child("a", 20, 2), Child("b", 11, 1)], True), 3.0)
    heir.on_message(beat("a", "idle", epoch=2, pid=20), 3.1)
    heir.on_message(beat("b", "idle", pid=11), 3.1)
    assert recovered(heir, 3.1) == [Recovered("a", 2)]


def test_too_many_deaths_end_the_engine_with_the_reason() -> None:
    core = up(max_restarts=1)
    core.on_message(Exited("a", 10, 1, -11), 2.0)
    core.on_message(Children([Child("a", 20, 2), Child("b", 11, 1)], True), 2.2)
    core.on_message(Exited("a", 20, 2, -11), 2.3)
    [kill] = orders(core, 2.3)
    assert kill == Kill("launcher", 0, "a (pid 20) was killed by SIGSEGV; it was started again "
                                       "1 time within 60 s of work")
    report = ask(core, 2.3, wait=True)
    assert report is not None and not report.ready and report.error == kill.reason


def test_a_beat_that_is_a_second_overdue_makes_it_unready_and_silence_kills() -> None:
    core = up(stopped=True, silence=3.0)
    now, unready, killed = 1.0, 0.0, 0.0
    while not killed:
        now += 0.125
        core.on_message(beat("b", "idle", pid=11), now)
        core.on_client(b"c", GetStatus("r"), now)
        sends = core.on_wake(now)
        report = answer([send for send in sends if send.to == CLIENT])
        if report is not None and not report.ready and not unready:
            unready = now
        for order in (send.message for send in sends if send.to == "launcher"):
            assert isinstance(order, Kill) and (order.role, order.pid) == ("a", 10)
            killed = now
        assert now < 10.0
    assert 1.0 < unready - 1.0 <= 1.75
    assert 3.0 < killed - 1.0 <= 3.5
    core.on_message(Exited("a", 10, 1, -9), killed + 0.2)
    assert core.health().gauges == {"restarts.a.silent": 1.0}
    assert core.error is None


def test_without_restarts_no_actor_is_killed_or_started() -> None:
    core = WatchdogCore("e", 1, 99, 100.0, RecoveryConfig(restart=False))
    core.on_message(Children([Child("a", 10, 1)]), 0.0)
    core.on_message(beat("a"), 1.0)
    assert core.on_wake(1.0) == [] and core.next_timer() is None
    assert core.on_wake(1000.0) == []
    core.on_message(Exited("a", 10, 1, -9), 1000.0)
    assert core.on_wake(1001.0) == [] and core.error == "a was killed by SIGKILL"


def test_a_new_watchdog_learns_which_actors_died() -> None:
    core = make(epoch=2)
    core.on_message(Children([Child("b", 11, 1)], True), 0.0)
    core.on_message(Exited("a", 30, 4, -9), 0.0)
    core.on_message(beat("b", "idle", pid=11), 0.05)
    report = ask(core, 0.05)
    assert report is not None and not report.ready and report.error is None
    assert orders(core, 0.2) == [Spawn("a", 5)]
    core.on_message(Exited("a", 30, 4, -9), 0.3)
    core.on_message(Children([Child("a", 31, 5), Child("b", 11, 1)], True), 0.3)
    core.on_message(Exited("a", 30, 4, -9), 0.3)
    core.on_message(beat("a", "idle", epoch=5, pid=31), 0.4)
    report = ask(core, 0.4)
    assert report is not None and report.ready
    assert orders(core, 0.5) == []


def test_the_next_watchdog_continues_the_counts() -> None:
    """It is told of the restart before it is ordered, and the next one of it with the children."""
    core = up(max_restarts=1)
    core.on_message(Exited("a", 10, 1, -11), 2.0)
    sends = [send.message for send in core.on_wake(2.2)]
    assert [type(message) for message in sends] == [Restarted, Spawn]
    heir = make(epoch=2, max_restarts=1)
    heir.on_message(beat("a", "idle", epoch=2, pid=20), 2.5)
    children = Children([Child("a", 20, 2), Child("b", 11, 1)], True, [sends[0]])
    heir.on_message(msgspec.msgpack.decode(msgspec.msgpack.encode(children), type=Children), 2.6)
    assert heir.health().gauges == {"restarts.a.killed": 1.0}
    assert orders(heir, 2.6) == []
    heir.on_message(Exited("a", 20, 2, -11), 3.0)
    (kill,) = orders(heir, 3.0)
    assert kill.role == "launcher" and "a (pid 20) was killed by SIGSEGV" in kill.reason


def test_a_draining_watchdog_restarts_no_actor() -> None:
    core = up()
    core.on_message(Exited("a", 10, 1, 0), 2.0)
    core.drain(2.0)
    assert orders(core, 60.0) == [] and core.next_timer() is None


def test_the_last_gauges_of_an_actor_are_known_until_its_successor_sends_some() -> None:
    core = up()
    assert core.actors["a"].known_gauges == {"g": 1.0}
    core.on_message(Exited("a", 10, 1, -9), 2.0)
    assert core.actors["a"].known_gauges == {"g": 1.0}
    for epoch in (2, 3):  # the first successor dies before it has said anything
        core.on_message(Children([Child("a", 20 + epoch, epoch)], True), 2.0 + epoch)
        assert core.actors["a"].gauges == {} and core.actors["a"].known_gauges == {"g": 1.0}
    core.on_message(msgspec.structs.replace(beat("a", epoch=3, pid=23), gauges={"g": 2.0}), 6.0)
    assert core.actors["a"].known_gauges == {"g": 2.0}
    assert make().actors == {}, "a watchdog that is new knows of none"
