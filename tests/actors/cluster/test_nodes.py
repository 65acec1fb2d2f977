"""Several machines: links are cut, agents, replicas and the nodes' actor die, and no stream notices
more than a pause."""

from __future__ import annotations

import random

import msgspec
import pytest
from helpers_nodes import NodeBox, NodesBox

from actorium.actors.cluster.cluster_control import (
    AskCluster,
    DrainReplica,
    ReplicaRow,
    ScaleCluster,
)
from actorium.actors.cluster.nodes.nodes_core import NodesCore
from actorium.actors.runtime.security.curve_keys import identity


def rows(box: NodesBox) -> dict[int, ReplicaRow]:
    return {row.replica: row for row in box.ask(AskCluster("q")).rows}


def turns(box: NodesBox, count: int) -> None:
    for _ in range(count):
        box.turn()


def loaded(max_tokens: int = 160, **nodes: float) -> NodesBox:
    """With streams that have begun."""
    box = NodesBox(nodes or {"a": 1, "b": 1})
    turns(box, 120)
    assert {row.phase for row in rows(box).values()} == {"ready"}
    for i in range(8):
        box.submit([1 + i, 2, 3], max_tokens=max_tokens, n=1 + i % 2)
    turns(box, 30)
    assert all(row.sequences for row in rows(box).values())
    return box


def test_nodes_join_and_serve() -> None:
    box = loaded(100, a=2, b=1)
    assert [row.node for row in rows(box).values()] == ["a", "b", "a"]
    box.run()
    box.assert_whole()
    assert box.hub.health().detail == "2 of 2 nodes, 3 of 3 of their replicas ready"


def test_requests_wait_for_the_first_node() -> None:
    box = NodesBox({"a": 1, "b": 1})
    box.nodes["a"].cut = box.nodes["b"].cut = True
    box.submit([1, 2, 3], max_tokens=5)
    turns(box, 50)
    assert box.hub.health().phase == "loading" and not box.over
    box.nodes["b"].cut = False
    box.run(1500)
    box.assert_whole()
    assert box.hub.health().phase == "ready" and "missing: a" in box.hub.health().detail


def test_a_node_that_is_cut_off_comes_back_with_its_replicas() -> None:
    box = loaded()
    launched = box.nodes["b"].boxes[1].launch
    box.nodes["b"].cut = True
    turns(box, 130)
    assert rows(box)[1].phase == "silent" and rows(box)[0].migrated_in == 4
    box.nodes["b"].cut = False
    box.run(3000)
    box.assert_whole()
    turns(box, 200)
    assert rows(box)[1].phase == "ready" and box.nodes["b"].boxes[1].launch == launched
    assert not box.nodes["b"].boxes[1].bare.state.requests, "what moved has ended there"
    for i in range(8):
        box.submit([40 + i, 2, 3], max_tokens=5)
    box.run()
    assert rows(box)[1].requests > 4


def test_an_agent_dies_with_its_replicas() -> None:
    box = loaded()
    box.kill_agent("b")
    turns(box, 10)
    assert rows(box)[0].migrated_in == 4
    box.run(3000)
    box.assert_whole()
    turns(box, 200)
    assert rows(box)[1].phase == "ready"


def test_a_replica_dies_at_a_node_and_is_started_again() -> None:
    box = loaded()
    box.kill_replica(1)
    box.run(3000)
    box.assert_whole()
    turns(box, 200)
    assert rows(box)[1].phase == "ready" and box.nodes["b"].boxes


def test_a_replica_that_cannot_be_started_is_left_out() -> None:
    box = NodesBox({"a": 1, "b": 1})
    box.nodes["b"].statuses[1] = 2
    turns(box, 300)
    assert "replica 1 at b" in (told := box.hub.health().detail) and "no such model" in told
    box.submit([1, 2, 3], max_tokens=5)
    box.run()
    box.assert_whole()
    assert (rows(box)[1].phase, rows(box)[1].why) == ("left out", told.partition("at b ")[2])
    assert "no other replica" in box.ask(DrainReplica("q", 0)).error
    box.kill_agent("b")  # and what was wrong there has been mended
    turns(box, 200)
    assert rows(box)[1].phase == "ready"


def test_the_nodes_actor_dies() -> None:
    """Its links are gone, and what was on its way; the replicas stay."""
    box = loaded()
    before = {index: replica.launch for node in box.nodes.values()
              for index, replica in node.boxes.items()}
    box.new_hub()
    box.run(3000)
    box.assert_whole()
    assert before == {index: replica.launch for node in box.nodes.values()
                      for index, replica in node.boxes.items()}


def test_frames_that_are_lost_are_noticed() -> None:
    """For a moment only, shorter than anybody would call silence."""
    box = loaded()
    box.nodes["b"].cut = True
    turns(box, 3)
    box.nodes["b"].cut = False
    box.run(3000)
    box.assert_whole()


def test_scaling_over_nodes() -> None:
    box = loaded(a=2, b=2)
    box.ask(ScaleCluster("q", 2))
    turns(box, 200)
    assert sorted(row.node for row in rows(box).values()) == ["a", "b"]
    assert all(len(node.boxes) == 1 for node in box.nodes.values())
    assert "room for 4" in box.ask(ScaleCluster("q", 5)).error
    box.ask(ScaleCluster("q", 4))
    turns(box, 200)
    assert all(len(node.boxes) == 2 for node in box.nodes.values())
    box.run(3000)
    box.assert_whole()


