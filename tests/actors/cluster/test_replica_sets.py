"""The router's replicas are those that the launcher has, whatever was ordered and whoever died, and
every order is answered."""

from __future__ import annotations

import os
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from helpers_cluster import NAME, ClusterBox, settings

from actorium.actors.cluster import router_actor
from actorium.actors.cluster.cluster_control import (
    AskCluster,
    AskReplicaSet,
    AutoscaleCluster,
    ClusterAnswer,
    ClusterWeights,
    DrainReplica,
    ReplicaEvent,
    ReplicaRow,
    ReplicaSet,
    ReplicasKept,
    ScaleCluster,
    UndrainReplica,
)
from actorium.actors.cluster.cluster_messages import (
    FromReplica,
    Inventory,
    ReplicaReport,
    RouterHello,
    life_of,
)
from actorium.actors.config.cluster_settings import ClusterConfig, came_later, replica_index
from actorium.actors.config.tree import Config
from actorium.actors.core import CLIENT, Context
from actorium.actors.launcher import replicas as local_replicas
from actorium.actors.launcher.launcher import Launcher
from actorium.actors.launcher.replicas import LocalReplicas, ReplicaRoster
from actorium.actors.messages import Child, Exited, Fatal, Spawn, WeightsSource
from actorium.actors.runtime.process import EXIT_BAD_CONFIG


def turns(box: ClusterBox, count: int = 80) -> None:
    for _ in range(count):
        box.turn()


def rows(box: ClusterBox) -> dict[int, ReplicaRow]:
    return {row.replica: row for row in box.ask(AskCluster("q")).rows}


def test_a_new_router_does_not_want_what_only_the_start_had() -> None:
    box = ClusterBox(settings(3))
    turns(box)
    box.ask(ScaleCluster("q", 2))
    turns(box)
    box.new_router()
    turns(box)
    found = box.ask(AskCluster("q"))
    assert found.target == 2 and [row.phase for row in found.rows] == ["ready"] * 2
    assert box.ask(ScaleCluster("q", 3)).target == 3
    turns(box)
    assert [row.phase for row in rows(box).values()] == ["ready"] * 3


def test_a_new_router_leaves_a_leaving_replica_its_time() -> None:
    box = ClusterBox(settings())
    for i in range(4):
        box.submit([1 + i, 2, 3], max_tokens=200)
    turns(box, 20)
    box.ask(ScaleCluster("q", 1, 60.0))
    box.new_router()
    turns(box, 60)
    assert rows(box)[1].phase == "leaving" and rows(box)[1].sequences and not box.gone
    box.run(2000)
    box.assert_whole()
    assert rows(box)[0].migrated_in == 0
    turns(box, 60)
    assert box.gone == {1}


def test_a_router_decides_nothing_before_it_knows_which_replicas_there_are() -> None:
    """Neither by an order nor by its policy; then it does what was ordered meanwhile."""
    config = settings(3)
    box = ClusterBox(msgspec.structs.replace(config, cluster=ClusterConfig(
        replicas=3, max_replicas=4, min_replicas=3)))
    turns(box)
    box.ask(ScaleCluster("q", 1))
    turns(box)
    box.new_router(told=False)
    box.router.on_client(b"p", ScaleCluster("s", 2), box.now)
    sent = [send for _ in range(30) for send in box.router.on_wake(box.now + 0.1 * _)]
    assert {type(send.message) for send in sent} == {AskReplicaSet}
    for answer in box.roster.on_ask(AskReplicaSet(2)):
        box.router.on_message(answer, box.now)
    turns(box, 200)
    answer = box.answers.pop()
    assert (answer.rid, answer.target, answer.error) == ("s", 2, "")
    assert [row.phase for row in rows(box).values()] == ["ready"] * 2


def test_an_order_is_answered_when_the_launcher_has_it_or_with_why_not() -> None:
    box = ClusterBox(settings())
    turns(box)
    box.router.on_client(b"p", ScaleCluster("s", 3), box.now)
    wanted = [send.message for send in box.router.on_wake(box.now)]
    assert len(wanted) == 1 and isinstance(wanted[0], ReplicaSet)
    box.router.on_message(ReplicasKept(7, wanted[0]), box.now)  # to a router of another life
    assert not [send for send in box.router.on_wake(box.now + 4.9) if send.to == CLIENT]
    late = [send.message for send in box.router.on_wake(box.now + 5.1) if send.to == CLIENT]
    assert "not confirmed: the launcher has said nothing" in late[0].error
    box.router.on_message(ReplicasKept(1, wanted[0]), box.now)
    box.router.on_client(b"p", ScaleCluster("t", 3), box.now)
    told = [send.message for send in box.router.on_wake(box.now) if send.to == CLIENT]
    assert [(each.rid, each.error, each.target) for each in told] == [("t", "", 3)]


