"""One actor in a real process: messages, timer, threads, faults, signals, heartbeats."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from helpers_frames import BAD_FRAMES
from helpers_ledger import read_all
from helpers_runtime import ActorProcess, Peer, Say, Told, Union, make_config, short_dir

from actorium.actors.config.tree import RecoveryConfig, dump
from actorium.actors.core import LEDGER, Context, Core, Health, Send
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.segments import LedgerFull, LedgerRecord, SegmentWriter
from actorium.actors.messages import Beat, Fatal, ToLauncher, ToWatchdog
from actorium.actors.runtime.mailbox import Inbox
from actorium.actors.runtime.process import EXIT_ORPHAN
from actorium.actors.runtime.rundir import address
from actorium.actors.runtime.shell import Shell


@pytest.fixture
def base() -> Iterator[Path]:
    with short_dir() as path:
        yield path


class Listener:
    """Stands in for the watchdog or the launcher."""

    def __init__(self, base: Path, name: str, union: Any) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.inbox = Inbox(self.context, address(base, name), union, hwm=1000)

    def until(self, wanted: Callable[[Any], bool], timeout: float = 20.0) -> list[Any]:
        """Messages up to and with the first that is wanted, with times of arrival."""
        got: list[tuple[float, Any]] = []
        end = time.monotonic() + timeout
        while True:
            for message in self.inbox.receive(1):
                got.append((time.monotonic(), message))
                if wanted(message):
                    return got
            if not self.inbox.pending():
                left = end - time.monotonic()
                assert left > 0, f"never came; got {[m for _, m in got][-5:]}"
                self.inbox.socket.poll(int(left * 1000) + 1)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.inbox.close()
        self.context.destroy(linger=0)


def watchdog(base: Path) -> Listener:
    return Listener(base, "watchdog.inbox", ToWatchdog)


def launcher(base: Path) -> Listener:
    return Listener(base, "launcher.inbox", ToLauncher)


def push(base: Path, role: str) -> tuple[zmq.Context[Any], zmq.Socket[bytes]]:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 5)
    socket.connect(address(base, f"{role}.inbox"))
    return context, socket


# --- messages ---

def test_echo_burst_alarm_and_thread(base: Path) -> None:
    with ActorProcess(base) as actor, actor.peer() as peer:
        assert peer.ask(Say("hello", 7)) == Told("hello", 7)
        for i in range(2000):  # many bursts, one edge of the fd
            peer.send(Say("x", i))
        assert [peer.receive().number for _ in range(2000)] == list(range(2000))
        began = time.monotonic()
        assert peer.ask(Say("alarm", 50)).text == "ring"
        assert 0.045 <= time.monotonic() - began < 5
        assert peer.ask(Say("thread")).text == "from a thread"
        actor.terminate()
        assert actor.wait() == 0


def test_every_bad_frame_at_a_live_actor(base: Path) -> None:
    with ActorProcess(base) as actor, actor.peer() as bad, actor.peer() as good:
        context, socket = push(base, actor.role)
        rng = random.Random(3)
        frames = [*BAD_FRAMES.values(), *(rng.randbytes(rng.randint(0, 200)) for _ in range(500))]
        for i, frame in enumerate(frames):
            bad.socket.send(frame)
            socket.send(frame)
            if i % 50 == 0:
                bad.socket.send_multipart([frame, frame])
                socket.send_multipart([frame, frame])
                assert good.ask(Say("still there", i)).number == i
        socket.send(msgspec.msgpack.encode(Told("through the inbox")))
        answers = {bad.receive().text for _ in range(len(frames))}
        assert all(text.startswith("bad: ") for text in answers)
        assert "bad: text: Expected `str`, got `int`" in answers
        bad.socket.send(b"x" * (5 << 20))  # beyond MAXMSGSIZE: costs the sender its connection
        while True:
            good.send(Say("got"))
            texts = []
            while (answer := good.receive()).text != "end":
                texts.append(answer.text)
            if "through the inbox" in texts:
                break
        # "gone": an answer to the bad client that its lost connection came before.
        assert [text for text in texts if text != "gone"] == ["through the inbox"]
        assert actor.process.poll() is None
        context.destroy(linger=0)


def test_a_stopped_reader_gets_everything_when_it_goes_on(base: Path) -> None:
    with ActorProcess(base, "sink", queue_messages=2000) as sink, \
            ActorProcess(base, "echo", queue_messages=2000) as echo, \
            sink.peer() as ask, echo.peer() as peer:
        ask.ask(Say("up"))
        sink.process.send_signal(signal.SIGSTOP)
        for _ in range(4):  # more than the pipe takes, less than pipe and backlog do
            peer.send(Say("flood", 900, "sink"))
        assert peer.ask(Say("not blocked")).text == "not blocked"
        sink.process.send_signal(signal.SIGCONT)
        peer.send(Say("last", 0, "sink"))
        while True:
            ask.send(Say("got"))
            count, last = 0, ""
            while (answer := ask.receive()).text != "end":
                count, last = count + 1, answer.text
            if last == "last":
                break
        assert count == 3601


def test_a_reader_that_never_reads_is_a_fatal_error(base: Path) -> None:
    with launcher(base) as ears, ActorProcess(base, queue_messages=16) as actor, \
            actor.peer() as peer:
        peer.send(Say("flood", 100, "nobody"))
        _, fatal = ears.until(lambda m: isinstance(m, Fatal))[-1]
        assert "nobody.inbox: 16 messages wait" in fatal.message
        assert actor.wait() == 1


def test_the_core_is_notified_of_a_disconnected_client(base: Path) -> None:
    with ActorProcess(base) as actor, actor.peer() as peer:
        with actor.peer() as brief:
            assert brief.ask(Say("hi")).text == "hi"
            brief.send(Say("alarm", 100))
        while True:
            peer.send(Say("got"))
            if peer.receive().text == "gone":
                break


# --- faults ---

def test_an_exception_of_the_core_is_fatal_with_its_stack(base: Path) -> None:
    with launcher(base) as ears, watchdog(base) as dog, ActorProcess(base) as actor, \
            actor.peer() as peer:
        peer.send(Say("raise"))
        for listener in (ears, dog):
            _, fatal = listener.until(lambda m: isinstance(m, Fatal))[-1]
            assert fatal.message.startswith("ZeroDivisionError in on_client (helpers_")
            assert "on_client" in fatal.stack and fatal.pid == actor.pid and fatal.epoch == 1
        assert actor.wait() == 1
        lines = [json.loads(line) for line in (base / "echo.log").read_text().splitlines()]
        assert any("ZeroDivisionError" in line.get("stack", "") for line in lines)
        assert all(line["role"] == "echo" and line["epoch"] == 1 for line in lines)
    assert not list(base.glob("echo.inbox")) and not list(base.glob("echo.front"))


@pytest.mark.parametrize(("target", "exit_code", "code", "text"), [
    ("helpers_runtime:build_bad_model", 2, "bad_model", "model: /no/such: no config.json there"),
    ("helpers_runtime:build_broken", 1, "internal", "KeyError: 'broken on purpose'"),
    ("helpers_runtime:no_such", 1, "internal", "AttributeError"),
    ("no.such.module:build", 1, "internal", "ModuleNotFoundError"),
])
def test_a_core_that_cannot_be_built(base: Path, target: str, exit_code: int, code: str,
                                     text: str) -> None:
    with launcher(base) as ears, ActorProcess(base, target=target) as actor:
        _, fatal = ears.until(lambda m: isinstance(m, Fatal))[-1]
        assert fatal.code == code and text in fatal.message
        assert actor.wait() == exit_code


def test_a_launcher_that_is_late_still_hears_why(base: Path) -> None:
    """A busy machine may keep it from reading for longer than sockets linger."""
    with ActorProcess(base, target="helpers_runtime:build_bad_model") as actor:
        time.sleep(1.2)
        with launcher(base) as ears:
            _, fatal = ears.until(lambda m: isinstance(m, Fatal))[-1]
            assert fatal.code == "bad_model" and actor.wait() == 2


# --- signals ---

def test_sigterm_drains_and_sigint_is_for_the_launcher(base: Path) -> None:
    with ActorProcess(base) as actor, actor.peer() as peer:
        peer.ask(Say("up"))
        actor.process.send_signal(signal.SIGINT)
        assert peer.ask(Say("still up")).text == "still up"
        actor.terminate()
        assert actor.wait() == 0
        assert sorted(os.listdir(base)) == ["config.json", "echo.log"]


def test_drain_timeout_ends_an_actor_that_is_never_done(base: Path) -> None:
    with ActorProcess(base, drain_timeout=0.3) as actor, actor.peer() as peer:
        peer.send(Say("hold"))
        peer.ask(Say("up"))
        began = time.monotonic()
        actor.terminate()
        assert actor.wait() == 0
        assert time.monotonic() - began >= 0.3


def test_a_second_sigterm_does_not_wait(base: Path) -> None:
    with ActorProcess(base, drain_timeout=60.0) as actor, watchdog(base) as dog, \
            actor.peer() as peer:
        peer.send(Say("hold"))
        peer.send(Say("phase", 0, "draining"))
        dog.until(lambda m: m.phase == "draining")
        actor.terminate()
        assert peer.ask(Say("draining, yet answering")).text == "draining, yet answering"
        actor.terminate()
        assert actor.wait() == 0


def test_stacks_on_sigusr1(base: Path) -> None:
    with ActorProcess(base) as actor, actor.peer() as peer:
        peer.ask(Say("up"))
        actor.process.send_signal(signal.SIGUSR1)
        assert peer.ask(Say("still up")).text == "still up"
        assert "shell.py" in (base / "echo.log").read_text()


def test_an_actor_of_another_parent_ends_at_once(base: Path) -> None:
    (base / "config.json").write_bytes(dump(make_config(base)))
    argv = [sys.executable, "-P", "-m", "actorium.actors.runtime.main", "echo", str(base), "1", "1",
            "helpers_runtime:build"]
    assert subprocess.run(argv, timeout=30).returncode == EXIT_ORPHAN


def test_wrong_arguments_get_one_line() -> None:
    argv = [sys.executable, "-P", "-m", "actorium.actors.runtime.main", "echo"]
    done = subprocess.run(argv, timeout=30, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ") and done.stderr.count("\n") == 1


# --- heartbeats ---

def test_phases_are_reported_at_once(base: Path) -> None:
    with watchdog(base) as dog, ActorProcess(base, "slow", heartbeat=30.0) as actor, \
            actor.peer() as peer:
        beats = [m for _, m in dog.until(lambda m: m.phase == "idle")]
        assert [beat.phase for beat in beats] == ["starting", "loading", "idle"]
        assert all((beat.role, beat.pid, beat.epoch) == ("slow", actor.pid, 1) for beat in beats)
        assert beats[0].budget == 60.0 and beats[-1].budget == 5.0
        peer.send(Say("phase", 0, "stepping"))
        dog.until(lambda m: m.phase == "stepping")  # long before the next beat of 30 s


def test_idle_beats_slower_than_work(base: Path) -> None:
    with watchdog(base) as dog, ActorProcess(base, heartbeat=0.1) as actor, actor.peer() as peer:
        dog.until(lambda m: m.phase == "idle")
        peer.send(Say("phase", 0, "stepping"))
        dog.until(lambda m: m.phase == "stepping")
        times = [dog.until(lambda m: True)[-1][0] for _ in range(4)]
        assert times[-1] - times[0] < 1.5, "three of 0.1 s, not of 1 s"
        peer.send(Say("phase", 0, "idle"))
        dog.until(lambda m: m.phase == "idle")
        times = [dog.until(lambda m: True)[-1] for _ in range(3)]
        assert times[2][0] - times[0][0] > 0.8
        beat: Beat = times[-1][1]
        assert beat.step >= 2 and beat.gauges == {"got": 0.0}


def test_an_idle_actor_sleeps(base: Path) -> None:
    with watchdog(base) as dog, ActorProcess(base) as actor:
        dog.until(lambda m: m.phase == "idle")
        dog.until(lambda m: True)
        ticks = cpu_ticks(actor.pid)
        for _ in range(2):
            dog.until(lambda m: True)
        assert cpu_ticks(actor.pid) - ticks <= 7  # of 10 ms, in one second or two


def test_heartbeats_continue_and_report_a_stuck_loop(base: Path) -> None:
    with watchdog(base) as dog, ActorProcess(base, heartbeat=0.05) as actor, actor.peer() as peer:
        peer.ask(Say("up"))
        dog.until(lambda m: m.phase == "idle" and m.loop_age < 0.5)
        peer.send(Say("stuck"))
        dog.until(lambda m: m.loop_age > 0.2)
        beats = [m for _, m in dog.until(lambda m: m.loop_age > 1.0)]
        ages = [m.loop_age for m in beats]
        assert ages == sorted(ages) and beats[-1].phase == "idle"


def test_heartbeats_report_a_loop_that_runs_again(base: Path) -> None:
    with watchdog(base) as dog, ActorProcess(base, heartbeat=0.05) as actor, actor.peer() as peer:
        peer.send(Say("phase", 0, "stepping"))
        dog.until(lambda m: m.phase == "stepping")
        peer.send(Say("compute", 600))
        dog.until(lambda m: m.loop_age > 0.2)
        beat = dog.until(lambda m: m.loop_age < 0.1)[-1][1]
        assert dog.until(lambda m: m.step == 2)[-1][1].phase == beat.phase == "stepping"


def test_a_stopped_process_is_silent(base: Path) -> None:
    with watchdog(base) as dog, ActorProcess(base, heartbeat=0.05) as actor, actor.peer() as peer:
        peer.ask(Say("up"))
        dog.until(lambda m: m.phase == "idle")
        actor.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, actor.pid, os.WSTOPPED)
        dog.inbox.receive(1000)
        # IDLE_HEARTBEAT is half a second: nothing comes in twice that time.
        assert not dog.inbox.socket.poll(1000)
        actor.process.send_signal(signal.SIGCONT)
        dog.until(lambda m: True)


def test_the_watchdogs_beats_go_to_the_launcher_as_well(base: Path) -> None:
    target = "actorium.actors.watchdog.watchdog_actor:build"
    with launcher(base) as ears, ActorProcess(base, "watchdog", target) as actor:
        beat = ears.until(lambda m: isinstance(m, Beat) and m.phase == "ready")[-1][1]
        assert (beat.role, beat.pid, beat.epoch) == ("watchdog", actor.pid, 1)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_a_client_by_hand_needs_no_more_than_a_dealer(base: Path) -> None:
    with ActorProcess(base) as actor, Peer(base, actor.role) as one, Peer(base, actor.role) as two:
        one.send(Say("a"))
        two.send(Say("b"))
        assert (one.receive().text, two.receive().text) == ("a", "b")


def test_a_message_to_the_worker_goes_to_every_rank(base: Path) -> None:
    with ActorProcess(base, "scheduler", ranks=3) as actor, \
            actor.peer() as peer, Listener(base, "worker-0.inbox", Union) as first, \
            Listener(base, "worker-2.inbox", Union) as last:
        peer.send(Say("a plan", 7, to="worker-0"))
        for rank in (first, last):
            assert rank.until(lambda told: True)[0][1] == Told("a plan", 7)


class _Full(Core):
    """Commits one record on a disk that stays full, then waits to be woken."""

    inbox = Union
    done = False
    woken_lost = False

    def __init__(self, base: Path) -> None:
        self.ledger = Ledger(base / "ledger")
        self.began = self.lost = False
        self.stop: Callable[[], None] = lambda: None

    def on_wake(self, now: float) -> Sequence[Send]:
        if self.lost:
            self.woken_lost = True
            self.stop()
        if self.began:
            return []
        self.began = True
        return [Send(LEDGER, LedgerRecord(9, b"x"))]

    def on_ledger_lost(self, why: str, now: float) -> None:
        self.lost = True

    def health(self) -> Health:
        return Health("idle", 0, 60.0)


def test_a_core_is_woken_when_it_may_go_on_without_a_ledger(
        base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By nobody's message: the disk stays full, and no client says anything."""

    def commit(self: SegmentWriter, batch: bytes) -> None:
        raise LedgerFull(28, "the ledger takes no more: no space")

    core = _Full(base)
    monkeypatch.setattr(SegmentWriter, "commit", commit)
    config = make_config(base)
    config = msgspec.structs.replace(config, recovery=RecoveryConfig(ledger_patience=0.15))
    shell = Shell(Context(config, base, "echo", 1, 0))
    core.stop = shell.loop.stop
    shell.loop.call_later(2.0, shell.loop.stop)
    try:
        assert shell.run(lambda ctx: core) == 0
    finally:
        gc.unfreeze()
    assert core.lost and core.woken_lost


