"""The watchdog over a worker of two ranks: the death of one is the group's."""

from __future__ import annotations

from typing import Any

from test_watchdog import beat
from test_watchdog_restarts import make, orders

from actorium.actors.messages import Child, Children, Exited, Kill, Restarted, Spawn, Up
from actorium.actors.watchdog.core import WatchdogCore

RANKS = ("worker-0", "worker-1")


def children(epoch: int, roles: tuple[str, ...] = RANKS) -> Children:
    return Children([Child(role, 10 * epoch + int(role[-1]), epoch) for role in roles], True)


def beats(core: WatchdogCore, now: float, epoch: int = 1, roles: tuple[str, ...] = RANKS) -> None:
    for role in roles:
        core.on_message(beat(role, "idle", epoch=epoch, pid=10 * epoch + int(role[-1])), now)


def up(**options: Any) -> WatchdogCore:
    core = make(**options)
    core.on_message(children(1), 0.0)
    beats(core, 1.0)
    core.on_wake(1.0)
    return core


def test_all_ranks_come_back_with_one_epoch_by_one_order() -> None:
    core = up()
    core.on_message(Exited("worker-1", 11, 1, -9), 2.0)
    beats(core, 2.01, roles=("worker-0",))  # was on its way
    assert orders(core, 2.5) == [], "rank 0 is not gone yet"
    assert (core.next_timer() or 0) > 2.5, "and it is not asked in vain"
    core.on_message(Exited("worker-0", 10, 1, -9), 2.6)
    assert orders(core, 2.6) == [Spawn("worker-0", 2)]
    core.on_message(children(2), 2.7)
    beats(core, 3.0, epoch=2)
    core.on_wake(3.0)
    assert core.ready and core.health().gauges == {"restarts.worker-0.killed": 1.0}
    assert orders(core, 3.2) == []


def test_deaths_of_different_ranks_have_one_limit() -> None:
    core = up(max_restarts=2)
    for epoch in (1, 2, 3):
        first, then = (10 * epoch + epoch % 2, 10 * epoch + 1 - epoch % 2)
        core.on_message(Exited(f"worker-{first % 10}", first, epoch, -11), 2.0 * epoch)
        core.on_message(Exited(f"worker-{then % 10}", then, epoch, -9), 2.0 * epoch)
        if epoch < 3:
            assert orders(core, 2.0 * epoch + 1.0) == [Spawn("worker-0", epoch + 1)]
            core.on_message(children(epoch + 1), 2.0 * epoch + 1.0)
            beats(core, 2.0 * epoch + 1.5, epoch + 1)
            core.on_wake(2.0 * epoch + 1.5)
    (kill,) = orders(core, 6.0)
    assert isinstance(kill, Kill) and kill.role == "launcher"
    assert kill.reason.startswith("worker-1 (pid 31) was killed by SIGSEGV; it was started again 2")


def test_of_a_group_the_silent_rank_is_killed_not_the_one_that_waits_for_it() -> None:
    core = up(stopped=True, silence=1.0)
    now, told = 1.0, list[Any]()
    while not told:
        now += 0.125
        beats(core, now, roles=("worker-0",))
        told = orders(core, now)
        assert now < 5.0
    (kill,) = told
    assert (kill.role, kill.pid) == ("worker-1", 11) and "stopped" in kill.reason
    core.on_message(Exited("worker-1", 11, 1, -9), now)
    core.on_message(Exited("worker-0", 10, 1, -9), now)
    assert core.health().gauges == {"restarts.worker-0.silent": 1.0}


def test_the_next_watchdog_waits_for_the_ranks_that_are_being_ended() -> None:
    core = make(epoch=2)
    core.on_message(children(1, ("worker-0",)), 0.0)
    core.on_message(Exited("worker-1", 11, 1, -9), 0.0)
    assert orders(core, 1.0) == []
    core.on_message(Exited("worker-0", 10, 1, -9), 1.1)
    sends = [send.message for send in core.on_wake(1.2)]
    assert [type(one) for one in sends] == [Restarted, Spawn] and sends[1] == Spawn("worker-0", 2)
    assert Up() not in sends
