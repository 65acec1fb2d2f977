"""When the dead are started again: limits, delays, and what does not count."""

from __future__ import annotations

import copy
import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.messages import Kill, Restarted, Spawn
from actorium.actors.runtime.memory_limits import OOM_KILLED
from actorium.actors.runtime.process import ProcessActivity
from actorium.actors.watchdog.restart_policy import (
    FIRST_DELAY,
    HEALTHY_AFTER,
    JITTER,
    LONGEST_DELAY,
    STEP_BACK,
    Restarts,
    SeededUniform,
)
from actorium.actors.watchdog.supervised import Supervised, starting
from actorium.actors.watchdog.supervisor import TICK, Supervisor

LIVES = st.lists(st.tuples(st.floats(0, 200), st.floats(0, 200)), max_size=60)
"""(seconds until ready, seconds of work) of each life."""


def stopped(pid: int) -> ProcessActivity:
    """How every process looks."""
    return ProcessActivity(True, False, 1.0)


def live(policy: Restarts, lives: list[tuple[float, float]],
         role: str = "a", killed: bool = False) -> list[tuple[float, float]]:
    """(time of death, time of the restart) of each life, until the policy gives up."""
    now, restarts = 0.0, []
    for loading, working in lives:
        now += loading
        policy.on_ready(role, now)
        now += working
        at = policy.on_death(role, now, killed)
        if at is None:
            break
        restarts.append((now, at))
        now = at
    return restarts


@given(LIVES, st.integers(0, 6), st.integers(0, 2**63 - 1))
def test_never_more_restarts_in_a_window_than_the_limit(
        lives: list[tuple[float, float]], limit: int, seed: int) -> None:
    times = [at for _, at in live(Restarts(limit, 60.0, seed), lives)]
    for first, last in zip(times, times[limit:], strict=False):
        assert last - first >= 60.0 * (1 - 1e-9)


@given(LIVES, st.integers(0, 2**63 - 1))
def test_delays_double_between_their_bounds_until_an_actor_is_healthy(
        lives: list[tuple[float, float]], seed: int) -> None:
    deaths = 0
    restarts = live(Restarts(1000, 60.0, seed), lives)
    for (_, working), (died, at) in zip(lives, restarts, strict=True):
        # Times of the clock are rounded: a life may come out a hair shorter than it was.
        if abs(working / STEP_BACK - round(working / STEP_BACK)) < 1e-6 and working > 1:
            return
        deaths = 0 if working >= HEALTHY_AFTER else max(0, deaths - int(working / STEP_BACK))
        base = min(FIRST_DELAY * 2**deaths, LONGEST_DELAY / (1 - JITTER))
        assert base * (1 - JITTER) * 0.999 <= at - died + 1e-6
        assert at - died <= min(base * (1 + JITTER), LONGEST_DELAY) + 1e-6
        deaths += 1


@given(st.floats(0.0, 300.0))
def test_who_dies_each_time_it_has_loaded_gets_no_further(loading: float) -> None:
    assert len(live(Restarts(5, 60.0, 1), [(loading, 0.0)] * 20)) == 5


def test_an_actor_that_works_for_long_is_always_restarted() -> None:
    restarts = live(Restarts(5, 60.0, 1), [(1.0, 61.0)] * 50)
    assert len(restarts) == 50
    assert all(at - died <= FIRST_DELAY * (1 + JITTER) + 1e-9 for died, at in restarts)


def test_an_actor_that_dies_rarely_restarts_fast() -> None:
    restarts = live(Restarts(1000, 60.0, 1), [(0.3, 12.0)] * 50)
    assert max(at - died for died, at in restarts) <= FIRST_DELAY * (1 + JITTER) + 1e-9
    restarts = live(Restarts(1000, 60.0, 1), [(0.3, 9.0)] * 12)
    assert restarts[-1][1] - restarts[-1][0] > LONGEST_DELAY / 2


def test_who_is_killed_at_work_is_started_again_at_once_however_often() -> None:
    restarts = live(Restarts(5, 60.0, 1), [(0.5, 0.0), (0.5, 2.0)] * 50, killed=True)
    assert len(restarts) == 100
    assert max(at - died for died, at in restarts) <= FIRST_DELAY * (1 + JITTER) + 1e-9
    assert live(Restarts(0, 60.0, 1), [(0.5, 2.0)], killed=True) == [], "never means never"