class _EndsByItself(Core):
    """Has work that ends at some time, of which no message and no timer tells."""

    inbox = Union

    def __init__(self, seconds: float = 0.3) -> None:
        self.until = time.monotonic() + seconds

    def on_wake(self, now: float) -> Sequence[Send]:
        return []

    @property
    def done(self) -> bool:
        return time.monotonic() >= self.until

    def health(self) -> Health:
        return Health("draining", 0, 60.0)


def test_a_drain_ends_when_the_work_does_whoever_says_so(base: Path) -> None:
    """As a gateway's, whose requests do not pass through the shell."""
    shell = Shell(Context(make_config(base, drain_timeout=4.0), base, "echo", 1, 0))
    shell.loop.call_later(0.05, shell._on_sigterm)
    began = time.monotonic()
    try:
        assert shell.run(lambda ctx: _EndsByItself()) == 0
    finally:
        gc.unfreeze()
    assert 0.3 <= time.monotonic() - began < 2.0


def test_files_of_a_ledger_that_go_from_an_idle_actor_are_written_anew(base: Path) -> None:
    class Idle(_EndsByItself):
        ledger = Ledger(base / "ledger")

        def live_records(self) -> list[list[LedgerRecord]]:
            return [[LedgerRecord(9, b"an answer that nobody has fetched yet")]]

    def remove() -> None:
        for path in (base / "ledger").glob("*.seg"):
            path.unlink()

    shell = Shell(Context(make_config(base), base, "echo", 1, 0))
    shell.loop.call_later(0.1, remove)
    shell.loop.call_later(1.9, shell.loop.stop)
    try:
        shell.run(lambda ctx: Idle(3600.0))
    finally:
        gc.unfreeze()
    assert [kind for kind, _ in read_all(base / "ledger")[0]][1:] == [9]
