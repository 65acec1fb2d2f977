"""The launcher's child processes: each actor leads a process group and is watched by its pidfd."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from actorium.actors.messages import Child, Exited
from actorium.actors.runtime.memory_limits import OomKills
from actorium.actors.runtime.process import kill_group, process_activity, python, send_signal
from actorium.actors.runtime.roles import group_of

MAIN = "actorium.actors.runtime.main"
STDERR = 2
SECRETS = frozenset({"ACTORIUM_API_KEY", "ACTORIUM_ADMIN_KEY", "HF_TOKEN",
                     "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"})
"""Environment variables that no actor gets: keys are in its configuration, and models are fetched
before it starts."""
SOCKETS = (".inbox", ".front")
STACKS_SIGNAL = signal.SIGUSR1
"""Has an actor write the stacks of all its threads into its log."""


class StartedProcess(Protocol):
    """A child of the launcher that leads a process group; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Reap it: its exit code, or minus the number of a signal."""


ForkStart: TypeAlias = Callable[[Sequence[str]], StartedProcess | None]
"""Starts an actor in a faster way than by a new interpreter, by the words of `runtime.main`; None
if there is no such way."""


class ChildProcess:
    """A running child."""

    def __init__(self, role: str, epoch: int, process: StartedProcess) -> None:
        self.role, self.epoch, self.process = role, epoch, process
        self.pid = process.pid
        self.killed_with_role = ""
        """The role whose death it was killed for, as ranks of one group are."""
        self.pidfd = os.pidfd_open(process.pid)

    def reap(self) -> int:
        """Kill what is left of the group, reap the leader, return its exit code (or -signal)."""
        kill_group(self.pid)
        status = self.process.wait()
        os.close(self.pidfd)
        return status


class ChildProcesses:
    """An engine's actors: those that run, and the exits of those that are gone."""

    def __init__(self, run_dir: Path, roles: Mapping[str, str], poll: select.poll,
                 forks: Sequence[ForkStart] = ()) -> None:
        """roles: role -> "module:function" of what builds it; pidfds are registered in `poll`."""
        self.running: dict[int, ChildProcess] = {}
        """By pidfd."""
        self.run_dir, self._roles, self._poll = run_dir, roles, poll
        self._forks = forks
        self.oom_kills = OomKills()
        self._epochs: dict[str, int] = {}
        self._exits: dict[str, Exited] = {}
        """Of the roles that nobody runs at the moment."""

    def spawn(self, role: str, epoch: int = 1) -> ChildProcess | None:
        """Start an incarnation; None if the role is unknown, runs, or has had this epoch."""
        if role not in self._roles or epoch <= self._epochs.get(role, 0):
            return None
        if any(actor.role == role for actor in self.running.values()):
            return None
        self._remove_sockets(role)
        words = [role, str(self.run_dir), str(epoch), str(os.getpid()), self._roles[role]]
        forked = (fork(words) for fork in self._forks)
        process = next(filter(None, forked), None) or start(python(MAIN, *words))
        actor = ChildProcess(role, epoch, process)
        self.running[actor.pidfd] = actor
        self._epochs[role] = epoch
        self._exits.pop(role, None)
        self._poll.register(actor.pidfd, select.POLLIN)
        return actor

    def _remove_sockets(self, role: str) -> None:
        """Peers that connect from now on wait for the new ones."""
        for suffix in SOCKETS:
            (self.run_dir / f"{role}{suffix}").unlink(missing_ok=True)

    def reap(self, pidfd: int) -> tuple[ChildProcess, Exited]:
        """Reap the dead actor behind `pidfd`."""
        actor = self.running.pop(pidfd)
        self._poll.unregister(pidfd)
        status = self.oom_kills.status(actor.reap())
        exited = Exited(actor.role, actor.pid, actor.epoch, status)
        self._exits[actor.role] = exited
        return actor, exited

    def end_mates(self, actor: ChildProcess) -> None:
        """Kill the other ranks of a dead one's group: without it they wait for nothing."""
        for other in self.running.values():
            if group_of(other.role) == group_of(actor.role) and not actor.killed_with_role:
                other.killed_with_role = actor.role
                kill_group(other.pid)

    def find(self, role: str, pid: int) -> ChildProcess | None:
        """The running actor of this role, if it has this pid."""
        return next((a for a in self.running.values() if (a.role, a.pid) == (role, pid)), None)

    def is_running(self, actor: ChildProcess) -> bool:
        """Whether it has not been reaped."""
        return self.running.get(actor.pidfd) is actor

    def children(self) -> list[Child]:
        """The running actors."""
        return [Child(a.role, a.pid, a.epoch) for a in self.running.values()]

    def exits(self) -> list[Exited]:
        """The last exits of the roles that nobody runs."""
        return list(self._exits.values())

    def close(self) -> None:
        """Kill and reap all that are left."""
        for actor in self.running.values():
            actor.reap()
        self.running.clear()


def start(argv: list[str], fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """A process that leads a group of its own and gets these descriptors. The engine's stdout
    belongs to whoever runs the launcher."""
    environ = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=STDERR, process_group=0,
                            env=environ, pass_fds=fds)


def dump_stacks(actor: ChildProcess) -> bool:
    """Have the actor write its stacks into its log; False if it is stopped and cannot."""
    send_signal(actor.pid, STACKS_SIGNAL)
    activity = process_activity(actor.pid)
    return activity is not None and not activity.stopped
