"""The watchdog of an engine that sleeps: its worker ends and comes back, and no death counts."""

from __future__ import annotations

import msgspec
import pytest
from test_watchdog import beat
from test_watchdog_ranks import RANKS, beats, children
from test_watchdog_restarts import make, orders

from actorium.actors.config.tree import Config
from actorium.actors.health import PAUSED, RELEASED, SLEEPING, WAKING, activity_of
from actorium.actors.messages import ActorStatus, Beat, Child, Exited, GetStatus, Release, Spawn
from actorium.actors.watchdog.core import WatchdogCore
from actorium.actors.watchdog.hangs import find_hang
from actorium.actors.watchdog.readiness import judge
from actorium.actors.watchdog.supervised import starting

SCHEDULER = Child("scheduler", 99, 1)


def rests(phase: str, level: float) -> Beat:
    return msgspec.structs.replace(beat("scheduler", phase, pid=99), gauges={"sleep_level": level})


def up() -> WatchdogCore:
    core = make()
    found = children(1)
    core.on_message(msgspec.structs.replace(found, children=[*found.children, SCHEDULER]), 0.0)
    beats(core, 1.0)
    core.on_message(rests("idle", 0), 1.0)
    core.on_wake(1.0)
    assert core.ready
    return core


def released(core: WatchdogCore, now: float, epoch: int = 1) -> None:
    for role in RANKS:
        core.on_message(Exited(role, 10 * epoch + int(role[-1]), epoch, 0, True), now)


def test_the_worker_ends_at_level_2_and_starts_when_the_engine_wakes() -> None:
    core = up()
    for epoch in (1, 2):
        now = 10.0 * epoch
        core.on_message(rests(SLEEPING, 1), now)
        assert orders(core, now) == [], "at level 1 its process stays"
        core.on_message(rests(SLEEPING, 2), now)
        pids = [10 * epoch, 10 * epoch + 1]
        assert orders(core, now) == [Release(*own) for own in zip(RANKS, pids, strict=True)]
        assert orders(core, now + 0.3) == [], "once"
        core.on_message(msgspec.structs.replace(
            beat("worker-0", "idle", epoch=epoch, pid=10 * epoch),
            gauges={"steps": 7.0, "weights_bytes": 9.0, "weights_bytes_planned": 9.0}), now + 0.4)
        released(core, now + 0.5, epoch)
        assert core.actors["worker-0"].known_gauges == {"steps": 7.0}, "it holds no bytes"
        core.on_message(rests(SLEEPING, 2), now + 0.6)
        assert orders(core, now + 0.6) == [] and core.ready
        assert judge(core, Config(), now + 0.6).ready
        core.on_message(rests(WAKING, 0), now + 1)
        assert orders(core, now + 1) == [Spawn("worker-0", epoch + 1)]
        assert orders(core, now + 1.3) == [], "once"
        core.on_message(children(epoch + 1), now + 1.4)
        core.on_message(rests(WAKING, 0), now + 1.4)
        core.on_wake(now + 1.4)
        assert core.ready, "requests wait for it in the scheduler"
        beats(core, now + 2, epoch + 1)
        core.on_message(rests("idle", 0), now + 2)
        core.on_wake(now + 2)
        assert core.ready and core.health().gauges == {}
        core.on_client(b"c", GetStatus("r"), now + 2)
        (status,) = [send.message for send in core.on_wake(now + 2) if send.to == "client"]
        assert [own.gauges["restarts"] for own in status.actors] == [0.0] * 3


def test_a_new_watchdog_learns_it_from_the_launcher_and_the_scheduler() -> None:
    core = make()
    core.on_message(msgspec.structs.replace(children(1), children=[SCHEDULER]), 0.0)
    released(core, 0.0)
    core.on_wake(0.1)
    core.on_message(msgspec.structs.replace(beat("scheduler", "starting", pid=99)), 0.2)
    assert orders(core, 0.3) == [], "nobody has said yet whether it is needed"
    core.on_message(rests(SLEEPING, 2), 0.4)
    assert orders(core, 0.5) == []
    core.on_message(rests("idle", 0), 0.6)
    assert orders(core, 0.7) == [Spawn("worker-0", 2)]


@pytest.mark.parametrize("phase", [PAUSED, SLEEPING, WAKING])
def test_nobody_hangs_who_waits_for_a_scheduler_that_rests(phase: str) -> None:
    waits, scheduler = starting("detokenizer", 1, 1, 0.0), starting("scheduler", 2, 1, 0.0)
    waits.phase, waits.budget, scheduler.phase = "stepping", 10.0, phase
    for now in (5.0, 5000.0):
        waits.seen = scheduler.seen = now
        actors = {own.role: own for own in (waits, scheduler)}
        assert find_hang(waits, actors, now, 0.75, 0.25) is None
        assert find_hang(scheduler, actors, now, 0.75, 0.25) is None
    scheduler.phase = "idle"
    assert find_hang(waits, actors, 5000.0, 0.75, 0.25) is not None


def test_a_process_that_has_ended_is_not_missed_for_its_silence() -> None:
    worker = starting("worker-0", 1, 1, 0.0)
    worker.phase = RELEASED
    assert find_hang(worker, {"worker-0": worker}, 5000.0, 0.75, 0.25) is None


def test_what_the_engine_does_in_a_word() -> None:
    def of(phase: str) -> str:
        return activity_of([ActorStatus("e", "scheduler", 1, 1, phase, 0, 0.0, 0.0)])

    assert [of(phase) for phase in (SLEEPING, WAKING, PAUSED, "idle", "stepping")] == [
        SLEEPING, WAKING, PAUSED, "running", "running"]
