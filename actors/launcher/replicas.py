"""A cluster's replicas on the launcher's machine, which come and go as the router says."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actorium.actors.cluster.cluster_control import (
    AskReplicaSet,
    ReplicaEvent,
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
    replica_built,
    replica_index,
)
from actorium.actors.config.tree import Config
from actorium.actors.launcher.children import ChildProcess, ChildProcesses
from actorium.actors.launcher.stopping import STOP_GRACE
from actorium.actors.messages import Child, Exited, ToLauncher
from actorium.actors.runtime.process import send_signal
from actorium.actors.runtime.rundir import address, remove_tensors

if TYPE_CHECKING:
    from actorium.actors.launcher.watchdog_link import WatchdogLink
    from actorium.actors.runtime.mailbox import Outbox

CLUSTER_INBOX: Any = ToLauncher | ReplicaSet | AskReplicaSet
"""The messages that the launcher of a cluster takes."""


class ReplicaRoster:
    """The replicas that a cluster has, kept by its launcher from router to router. Pure: each
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
        return [self._kept_replicas(), *map(self._left_out_event, self._left_out)]

    def on_set(self, wanted: ReplicaSet) -> list[Any]:
        """A router wants these."""
        if wanted.number < max(self.kept.number, self._epoch << 32):
            return []  # an earlier one
        back: list[Any] = []
        if wanted.replicas != self.kept.replicas:
            back = [ReplicaEvent(index, "left_out") for index in self._left_out]
            self._left_out.clear()
        self.kept = wanted
        return [*back, self._kept_replicas()]

    def leave_out(self, index: int, why: str) -> ReplicaEvent:
        """A replica cannot be started."""
        self._left_out[index] = why[:1000]
        return self._left_out_event(index)

    def local_replicas(self) -> dict[str, ReplicaState]:
        """What is to run on this machine, by role."""
        return {f"{REPLICA_ROLE}{state.index}": state for state in self.kept.replicas
                if not state.node and state.index not in self._left_out}

    def _left_out_event(self, index: int) -> ReplicaEvent:
        return ReplicaEvent(index, "left_out", why=self._left_out[index])

    def _kept_replicas(self) -> ReplicasKept:
        return ReplicasKept(self._epoch, self.kept)


class LocalReplicas:
    """Starts and ends replicas, and answers the router."""

    def __init__(self, config: Config, roles: dict[str, str], actors: ChildProcesses,
                 watchdog: WatchdogLink, context: Any, on_started: Callable[[], None],
                 say: Callable[[str], None]) -> None:
        """roles: the launcher's, which changes with the replicas; context: its zmq.Context;
        on_started: called when a replica has been started; say: prints a line for people."""
        self.roster = ReplicaRoster(config.cluster)
        self.leaving: frozenset[str] = frozenset()
        """Roles of replicas that were ordered to end and still run."""
        self._roles, self._actors, self._watchdog = roles, actors, watchdog
        self._context, self._on_started, self._say = context, on_started, say
        self._patience = config.runtime.drain_timeout + STOP_GRACE
        self._epochs: dict[str, int] = {}
        """Of replicas that have ended: the next one of the role has a later epoch."""
        self._router: Outbox | None = None
        """To the router that asked last."""

    # --- the router ---

    def on_set(self, wanted: ReplicaSet, working: bool) -> None:
        """The router wants these. working: the engine neither stops nor has failed."""
        before = self.roster.kept.weights
        answers = self.roster.on_set(wanted)
        if working:
            self.change()
        if self.roster.kept.weights != before:  # some replicas still have those of before
            remove_tensors(self._actors.run_dir,
                           {*before.source.over, *self.roster.kept.weights.source.over})
        self._tell_router(answers)

    def on_ask(self, ask: AskReplicaSet) -> None:
        """A router has started."""
        self.close()
        self._tell_router(self.roster.on_ask(ask))

    def _tell_router(self, messages: list[Any]) -> None:
        """Sends messages. A router asks again for what does not arrive."""
        from actorium.actors.runtime.mailbox import Outbox

        if self._router is None:
            self._router = Outbox(self._context, address(
                self._actors.run_dir, f"{ROUTER_ROLE}.inbox"), hwm=64, lossy=True)
        for message in messages:
            self._router.send(message)

    def close(self) -> None:
        """Closes the connection to the router; the next message opens another one."""
        if self._router is not None:
            self._router.close()
            self._router = None

    # --- processes ---

    def change(self) -> None:
        """Ends replicas that are not wanted any more, and starts those that are missing."""
        wanted = self.roster.local_replicas()
        for role in [role for role in self._roles if role.startswith(REPLICA_ROLE)]:
            if role not in wanted:
                self._dismiss(role)
        for role, state in wanted.items():
            if role not in self._roles and role not in self.leaving:
                self._add(role, state)

    def _add(self, role: str, state: ReplicaState) -> None:
        worker = next((built.partition(";")[2] for built in self._roles.values()
                       if built.startswith(REPLICA)), "")
        self._roles[role] = replica_built(state.node_index, worker)
        actor = self._actors.spawn(role, self._epochs.get(role, 0) + 1)
        if actor is not None:
            self._say(f"{role} is started (pid {actor.pid})")
            self._on_started()

    def _dismiss(self, role: str) -> None:
        """Has a replica end by itself, in the time that an engine has to drain."""
        del self._roles[role]
        for actor in self._actors.running.values():
            if actor.role == role:
                self.leaving |= {role}
                send_signal(actor.pid, signal.SIGTERM)
                self._actors.kill_at.setdefault(actor, time.monotonic() + self._patience)
                self._say(f"{role} (pid {actor.pid}) leaves")
                return
        epoch = max((e.epoch for e in self._actors.exits() if e.role == role), default=0)
        self._retire(role, epoch)  # it was dead at the moment

    def on_leaving_exit(self, actor: ChildProcess, working: bool) -> None:
        """A replica that was ordered to end has done so. working: as of `on_set`."""
        self.leaving -= {actor.role}
        self._retire(actor.role, actor.epoch)
        if working:
            self.change()  # it may be wanted again by now

    def on_crash(self, exited: Exited) -> None:
        """Has the router know of a replica's death at once."""
        if (index := replica_index(exited.role)) is not None:
            self._tell_router([ReplicaEvent(index, "died", exited.epoch)])

    def leave_out(self, actor: ChildProcess, why: str) -> None:
        """A replica that came later cannot run as configured: the rest serves on without it, until
        the router wants others than now."""
        self._say(f"{actor.role} is left out: {why}")
        del self._roles[actor.role]
        self._retire(actor.role, actor.epoch)
        index = replica_index(actor.role)
        assert index is not None
        self._tell_router([self.roster.leave_out(index, why)])

    def _retire(self, role: str, epoch: int) -> None:
        self._epochs[role] = epoch
        self._watchdog.send(RetiredReplica(role, epoch))

    def without_leaving(self, children: list[Child], exits: list[Exited]
                        ) -> tuple[list[Child], list[Exited]]:
        """What a new watchdog is sent: nothing of replicas that were ordered to end."""
        return ([child for child in children if child.role not in self.leaving],
                [exited for exited in exits if not exited.role.startswith(REPLICA_ROLE)
                 or exited.role in self._roles])
