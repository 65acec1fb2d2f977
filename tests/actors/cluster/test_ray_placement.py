"""Placement groups are asked for, given back and asked for again: against a Ray that is an object,
whose machines die and whose answers are late."""

from __future__ import annotations

import random

import pytest

from actorium.actors.cluster.cluster_control import (
    PlacementReport,
    ReplicaSet,
    ReplicaState,
    SetRequest,
)
from actorium.actors.cluster.ray import ray_actor
from actorium.actors.cluster.ray.ray_actor import (
    DRIVER_ROLE,
    AskGroup,
    DropGroup,
    GroupOrders,
    GroupRow,
    RayCore,
    RayFault,
    RayReport,
)


def wanted(*nodes: str) -> ReplicaSet:
    return ReplicaSet([ReplicaState(i, node) for i, node in enumerate(nodes)])


class FakeRay:
    """Ray with its driver: what `ray_driver` says and does, by hand."""

    def __init__(self, cpus: float = 2.0, gpus: int = 0, auto: bool = False, **machines: float
                 ) -> None:
        """machines: address -> CPUs."""
        self.machines = dict(machines)
        self.groups: dict[tuple[str, int], tuple[AskGroup, GroupRow]] = {}
        self.pid, self.seen, self.now, self.gpus = 100, 0, 1000.0, 0.0
        self.asks: list[AskGroup] = []
        self.orders: list[GroupOrders] = []
        """On their way."""
        self.news = ""
        self.ended = False
        self._settings = (cpus, gpus, auto)
        self.born = 10
        self.core = self.new_core()

    def new_core(self) -> RayCore:
        self.born += 1000
        self.core = RayCore(*self._settings, self.born)
        return self.core

    def wake(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for send in self.core.on_wake(self.now):
            if send.to == DRIVER_ROLE:
                self.orders.append(send.message)
            elif isinstance(send.message, PlacementReport):
                self.news = send.message.text
        timer = self.core.next_timer()
        assert timer is not None and timer > self.now, "it would spin"

    def obey(self) -> None:
        for message in self.orders:
            self.seen = message.number
            self.ended = message.end
            for order in message.orders:
                if isinstance(order, AskGroup):
                    self.asks.append(order)
                    key = (order.node, order.generation)
                    self.groups[key] = (order, GroupRow(*key, "waiting"))
                else:
                    self.groups.pop((order.node, order.generation), None)
        self.orders.clear()

    def place_groups(self) -> None:
        """Whatever has room gets it; whoever was on a machine that is gone has ended."""
        for key, (ask, row) in self.groups.items():
            if row.at and row.at not in self.machines:
                self.groups[key] = ask, GroupRow(*key, "ended", row.at, "its machine is gone")
            elif row.phase == "waiting":
                for at, cpus in self.machines.items():
                    used = sum(a.cpus for a, r in self.groups.values()
                               if r.at == at and r.phase != "ended")
                    if used + ask.cpus <= cpus and ask.home in ("", at):
                        self.groups[key] = ask, GroupRow(*key, "running", at)
                        break

    def report(self) -> RayReport:
        return RayReport(self.pid, self.seen, "10.0.0.9:6379", sorted(self.machines), self.gpus,
                         [row for _, row in self.groups.values()])

    def turn(self, seconds: float = 1.0) -> None:
        """Orders arrive, Ray does what it can, and says so."""
        self.obey()
        self.place_groups()
        self.core.on_message(self.report(), self.now)
        self.wake(seconds)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def running(self) -> dict[str, str]:
        rows = [row for _, row in self.groups.values() if row.phase == "running"]
        assert len({row.node for row in rows}) == len(rows), "two agents of one node"
        return {row.node: row.at for row in rows}


def served(**machines: float) -> FakeRay:
    """Two replicas that run."""
    ray = FakeRay(**machines or {"a": 2.0, "b": 2.0})
    ray.core.on_message(wanted("ray-0", "ray-1"), ray.now)
    ray.turns(4)
    assert set(ray.running()) == {"ray-0", "ray-1"}
    return ray


def test_the_router_is_asked_and_groups_are_placed() -> None:
    ray = FakeRay(a=2.0, b=2.0)
    first = [send.message for send in ray.core.on_wake(ray.now)]
    assert first == [SetRequest("ray")] and ray.core.start_driver
    ray.turns(3)
    assert not ray.asks, "the router has not said which are wanted"
    ray.core.on_message(wanted("", "ray-0", "mine", "ray-1"), ray.now)
    ray.turns(4)
    assert ray.running() == {"ray-0": "a", "ray-1": "b"} and len(ray.asks) == 2
    assert {(ask.cpus, ask.gpus, ask.home) for ask in ray.asks} == {(2.0, 0, "")}
    assert ray.news == "ray: 2 of 2 placement groups run (ray-0 at a, ray-1 at b)"


def test_a_machine_dies_and_another_comes() -> None:
    ray = served()
    old = ray.core.wanted["ray-1"].generation  # type: ignore[index]
    del ray.machines["b"]
    ray.turns(6)
    assert ray.running() == {"ray-0": "a"}
    assert ray.news == ("ray: 1 of 2 placement groups run (ray-0 at a); "
                        "ray-1 wait for room (2 CPUs)")
    assert ray.asks[-1].node == "ray-1" and ray.asks[-1].generation > old
    assert ray.asks[-1].home == "", "nobody waits for a machine that is gone"
    ray.machines["c"] = 4.0
    ray.turns(3)
    assert ray.running() == {"ray-0": "a", "ray-1": "c"} and len(ray.groups) == 2


def test_replicas_come_and_go() -> None:
    ray = served(a=8.0)
    ray.core.on_message(wanted("ray-0", "ray-1", "ray-2"), ray.now)
    ray.turns(3)
    assert len(ray.running()) == 3
    ray.core.on_message(wanted("ray-1"), ray.now)
    ray.turns(3)
    assert ray.running() == {"ray-1": "a"} and len(ray.groups) == 1
    assert len(ray.asks) == 3, "what stayed was not asked for again"


def test_orders_under_way_are_not_given_twice() -> None:
    ray = FakeRay(a=8.0)
    ray.core.on_message(wanted("ray-0", "ray-1"), ray.now)
    for _ in range(5):
        ray.core.on_message(ray.report(), ray.now)
        ray.wake(1.0)
    assert len(ray.orders) == 1
    ray.turns(2)
    assert len(ray.asks) == 2


def test_what_ends_is_asked_for_again_later_and_later() -> None:
    ray = FakeRay(a=8.0)
    ray.core.on_message(wanted("ray-0"), ray.now)
    at = []
    for _ in range(200):
        ray.turn()
        for key, (ask, row) in ray.groups.items():
            if row.phase == "running":
                at.append(ray.now)
                ray.groups[key] = ask, GroupRow(*key, "ended", row.at, "no such model")
    pauses = [b - a for a, b in zip(at, at[1:], strict=False)]
    assert len(pauses) > 5 and pauses == sorted(pauses) and pauses[0] < 5 < 30 < pauses[-1] < 70


def test_the_reason_of_an_end_is_reported() -> None:
    ray = served()
    key, (ask, row) = next((k, g) for k, g in ray.groups.items() if k[0] == "ray-0")
    ray.groups[key] = ask, GroupRow(*key, "ended", row.at, "no such model")
    ray.core.on_message(ray.report(), ray.now)
    ray.wake()
    assert "ray-0 ended: no such model" in ray.news


def test_another_actor_finds_the_groups_of_the_one_before() -> None:
    ray = served()
    asked = len(ray.asks)
    ray.new_core()
    ray.core.on_message(wanted("ray-0", "ray-1", "ray-2"), ray.now)
    ray.seen = 0
    ray.pid += 1
    ray.turns(3)
    assert len(ray.running()) == 2 and [ask.node for ask in ray.asks[asked:]] == ["ray-2"]
    assert ray.asks[-1].generation > max(ask.generation for ask in ray.asks[:asked])
    ray.core.on_message(wanted("ray-0"), ray.now)
    ray.turns(3)
    assert set(ray.running()) == {"ray-0"} and len(ray.groups) == 1


def test_ray_is_away_and_comes_back_empty() -> None:
    """What ran goes on where it is: groups are asked for there first, and anywhere if that machine
    has no room."""
    ray = served(a=2.0, b=2.0)
    asked, places = len(ray.asks), ray.running()
    ray.core.start_driver = False
    ray.core.on_message(RayFault("its head does not answer"), ray.now)
    ray.wake()
    assert ray.news.startswith("ray is away (its head does not answer): what runs goes on")
    waits = []
    for _ in range(12):
        began = ray.now
        ray.core.driver_ended("exited with code 1", ray.now)
        while not ray.core.start_driver:
            ray.wake(0.5)
            assert ray.now < began + 100
        ray.core.start_driver = False
        waits.append(ray.now - began)
    assert waits == sorted(waits) and waits[0] <= 1.5 and 20 < waits[-1] <= 31
    assert not ray.orders and len(ray.asks) == asked
    ray.groups.clear()
    ray.pid, ray.seen = ray.pid + 1, 0
    ray.machines["a"] = 1.0  # somebody else has taken a processor there
    ray.machines["c"] = 2.0
    ray.turns(2)
    assert {ask.node: ask.home for ask in ray.asks[asked:]} == places
    ray.turns(int(ray_actor.HOME) + 6)
    moved = next(node for node, at in places.items() if at == "a")
    assert ray.running() == places | {moved: "c"} and ray.core.address == "10.0.0.9:6379"


def test_no_word_is_as_good_as_away() -> None:
    ray = served()
    ray.wake(ray_actor.SILENT + 1)
    assert "ray is away (no word for 10 s)" in ray.news and not ray.orders
    ray.turn()
    assert ray.news.startswith("ray: 2 of 2")


@pytest.mark.parametrize(("gpus_there", "auto", "want"), [
    (8.0, True, 2), (0.0, True, 0), (0.0, False, 2)])
def test_gpus(gpus_there: float, auto: bool, want: int) -> None:
    ray = FakeRay(2.0, 2, auto, a=2.0)
    ray.gpus = gpus_there
    ray.core.on_message(wanted("ray-0", "ray-1"), ray.now)
    ray.turns(3)
    assert {ask.gpus for ask in ray.asks} == {want}
    assert ("2 GPUs, 2 CPUs" in ray.news) == bool(want)


def test_at_the_end_all_is_given_back() -> None:
    ray = served()
    ray.core.drain(ray.now)
    assert not ray.core.done
    ray.turns(3)
    assert not ray.groups and ray.ended and not ray.core.done, "its driver is waited for"
    ray.wake(1.0)
    ray.core.driver_ended("exited with code 0", ray.now)
    ray.wake(40.0)
    assert ray.core.done and not ray.orders and "away" not in ray.news


def test_nobody_waits_at_the_end_for_a_ray_that_is_away() -> None:
    ray = served()
    ray.core.on_message(RayFault("gone"), ray.now)
    ray.core.drain(ray.now)
    ray.wake()
    assert ray.core.done and ray.groups


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_it_comes_right(seed: int) -> None:
    """Machines, drivers and the actor die, orders are lost with a driver, reports are late: when it
    is over each node that is wanted has one agent, and nothing else is held."""
    chance = random.Random(seed)
    ray = FakeRay(a=2.0, b=4.0, c=2.0)
    nodes = ["ray-0", "ray-1"]
    late: list[RayReport] = []
    ray.core.on_message(wanted(*nodes), ray.now)
    for _ in range(300):
        event = chance.random()
        if event < 0.03 and len(ray.machines) > 1:
            del ray.machines[chance.choice(sorted(ray.machines))]
        elif event < 0.06:
            ray.machines[chance.choice("abcd")] = 2.0
        elif event < 0.08:
            ray.pid, ray.seen = ray.pid + 1, 0
            ray.orders.clear()
            late.clear()
            ray.core.driver_ended("was killed", ray.now)
        elif event < 0.09:
            ray.pid, ray.seen = ray.pid + 1, 0
            ray.orders.clear()
            late.clear()
            ray.new_core().on_message(wanted(*nodes), ray.now)
        elif event < 0.12:
            nodes = [f"ray-{i}" for i in range(chance.randint(1, 5))]
            ray.core.on_message(wanted(*nodes), ray.now)
        elif event < 0.13:
            ray.groups.clear()  # another Ray
        if chance.random() < 0.5:
            ray.obey()
        ray.place_groups()
        late.append(ray.report())
        if chance.random() < 0.6:
            for report in late:
                ray.core.on_message(report, ray.now)
            late.clear()
        ray.wake(chance.random() * 3)
    ray.machines = dict.fromkeys("abcd", 4.0)
    ray.turns(150)
    assert set(ray.running()) == set(nodes) and len(ray.groups) == len(nodes)
    assert not any(isinstance(order, DropGroup) for m in ray.orders for order in m.orders)
