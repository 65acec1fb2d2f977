"""The launcher: starts an engine's actors, waits on them, stops them, leaves nothing behind.

With `recovery.restart` it is the watchdog's hands once the engine has been ready: it kills and
starts as told. Over the watchdog itself it watches on its own, by the same rules.

It waits in one poll on pidfds, its inbox and a wake-up pipe, and imports no event loop: the worker
must be on its way before anything heavy is loaded. Each actor leads its own process group and dies
with the launcher (parent-death signal). An `Engine` runs it as `job` does.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actorium.actors.config import tree as configs
from actorium.actors.config.rules import checked
from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError, BadConfig, BadModel, EngineUnavailable
from actorium.actors.launcher.children import Actor, Actors
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.messages import (
    Beat,
    Children,
    Exited,
    Fatal,
    Kill,
    Restarted,
    Spawn,
    ToLauncher,
    Up,
)
from actorium.actors.runtime.console import print_notice
from actorium.actors.runtime.process import (
    DRAIN_SIGNAL,
    EXIT_BAD_CONFIG,
    EXIT_DRAINED,
    EXIT_FAULT,
    describe_exit,
    kill_group,
    send_signal,
)
from actorium.actors.runtime.roles import (
    LAUNCHER,
    WATCHDOG,
    drains,
    hears_of_drain,
    missing_packages,
    refuses,
    roles_of,
    stop_rank,
)
from actorium.actors.runtime.rundir import RunDir, address, sweep, write_private
from actorium.actors.runtime.security import curve_keys as keys

if TYPE_CHECKING:
    from actorium.actors.launcher.watchdog_link import Keeper
    from actorium.actors.runtime.mailbox import Inbox

STOP_GRACE = 3.0
"""Seconds an actor gets to end once it has nothing left to drain."""
FAULT_GRACE = 0.5
"""The same in an engine that has failed."""
LAST_WORDS = 0.2
"""Seconds to wait for the Fatal of an actor that exited with an error code."""
SETTLED = 2.0
"""Seconds from its start in which a successor may not have heard yet what goes on."""
STACKS = 0.2
"""Seconds that an actor gets to write down its stacks before it is killed."""
UNHURT = (EXIT_DRAINED, -signal.SIGTERM, -DRAIN_SIGNAL)
"""Ends of an actor that was told to stop; by the signals themselves, if it had only begun."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Launcher:
    """One engine. `run` blocks until it is over; `stop` may be called from any thread."""

    def __init__(self, config: Config, roles: Mapping[str, str] | None = None,
                 started: Callable[[Path], None] | None = None) -> None:
        """`roles` (role -> "module:function") replaces the engine's own; `started(run_dir)` is
        called when all actors have been started, long before they are ready."""
        self.config = config
        self.roles = dict(roles) if roles is not None else roles_of(config)
        self.failure: ActoriumError | None = None
        """Why the engine ended, if not by `stop`."""
        self._started = started
        self._run_dir: RunDir | None = None
        self._poll = select.poll()
        self._actors = Actors(Path(), {}, self._poll)
        self._condemned: dict[Actor, float] = {}
        """When to kill whom."""
        self._fatals: dict[int, Fatal] = {}
        self._inbox: Inbox | None = None
        self._keeper: Keeper | None = None
        self._up = False
        """The engine has been ready."""
        self._rank = -1
        """Of the group that is being stopped."""
        self._hurried = False
        """The drain timeout is over: who is killed is killed by us."""
        self._gap: tuple[str, str, float] | None = None
        """Who died while the engine drained: role, what to say of it, and when it was started
        again (infinity: not yet)."""
        self._undrained = ""
        """Who died while streams may still have needed it, and can have no successor."""
        self._context: Any = None
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._parent_fd: int | None = None
        self._stops = 0
        self._code = EXIT_DRAINED

    def run(self) -> int:
        """Start, wait, stop. Returns the exit code: 0 drained, 1 fault, 2 bad configuration.

        The reason of 1 and 2 goes to stderr as one line, and into `failure`.
        """
        old = self._catch_signals()
        try:
            self._start()
            self._wait_until(lambda: self._stops > 0 or self.failure is not None)
            self._stop_actors()
            if self._undrained:
                self._fail(EngineUnavailable(self._undrained), EXIT_FAULT)
        except ActoriumError as error:
            self._fail(error, EXIT_BAD_CONFIG)
        except OSError as error:
            self._fail(EngineUnavailable(f"cannot start: {error}"), EXIT_FAULT)
        finally:
            if old:
                signal.set_wakeup_fd(-1)
            self._clean_up()
            for number, handler in old.items():
                signal.signal(number, handler)
        if self.failure is not None:
            self._say(self.failure.message)
        return self._code

    def stop(self) -> None:
        """Drain and end; a second call ends it without draining. Safe in a signal handler."""
        self._stops += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"!")

    def tie_to(self, parent: int) -> None:
        """Stop when the process `parent` is gone. Unlike the parent-death signal, this does not
        mind which of the parent's threads started us."""
        self._parent_fd = os.pidfd_open(parent)
        if os.getppid() != parent:
            self.stop()

    # --- start ---

    def _catch_signals(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        # A signal that comes just before poll, or to another thread, does not interrupt poll; what
        # C writes to this pipe does.
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        return {number: signal.signal(number, lambda *_: self.stop()) for number in SIGNALS}

    def _start(self) -> None:
        runtime = checked(self.config).runtime
        if missing := missing_packages(self.config):
            raise BadConfig(f"an engine needs {', '.join(missing)}: pip install 'actorium[engine]'")
        check_machine(self.config)
        if runtime.listen is not None:
            keys.read_server(keys.directory(runtime.keys_dir))
        self._run_dir = RunDir(runtime.name, runtime.run_dir)
        path = self._run_dir.path
        write_private(path / "config.json", configs.dump(self.config))
        self._actors = Actors(path, self.roles, self._poll)
        for role in self.roles:
            self._actors.spawn(role)
        write_private(path / "engine.json", msgspec.json.encode({
            "name": runtime.name, "pid": os.getpid(), "model": self.config.model.model,
            "started": time.time(), "roles": list(self.roles)}))
        self._open_mailboxes(path)
        for fd in (self._wake_r, self._parent_fd):
            if fd is not None:
                self._poll.register(fd, select.POLLIN)
        if self._started is not None:
            self._started(path)
        sweep(runtime.run_dir)

    def _open_mailboxes(self, path: Path) -> None:
        """Only now: importing zmq takes longer than starting all the actors."""
        import zmq

        from actorium.actors.launcher.watchdog_link import Keeper
        from actorium.actors.runtime.mailbox import Inbox

        self._context = zmq.Context(io_threads=1)
        self._inbox = Inbox(self._context, address(path, "launcher.inbox"), ToLauncher,
                            hwm=self.config.runtime.queue_messages)
        self._poll.register(self._inbox.fd, select.POLLIN)
        self._keeper = Keeper(self.config, path, self._context)
        self._meet_watchdog()

    def _meet_watchdog(self) -> None:
        assert self._keeper is not None
        self._keeper.meet(self._actors.children(), self._actors.down(), self._up)

    # --- wait ---

    def _wait_until(self, over: Callable[[], bool], timeout: float | None = None) -> bool:
        """Handle events until `over()`; False on a timeout."""
        until = None if timeout is None else time.monotonic() + timeout
        self._read_inbox()
        while not over():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._turn(left)
        return True

    def _turn(self, timeout: float | None) -> None:
        events = self._poll.poll(self._patience(timeout))
        self._read_inbox()
        for fd, _ in events:
            if fd == self._wake_r:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            elif fd == self._parent_fd:
                self._poll.unregister(fd)
                self.stop()
            elif fd in self._actors.running:
                self._on_exit(fd)
        self._on_time(time.monotonic())

    def _patience(self, timeout: float | None) -> float | None:
        """Milliseconds until there is something to do though nothing happens."""
        now = time.monotonic()
        dues = [timeout] if timeout is not None else []
        dues += [at - now for at in self._condemned.values()]
        look = self._keeper.next_timer() if self._keeper is not None and self._up else None
        if look is not None:
            dues.append(look - now)
        return max(0.0, min(dues)) * 1000 + 1 if dues else None

    def _on_time(self, now: float) -> None:
        for actor in [a for a, at in self._condemned.items() if now >= at]:
            del self._condemned[actor]
            if self._actors.runs(actor):
                kill_group(actor.pid)
        if self._keeper is not None and self._up:
            for order in self._keeper.orders(now):
                self._on_message(order)

    def _read_inbox(self) -> None:
        if self._inbox is None:
            return
        while True:
            for message in self._inbox.receive(256):
                self._on_message(message)
            if not self._inbox.more:
                return

    def _on_message(self, message: Any) -> None:
        match message:
            case Fatal():
                self._fatals[message.pid] = message
            case Up():
                self._up = True
                self._tell_children()
            case Beat() if self._keeper is not None:
                self._keeper.hear(message)
            case Restarted() if self._keeper is not None:
                self._keeper.remember(message)
            case Kill():
                self._on_kill(message)
            case Spawn():
                self._on_spawn(message)

    def _on_kill(self, order: Kill) -> None:
        if order.role == LAUNCHER:
            if self._stops == 0:
                self._fail(EngineUnavailable(order.reason), EXIT_FAULT)
            return
        actor = self._actors.find(order.role, order.pid)
        if actor is not None and actor not in self._condemned:
            wait = STACKS if self._actors.dump(actor, order.reason) else 0.0
            self._condemned[actor] = time.monotonic() + wait
            self._say(f"{actor.role} (pid {actor.pid}) is killed: {order.reason}")

    def _on_spawn(self, order: Spawn) -> None:
        if not self._revives(order.role):
            return
        actor = self._actors.spawn(order.role, order.epoch)
        if actor is None:
            return
        self._say(f"{actor.role} is started again (pid {actor.pid}, epoch {actor.epoch})")
        if self._gap is not None and self._gap[0] == actor.role:
            self._gap = *self._gap[:2], time.monotonic()
        if actor.role == WATCHDOG:
            self._meet_watchdog()
        else:
            self._tell_children()

    def _tell_children(self) -> None:
        if self._keeper is not None:
            self._keeper.tell(Children(self._actors.children(), self._up))

    def _revives(self, role: str) -> bool:
        """An actor of this role that dies now is started again. While the engine drains, only those
        who are still needed for that."""
        if not (self.config.recovery.restart and self._up and self.failure is None):
            return False
        needed = self._stops == 1 and stop_rank(role) > self._rank and not refuses(role)
        return self._stops == 0 or needed

    def _on_exit(self, pidfd: int) -> None:
        actor, gone = self._actors.take(pidfd)
        self._condemned.pop(actor, None)
        unexpected = self._stops == 0 and self.failure is None
        if unexpected and gone.status in (EXIT_FAULT, EXIT_BAD_CONFIG):
            self._await_last_words(actor.pid)
        if unexpected and gone.status != EXIT_BAD_CONFIG:
            self._report_crash(gone)
        text = (f"{actor.role} (pid {actor.pid}) {describe_exit(gone.status)} while the engine "
                "drained")
        if self._revives(actor.role) and gone.status != EXIT_BAD_CONFIG:
            if self._stops and drains(actor.role):
                self._gap = actor.role, text, math.inf
            self._on_death(actor, gone)
        elif unexpected and self.failure is None:
            self._on_fault(actor, gone.status)
        elif (self._stops == 1 and not self._hurried and drains(actor.role)
              and gone.status not in UNHURT):
            self._undrained = text
        if self._keeper is not None:
            self._keeper.tell(gone)

    def _report_crash(self, gone: Exited) -> None:
        from actorium.actors.launcher import crash_reports as crash

        fatal = self._fatals.get(gone.pid)
        if self._run_dir is not None and self.config.runtime.crash_reports:
            crash.report(self._run_dir.path, gone, fatal.message if fatal is not None else "",
                         lambda path: self._say(f"crash report: {path}"))

    def _on_death(self, actor: Actor, gone: Exited) -> None:
        fatal = self._fatals.get(actor.pid)
        why = fatal.message if fatal is not None else ""
        self._say(f"{actor.role} (pid {actor.pid}) {describe_exit(gone.status)}"
                  f"{why and ': ' + why}")
        if self._keeper is not None:
            self._keeper.gone(gone, why)

    def _await_last_words(self, pid: int) -> None:
        until = time.monotonic() + LAST_WORDS
        while pid not in self._fatals and (left := until - time.monotonic()) > 0:
            assert self._inbox is not None
            poll = select.poll()
            poll.register(self._inbox.fd, select.POLLIN)
            poll.poll(left * 1000)
            self._read_inbox()

    def _on_fault(self, actor: Actor, status: int) -> None:
        fatal = self._fatals.get(actor.pid)
        if status == EXIT_BAD_CONFIG and fatal is not None:
            kind = BadConfig if fatal.code == BadConfig.code else BadModel
            self._fail(kind(fatal.message), EXIT_BAD_CONFIG)
            return
        why = f": {fatal.message}" if fatal is not None else ""
        text = f"{actor.role} (pid {actor.pid}) {describe_exit(status)}{why}"
        self._fail(EngineUnavailable(text), EXIT_FAULT)

    def _fail(self, error: ActoriumError, code: int) -> None:
        if self.failure is None:
            self.failure, self._code = error, code

    # --- stop ---

    def _stop_actors(self) -> None:
        """Close the door, then SIGTERM along the ring, each group when the one before is gone."""
        until = time.monotonic() + self.config.runtime.drain_timeout
        for actor in self._actors.running.values():
            if self.failure is None and hears_of_drain(actor.role):
                send_signal(actor.pid, DRAIN_SIGNAL)
        for rank in sorted({stop_rank(role) for role in self.roles}):
            self._rank = rank
            group = [a for a in self._actors.running.values() if stop_rank(a.role) == rank]
            self._miss(rank)
            for actor in group:
                send_signal(actor.pid, signal.SIGTERM)
            if self.failure is None:
                patience = max(0.0, until - time.monotonic()) + STOP_GRACE
            else:
                patience = FAULT_GRACE
            self._wait_until(partial(self._gone, group, True), patience)
            self._hurried = self._hurried or not self._gone(group)
            for actor in group:
                if self._actors.runs(actor):
                    kill_group(actor.pid)
            self._wait_until(partial(self._gone, group))

    def _miss(self, rank: int) -> None:
        """Who died while the engine drained, and whose successor did not come in time to hear of
        the streams from those who are gone now."""
        if self.failure is None and self._stops == 1 and self._gap is not None:
            role, text, filled = self._gap
            if stop_rank(role) == rank and time.monotonic() - filled < SETTLED:
                self._undrained = text

    def _gone(self, group: list[Actor], unless_hurried: bool = False) -> bool:
        if unless_hurried and self._stops > 1:
            return True
        return not any(self._actors.runs(actor) for actor in group)

    def _say(self, text: str) -> None:
        """A line for whoever runs the engine."""
        print_notice(text, self.config.runtime, LAUNCHER)

    def _clean_up(self) -> None:
        self._actors.close()
        for box in (self._inbox, self._keeper):
            if box is not None:
                box.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._run_dir is not None:
            self._run_dir.close()
        for fd in (self._wake_r, self._wake_w, self._parent_fd):
            if fd is not None:
                os.close(fd)
