"""The watchdog's core: readiness, ages, fencing, failures."""

from __future__ import annotations

import pytest

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.core import CLIENT, Send
from actorium.actors.errors import EngineFailed
from actorium.actors.messages import (
    ActorStatus,
    Beat,
    Child,
    Children,
    Exited,
    Fatal,
    GetStatus,
    Status,
)
from actorium.actors.watchdog.core import MAX_WAITERS, WatchdogCore


def make(*roles: str, start_timeout: float = 100.0) -> WatchdogCore:
    core = WatchdogCore("e", 1, 99, start_timeout, RecoveryConfig(restart=False))
    if roles:
        core.on_message(Children([Child(r, 10 + i, 1) for i, r in enumerate(roles)]), 0.0)
    return core


def beat(role: str, phase: str = "ready", step: int = 0, epoch: int = 1, pid: int = 10,
         detail: str = "") -> Beat:
    return Beat(role, pid, epoch, phase, step, 5.0, {"g": 1.0}, detail)


def ask(core: WatchdogCore, now: float, wait: bool = False, client: bytes = b"c") -> Status | None:
    """Ask and wake; the answer if there is one."""
    core.on_client(client, GetStatus("r", wait), now)
    return answer(core.on_wake(now), client)


def answer(sends: object, client: bytes = b"c") -> Status | None:
    for send in sends:  # type: ignore[attr-defined]
        assert isinstance(send, Send) and send.to == CLIENT
        if send.client == client:
            return send.message  # type: ignore[no-any-return]
    return None


def line(core: WatchdogCore, role: str, now: float) -> ActorStatus:
    report = ask(core, now)
    assert report is not None
    return next(actor for actor in report.actors if actor.role == role)


def test_not_ready_before_the_launcher_reports_the_processes() -> None:
    core = make()
    core.on_message(beat("a"), 0.0)
    report = ask(core, 1.0)
    assert report is not None and not report.ready and report.error is None


def test_ready_when_every_child_is() -> None:
    core = make("a", "b")
    core.on_message(beat("a", "idle"), 1.0)
    core.on_message(beat("b", "loading", pid=11), 1.0)
    assert ask(core, 1.0, wait=True) is None
    core.on_message(beat("b", "stepping", pid=11), 2.0)
    report = answer(core.on_wake(2.0))
    assert report is not None and report.ready and report.rid == "r"
    assert [(a.name, a.role, a.pid, a.phase) for a in report.actors] == [
        ("e", "a", 10, "idle"), ("e", "b", 11, "stepping")]
    assert core.on_wake(3.0) == [], "answered once"
    core.on_message(beat("a", "idle"), 3.0)
    core.on_message(beat("b", "stepping", pid=11), 3.0)
    at_once = ask(core, 3.0, wait=True)
    assert at_once is not None and at_once.ready


@pytest.mark.parametrize("phase", ["starting", "loading", "warming", "draining", "stopping"])
def test_phases_that_are_not_ready(phase: str) -> None:
    core = make("a")
    core.on_message(beat("a", phase), 0.0)
    report = ask(core, 0.0)
    assert report is not None and not report.ready


def test_step_age_runs_from_the_last_step_or_phase() -> None:
    core = make("a")
    core.on_message(beat("a", "stepping", 5), 10.0)
    core.on_message(beat("a", "stepping", 5), 12.0)
    assert (line(core, "a", 13.0).step_age, line(core, "a", 13.0).beat_age) == (3.0, 1.0)
    core.on_message(beat("a", "stepping", 6), 14.0)
    assert line(core, "a", 15.0).step_age == 1.0
    core.on_message(beat("a", "idle", 6, detail="resting"), 16.0)
    now = line(core, "a", 16.5)
    assert (now.step_age, now.step, now.detail, now.gauges) == (
        0.5, 6, "resting", {"g": 1.0, "restarts": 0.0})


def test_older_epochs_are_fenced_off() -> None:
    core = make("a")
    core.on_message(beat("a", "idle", 50, epoch=2, pid=20), 1.0)
    core.on_message(beat("a", "stepping", 99, epoch=1, pid=10), 2.0)
    now = line(core, "a", 3.0)
    assert (now.epoch, now.pid, now.phase, now.step, now.beat_age) == (2, 20, "idle", 50, 2.0)
    core.on_message(Exited("a", 10, 1, -9), 4.0)  # the old one's end is no news
    report = ask(core, 4.0)
    assert report is not None and report.error is None
    core.on_message(beat("a", "stepping", 7, epoch=2, pid=66), 5.0)  # an impostor of this epoch
    assert line(core, "a", 5.0).step == 50


def test_failures_answer_waiting_clients() -> None:
    core = make("a", "b")
    assert ask(core, 0.0, wait=True) is None
    core.on_message(Fatal("a", 10, 1, "cannot read the weights", "stack"), 1.0)
    report = answer(core.on_wake(1.0))
    assert report is not None and not report.ready
    assert report.error == "a: cannot read the weights"
    core.on_message(Exited("a", 10, 1, 2), 2.0)
    now = line(core, "a", 3.0)
    assert (now.phase, now.detail) == ("exited", "cannot read the weights")


def test_an_exit_without_last_words() -> None:
    core = make("a")
    core.on_message(beat("a"), 0.0)
    core.on_message(Exited("a", 10, 1, -9), 1.0)
    report = ask(core, 1.0, wait=True)
    assert report is not None and not report.ready and report.error == "a was killed by SIGKILL"


def test_start_timeout_names_the_late_actors() -> None:
    core = make("a", "b", start_timeout=10.0)
    core.on_message(beat("a"), 1.0)
    assert core.next_timer() == 10.0
    core.on_message(beat("a"), 9.9)
    core.on_wake(9.9)
    with pytest.raises(EngineFailed, match="start_timeout: not ready after 10 s: b is starting"):
        core.on_wake(10.0)


def test_an_engine_that_was_ready_has_no_start_timeout() -> None:
    core = make("a", start_timeout=10.0)
    core.on_message(beat("a"), 1.0)
    core.on_wake(1.0)
    core.on_message(beat("a", "draining"), 5.0)
    assert core.next_timer() is None
    core.on_wake(50.0)


def test_waiters_are_bounded() -> None:
    core = make("a")
    for i in range(MAX_WAITERS):
        assert ask(core, 0.0, wait=True, client=b"%d" % i) is None
    one_more = ask(core, 0.0, wait=True, client=b"late")
    assert one_more is not None and not one_more.ready


def test_drain_answers_the_waiters_and_is_done() -> None:
    core = make("a")
    assert ask(core, 0.0, wait=True) is None
    assert not core.done
    core.drain(1.0)
    assert not core.done
    report = answer(core.on_wake(1.0))
    assert report is not None and report.error == "the engine is stopping"
    assert core.done and core.health().phase == "draining"
    assert core.next_timer() is None
