"""The launcher that takes a running engine over from one of another version, or with other flags.

    python -m actorium.actors.launcher.handed_launcher STATE PYTHON
    python -m actorium.actors.launcher.handed_launcher --check STATE
    python -m actorium.actors.launcher.handed_launcher STATE --back BACK

STATE and BACK are descriptors (`handover`), PYTHON is the old version's interpreter. The process is
the one that the old launcher was. The old actors run on until the new ones have imported what they
need; then the old ones are killed, and the new ones continue as after a death: from the ledger, and
with the connections that the launcher holds.

If anything fails before they are ready, the old version gets the process back, and goes on. Where
it could not read what this one writes, the scheduler and the gateways are started last, when the
others are ready, and from there on the engine is this version's, whatever happens: the ledger and
the records of connections are not touched before. `--check` looks whether a state can be continued,
and says why not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from actorium import __version__
from actorium.actors.config import tree as configs
from actorium.actors.config.tree import Config
from actorium.actors.config.validation import validate
from actorium.actors.errors import ActoriumError, EngineFailed, EngineUnavailable
from actorium.actors.launcher.children import ChildProcess, ChildProcesses
from actorium.actors.launcher.engine import report_failure
from actorium.actors.launcher.handover import (
    CHECK_SECONDS,
    FORMATS_WRITTEN,
    GoingBack,
    HandedOver,
    UpgradeOutcome,
    execute,
    memory_of,
    read_back,
    read_state,
    write_outcome,
)
from actorium.actors.launcher.launcher import Launcher
from actorium.actors.launcher.preflight import check_all, with_installed_plugins
from actorium.actors.launcher.stopping import SIGNALS
from actorium.actors.messages import Fatal
from actorium.actors.runtime.http.connection_store import ConnectionStore
from actorium.actors.runtime.inflight_journal import acquit_all
from actorium.actors.runtime.process import EXIT_BAD_CONFIG, kill_group
from actorium.actors.runtime.roles import RELAY_ROLE, SCHEDULER, is_gateway, roles_of
from actorium.actors.runtime.rundir import RunDir, rewrite_private

PREPARE_SECONDS = 60.0
"""For the imports of the new actors, while the old ones run."""
END_SECONDS = 60.0
"""For killed processes to end: the memory of a GPU is given back slowly."""
PREPARING, ENDING, LOADING, STARTING, RUNNING, GOING_BACK, CONTINUING = (
    "preparing", "ending", "loading", "starting", "running", "going-back", "continuing")
"""Steps of an upgrade; see `upgrade_fault` in the configuration."""


class HandedLauncher(Launcher):
    """See the module."""

    def __init__(self, memory: int, state: HandedOver, back: GoingBack | None) -> None:
        """memory: descriptor of the state. Raises `ActoriumError`, with nothing changed."""
        config = configs.load(bytes(state.wanted if back is None else state.config))
        super().__init__(validate(config), roles_of(config) | state.overrides)
        self._memory, self._handed, self._back = memory, state, back
        self._step = PREPARING
        self._loaded = False
        self._ended_at = 0.0
        self.report, self._restart_records = state.report, state.restarts

    def _start(self) -> None:
        """Takes the engine over instead of starting one."""
        state, back = self._handed, self._back
        path = Path(state.run_dir)
        self._run_dir = RunDir.taken_over(path, state.lock)
        if back is not None and back.epochs and state.store is not None:
            state.store = state.store.left(back.descriptors)
        for fd in (self._memory, *state.descriptors):
            os.set_inheritable(fd, False)
        try:
            self._take_over(path, state, back)
            if back is None:
                self._replace()
            else:
                self._continue(back)
        except Exception as error:
            if self._up or back is not None:
                raise
            self._go_back(error.message if isinstance(error, ActoriumError) else
                          f"{type(error).__name__}: {error}")

    def _take_over(self, path: Path, state: HandedOver, back: GoingBack | None) -> None:
        if state.parent is not None:
            self.tie_to(state.parent)
        self._stops.register(self._poll)
        for _ in range(0 if back is None else back.stops):
            self.stop()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for pid in state.fork_servers:
            with contextlib.suppress(ChildProcessError):  # it was reaped before
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    kill_group(pid)
                    os.waitpid(pid, 0)
        self._actors = ChildProcesses(path, self.roles, self._poll, self._forks)
        self._actors.adopt(back.children if back is not None and back.epochs else state.children,
                           state.epochs | (back.epochs if back is not None else {}))
        if state.store is not None:
            self._connections = ConnectionStore(path, self._poll, self._actors.role_of, state.store)
        self._open_mailboxes(path)

    # --- forward ---

    def _replace(self) -> None:
        check_all(self.config)
        self._prepare()
        if self._stops.count:  # the old actors drain
            self._step, self._up = RUNNING, True
            self._connect_watchdog()
            self._outcome("failed", "the engine is stopping")
            return
        self._end_actors()
        self._enter(LOADING)
        if self._connections is not None and self.config.gateway.gateways > 1:
            self._connections.share_listeners()
        same = self._handed.formats == FORMATS_WRITTEN
        # Nobody would go on with what a further gateway has accepted, if this goes back.
        early = [role for role in self.roles if role in self._handed.epochs
                 and (same or not _writes_what_is_kept(role))]
        for role in early:
            self._actors.spawn_next(role)
        self._fault(LOADING)
        self._connect_watchdog()
        seconds = self.config.runtime.start_timeout
        self._wait_until(lambda: self._loaded or self.failure is not None or self._stops.count > 1,
                         seconds)
        if (failure := self.failure) is not None:
            self.failure = None
            raise failure
        if self._stops.count > 1:
            return
        if not self._loaded:
            raise EngineFailed(f"its actors were not ready after {seconds:g} s")
        self._up = True
        self._enter(STARTING)
        for role in self.roles:
            if role not in early:
                self._spawn_next(role)
        self._fault(STARTING)
        self._run(f"actorium {__version__} runs", "done")

    def _prepare(self) -> None:
        """Has the new actors import what they need while the old ones still run. If one of those
        ends meanwhile, this ends, too."""
        until = time.monotonic() + PREPARE_SECONDS
        running = len(self._actors.running)
        for role in self.roles:
            if role != RELAY_ROLE:
                self._actors.prepare(role)
        self._fault(PREPARING)
        while (not self._actors.prepared and len(self._actors.running) == running
               and self._stops.count == 0 and time.monotonic() < until):
            self._wait_until(lambda: self._stops.count > 0, 0.02)

    def _end_actors(self) -> None:
        """Kills the old actors. What they have sent is in the ledger, so that no moment is better
        than another; the step that is being computed is computed again. The relay stays, since its
        connections would end with it."""
        self._enter(ENDING)
        self._ended_at = time.monotonic()
        ending = self._end_all_but_the_relay()
        if any(map(self._actors.is_running, ending)):
            raise EngineFailed("the old actors do not end")
        for actor in ending:
            acquit_all(self._actors.run_dir, actor.role)
        self._fault(ENDING)
        rewrite_private(self._actors.run_dir / "config.json",
                        configs.dump(with_installed_plugins(self.config)))

    def _end_all_but_the_relay(self) -> list[ChildProcess]:
        """Waits for their ends, and returns them."""
        ending = [actor for actor in self._actors.running.values() if actor.role != RELAY_ROLE]
        for actor in ending:
            kill_group(actor.pid)
        self._wait_until(lambda: not any(map(self._actors.is_running, ending)), END_SECONDS)
        return ending

    def _run(self, text: str, state: str, why: str = "") -> None:
        self._enter(RUNNING)
        try:
            self._write_facts(self._handed.started)
        except OSError as error:
            self._say(f"upgrade: engine.json: {error.strerror}")
        self._send_children()
        self._forks.on_up(self.config, self._actors.run_dir, self.roles)
        self._outcome(state, why)
        self._say(f"upgrade: {text}")

    # --- back ---

    def _go_back(self, why: str) -> NoReturn:
        """Has the old version go on."""
        state = self._handed
        self._say(f"upgrade: {why}; actorium {state.release} goes on")
        self._step = ENDING
        self._fault(GOING_BACK)
        self._end_all_but_the_relay()
        for role in self.roles:
            acquit_all(self._actors.run_dir, role)
        relay = [child for child in self._actors.children() if child.role == RELAY_ROLE]
        self._actors.close(RELAY_ROLE)
        store = state.store if self._connections is None else self._connections.state()
        kept = [] if store is None else store.descriptors
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        back = GoingBack(why, self._actors.epochs, kept, self._stops.count, relay)
        try:
            execute(state.python, self._memory, ["--back", memory_of(back)], [*kept, *(
                fd for fd in (state.lock, state.report) if fd is not None)])
        except OSError as error:
            raise EngineUnavailable(f"the upgrade failed: {why}; and {state.python} cannot be "
                                    f"started: {error.strerror}") from None
        raise AssertionError("not reached")

    def _continue(self, back: GoingBack) -> None:
        """Goes on after an upgrade that has failed."""
        self._end_actors()
        self._up = True
        for role in self.roles:
            self._spawn_next(role)
        self._connect_watchdog()
        self._fault(CONTINUING)
        self._run(f"failed, actorium {__version__} goes on", "failed", back.why)

    def _spawn_next(self, role: str) -> None:
        """Starts an actor that goes on with what the one before has left."""
        actor = self._actors.spawn_next(role)
        if actor is not None and actor.epoch > 1:
            self._drain.on_restarted(role, actor.epoch)

    # --- meanwhile ---

    def _enter(self, step: str) -> None:
        self._step = step
        self._outcome("under way")

    def _outcome(self, state: str, why: str = "") -> None:
        try:
            write_outcome(self._actors.run_dir, UpgradeOutcome(
                self._handed.upgrade, state, why, __version__, self._ended_at))
        except OSError as error:
            self._say(f"upgrade: {error}")

    def _fault(self, step: str) -> None:
        """Does what a test wants to be done at this step (`upgrade_fault`)."""
        for fault in self.config.recovery.upgrade_fault.split(","):
            at, _, what = fault.partition("=")
            if at != step:
                continue
            if what in ("", "stop"):
                os.kill(os.getpid(), signal.SIGTERM if what else signal.SIGKILL)
            for actor in self._actors.running.values():
                if actor.role == what:
                    kill_group(actor.pid)

    def _on_message(self, message: Any) -> None:
        """Ignores what the old actors send as they end."""
        if self._step in (LOADING, STARTING, RUNNING) or isinstance(message, Fatal):
            super()._on_message(message)

    def _on_up(self) -> None:
        if self._step == LOADING:
            self._loaded = True
        else:
            super()._on_up()

    def _has_successor(self, role: str) -> bool:
        return self._step == LOADING or super()._has_successor(role)

    def _on_exit(self, pidfd: int) -> None:
        if self._step in (PREPARING, ENDING):
            self._actors.reap(pidfd)
            return
        role = self._actors.running[pidfd].role
        super()._on_exit(pidfd)
        if self._step == LOADING and self.failure is None:
            self._fail(EngineUnavailable(f"{role} ended while the engine stopped"), EXIT_BAD_CONFIG)


def _writes_what_is_kept(role: str) -> bool:
    """Whether the role writes the ledger or records of connections."""
    return role == SCHEDULER or is_gateway(role)


def check(memory: int) -> Config:
    """Raises `ActoriumError` if the state cannot be continued."""
    state = read_state(memory)
    config = validate(configs.load(bytes(state.wanted)))
    check_all(config)
    return config


def main(argv: Sequence[str]) -> int:
    if argv[0] == "--check":
        signal.alarm(CHECK_SECONDS)
        try:
            check(int(argv[1]))
        except (ActoriumError, ValueError) as error:
            print(error.message if isinstance(error, ActoriumError) else error)
            return EXIT_BAD_CONFIG
        return 0
    memory, going_back = int(argv[0]), len(argv) > 2
    try:
        state = read_state(memory)
        launcher = HandedLauncher(memory, state, read_back(int(argv[2])) if going_back else None)
    except Exception as error:
        if going_back:
            raise
        execute(argv[1], memory, ["--back", memory_of(GoingBack(str(error)))], [])
    code = launcher.run()
    if state.report is not None:
        report_failure(state.report, launcher.failure)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
