"""Replicas come, rest and go while streams run: nothing is lost, changed or told twice."""

from __future__ import annotations

import random

import pytest
from helpers_cluster import ClusterBox, settings

from actorium.actors.cluster.cluster_control import (
    AskCluster,
    DrainReplica,
    ReplicaRow,
    ScaleCluster,
    UndrainReplica,
)
from actorium.actors.cluster.routing.routing_policy import FIRST_RATE
from actorium.actors.errors import EngineUnavailable
from actorium.tools.cli.cluster_command import COLUMNS, is_done, table


def rows(box: ClusterBox) -> dict[int, ReplicaRow]:
    return {row.replica: row for row in box.ask(AskCluster("q")).rows}


def loaded(requests: int = 8, replicas: int = 2, max_tokens: int = 120) -> ClusterBox:
    box = ClusterBox(settings(replicas))
    for i in range(requests):
        box.submit([1 + i, 2, 3], max_tokens=max_tokens, n=1 + i % 2)
    for _ in range(20):
        box.turn()
    return box


def turns(box: ClusterBox, count: int = 80) -> None:
    for _ in range(count):
        box.turn()


def test_more_replicas_join_and_get_requests() -> None:
    box = loaded()
    assert box.ask(ScaleCluster("q", 4)).target == 4
    turns(box)
    assert [row.phase for row in rows(box).values()] == ["ready"] * 4
    for i in range(8):
        box.submit([50 + i, 2, 3], max_tokens=8)
    box.run()
    box.assert_whole()
    assert all(row.requests for row in rows(box).values())


def test_one_that_comes_gets_its_part_of_what_waits() -> None:
    """Of 24 sequences 8 have slots."""
    box = loaded(16, replicas=1, max_tokens=400)
    box.ask(ScaleCluster("q", 2))
    turns(box, 160)
    found = rows(box)
    assert found[1].requests == found[1].migrated_in == found[0].migrated_out > 3
    assert box.router.health().gauges["migrated_tokens"] == 0, "who has begun stays"
    box.run(2000)
    box.assert_whole()


def test_replicas_leave_and_their_streams_go_on_at_once() -> None:
    box = loaded(replicas=4)
    assert all(row.sequences for row in rows(box).values())
    box.ask(ScaleCluster("q", 1))
    turns(box, 60)
    assert box.gone == {1, 2, 3} and [*rows(box)] == [0]
    assert not box.over, "they were moved, and not waited for"
    assert rows(box)[0].migrated_in == 6
    box.run(1500)
    box.assert_whole()


def test_a_replica_that_leaves_may_finish_first() -> None:
    box = loaded(max_tokens=60)
    box.ask(ScaleCluster("q", 1, 60.0))
    late = box.submit([77, 2], max_tokens=8)
    turns(box, 5)
    found = rows(box)
    assert found[1].phase == "leaving" and found[1].sequences and not found[0].migrated_in
    box.run()
    box.assert_whole()
    assert box.of(late) and found[0].requests == 5
    turns(box, 60)
    assert box.gone == {1} and rows(box)[0].migrated_in == 0


def test_what_has_not_finished_in_time_goes_on_elsewhere() -> None:
    box = loaded(max_tokens=400)
    box.ask(ScaleCluster("q", 1, 0.5))
    turns(box, 120)
    assert box.gone == {1} and rows(box)[0].migrated_in == 4
    box.run(3000)
    box.assert_whole()


def test_drained_and_back() -> None:
    box = loaded()
    assert box.ask(DrainReplica("q", 0)).error == ""
    turns(box, 60)
    assert rows(box)[0].phase == "drained" and rows(box)[0].migrated_out == 4
    before = rows(box)[0].requests
    for i in range(4):
        box.submit([60 + i, 2, 3], max_tokens=8)
    box.run(1500)
    assert rows(box)[0].requests == before
    box.ask(UndrainReplica("q", 0))
    turns(box, 60)
    for i in range(4):
        box.submit([70 + i, 2, 3], max_tokens=8)
    box.run()
    box.assert_whole()
    assert rows(box)[0].phase == "ready" and rows(box)[0].requests > before


def test_refusals() -> None:
    box = ClusterBox(settings())
    turns(box, 40)
    assert "no replica 7" in box.ask(DrainReplica("q", 7)).error
    assert "no replica 7" in box.ask(UndrainReplica("q", 7)).error
    assert box.ask(DrainReplica("q", 1)).error == ""
    assert "no other replica than 0" in box.ask(DrainReplica("q", 0)).error
    assert [row.phase for row in rows(box).values()] == ["ready", "drained"]


