"""The scheduler before a worker of several ranks: it goes on when all are there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from helpers_scheduler import Ring, assert_whole, config

from actorium.actors.errors import BadModel
from actorium.actors.messages import PageGroup, Ready, Reset
from actorium.actors.scheduler.worker_capacity import WorkerGroup


def ready(rank: int, epoch: int = 1, pages: int = 9, **more: Any) -> Ready:
    return Ready(epoch, [PageGroup(pages), PageGroup(2 * pages, 64)], 16, 9, 128, 512, "cpu",
                 **more, rank=rank)


def test_ready_when_all_ranks_are_with_the_least_room() -> None:
    group = WorkerGroup(3)
    assert group.join(ready(2, checkpoints=4)) is None
    assert group.join(ready(0, checkpoints=5)) is None
    assert group.join(ready(0, checkpoints=5)) is None, "the same rank once more"
    whole = group.join(ready(1, pages=7, checkpoints=6, inexact="images"))
    assert whole == ready(0, checkpoints=4, pages=7, inexact="images")
    assert group.join(ready(1, pages=7, checkpoints=6)) == ready(0, checkpoints=4, pages=7)


def test_a_rank_of_an_older_group_does_not_count() -> None:
    group = WorkerGroup(2)
    assert group.join(ready(1, epoch=1)) is None
    assert group.join(ready(0, epoch=2)) is None, "rank 1 has another epoch"
    assert group.join(ready(1, epoch=1)) is None, "it was on its way"
    assert group.join(ready(1, epoch=2)) == ready(0, epoch=2)
    assert group.join(ready(7, epoch=3)) is None, "no rank of this engine"


@pytest.mark.parametrize(("change", "text"), [
    ({"page_size": 32}, "page_size: rank 0 of the worker has 16, rank 1 has 32"),
    ({"vocab_size": 7}, "vocab_size: rank 0 of the worker has 512, rank 1 has 7"),
    ({"drafts": 2}, "drafts: rank 0 of the worker has 0, rank 1 has 2"),
    ({"groups": [PageGroup(9)]}, r"windows: rank 0 of the worker has \[0, 64\], rank 1 has \[0\]"),
])
def test_ranks_that_disagree_are_refused_in_one_line(change: dict[str, Any], text: str) -> None:
    group = WorkerGroup(2)
    group.join(ready(0))
    with pytest.raises(BadModel, match=text):
        group.join(msgspec.structs.replace(ready(1), **change))


def two_ranks() -> Ring:
    settings = config()
    return Ring(msgspec.structs.replace(settings, device=msgspec.structs.replace(
        settings.device, tensor_parallel_size=2)), start=False)


def test_plans_and_results_with_two_ranks_and_a_death() -> None:
    ring = two_ranks()
    ring.up = True
    (first,) = ring.worker.on_wake(ring.now)
    rid = ring.submit(40, max_tokens=12)
    ring.tell(first.message)
    ring.wake()
    assert not ring.sent and ring.scheduler.health().phase == "starting"
    ring.tell(msgspec.structs.replace(first.message, rank=1))
    ring.wake()
    assert len(ring.plans) == 2
    ring.work()
    ring.deliver()
    ring.lose_worker()  # rank 0 of the next group is there, but rank 1 is not yet
    ring.wake()
    assert not ring.plans and len(ring.sent) <= 3
    ring.tell(msgspec.structs.replace(ring.worker.ready, rank=1))
    ring.run()
    assert [len(heard.tokens) for heard in ring.of(rid)] == [12]
    assert_whole(ring)
    assert ring.scheduler.health().gauges["worker_restarts"] == 1


def test_the_scheduler_greets_the_group_once() -> None:
    ring = two_ranks()
    list(ring.scheduler.on_wake(ring.now))
    (first,) = ring.worker.on_wake(ring.now)
    for rank in (1, 0, 1, 0):
        ring.tell(msgspec.structs.replace(first.message, rank=rank))
    greetings = [send for send in ring.scheduler.on_wake(ring.now)
                 if isinstance(send.message, Reset)]
    assert [(send.to, send.message.worker) for send in greetings] == [("worker-0", 3)]


def test_a_request_that_wants_exactness_ends_where_it_is_not_kept() -> None:
    """With a worker that comes later as with the one that is there; others go on."""
    ring = Ring(config())
    plain = ring.submit(20, max_tokens=6)
    begun = ring.submit(20, max_tokens=6, deterministic=True)
    ring.wake()
    ring.work()
    ring.deliver()
    assert len(ring.scheduler.state.requests) == 2
    ring.lose_worker(inexact="images")
    refused = ring.submit(20, max_tokens=6, deterministic=True)
    ring.run()
    for rid in (begun, refused):
        (heard,) = ring.of(rid)
        (end,) = [event for event in heard.events if event.finish_reason]
        assert end.error == "deterministic: this engine cannot keep it: images"
        assert end.error_code == "invalid_request"
    assert [len(heard.tokens) for heard in ring.of(plain)] == [6]
