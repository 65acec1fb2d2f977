"""Who hangs and who does not, in virtual time."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from actorium.actors.core import IDLE_HEARTBEAT
from actorium.actors.health import HUNG, READY_PHASES, SILENT
from actorium.actors.messages import Beat
from actorium.actors.runtime.process import (
    ProcessActivity,
    activity_seen_by_watcher,
    process_activity,
)
from actorium.actors.watchdog.hangs import (
    DOUBT,
    MARGIN,
    RELAY_SILENCE,
    STARTING_SILENCE,
    STOPPED_SILENCE,
    WATCHED,
    Hang,
    SilenceDiagnosis,
    find_hang,
)
from actorium.actors.watchdog.supervised import Supervised, starting

SILENCE, HEARTBEAT, TICK = 3.0, 0.25, 0.25


class Actor:
    """Heartbeats into its supervised as its phase has it."""

    def __init__(self, role: str, phase: str = "idle", budget: float = 60.0) -> None:
        self.supervised = starting(role, 7, 1, 0.0)
        self.phase, self.budget = phase, budget
        self.step = 0
        self.beats, self.loops, self.steps = True, True, False
        self._looped = 0.0

    def turn(self, now: float) -> None:
        self._looped = now if self.loops else self._looped
        self.step += self.steps
        if self.beats:
            age = now - self._looped
            beat = Beat(self.supervised.role, 7, 1, self.phase, self.step, self.budget,
                        loop_age=age)
            self.supervised.on_beat(beat, now)


def run(*actors: Actor, start: float = 0.0, seconds: float,
        diagnosis: str = "stopped") -> dict[str, tuple[float, Hang]]:
    """Whose hang was detected, when (seconds after `start`), and how. diagnosis: of silent ones."""
    by_role: dict[str, Supervised] = {actor.supervised.role: actor.supervised for actor in actors}
    hangs: dict[str, tuple[float, Hang]] = {}
    for tick in range(int(seconds / TICK) + 1):
        now = start + tick * TICK
        for actor in actors:
            actor.turn(now)
        for supervised in by_role.values():
            hang = find_hang(supervised, by_role, now, SILENCE, HEARTBEAT, diagnosis)
            if hang is not None:
                supervised.hang_cause = hang.cause
                hangs[supervised.role] = (now - start, hang)
    return hangs


@pytest.mark.parametrize("phase", sorted(READY_PHASES) + ["draining"])
def test_a_stopped_process_is_detected_by_its_silence(phase: str) -> None:
    actor, sibling = Actor("a", phase), Actor("b", "idle")
    assert run(actor, sibling, seconds=30.0) == {}
    actor.beats = False
    found = run(actor, sibling, start=30.0, seconds=10.0)
    assert found.keys() == {"a"}
    when, hang = found["a"]
    assert hang.cause == SILENT and SILENCE - TICK <= when <= SILENCE + 2 * TICK
    assert hang.text.endswith(f"({phase}, stopped)")


@pytest.mark.parametrize("phase", sorted(READY_PHASES) + ["draining"])
def test_one_that_may_only_be_starved_gets_longer(phase: str) -> None:
    actor = Actor("a", phase)
    run(actor, seconds=30.0)
    actor.beats = False
    when, hang = run(actor, start=30.0, seconds=20.0, diagnosis="")["a"]
    assert hang.cause == SILENT and abs(when - DOUBT * SILENCE) <= 2 * TICK
    assert hang.text.endswith(f"({phase})")


@pytest.mark.parametrize("diagnosis", ["", "stopped"])
def test_the_relay_is_waited_for(diagnosis: str) -> None:
    """Its connections end with it."""
    relay = Actor("relay", "ready")
    run(relay, seconds=30.0)
    relay.beats = False
    when, _ = run(relay, start=30.0, seconds=60.0, diagnosis=diagnosis)["relay"]
    assert abs(when - RELAY_SILENCE) <= 2 * TICK


class Kernel:
    """What is to be seen of one process."""

    def __init__(self, **activity: object) -> None:
        self.activity: ProcessActivity | None = ProcessActivity(
            False, False, 1.0)._replace(**activity)
        self.asked = 0

    def activity_of(self, pid: int) -> ProcessActivity | None:
        self.asked += 1
        return self.activity


def diagnosis_of(kernel: Kernel, until: float, busy: bool = True, works: float = 0.0) -> str:
    """Of an actor that is silent from 100.0 on and uses `works` of a processor."""
    supervised = starting("a", 7, 1, 100.0)
    supervised.phase, supervised.resting = "stepping" if busy else "idle", not busy
    diagnosis, said = SilenceDiagnosis(kernel.activity_of, HEARTBEAT), ""
    for tick in range(int((until - 100.0) / 0.05 + 1.5)):
        if kernel.activity is not None:
            kernel.activity = kernel.activity._replace(cpu_seconds=1.0 + 0.05 * tick * works)
        said = diagnosis.diagnose(supervised, 100.0 + 0.05 * tick)
    return said


def test_stopped_and_sleeping_actors_are_distinguished_from_starved_ones() -> None:
    assert diagnosis_of(Kernel(stopped=True), 100.75) == "stopped"
    assert diagnosis_of(Kernel(), 100.75) == "asleep"
    assert diagnosis_of(Kernel(runnable=True), 103.0) == "", "it wants to run"
    assert diagnosis_of(Kernel(), 103.0, works=0.5) == "", "it runs between the looks"
    gone = Kernel()
    gone.activity = None
    assert diagnosis_of(gone, 103.0) == "", "the launcher will tell"


def test_sleep_is_watched_for_a_while() -> None:
    kernel = Kernel()
    diagnosis = SilenceDiagnosis(kernel.activity_of, HEARTBEAT)
    supervised = starting("a", 7, 1, 100.0)
    assert [diagnosis.diagnose(supervised, now) for now in (102.0, 102.01, 102.0 + WATCHED)] == [
        "", "", "asleep"]
    supervised.seen = 102.2
    assert diagnosis.diagnose(supervised, 102.3) == ""
    found = [diagnosis.diagnose(supervised, now) for now in (103.0, 103.1)]
    assert found == ["", ""], "from the start"


def test_a_punctual_actor_is_not_inspected() -> None:
    for busy, period in ((True, HEARTBEAT), (False, IDLE_HEARTBEAT)):
        kernel = Kernel()
        diagnosis_of(kernel, 100.0 + period, busy)
        assert kernel.asked == 0


def test_an_idle_actor_is_recognised_by_its_heartbeats() -> None:
    supervised = starting("a", 7, 1, 0.0)
    for step, phase, resting in ((0, "idle", True), (4, "idle", False), (4, "idle", True),
                                 (4, "stepping", False), (4, "ready", True)):
        supervised.on_beat(Beat("a", 7, 1, phase, step, 5.0), 1.0)
        assert supervised.resting == resting
        assert supervised.period(HEARTBEAT) == (IDLE_HEARTBEAT if resting else HEARTBEAT)
        assert supervised.period(2.0) == 2.0


def test_a_starved_watchdog_does_not_conclude_that_actors_sleep() -> None:
    """A thread of this process that wants to run may be the one that has a beat to read."""
    sleeps = subprocess.Popen(["sleep", "300"])
    works = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha512", b"x", b"y", 1_500_000))
    try:
        until = time.monotonic() + 20
        while not (activity := activity_seen_by_watcher(sleeps.pid)) or activity.runnable:
            assert time.monotonic() < until, "the thread that looks does not count"
        works.start()
        while not (activity := activity_seen_by_watcher(sleeps.pid)) or not activity.runnable:
            assert works.is_alive() and time.monotonic() < until
        assert process_activity(sleeps.pid) == activity._replace(runnable=False)
        os.kill(sleeps.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, sleeps.pid, os.WSTOPPED)
        activity = activity_seen_by_watcher(sleeps.pid)
        assert activity is not None and activity.stopped and not activity.runnable
    finally:
        sleeps.kill()
        sleeps.wait()
        if works.ident is not None:
            works.join()
    assert activity_seen_by_watcher(sleeps.pid) is None


def test_processes_are_seen_as_they_are() -> None:
    """Real ones: a sleeping, a stopped and a spinning child."""
    sleeps = subprocess.Popen(["sleep", "300"])
    spins = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until = time.monotonic() + 20
        while (activity := process_activity(spins.pid)) is None or activity.cpu_seconds < 0.1:
            assert time.monotonic() < until
        assert activity.runnable and not activity.stopped
        activity = process_activity(sleeps.pid)
        assert activity is not None and not activity.runnable and not activity.stopped
        os.kill(spins.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, spins.pid, os.WSTOPPED)
        activity = process_activity(spins.pid)
        assert activity is not None and activity.stopped and not activity.runnable
    finally:
        for process in (sleeps, spins):
            process.kill()
            process.wait()
    assert process_activity(spins.pid) is None


@pytest.mark.parametrize("phase", ["starting", "loading", "warming"])
def test_a_loading_actor_may_be_silent_for_longer(phase: str) -> None:
    actor = Actor("a", phase, budget=600.0)
    run(actor, seconds=0.0)
    actor.beats = False
    when, hang = run(actor, seconds=100.0, diagnosis="asleep")["a"]
    assert hang.cause == SILENT and abs(when - STARTING_SILENCE) <= TICK
    assert "no sign of life for 60." in hang.text and phase in hang.text


@pytest.mark.parametrize("phase", ["starting", "loading", "warming"])
def test_a_stopped_actor_does_not_count_as_loading(phase: str) -> None:
    """So does not who was stopped before the watchdog was started that judges it."""
    actor = Actor("a", phase, budget=600.0)
    run(actor, seconds=0.0)
    actor.beats = False
    when, hang = run(actor, seconds=100.0)["a"]
    assert hang.cause == SILENT and abs(when - STOPPED_SILENCE) <= TICK
    assert hang.text.endswith(f"({phase}, stopped)")


def test_an_actor_that_never_sends_a_heartbeat_is_detected() -> None:
    actor = Actor("a")
    actor.beats = False
    assert run(actor, seconds=59.0, diagnosis="") == {}
    assert run(actor, seconds=61.0, diagnosis="")["a"][1].cause == SILENT


@pytest.mark.parametrize("phase", sorted(READY_PHASES) + ["draining"])
def test_a_stuck_loop_is_detected_despite_heartbeats(phase: str) -> None:
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
def test_loading_and_graph_capture_have_their_declared_time(phase: str) -> None:
    worker = Actor("worker-0", phase, budget=600.0)
    worker.loops = False  # where it all happens on the loop
    assert run(worker, seconds=599.0) == {}
    assert run(worker, start=599.0, seconds=2.0)["worker-0"][1].cause == HUNG


def test_the_idle_need_not_move() -> None:
    actors = [Actor("worker-0", "idle"), Actor("scheduler", "ready"), Actor("tokenizer", "ready")]
    assert run(*actors, seconds=4000.0) == {}


def test_a_waiting_actor_is_not_blamed_for_its_peer() -> None:
    """The worker's step takes for ever. Scheduler and detokenizer make no progress either, and
    would have less patience."""
    worker = Actor("worker-0", "stepping", budget=60.0)
    scheduler = Actor("scheduler", "stepping", budget=60.0)
    detokenizer = Actor("detokenizer", "stepping", budget=30.0)
    found = run(worker, scheduler, detokenizer, seconds=200.0)
    assert found.keys() == {"worker-0"}
    # It is killed, starts and loads for five minutes, while the others go on to wait.
    worker.supervised = starting("worker-0", 8, 2, 200.0)
    worker.phase, worker.budget = "loading", 600.0
    assert run(worker, scheduler, detokenizer, start=200.0, seconds=300.0) == {}


def test_a_hanging_actor_without_excuse_is_detected() -> None:
    """The worker rests, yet the scheduler has work and makes no step."""
    worker, scheduler = Actor("worker-0", "idle"), Actor("scheduler", "stepping", budget=60.0)
    when, hang = run(worker, scheduler, seconds=200.0)["scheduler"]
    assert hang.cause == HUNG and 60.0 <= when <= 60.0 + MARGIN + 2 * TICK


def test_a_slow_heartbeat_does_not_count_as_silence() -> None:
    supervised = starting("a", 7, 1, 0.0)
    supervised.on_beat(Beat("a", 7, 1, "idle", 0, 5.0), 0.0)
    for diagnosis in ("", "asleep"):
        assert find_hang(supervised, {"a": supervised}, 29.0, SILENCE, 10.0, diagnosis) is None
        assert find_hang(supervised, {"a": supervised}, 31.0, SILENCE, 10.0, diagnosis) is not None


def test_the_dead_and_the_condemned_are_left_alone() -> None:
    for phase, hang_cause in (("exited", ""), ("idle", SILENT)):
        supervised = starting("a", 7, 1, 0.0)
        supervised.phase, supervised.hang_cause = phase, hang_cause
        assert find_hang(supervised, {"a": supervised}, 1000.0, SILENCE, HEARTBEAT) is None