def test_a_drained_replica_goes_first() -> None:
    box = ClusterBox(settings(3))
    turns(box, 40)
    box.ask(DrainReplica("q", 0))
    box.ask(ScaleCluster("q", 2))
    turns(box, 60)
    assert box.gone == {0} and [*rows(box)] == [1, 2]


def test_one_that_was_leaving_stays_when_more_are_wanted() -> None:
    box = loaded(max_tokens=300)
    box.ask(ScaleCluster("q", 1, 60.0))
    turns(box, 5)
    box.ask(ScaleCluster("q", 2))
    turns(box, 20)
    assert [row.phase for row in rows(box).values()] == ["ready"] * 2 and not box.gone
    box.run(1500)
    box.assert_whole()


def test_a_new_router_knows_who_is_drained_and_who_came() -> None:
    box = loaded(max_tokens=200)
    box.ask(ScaleCluster("q", 3))
    turns(box, 60)
    box.ask(DrainReplica("q", 0))
    turns(box, 60)
    box.new_router()
    turns(box, 60)
    found = rows(box)
    assert [row.phase for row in found.values()] == ["drained", "ready", "ready"]
    box.run(1500)
    box.assert_whole()


def test_a_replica_dies_while_it_leaves() -> None:
    box = loaded(max_tokens=300)
    box.ask(ScaleCluster("q", 1, 60.0))
    turns(box, 5)
    box.kill(1)
    box.run(2000)
    box.assert_whole()
    turns(box, 60)
    assert box.gone == {1}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(i, marks=pytest.mark.slow)
                                         for i in range(2, 12))])
def test_streams_while_everything_changes(seed: int) -> None:
    """In any order, with deaths in between."""
    chance = random.Random(seed)
    box = ClusterBox(settings(2))
    for step in range(14):
        for _ in range(3):
            box.submit([1 + len(box.submits), 2, 3], max_tokens=30, n=1 + step % 2)
        turns(box, chance.randrange(25))
        what = chance.randrange(5)
        if what == 0:
            box.ask(ScaleCluster("q", chance.randint(1, 5), chance.choice((0.0, 0.3))))
        elif what == 1:
            box.ask(DrainReplica("q", chance.randrange(4), chance.choice((0.0, 0.3))))
        elif what == 2:
            box.ask(UndrainReplica("q", chance.randrange(4)))
        elif what == 3 and (there := sorted(set(range(len(box.replicas))) - box.gone)):
            box.kill(chance.choice(there))
        else:
            box.new_router()
            box.repeat_unheard()
    box.repeat_unheard()
    box.run(4000)
    box.assert_whole()


def test_a_table_tells_of_each_replica_what_its_headings_say() -> None:
    answer = loaded().ask(AskCluster("q"))
    headings, *lines = table(answer).splitlines()
    assert headings.endswith("prompt tokens/s")
    for row, line in zip(answer.rows, lines, strict=False):
        assert line.endswith(str(round(FIRST_RATE))) and row.prompt_rate == FIRST_RATE
        assert len(line.split()) == len(COLUMNS)


def test_who_waits_for_an_order_hears_when_it_will_never_be_so() -> None:
    box = ClusterBox(settings())
    turns(box, 40)
    box.cut_off.add(2)
    box.ask(ScaleCluster("q", 3))
    assert not is_done("scale", 3, box.ask(AskCluster("q")))
    box.to_router.append(box.roster.leave_out(2, "no device"))
    turns(box, 40)
    answer = box.ask(AskCluster("q"))
    assert table(answer).splitlines()[-1] == "replica 2 is left out: no device"
    with pytest.raises(EngineUnavailable, match="replica 2 is left out: no device"):
        is_done("scale", 3, answer)
    with pytest.raises(EngineUnavailable, match="3 replicas are wanted by now, not 4"):
        is_done("scale", 4, answer)
    box.ask(DrainReplica("q", 0))
    turns(box, 40)
    assert is_done("drain", 0, box.ask(AskCluster("q"))) and is_done("drain", 7, answer)
    with pytest.raises(EngineUnavailable, match="replica 1 is ready: somebody has undrained it"):
        is_done("drain", 1, box.ask(AskCluster("q")))