def test_a_launcher_does_not_hear_routers_that_are_no_more() -> None:
    roster = ReplicaRoster(ClusterConfig(replicas=2))
    roster.on_ask(AskReplicaSet(1))
    two = roster.kept.replicas
    assert roster.on_set(ReplicaSet(two[:1], number=(1 << 32) + 5))
    assert isinstance(kept := roster.on_ask(AskReplicaSet(2))[0], ReplicasKept)
    assert kept.epoch == 2 and kept.kept.replicas == two[:1]
    assert roster.on_set(ReplicaSet(two, number=(1 << 32) + 6)) == []
    assert roster.kept.replicas == two[:1]
    roster.leave_out(0, "no device")
    assert roster.local_replicas() == {}
    assert roster.on_ask(AskReplicaSet(3))[1:] == [ReplicaEvent(0, "left_out", why="no device")]
    assert roster.on_set(ReplicaSet(two, number=(3 << 32) + 1))[0] == ReplicaEvent(0, "left_out")
    assert [*roster.local_replicas()] == ["replica-0", "replica-1"]


def test_a_replica_that_cannot_be_started_is_no_other_to_drain_to() -> None:
    box = ClusterBox(settings())
    turns(box)
    box.ask(ScaleCluster("q", 3))
    box.to_router.append(box.roster.leave_out(2, "no device"))
    box.cut_off.add(2)
    turns(box)
    assert (rows(box)[2].phase, rows(box)[2].why) == ("left out", "no device")
    assert box.ask(DrainReplica("q", 0)).error == ""
    assert "no other replica" in box.ask(DrainReplica("q", 1)).error
    assert rows(box)[2].phase == "starting", "with others than before it is tried again"
    box.to_router.append(box.roster.leave_out(2, "no device"))
    box.new_router()
    turns(box, 300)
    assert [row.phase for row in rows(box).values()] == ["drained", "ready", "left out"]
    box.ask(ScaleCluster("q", 1))
    turns(box)
    assert [*rows(box)] == [1]


# --- any orders, any deaths ----------------------------------------------------------------------

TURN = 0.1
"""Seconds of the virtual clock."""
BROKEN = 5
"""Index of a replica that cannot be started."""


class FakeChild(msgspec.Struct, eq=False):
    """A child of the launcher."""

    role: str
    epoch: int
    pid: int
    ready_at: float
    killed_with_role: str = ""
    end_at: float = float("inf")
    hello: int = 0
    seen: int = 0

    @property
    def pidfd(self) -> int:
        return self.pid


class FakeChildren:
    """Stands for `ChildProcesses`."""

    def __init__(self, roles: dict[str, str], made: list[FakeChild]) -> None:
        self.running: dict[int, FakeChild] = {}
        self.kill_at: dict[FakeChild, float] = {}
        self.run_dir = Path("/nowhere")
        self._roles, self._made = roles, made
        self._epochs: dict[str, int] = {}
        self._exits: dict[str, Exited] = {}

    def spawn(self, role: str, epoch: int = 1) -> FakeChild | None:
        if role not in self._roles or epoch <= self._epochs.get(role, 0) or any(
                child.role == role for child in self.running.values()):
            return None
        child = FakeChild(role, epoch, len(self._made), 0.0)
        self._made.append(child)
        self.running[child.pidfd] = child
        self._epochs[role] = epoch
        self._exits.pop(role, None)
        return child

    def reap(self, pidfd: int, status: int = -9) -> tuple[FakeChild, Exited]:
        child = self.running.pop(pidfd)
        status = EXIT_BAD_CONFIG if replica_index(child.role) == BROKEN else status
        exited = self._exits[child.role] = Exited(child.role, child.pid, child.epoch, status)
        return child, exited

    def end_mates(self, child: FakeChild) -> None:
        pass

    def released(self, role: str) -> bool:
        """A cluster's router orders no sleep."""
        return False

    def children(self) -> list[Child]:
        return [Child(c.role, c.pid, c.epoch) for c in self.running.values()]

    def exits(self) -> list[Exited]:
        return list(self._exits.values())


class FakeWatchdog:
    """Stands for the link to the watchdog, and for that: has the dead started again."""

    def __init__(self) -> None:
        self.due: list[Exited] = []
        self.alive = True

    def connect(self, children: list[Child], exits: list[Exited], up: bool) -> None:
        self.due, self.alive = [*exits], True

    def on_exit(self, exited: Exited, why: str) -> None:
        pass

    def send(self, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, Exited):
            self.due.append(message)
        else:
            self.due = [each for each in self.due if each.role != getattr(message, "role", "")]


