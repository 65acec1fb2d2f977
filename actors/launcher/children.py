"""The launcher's child processes: each actor leads a process group and is watched by its pidfd.

They start from scratch; once the engine has been ready they are forked off a process that has
imported their libraries (`runtime/fork_server.py`), one for workers and one for all others. Without
it, or where it does not answer, they start from scratch as well.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from actorium.actors.config.cluster_settings import REPLICA
from actorium.actors.config.tree import Config
from actorium.actors.health import HUNG
from actorium.actors.messages import Child, Exited
from actorium.actors.runtime.fork_server import GO, MAIN, READY
from actorium.actors.runtime.memory_limits import OomKills
from actorium.actors.runtime.process import (
    adopting_orphans,
    kill_group,
    process_activity,
    python,
    send_signal,
)
from actorium.actors.runtime.roles import MANAGER_ROLE, PRELOADS, RELAY_ROLE, TLS_PASSWORD, group_of

if TYPE_CHECKING:
    import zmq

REPLICA_PROCESS = "actorium.actors.cluster.replica_process"
STDERR = 2
HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"})
SECRETS = HUB_TOKENS | {"ACTORIUM_API_KEY", "ACTORIUM_ADMIN_KEY", TLS_PASSWORD}
"""Environment variables that no actor gets unless `SECRETS_OF` has it: keys are in its
configuration, and models are fetched before it starts."""
SECRETS_OF = {RELAY_ROLE: frozenset({TLS_PASSWORD}), MANAGER_ROLE: HUB_TOKENS}
"""Role -> those that it gets."""
SOCKETS = (".inbox", ".front")
STACKS_SIGNAL = signal.SIGUSR1
"""Has an actor write the stacks of all its threads into its log."""
STACKS = 0.2
"""Seconds that an actor gets to write down its stacks before it is killed."""
PATIENCE = 2.0
"""Seconds to wait for a fork: on a machine whose processors all are taken ten times over it takes
0.1 s, and a start from scratch many seconds."""
SETTLE = 3.0
"""Seconds after which the fork server begins its imports: an engine that has just come up has
better things to do, and one that ends by then needs none of it."""
PAD = "-" * 64
"""Room for what an actor's command line has and the server's has not."""


class ForkedProcess:
    """An adopted child, to be used as a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ChildProcess:
    """A running child."""

    def __init__(self, role: str, epoch: int,
                 process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        self.role, self.epoch, self.process = role, epoch, process
        self.pid = process.pid
        self.killed_with_role = ""
        """The role whose death it was killed for, as ranks of one group are."""
        self.pidfd = os.pidfd_open(process.pid)

    def end(self) -> int:
        """Kill what is left of the group, reap the leader, return its exit code (or -signal)."""
        kill_group(self.pid)
        status = self.process.wait()
        os.close(self.pidfd)
        return status


class WaitingActor(NamedTuple):
    """A child that imports what it needs, and then waits."""

    process: subprocess.Popen[bytes]
    ready: int
    """Pipe at which it says that all is imported."""
    go: int
    """Pipe at which it is let begin."""

    def close(self) -> None:
        os.close(self.ready)
        os.close(self.go)

    def end(self) -> None:
        """Kills and reaps it."""
        self.close()
        kill_group(self.process.pid)
        self.process.wait()


class ChildProcesses:
    """An engine's actors: those that run, and the exits of the others."""

    def __init__(self, run_dir: Path, roles: Mapping[str, str], poll: select.poll | zmq.Poller,
                 forks: ForkedStarts | None = None) -> None:
        """roles: role -> "module:function" of what builds it; pidfds are registered in `poll`."""
        self.running: dict[int, ChildProcess] = {}
        """By pidfd."""
        self.run_dir, self._roles, self._poll = run_dir, roles, poll
        self._forks = forks
        self.kill_at: dict[ChildProcess, float] = {}
        """Actors that are about to be killed, and when, CLOCK_MONOTONIC seconds."""
        self.oom_kills = OomKills()
        self.epochs: dict[str, int] = {}
        """The last one of each role."""
        self._waiting: dict[str, WaitingActor] = {}
        """By role: those that `prepare` has started."""
        self._exits: dict[str, Exited] = {}
        """Of the roles that no process runs at the moment."""

    def spawn(self, role: str, epoch: int = 1) -> ChildProcess | None:
        """Start an incarnation; None if the role is unknown, runs, or has had this epoch."""
        if role not in self._roles or epoch <= self.epochs.get(role, 0):
            return None
        if any(actor.role == role for actor in self.running.values()):
            return None
        self._remove_sockets(role)
        words = self._words(role, epoch)
        process = self._prepared_process(role) or (
            self._forks.fork(words) if self._forks is not None else None)
        actor = ChildProcess(role, epoch, process or start(python(
            REPLICA_PROCESS if words[-1].startswith(REPLICA) else MAIN, *words),
            secrets=SECRETS_OF.get(role, frozenset())))
        self.running[actor.pidfd] = actor
        self.epochs[role] = epoch
        self._exits.pop(role, None)
        self._poll.register(actor.pidfd, select.POLLIN)
        return actor

    def _words(self, role: str, epoch: int) -> list[str]:
        """Of `runtime.main`."""
        return [role, str(self.run_dir), str(epoch), str(os.getpid()), self._roles[role]]

    def adopt(self, children: Iterable[Child], epochs: Mapping[str, int]) -> None:
        """Goes on with the children of the launcher that this process was before; epochs: the last
        ones of all roles."""
        for child in children:
            actor = ChildProcess(child.role, child.epoch, ForkedProcess(child.pid))
            self.running[actor.pidfd] = actor
            self._poll.register(actor.pidfd, select.POLLIN)
        self.epochs.update(epochs)

    def spawn_next(self, role: str) -> ChildProcess | None:
        """Starts the role's next incarnation; see `spawn`."""
        return self.spawn(role, self.epochs.get(role, 0) + 1)

    def prepare(self, role: str) -> None:
        """Has the role's next incarnation import what it needs, beside the one that runs, and wait
        for `spawn_next`."""
        ready, imported = os.pipe2(os.O_CLOEXEC)
        wait, go = os.pipe2(os.O_CLOEXEC)
        words = self._words(role, self.epochs.get(role, 0) + 1)
        process = start(python(MAIN, *words, str(wait), str(imported)), (wait, imported))
        self._waiting[role] = WaitingActor(process, ready, go)
        os.close(wait)
        os.close(imported)

    @property
    def prepared(self) -> bool:
        """Whether nothing more comes of `prepare`."""
        poll = select.poll()
        for waiting in self._waiting.values():
            poll.register(waiting.ready, select.POLLIN)
        return len(poll.poll(0)) == len(self._waiting)

    def _prepared_process(self, role: str) -> subprocess.Popen[bytes] | None:
        """Lets the role's prepared incarnation begin, if there is one."""
        waiting = self._waiting.pop(role, None)
        if waiting is None:
            return None
        try:
            os.write(waiting.go, GO)
        except OSError:  # it has ended
            waiting.end()
            return None
        waiting.close()
        return waiting.process

    def _remove_sockets(self, role: str) -> None:
        """Peers that connect from now on wait for the new ones."""
        for suffix in SOCKETS:
            (self.run_dir / f"{role}{suffix}").unlink(missing_ok=True)

    def reap(self, pidfd: int) -> tuple[ChildProcess, Exited]:
        """Reap the dead actor behind `pidfd`."""
        actor = self.running.pop(pidfd)
        self.kill_at.pop(actor, None)
        self._poll.unregister(pidfd)
        status = self.oom_kills.status(actor.end())
        exited = Exited(actor.role, actor.pid, actor.epoch, status)
        self._exits[actor.role] = exited
        return actor, exited

    def kill_soon(self, actor: ChildProcess, reason: str) -> bool:
        """Has the actor killed, once it has written its stacks into its log; False = it is about to
        be anyway. One that hangs for a request leaves a mark in its journal."""
        if actor in self.kill_at:
            return False
        if reason.startswith(HUNG):
            from actorium.actors.runtime.inflight_journal import mark_hung

            mark_hung(self.run_dir, actor.role)
        send_signal(actor.pid, STACKS_SIGNAL)
        activity = process_activity(actor.pid)
        wait = 0.0 if activity is None or activity.stopped else STACKS
        self.kill_at[actor] = time.monotonic() + wait
        return True

    def kill_due(self, now: float) -> None:
        """Kills those whose time has come. Call it now and then."""
        self.oom_kills.look(now)
        for actor in [a for a, at in self.kill_at.items() if now >= at]:
            del self.kill_at[actor]
            kill_group(actor.pid)

    def end_mates(self, actor: ChildProcess) -> None:
        """Kill the other ranks of a dead one's group: without it they wait for nothing."""
        for other in self.running.values():
            if group_of(other.role) == group_of(actor.role) and not actor.killed_with_role:
                other.killed_with_role = actor.role
                kill_group(other.pid)

    def find(self, role: str, pid: int) -> ChildProcess | None:
        """The running actor of this role, if it has this pid."""
        return next((a for a in self.running.values() if (a.role, a.pid) == (role, pid)), None)

    def role_of(self, pid: int) -> str | None:
        """The role of the running actor with this pid."""
        return next((actor.role for actor in self.running.values() if actor.pid == pid), None)

    def is_running(self, actor: ChildProcess) -> bool:
        """Whether it has not been reaped."""
        return self.running.get(actor.pidfd) is actor

    def forget(self, role: str) -> None:
        """The role may have any epoch next."""
        self.epochs.pop(role, None)
        self._exits.pop(role, None)

    def children(self) -> list[Child]:
        """The running actors."""
        return [Child(a.role, a.pid, a.epoch) for a in self.running.values()]

    def exits(self) -> list[Exited]:
        """The last exits of the roles that no process runs."""
        return list(self._exits.values())

    def close(self, spared: str = "") -> None:
        """Kill and reap all that are left but for the actor of one role."""
        for actor in self.running.values():
            if actor.role != spared:
                actor.end()
        for waiting in self._waiting.values():
            waiting.end()
        self.running.clear()
        self._waiting.clear()
        if self._forks is not None:
            self._forks.close()


def start(argv: list[str], fds: Sequence[int] = (), secrets: Set[str] = frozenset()
          ) -> subprocess.Popen[bytes]:
    """A process that leads a group of its own and gets these descriptors. secrets: those of
    `SECRETS` that it gets. The engine's stdout belongs to whoever runs the launcher."""
    environ = {name: value for name, value in os.environ.items()
               if name not in SECRETS or name in secrets}
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=STDERR, process_group=0,
                            env=environ, pass_fds=fds)