def test_deadlines_are_those_of_the_clock_that_reads_them() -> None:
    """A node's clock may be hours ahead."""
    box = NodesBox({"a": 1})
    turns(box, 120)
    box.submit([1, 2, 3], max_tokens=4000)
    submit = box.submits["r0"]
    box.to_router.clear()
    box.submits["r0"] = msgspec.structs.replace(submit, deadline=box.now + 2.0, arrival=box.now)
    box.to_router.append(box.submits["r0"])
    turns(box, 120)
    assert box.of("r0")[0].end is None and len(box.of("r0")[0].tokens) > 50
    turns(box, 140)
    end = box.of("r0")[0].end
    assert end is not None and end.finish_reason == "deadline"


def test_strangers_and_doubles_are_refused() -> None:
    box = loaded()
    assert isinstance(box.hub, NodesCore)
    double, stranger = NodeBox("a", "a-9", 0.0), NodeBox("z", "z-0", 0.0)
    box.nodes |= {"a2": double, "z": stranger}
    turns(box, 30)
    assert "is there already" in double.core.refusal
    assert "no node of this cluster" in stranger.core.refusal
    del box.nodes["a2"], box.nodes["z"]
    box.run(3000)
    box.assert_whole()


def test_an_agent_of_a_higher_generation_takes_the_place_of_another() -> None:
    """As when Ray has placed a node anew while the old agent lives on: it is told to end, and so is
    one that was cut off meanwhile."""
    box = loaded()
    old, new = box.nodes["b"], NodeBox("b", "b-9", 5.0, generation=7)
    box.nodes["b2"] = new
    turns(box, 20)
    assert old.core.replaced and not new.core.replaced and rows(box)[0].migrated_in == 4
    box.run(3000)
    box.assert_whole()
    turns(box, 100)
    assert rows(box)[1].phase == "ready" and list(new.boxes) == [1]
    del box.nodes["b"]
    late = box.nodes["b3"] = NodeBox("b", "b-8", 0.0, generation=6)
    turns(box, 30)
    assert late.core.replaced and "has taken the place" in late.core.refusal
    assert rows(box)[1].phase == "ready"


def test_spare_nodes_of_ray_are_not_missed_and_their_agents_end() -> None:
    """Whether Ray is there to end them or not."""
    box = loaded(60, **{"ray-0": 1, "ray-1": 1})
    box.ask(ScaleCluster("s", 1))
    box.run(3000)
    turns(box, 20)
    assert box.nodes["ray-1"].core.dismissed and not box.nodes["ray-1"].boxes
    del box.nodes["ray-1"]
    turns(box, 150)
    assert box.hub.health().detail == "1 of 1 nodes, 1 of 1 of their replicas ready"
    assert box.hub.health().gauges["nodes"] == 1
    assert not box.nodes["ray-0"].core.dismissed
    box.hub.drain(box.now)
    turns(box, 5)
    assert box.nodes["ray-0"].core.dismissed


@pytest.mark.slow
def test_replicas_without_a_head_end() -> None:
    box = loaded(4000)
    box.nodes["b"].cut = True
    turns(box, 7000)
    assert box.nodes["b"].boxes == {} and box.nodes["a"].boxes


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow)
                                      for i in range(1, 8))])
def test_streams_while_everything_breaks(seed: int) -> None:
    chance = random.Random(seed)
    box = NodesBox({"a": 2, "b": 1, "c": 1})
    turns(box, 100)
    for _ in range(10):
        for _ in range(2):
            box.submit([1 + len(box.submits), 2, 3], max_tokens=40, n=chance.randint(1, 2))
        name = chance.choice("abc")
        what = chance.randrange(6)
        if what == 0:
            box.nodes[name].cut = True
        elif what == 1:
            box.kill_agent(name)
        elif what == 2:
            box.kill_replica(chance.randrange(4))
        elif what == 3:
            box.new_hub()
        elif what == 4:
            box.ask(ScaleCluster("q", chance.randint(1, 4)))
        else:
            box.new_router()
            box.repeat_unheard()
        turns(box, chance.randrange(60))
        for node in box.nodes.values():
            node.cut = node.cut and chance.random() < 0.5
    for node in box.nodes.values():
        node.cut = False
    for _ in range(6):
        box.repeat_unheard()
        turns(box, 300)
    box.run(3000)
    box.assert_whole()


def test_a_node_cannot_call_itself_by_anothers_name() -> None:
    """Who has b's key says that it is a, with a generation that would take a's place: it is told
    why not, and a's streams notice nothing."""
    box = loaded()
    sender = NodeBox("a", "a-9", 0.0, generation=9)
    sender.core.tick(box.now)
    [join] = sender.core.take()
    box.hub.on_client(identity("b", b"9"), join, box.now)
    [refusal] = [send.message for send in box.hub.on_wake(box.now) if send.client]
    assert refusal.why == "it has the key of 'b' and calls itself 'a'" and not refusal.replaced
    box.run(3000)
    box.assert_whole()
    assert all(row.migrated_in == 0 for row in rows(box).values())


def test_a_message_that_nobody_could_read_is_answered() -> None:
    """Its session is not known: the answer is for whichever the node has."""
    box = loaded()
    node = box.nodes["b"]
    box.hub.on_bad_client(node.client, "a field is wrong")
    turns(box, 1)
    assert node.core.refusal == "a field is wrong" and not node.core.joined
    box.run(3000)
    box.assert_whole()
    assert node.core.joined and not node.core.refusal and not node.core.replaced