class LauncherBox(Launcher):
    """A launcher whose processes are made up."""

    def __init__(self, config: Config, made: list[FakeChild], to_router: deque[Any]) -> None:
        super().__init__(config)
        self.roles = {role: built for role, built in self.roles.items()
                      if role.startswith("replica-")}
        self._up = True
        self.children = FakeChildren(self.roles, made)
        self.watchdog = FakeWatchdog()
        self._actors: Any = self.children
        self._watchdog: Any = self.watchdog
        self.replicas = self._replicas = LocalReplicas(
            config, self.roles, self._actors, self._watchdog, None, self._send_children, self._say)
        self.replicas._router: Any = SimpleNamespace(send=to_router.append, close=lambda: None)
        self.replicas.close = lambda: None  # type: ignore[method-assign]
        for role in self.roles:
            self.children.spawn(role)

    def _say(self, text: str) -> None:
        pass


class Asker:
    """Somebody who has ordered something, and says it again until there is an answer."""

    def __init__(self, message: Any, now: float) -> None:
        self.message, self.next_at, self.until = message, now, now + 10.0
        self.answer: ClusterAnswer | None = None
        self.calm = 0.0
        """The most seconds for which it has asked one and the same router."""


class FleetBox:
    """A router, a launcher and replicas of which nothing is asked, on a virtual clock."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance, self.now = random.Random(seed), 100.0
        config = settings(3)
        self.config = msgspec.structs.replace(config, runtime=msgspec.structs.replace(
            config.runtime, name=NAME, crash_reports=False))
        self.made: list[FakeChild] = []
        self.to_router: deque[Any] = deque()
        self.to_launcher: deque[Any] = deque()
        self.launcher = LauncherBox(self.config, self.made, self.to_router)
        monkeypatch.setattr(local_replicas, "send_signal", self._end)
        self.epoch, self.router_at, self.watchdog_at = 0, self.now, 0.0
        self.router_born = self.now
        self.router: Any = None
        self.askers: list[Asker] = []

    def _end(self, pid: int, number: int) -> None:
        """A replica was told to go."""
        self.made[pid].end_at = self.now + self.chance.uniform(0.0, 1.5)

    def order(self) -> None:
        count, index = self.chance.randint(1, 6), self.chance.randrange(6)
        rid = f"o{len(self.askers)}"
        kind = self.chance.randrange(6)
        order = (ScaleCluster(rid, count) if kind < 3 else DrainReplica(rid, index) if kind == 3
                 else UndrainReplica(rid, index) if kind == 4 else AutoscaleCluster(rid, 1, 6))
        self.askers.append(Asker(order, self.now))

    def kill_router(self) -> None:
        """What it has said to the launcher arrives in part, what was said to it may come late."""
        self.router = None
        for _ in range(self.chance.randint(0, len(self.to_launcher))):
            self.to_launcher.pop()
        for _ in range(self.chance.randint(0, len(self.to_router))):
            self.to_router.popleft()
        self.router_at = self.now + self.chance.uniform(0.1, 1.5)

    def kill_replica(self) -> None:
        if there := [*self.launcher.children.running.values()]:
            self.chance.choice(there).end_at = self.now

    def kill_watchdog(self) -> None:
        self.launcher.watchdog.alive = False
        self.launcher.watchdog.due.clear()
        self.watchdog_at = self.now + self.chance.uniform(0.1, 1.5)

    def turn(self) -> None:
        self.now += TURN
        if self.router is None and self.now >= self.router_at:
            self.epoch, self.router_born = self.epoch + 1, self.now
            self.router = router_actor.router_core(
                Context(self.config, Path("/nowhere"), "scheduler", self.epoch, 7))
        self._turn_launcher()
        for child in self.launcher.children.running.values():
            self._turn_replica(child)
        if self.router is not None:
            self._turn_router()

    def _turn_launcher(self) -> None:
        launcher, watchdog = self.launcher, self.launcher.watchdog
        for child in [*launcher.children.running.values()]:
            if not child.ready_at:
                child.ready_at = self.now + self.chance.uniform(0.1, 2.0)
                if replica_index(child.role) == BROKEN:
                    child.end_at = child.ready_at
            if self.now >= child.end_at:
                launcher._fatals[child.role] = Fatal(child.role, child.pid, child.epoch,
                                                     "no device")
                launcher._on_exit(child.pidfd)
        if not watchdog.alive and self.now >= self.watchdog_at:
            launcher._connect_watchdog()
        if watchdog.alive and self.chance.random() < 0.3:
            due, watchdog.due = watchdog.due, []
            for exited in due:
                launcher._on_message(Spawn(exited.role, exited.epoch + 1))
        while self.to_launcher and self.chance.random() < 0.7:
            launcher._on_message(self.to_launcher.popleft())

    def _turn_replica(self, child: FakeChild) -> None:
        if not child.ready_at or self.now < child.ready_at:
            return
        said: list[Any] = [ReplicaReport(True, 1, {})]
        if child.hello:
            child.hello = 0
            said.append(Inventory([], False))
        self.to_router.append(FromReplica(replica_index(child.role) or 0,
                                          life_of(child.epoch, 1), child.seen, said))

    def _turn_router(self) -> None:
        for _ in range(self.chance.randint(0, len(self.to_router))):
            self.router.on_message(msgspec.msgpack.decode(msgspec.msgpack.encode(
                self.to_router.popleft()), type=self.router.inbox), self.now)
        for asker in self.askers:
            if asker.answer is None and self.now < asker.until:
                asker.calm = max(asker.calm, self.now - max(self.router_born, asker.until - 10.0))
                if asker.next_at <= self.now:
                    asker.next_at += 1.0
                    self.router.on_client(b"p", asker.message, self.now)
        for send in self.router.on_wake(self.now):
            if send.to == "launcher":
                self.to_launcher.append(send.message)
            elif send.to == CLIENT:
                for asker in self.askers:
                    if asker.message.rid == send.message.rid:
                        asker.answer = asker.answer or send.message
            elif isinstance(send.message, RouterHello):
                role = f"replica-{send.to.split('/')[1].removeprefix(f'{NAME}.')}"
                for child in self.launcher.children.running.values():
                    if child.role == role and 0 < child.ready_at <= self.now:
                        child.hello = child.seen = send.message.number

    def assert_at_rest(self) -> None:
        """Who is wanted is who is there, and somebody takes requests."""
        kept = self.launcher.replicas.roster
        found = {row.replica: row for row in self.router.fleet.rows()}
        assert self.router.fleet.replica_set() == kept.kept
        left_out = {index for index, row in found.items() if row.why}
        assert left_out <= {BROKEN}
        there = {child.role for child in self.launcher.children.running.values()}
        assert there == self.launcher.roles.keys() == {
            f"replica-{index}" for index in found.keys() - left_out}
        assert {row.phase for row in found.values()} <= {"ready", "drained", "left out"}
        assert "ready" in {row.phase for row in found.values()}
        assert not self.launcher.replicas.leaving and self.launcher.failure is None


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(i, marks=pytest.mark.slow)
                                                for i in range(10, 400))])
def test_orders_and_deaths_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers, replicas and watchdogs die alone and together, orders come meanwhile: then both sets
    are one, every order was answered in time, and what the last one said is so."""
    box = FleetBox(seed, monkeypatch)
    chance = box.chance
    happens = [box.order, box.order, box.kill_router, box.kill_replica, box.kill_watchdog]
    for _ in range(12):
        for what in chance.sample(happens, chance.randint(1, 3)):
            what()
        for _ in range(chance.randint(1, 25)):
            box.turn()
    for _ in range(250):
        box.turn()
    assert not [asker for asker in box.askers if asker.answer is None and asker.calm > 4.5]
    assert sum(asker.answer is not None for asker in box.askers) >= len(box.askers) // 2
    box.assert_at_rest()
    for count in (2, 6, 3):
        asker = Asker(ScaleCluster(f"end{count}", count), box.now)
        box.askers.append(asker)
        for _ in range(150):
            box.turn()
        assert asker.answer is not None and asker.answer.error == ""
        assert box.router.fleet.target == count
        box.assert_at_rest()
    assert all(came_later(built) or role in {f"replica-{i}" for i in range(3)}
               for role, built in box.launcher.roles.items())


def test_tensors_that_no_replica_needs_are_removed(tmp_path: Path) -> None:
    """Those of the version before are kept: a replica may not have taken the newest one."""
    launcher = LauncherBox(settings(2), [], deque())
    launcher.children.run_dir = tmp_path  # type: ignore[attr-defined]
    (tmp_path / "tensors-new.safetensors").write_bytes(b"")
    for number in range(3):
        file = tmp_path / f"tensors-{number}.safetensors"
        file.write_bytes(b"")
        os.utime(file, (1.0, 1.0))
        weights = ClusterWeights(1 + number, WeightsSource("", [str(file)]))
        replicas = launcher.replicas.roster.kept.replicas
        launcher.replicas.on_set(ReplicaSet(replicas, number=number, weights=weights), True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tensors-1.safetensors", "tensors-2.safetensors", "tensors-new.safetensors"}