def test_who_is_killed_on_the_way_to_work_waits_longer_and_longer() -> None:
    policy = Restarts(5, 60.0, 1)
    delays = [policy.on_death("a", 0.0, killed=True) or 0.0 for _ in range(20)]
    assert all(b > a for a, b in itertools.pairwise(delays[:8]))
    assert LONGEST_DELAY / 2 < delays[-1] <= LONGEST_DELAY


def test_a_kill_neither_excuses_what_an_actor_did_nor_is_excused_for_it() -> None:
    policy = Restarts(2, 60.0, 1)
    for killed in (False, True, True, False):
        policy.on_ready("a", 1.0)
        assert policy.on_death("a", 1.0, killed) is not None
        if killed:
            policy.forgive_last("a")
    assert policy.on_death("a", 1.0) is None


def test_roles_do_not_share_a_limit() -> None:
    policy = Restarts(2, 60.0, 1)
    for role, _ in itertools.product("abc", range(2)):
        assert policy.on_death(role, 1.0) is not None
    assert [policy.on_death(role, 2.0) for role in "abc"] == [None] * 3


def test_dice_are_fair_enough_and_repeatable() -> None:
    one, two, other = SeededUniform(7), SeededUniform(7), SeededUniform(8)
    rolls = [one.uniform() for _ in range(4000)]
    assert rolls == [two.uniform() for _ in range(4000)]
    assert rolls[0] != other.uniform()
    assert all(0 <= roll < 1 for roll in rolls) and abs(sum(rolls) / 4000 - 0.5) < 0.03


# --- the supervisor ---

def kill_again_and_again(supervisor: Supervisor, gauges: list[dict[str, float]]) -> int:
    """Lives of a worker that dies at once each time; in each, the scheduler tells its gauges.
    Returns how many there were before the supervisor gave up, or all."""
    now = 0.0
    for epoch, told in enumerate(gauges, 1):
        actor = starting("worker-0", 10 + epoch, epoch, now)
        supervisor.on_ready("worker-0", now)
        supervisor.on_suspect_gauges(told)
        supervisor.on_exit(actor, -11, "", now)
        if supervisor.give_up_reason is not None:
            return epoch - 1
        while not (orders := supervisor.tick({}, now)):
            now = max(now, supervisor.next_timer())
        assert orders == [Spawn("worker-0", epoch + 1)]
    return len(gauges)


def recovery(**values: float) -> RecoveryConfig:
    return RecoveryConfig(restart=True, **values)  # type: ignore[arg-type]


def test_hangs_and_want_of_memory_are_an_actors_affair() -> None:
    for number, hung, counts in ((-9, "", False), (-9, "hung", True), (OOM_KILLED, "", True),
                                 (-11, "", True), (-15, "", True)):
        supervisor = Supervisor(recovery(max_restarts=1), 0.25, 1)
        for epoch in (1, 2):
            actor = starting("worker-0", epoch, epoch, 0.0)
            actor.hang_cause = hung
            supervisor.on_ready("worker-0", 0.0)
            supervisor.on_exit(actor, number, "", 1.0)
        assert (supervisor.give_up_reason is not None) == counts, (number, hung)


@given(st.integers(0, 8), st.integers(0, 2**63 - 1))
def test_the_limit_ends_the_engine_with_a_reason(limit: int, seed: int) -> None:
    supervisor = Supervisor(recovery(max_restarts=limit), 0.25, seed)
    assert kill_again_and_again(supervisor, [{}] * (limit + 5)) == limit
    [order] = supervisor.tick({}, 1e6)
    assert isinstance(order, Kill) and order.role == "launcher"
    assert order.reason == supervisor.give_up_reason
    times = f"{limit} time{'s' if limit != 1 else ''}"
    assert order.reason == (f"worker-0 (pid {11 + limit}) was killed by SIGSEGV; it was started "
                            f"again {times} within 60 s of work")
    assert supervisor.counts == ({("worker-0", "killed"): limit} if limit else {})


def test_restarts_that_narrow_the_suspects_down_do_not_count() -> None:
    """256 suspects are halved down to one, which is convicted; twenty times over."""
    hunt = [*({"suspects": float(2**n)} for n in range(8, -1, -1)), {"suspects": 1.0}]
    gauges = [told | {"quarantined": float(n)} for n in range(20) for told in hunt]
    supervisor = Supervisor(recovery(), 0.25, 1)
    assert kill_again_and_again(supervisor, gauges) == len(gauges)


def test_a_hunt_that_goes_on_counts_where_it_gets_nowhere() -> None:
    gauges = [{"suspects": float(n)} for n in (8, 8, 8, 4, 4, 4, 4, 4)]
    assert kill_again_and_again(Supervisor(recovery(), 0.25, 1), gauges) == 6


