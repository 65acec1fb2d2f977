"""The launcher's children: each actor a process that leads its own group, watched by its pidfd."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from actorium.actors.messages import Child, Exited
from actorium.actors.runtime.inflight_journal import mark_hung
from actorium.actors.runtime.process import kill_group, process_activity, python, send_signal
from actorium.actors.watchdog.hangs import HUNG

STDERR = 2
KEPT_BACK = frozenset({"ACTORIUM_API_KEY", "ACTORIUM_ADMIN_KEY", "HF_TOKEN",
                       "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"})
"""Variables that hold secrets, for which no actor asks: keys are in its configuration, and nothing
is fetched."""
SOCKETS = (".inbox", ".front")
STACKS_SIGNAL = signal.SIGUSR1
"""Has an actor write the stacks of all its threads into its log."""


class Actor:
    """A running child."""

    def __init__(self, role: str, epoch: int, process: subprocess.Popen[bytes]) -> None:
        self.role, self.epoch, self.process = role, epoch, process
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)

    def reap(self) -> int:
        """Kill what is left of the group, reap the leader, return its exit code (or -signal)."""
        kill_group(self.pid)
        status = self.process.wait()
        os.close(self.pidfd)
        return status


class Actors:
    """An engine's actors, those that run and those that are gone."""

    def __init__(self, run_dir: Path, roles: Mapping[str, str], poll: select.poll) -> None:
        """`roles`: role -> "module:function" of what builds it; pidfds are registered in `poll`."""
        self.running: dict[int, Actor] = {}
        """By pidfd."""
        self._run_dir, self._roles, self._poll = run_dir, roles, poll
        self._epochs: dict[str, int] = {}
        self._exits: dict[str, Exited] = {}
        """Of the roles that nobody plays at the moment."""

    def spawn(self, role: str, epoch: int = 1) -> Actor | None:
        """Start an incarnation; None if the role is unknown, or has seen this epoch already."""
        if role not in self._roles or epoch <= self._epochs.get(role, 0):
            return None
        if any(actor.role == role for actor in self.running.values()):
            return None
        self._remove_sockets(role)
        argv = python("actorium.actors.runtime.main", role, str(self._run_dir), str(epoch),
                      str(os.getpid()), self._roles[role])
        # The engine's stdout belongs to whoever runs the launcher.
        environ = {name: value for name, value in os.environ.items() if name not in KEPT_BACK}
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=STDERR,
                                   process_group=0, env=environ)
        actor = Actor(role, epoch, process)
        self.running[actor.pidfd] = actor
        self._epochs[role] = epoch
        self._exits.pop(role, None)
        self._poll.register(actor.pidfd, select.POLLIN)
        return actor

    def _remove_sockets(self, role: str) -> None:
        """Who connects from now on waits for the new ones."""
        for suffix in SOCKETS:
            (self._run_dir / f"{role}{suffix}").unlink(missing_ok=True)

    def take(self, pidfd: int) -> tuple[Actor, Exited]:
        """Reap the dead actor behind `pidfd`."""
        actor = self.running.pop(pidfd)
        self._poll.unregister(pidfd)
        gone = Exited(actor.role, actor.pid, actor.epoch, actor.reap())
        self._exits[actor.role] = gone
        return actor, gone

    def find(self, role: str, pid: int) -> Actor | None:
        """The running actor of this role, if it has this pid."""
        return next((a for a in self.running.values() if (a.role, a.pid) == (role, pid)), None)

    def runs(self, actor: Actor) -> bool:
        """It has not been reaped."""
        return self.running.get(actor.pidfd) is actor

    def dump(self, actor: Actor, reason: str) -> bool:
        """Have it write down its stacks, before it is killed for that reason; False = it is
        stopped, and cannot."""
        if reason.startswith(HUNG):
            mark_hung(self._run_dir, actor.role)
        send_signal(actor.pid, STACKS_SIGNAL)
        sight = process_activity(actor.pid)
        return sight is not None and not sight.stopped

    def children(self) -> list[Child]:
        """Who runs."""
        return [Child(a.role, a.pid, a.epoch) for a in self.running.values()]

    def down(self) -> list[Exited]:
        """The last ends of the roles that nobody plays."""
        return list(self._exits.values())

    def close(self) -> None:
        """Kill and reap whoever is left."""
        for actor in self.running.values():
            actor.reap()
        self.running.clear()
