"""The launcher of a cluster: replicas come and go as the router says."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorium.actors.cluster.cluster_control import (
    AskReplicaSet,
    ReplicaLeftOut,
    ReplicaSet,
    ReplicasKept,
    ReplicaState,
    RetiredReplica,
    first_replicas,
)
from actorium.actors.config.cluster_settings import (
    REPLICA,
    REPLICA_ROLE,
    ROUTER_ROLE,
    ClusterConfig,
    came_later,
    clustered,
    replica_built,
    replica_index,
)
from actorium.actors.launcher.children import ChildProcess
from actorium.actors.launcher.launcher import STOP_GRACE, Launcher
from actorium.actors.messages import ToLauncher
from actorium.actors.runtime.process import EXIT_BAD_CONFIG, send_signal
from actorium.actors.runtime.rundir import address

if TYPE_CHECKING:
    from actorium.actors.runtime.mailbox import Outbox


class ReplicaRoster:
    """Which replicas a cluster has, as its launcher keeps it from router to router. Pure: each
    message returns its answers."""

    def __init__(self, settings: ClusterConfig) -> None:
        self.kept = first_replicas(settings)
        self._epoch = 0
        """Of the router that asked last."""
        self._left_out: dict[int, str] = {}
        """Replicas of this machine that are not started any more, until the router wants others
        than now, and why."""

    def on_ask(self, ask: AskReplicaSet) -> list[Any]:
        """A router has started."""
        self._epoch = max(self._epoch, ask.epoch)
        return [self._kept_replicas(), *(ReplicaLeftOut(*each) for each in self._left_out.items())]

    def on_set(self, wanted: ReplicaSet) -> list[Any]:
        """A router wants these."""
        if wanted.number < max(self.kept.number, self._epoch << 32):
            return []  # one that is no more
        back: list[Any] = []
        if wanted.replicas != self.kept.replicas:
            back = [ReplicaLeftOut(index, "") for index in self._left_out]
            self._left_out.clear()
        self.kept = wanted
        return [*back, self._kept_replicas()]

    def leave_out(self, index: int, why: str) -> ReplicaLeftOut:
        """A replica cannot be started."""
        self._left_out[index] = why[:1000]
        return ReplicaLeftOut(index, self._left_out[index])

    def local_replicas(self) -> dict[str, ReplicaState]:
        """What is to run on this machine, by role."""
        return {f"{REPLICA_ROLE}{state.index}": state for state in self.kept.replicas
                if not state.node and state.index not in self._left_out}

    def _kept_replicas(self) -> ReplicasKept:
        return ReplicasKept(self._epoch, self.kept)


class ClusterLauncher(Launcher):
    """A `Launcher` whose replicas change; it also launches engines without replicas."""

    _roster: ReplicaRoster | None = None
    """None = it is an engine of one."""
    _router: Outbox | None = None
    """To the router that asked last."""
    _leaving: frozenset[str] = frozenset()
    """Roles of replicas that were ordered to end and still run."""
    _epochs: dict[str, int]
    """Of replicas that have ended: the next one of the role has a later epoch."""

    def _open_mailboxes(self, path: Path) -> None:
        self._epochs = {}
        if clustered(self.config.cluster):
            self.inbox_union = ToLauncher | ReplicaSet | AskReplicaSet
            self._roster = ReplicaRoster(self.config.cluster)
        super()._open_mailboxes(path)

    def _on_message(self, message: Any) -> None:
        if self._roster is not None and isinstance(message, ReplicaSet):
            answers = self._roster.on_set(message)
            self._change_replicas()
            self._tell_router(answers)
        elif self._roster is not None and isinstance(message, AskReplicaSet):
            self._close_router()
            self._tell_router(self._roster.on_ask(message))
        else:
            super()._on_message(message)

    def _tell_router(self, messages: list[Any]) -> None:
        """What does not arrive a router asks for again."""
        from actorium.actors.runtime.mailbox import Outbox

        if self._router is None and self._run_dir is not None:
            self._router = Outbox(self._context, address(
                self._run_dir.path, f"{ROUTER_ROLE}.inbox"), hwm=64, lossy=True)
        for message in messages:
            if self._router is not None:
                self._router.send(message)

    def _close_router(self) -> None:
        if self._router is not None:
            self._router.close()
            self._router = None

    def _change_replicas(self) -> None:
        """Ends replicas that are not wanted any more, and starts those that are missing."""
        if self._roster is None or self._stops.count or self.failure is not None:
            return
        wanted = self._roster.local_replicas()
        for role in [role for role in self.roles if role.startswith(REPLICA_ROLE)]:
            if role not in wanted:
                self._dismiss(role)
        for role, state in wanted.items():
            if role not in self.roles and role not in self._leaving:
                self._add(role, state)

    def _add(self, role: str, state: ReplicaState) -> None:
        worker = next((built.partition(";")[2] for built in self.roles.values()
                       if built.startswith(REPLICA)), "")
        self.roles[role] = replica_built(state.place, worker)
        actor = self._actors.spawn(role, self._epochs.get(role, 0) + 1)
        if actor is not None:
            self._say(f"{role} is started (pid {actor.pid})")
            self._send_children()

    def _dismiss(self, role: str) -> None:
        """It ends by itself, in the time that an engine has to drain."""
        del self.roles[role]
        for actor in self._actors.running.values():
            if actor.role == role:
                self._leaving |= {role}
                send_signal(actor.pid, signal.SIGTERM)
                patience = self.config.runtime.drain_timeout + STOP_GRACE
                self._kill_at.setdefault(actor, time.monotonic() + patience)
                self._say(f"{role} (pid {actor.pid}) leaves")
                return
        epoch = max((e.epoch for e in self._actors.exits() if e.role == role), default=0)
        self._forget(role, epoch)  # it was dead at the moment

    def _on_exit(self, pidfd: int) -> None:
        if self._actors.running[pidfd].role not in self._leaving:
            super()._on_exit(pidfd)
            return
        actor, _ = self._actors.reap(pidfd)
        self._kill_at.pop(actor, None)
        self._leaving -= {actor.role}
        self._forget(actor.role, actor.epoch)
        self._change_replicas()  # it may be wanted again by now

    def _on_fault(self, actor: ChildProcess, status: int, death: str) -> None:
        """A replica that came later and cannot be what it is told to is left out, until the router
        has others than now; the rest serves on."""
        if status != EXIT_BAD_CONFIG or not came_later(self.roles.get(actor.role, "")):
            super()._on_fault(actor, status, death)
            return
        why, index = self._error_of(actor) or death, replica_index(actor.role)
        self._say(f"{actor.role} is left out: {why}")
        del self.roles[actor.role]
        self._forget(actor.role, actor.epoch)
        if self._roster is not None and index is not None:
            self._tell_router([self._roster.leave_out(index, why)])

    def _forget(self, role: str, epoch: int) -> None:
        self._epochs[role] = epoch
        if self._watchdog is not None:
            self._watchdog.send(RetiredReplica(role, epoch))

    def _connect_watchdog(self) -> None:
        """A new watchdog is not sent those that were ordered to end."""
        assert self._watchdog is not None
        children = [c for c in self._actors.children() if c.role not in self._leaving]
        exits = [e for e in self._actors.exits()
                 if not e.role.startswith(REPLICA_ROLE) or e.role in self.roles]
        self._watchdog.connect(children, exits, self._up)