def test_suspects_that_only_grow_are_no_progress() -> None:
    gauges = [{"suspects": float(n), "quarantined": 3.0} for n in range(20)]
    assert kill_again_and_again(Supervisor(recovery(), 0.25, 1), gauges) == 5


def test_the_progress_of_others_is_the_workers_alone() -> None:
    supervisor = Supervisor(recovery(max_restarts=1), 0.25, 1)
    supervisor.on_exit(starting("scheduler", 5, 1, 0.0), 1, "ValueError: x", 0.0)
    supervisor.on_suspect_gauges({"suspects": 2.0})
    supervisor.on_suspect_gauges({"suspects": 1.0})
    supervisor.on_exit(starting("scheduler", 6, 2, 1.0), 1, "ValueError: x", 1.0)
    assert supervisor.give_up_reason is not None
    why = supervisor.give_up_reason
    assert "scheduler (pid 6) exited with code 1: ValueError: x; it was" in why
    assert supervisor.gauges() == {"restarts.scheduler.fault": 1.0}


def test_a_restart_is_ordered_once_and_not_for_a_running_actor() -> None:
    supervisor = Supervisor(recovery(), 0.25, 1)
    supervisor.on_exit(starting("a", 5, 1, 0.0), 0, "", 0.0)
    assert supervisor.tick({}, 0.01) == []
    assert supervisor.tick({}, 0.2) == [Spawn("a", 2)]
    assert supervisor.tick({}, 0.4) == []
    supervisor.on_exit(starting("b", 6, 4, 1.0), 0, "", 1.0)
    supervisor.on_started("b", 5)
    assert supervisor.tick({}, 60.0) == []
    assert supervisor.counts == {("a", "exited"): 1, ("b", "exited"): 1}


def test_the_cause_of_a_killed_hang_is_the_hang() -> None:
    supervisor = Supervisor(recovery(silence=3.0), 0.25, 1, stopped)
    actor = Supervised("a", 5, 1, "idle", 0, 0.0, 0.0)
    now = 0.0
    while not (orders := supervisor.tick({"a": actor}, now)):
        now += TICK
    assert 3.0 < now <= 3.0 + 2 * TICK
    [kill] = orders
    assert isinstance(kill, Kill) and (kill.role, kill.pid) == ("a", 5)
    assert kill.reason.startswith("silent: no sign of life for 3.")
    assert supervisor.tick({"a": actor}, now + TICK) == [], "told once"
    supervisor.on_exit(actor, -9, "", now + 0.3)
    assert supervisor.counts == {("a", "silent"): 1}


def test_time_without_the_watchdog_running_is_not_counted_as_silence() -> None:
    supervisor = Supervisor(recovery(silence=3.0), 0.25, 1, stopped)
    actor = Supervised("a", 5, 1, "stepping", 0, 0.0, 0.0, budget=10.0)
    assert supervisor.tick({"a": actor}, 0.0) == []
    assert supervisor.tick({"a": actor}, 500.0) == [], "the machine was asleep"
    assert 0.0 <= 500.0 - actor.seen <= TICK + 1e-6 >= 500.0 - actor.moved
    now = 500.0
    while not supervisor.tick({"a": actor}, now):
        now += TICK
    assert 502.5 < now < 504.0, "awake, it goes on to count"


def killed_at(activity: ProcessActivity, late: float) -> float:
    """When an actor is killed that was heard of at 0 for the last time, by a watchdog whose own
    beats stay away until `late`."""
    supervisor = Supervisor(recovery(silence=0.75), 0.25, 1, lambda pid: activity)
    actor = Supervised("a", 5, 1, "stepping", 0, 0.0, 0.0, budget=60.0)
    own = Supervised("watchdog", 6, 1, "ready", 0, 0.0, 0.0)
    now = 0.0
    while not supervisor.tick({"a": actor}, now, own):
        now += TICK
        own.seen = now if now >= late else own.seen
        assert now < 60
    return now


def test_as_late_as_its_own_beats_may_be_those_of_who_sleeps() -> None:
    asleep, halted = ProcessActivity(False, False, 1.0), ProcessActivity(True, False, 1.0)
    assert killed_at(asleep, 0.0) == killed_at(halted, 0.0) == 1.0
    assert killed_at(halted, 1.25) == 1.25, "a little more for the beats, none for doubt"
    assert killed_at(asleep, 1.25) == 1.75, "once they come again, it forgets"
    assert killed_at(asleep, 2.0) == 3.25