class ForkedStarts:
    """The fork servers of an engine, by what they import."""

    def __init__(self, settle: float = SETTLE, patience: float = PATIENCE) -> None:
        """settle: `SETTLE`, patience: `PATIENCE`, of another engine than a real one."""
        self._settle, self._patience = settle, patience
        self.servers: dict[str, ForkServer] = {}

    @property
    def pids(self) -> list[int]:
        """The processes of the servers."""
        return [server.pid for server in self.servers.values()]

    def on_up(self, config: Config, run_dir: Path, roles: Mapping[str, str]) -> None:
        """The engine is ready for the first time."""
        recovery = config.recovery
        if recovery.restart and recovery.fork_server != "off":
            for target in {PRELOADS[built] for built in roles.values() if built in PRELOADS}:
                self.servers[target] = ForkServer([str(run_dir), target], self._settle,
                                                  self._patience)

    def fork(self, words: Sequence[str]) -> ForkedProcess | None:
        """Starts an actor by the words of `runtime.main`; None where that is not possible."""
        server = self.servers.get(PRELOADS.get(words[-1], ""))
        return None if server is None else server.fork(words)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


class ForkServer:
    """The launcher's end of one, which is there some seconds after it is made."""

    def __init__(self, words: Sequence[str], settle: float, patience: float) -> None:
        """words: the run directory, and what it imports."""
        self._words, self._settle, self._patience = words, settle, patience
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._start()

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def fork(self, words: Sequence[str]) -> ForkedProcess | None:
        """As `ForkedStarts.fork`."""
        if not self.answers():
            return None
        assert self._control is not None
        wait, go = os.pipe2(os.O_CLOEXEC)
        try:
            with adopting_orphans():
                socket.send_fds(self._control, [json.dumps(words).encode()], [wait])
                pid = int(self._control.recv(32) or 0)
            if not pid:
                raise OSError("the fork server is gone, or has no room")
            os.write(go, GO)
            return ForkedProcess(pid)
        except OSError:  # what it may have forked ends, since nobody lets it begin
            self._start()
            return None
        finally:
            os.close(wait)
            os.close(go)

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            kill_group(self._server.pid)
            self._server.wait()
        self._server = self._control = None

    def _start(self) -> None:
        """A new server, ready some seconds later."""
        self.close()
        self._ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(self._patience)
        words = [str(os.getpid()), str(theirs.fileno()), str(self._settle), *self._words, PAD]
        with theirs:
            self._server = start(python("actorium.actors.runtime.fork_server", *words),
                                 (theirs.fileno(),))

    def answers(self) -> bool:
        """Whether its imports are done. One that has ended is replaced."""
        assert self._control is not None
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not self._ready and poll.poll(0):
            try:
                self._ready = self._control.recv(len(READY)) == READY
            except OSError:
                self._ready = False
            if not self._ready:
                self._start()
        return self._ready