@given(st.floats(0.06, 2.0))
def test_a_watchdog_that_is_starved_takes_its_own_lateness_for_nobodys(late: float) -> None:
    """It gets to look every `TICK + late` seconds only, and beats are late by as much."""
    supervisor = Supervisor(recovery(silence=0.75), 0.25, 1, stopped)
    actor = Supervised("a", 5, 1, "stepping", 0, 0.0, 0.0, budget=600.0)
    now = 0.0
    for _ in range(40):
        assert supervisor.tick({"a": actor}, now) == []
        if now - actor.seen > 0.25:
            actor.seen = now
        now += TICK + late
    died, looks = now, 0
    while not supervisor.tick({"a": actor}, now):
        now += TICK + late
        looks += 1
    assert 2 <= looks <= 5 and now - died >= 0.5, "what it sees of the time still counts"


def test_counts_are_passed_to_the_next_watchdog() -> None:
    """Two restarts are allowed. After each death the watchdog is another one."""
    known: dict[str, Restarted] = {}
    now = 0.0
    for epoch in range(1, 5):
        supervisor = Supervisor(recovery(max_restarts=2), 0.25, epoch)
        supervisor.restore(msgspec.msgpack.decode(msgspec.msgpack.encode([*known.values()]),
                                                 type=list[Restarted]))
        actor = starting("worker-0", 10 + epoch, epoch, now)
        supervisor.on_ready("worker-0", now)
        known |= {news.role: news for news in supervisor.changed_restarts()}
        supervisor.on_exit(actor, -11, "", now + 1)
        assert supervisor.changed_restarts() == [], "the next one hears itself what is not ordered"
        if supervisor.give_up_reason is not None:
            break
        orders = supervisor.tick({}, now + 2)
        assert orders == [Spawn("worker-0", epoch + 1)]
        (news,) = supervisor.changed_restarts()
        assert news.causes == {"killed": epoch} and len(news.counted) == epoch
        assert supervisor.changed_restarts() == []
        known[news.role] = news
        now += 2
    assert epoch == 3 and supervisor.give_up_reason is not None
    assert supervisor.gauges() == {"restarts.worker-0.killed": 2.0}


@given(LIVES, st.sets(st.integers(0, 60)), st.integers(1, 6), st.integers(0, 2**63 - 1))
def test_a_policy_handed_over_decides_as_one_that_goes_on(
        lives: list[tuple[float, float]], changes: set[int], limit: int, seed: int) -> None:
    def decisions(handed: set[int]) -> list[bool]:
        policy, now, found = Restarts(limit, 60.0, seed), 0.0, []
        for number, (loading, working) in enumerate(lives):
            policy.on_ready("a", now := now + loading)
            if number in handed and (record := policy.get("a")) is not None:
                policy = Restarts(limit, 60.0, seed + 1)
                policy.on_ready("a", now)  # it is heard of before what is known of it
                policy.restore("a", copy.deepcopy(record))
            found.append(policy.on_death("a", now := now + working) is not None)
        return found
    assert decisions(changes) == decisions(set())


def test_forgiven_restarts_are_forgiven_by_the_next_watchdog() -> None:
    supervisor = Supervisor(recovery(max_restarts=1), 0.25, 1)
    supervisor.on_ready("worker-0", 0.0)
    supervisor.on_exit(starting("worker-0", 5, 1, 0.0), -11, "", 1.0)
    assert supervisor.tick({}, 2.0) == [Spawn("worker-0", 2)]
    assert len(supervisor.changed_restarts()[0].counted) == 1
    supervisor.on_suspect_gauges({"quarantined": 0.0})
    supervisor.on_suspect_gauges({"quarantined": 1.0})
    (news,) = supervisor.changed_restarts()
    assert news.counted == [] and news.causes == {"killed": 1}
    heir = Supervisor(recovery(max_restarts=1), 0.25, 2)
    heir.restore([news])
    heir.on_exit(starting("worker-0", 6, 2, 2.0), -11, "", 3.0)
    assert heir.give_up_reason is None


def test_time_in_which_the_engine_sleeps_is_no_work() -> None:
    """Else a sleep of an hour between two deaths would have them forgotten."""
    policy = Restarts(1, 60.0, 7)
    policy.on_ready("a", 0.0)
    assert policy.on_death("a", 10.0) is not None
    policy.on_ready("a", 11.0)
    policy.on_released("a", 12.0)
    policy.on_released("a", 13.0)
    policy.on_ready("a", 4000.0)
    assert policy.on_death("a", 4001.0) is None
