"""Other weights for a cluster: all replicas serve them, or none; whoever dies, each token is of the
version that is told for it, and a replica that comes later has them before it takes requests."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from helpers_cluster import ClusterBox, settings

from actorium.actors.cluster.cluster_control import AskCluster, ScaleCluster
from actorium.actors.cluster.cluster_messages import launch_of
from actorium.actors.messages import (
    RunningMode,
    TensorCall,
    WeightsAnswer,
    WeightsCall,
    WeightsOrder,
    WeightsSource,
)
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.null import null_worker

CLIENT = b"client"


def order(box: ClusterBox, path: str, **fields: Any) -> str:
    """A client gives an order; its name."""
    rid = fields.pop("rid", f"w{box.now}{path}")
    box.to_router.append(WeightsOrder(CLIENT, WeightsCall(rid, "update", path, **fields)))
    return rid


def update(box: ClusterBox, path: str, **fields: Any) -> dict[str, Any]:
    return box.answer(order(box, path, **fields))


def turns(box: ClusterBox, count: int) -> None:
    for _ in range(count):
        box.turn()


def begun(replicas: int = 2, requests: int = 6, ledger: bool = False) -> ClusterBox:
    """A cluster in which requests run."""
    box = ClusterBox(settings(replicas), ledger=ledger)
    for i in range(requests):
        box.submit([1 + i, 2, 3], max_tokens=40, n=1 + i % 2)
    turns(box, 12)
    return box


def served(box: ClusterBox) -> list[tuple[int, str]]:
    """Version and directory of each replica."""
    records = [replica.bare.weights.record for replica in box.replicas]
    return [(record.version, record.source.path) for record in records]


def assert_right(box: ClusterBox, paths: dict[int, str]) -> None:
    """Each request has all its tokens, each of the version that is told for it. paths: of the
    versions."""
    book = box.router.book
    for rid, submit in box.submits.items():
        for index, output in enumerate(book.requests[submit.client, rid].entry.choices):
            told = box.of(rid)[index]
            assert told.tokens == memoryview(bytes(output.tokens)).cast("i").tolist()
            first, own, want = len(submit.prompt) // 4, choice_seed(submit.seed, index), []
            for at in range(submit.params.max_tokens):
                version = [number for start, number in [(0, 0), *output.runs] if start <= at][-1]
                digest = null_worker.weights_digest(WeightsSource(paths[version])) \
                    if version else b""
                want.append(null_worker.next_token(
                    null_worker.adapted_seed(own, digest), first + at, null_worker.VOCAB))
            assert told.tokens == want


def assert_none_is_behind(box: ClusterBox, version: int) -> None:
    """Replicas that take requests, as far as the router knows whom it speaks with, have it."""
    for view, replica in zip(box.router.views, box.replicas, strict=False):
        if view.takes_requests and launch_of(view.life) == replica.launch:
            assert replica.bare.weights.record.version >= version


@pytest.mark.parametrize("mode", ["wait", "keep", "retract"])
def test_all_replicas_change_under_streams(mode: RunningMode) -> None:
    """None is lost, and none that comes after the answer is of the weights of before."""
    box = begun()
    late = box.submit([9, 9], max_tokens=8)
    assert update(box, "/b", mode=mode) == {
        "version": 1, "path": "/b", "seconds": 0.0, "read_seconds": 0.0}
    assert served(box) == [(1, "/b")] * 2
    new = box.submit([8, 8], max_tokens=8)
    box.run()
    assert_right(box, {1: "/b"})
    assert box.router.book.requests[CLIENT, new].entry.choices[0].runs == [(0, 1)]
    assert box.of(late)[0].end is not None
    box.to_router.append(WeightsOrder(CLIENT, WeightsCall("s", "state")))
    assert box.answer("s")["version"] == 1 == box.router.health().gauges["weight_version"]
    assert update(box, "/c", version=7)["version"] == 7 and served(box) == [(7, "/c")] * 2


def test_requests_that_run_are_aborted_once_all_have_read() -> None:
    box = begun()
    assert update(box, "/b", mode="abort")["version"] == 1
    turns(box, 20)
    ends = {heard.end.finish_reason for heard in box.heard.values() if heard.end is not None}
    assert ends == {"abort"} and not box.router.book.live


def test_one_that_cannot_read_them_keeps_all_from_changing() -> None:
    box = begun()
    worker = box.replicas[1].worker
    prepare = worker._prepare
    worker._prepare = lambda message: prepare(msgspec.structs.replace(  # type: ignore[method-assign]
        message, source=WeightsSource("/x" + null_worker.REFUSED)))
    refused = update(box, "/b")
    assert refused["error"]["code"] == "bad_model"
    assert refused["error"]["message"].startswith("replica 1: /x")
    turns(box, 5)
    assert served(box) == [(0, "")] * 2
    assert not any(replica.bare.weights._waiting for replica in box.replicas)
    worker._prepare = prepare  # type: ignore[method-assign]
    assert update(box, "/c")["version"] == 1
    box.run()
    assert_right(box, {1: "/c"})


def test_orders_are_checked_and_repeated_ones_count_once() -> None:
    box = begun()
    first = order(box, "/b", version=4, rid="w")
    box.to_router.append(box.to_router[-1])
    assert box.answer(first)["version"] == 4
    box.replies.clear()
    assert update(box, "/b", rid="w", version=4)["version"] == 4
    assert "must be above 4" in update(box, "/c", version=4)["error"]["message"]
    assert served(box) == [(4, "/b")] * 2


@pytest.mark.parametrize("turned", range(1, 14, 2))
def test_a_replica_dies_while_the_order_goes_round(turned: int) -> None:
    """Those that are left have one version; it comes back with that, before it takes requests."""
    box = begun()
    rid = order(box, "/b", mode="retract")
    turns(box, turned)
    box.kill(0)
    assert box.answer(rid)["version"] == 1
    for _ in range(100):
        assert_none_is_behind(box, 1)
        box.turn()
    assert served(box) == [(1, "/b")] * 2 and box.router.views[0].takes_requests
    box.run()
    assert_right(box, {1: "/b"})
    assert not box.router._weights._plans


def test_later_replicas_have_the_weights_before_they_take_requests() -> None:
    box = begun()
    update(box, "/b")
    box.run()
    box.ask(ScaleCluster("s", 3))
    box.kill(0)
    for _ in range(60):
        assert_none_is_behind(box, 1)
        box.turn()
    assert served(box) == [(1, "/b")] * 3
    assert [row.phase for row in box.ask(AskCluster("a")).rows] == ["ready"] * 3


@pytest.mark.parametrize("turned", range(1, 16, 2))
def test_a_router_dies_while_the_order_goes_round(turned: int) -> None:
    """The next one brings all to what the launcher has; the client gives the order again."""
    box = begun(ledger=True)
    order(box, "/b", rid="w", mode="keep")
    turns(box, turned)
    box.new_router()
    turns(box, 5)
    assert update(box, "/b", rid="w", mode="keep")["version"] == 1
    for _ in range(60):
        box.turn()
    assert served(box) == [(1, "/b")] * 2
    assert not any(replica.bare.weights._waiting for replica in box.replicas)
    box.run()
    assert_right(box, {1: "/b"})


def test_nothing_is_taken_before_the_launcher_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that dies earlier has changed nothing."""
    box = begun(ledger=True)
    with monkeypatch.context() as patch:
        patch.setattr(box, "launch", lambda order: None)
        order(box, "/b", mode="keep")
        turns(box, 30)
        assert [replica.bare.weights._stage for replica in box.replicas] == ["prepared"] * 2
        assert served(box) == [(0, "")] * 2
    box.new_router()
    box.run()
    turns(box, 20)
    assert served(box) == [(0, "")] * 2
    assert not any(replica.bare.weights._waiting for replica in box.replicas)
    assert_right(box, {})


def test_files_that_have_changed_are_a_version_of_their_own(
        monkeypatch: pytest.MonkeyPatch) -> None:
    box = begun()
    update(box, "/b")
    box.run()
    digest = null_worker.weights_digest
    with monkeypatch.context() as patch:
        patch.setattr(null_worker, "weights_digest", lambda source: digest(source)[::-1])
        box.kill(1)
        turns(box, 60)
    assert served(box) == [(1, "/b"), (2, "/b")]
    assert all(view.takes_requests for view in box.router.views)
    assert update(box, "/c")["version"] == 3
    assert served(box) == [(3, "/c")] * 2


def test_a_replica_that_cannot_get_the_weights_says_why_and_takes_no_requests() -> None:
    box = begun()
    update(box, "/b")
    box.run()
    box.kill(0)
    worker = box.replicas[0].worker
    prepare = worker._prepare
    worker._prepare = lambda message: worker._out.append(  # type: ignore[method-assign]
        null_worker.Send("scheduler", WeightsAnswer(
            message.epoch, 0, message.number, error="/b: no such file", prepared=True)))
    turns(box, 60)
    row = box.ask(AskCluster("a")).rows[0]
    assert (row.phase, row.why) == ("behind", "replica 0: /b: no such file")
    box.submit([4, 4])
    box.run()
    worker._prepare = prepare  # type: ignore[method-assign]
    assert update(box, "/c")["version"] == 2 and served(box) == [(2, "/c")] * 2
    assert [row.phase for row in box.ask(AskCluster("a")).rows] == ["ready"] * 2


def test_a_replica_that_is_told_to_take_them_and_cannot_tries_again() -> None:
    box = begun()
    worker = box.replicas[0].worker
    take, refused = worker._update, []

    def refuse(message: Any) -> None:
        if message.take and not refused:
            refused.append(message)
            worker._out.append(null_worker.Send("scheduler", WeightsAnswer(
                message.epoch, 0, message.number, error="no memory")))
        else:
            take(message)

    worker._update = refuse  # type: ignore[method-assign]
    assert update(box, "/b", mode="retract")["version"] == 1
    assert served(box) == [(0, ""), (1, "/b")] and not box.router.views[0].takes_requests
    box.now += 5.0
    box.run()
    turns(box, 20)
    assert served(box) == [(1, "/b")] * 2
    assert_right(box, {1: "/b"})


def test_replicas_that_sleep_by_themselves_wake_for_an_order() -> None:
    box = ClusterBox(settings(sleep_after=1.0))
    turns(box, 150)
    levels = [replica.bare.sleep.level for replica in box.replicas]
    assert levels == [1, 1] and update(box, "/b")["version"] == 1
    assert served(box) == [(1, "/b")] * 2
    turns(box, 150)
    box.kill(0)
    turns(box, 150)
    assert served(box) == [(1, "/b")] * 2


def test_tensors_lie_over_what_is_served_at_each_replica() -> None:
    box = begun()
    update(box, "/b")
    assert update(box, "", tensors="/t/1")["path"] == "/b"
    update(box, "", tensors="/t/2")
    box.kill(1)
    turns(box, 60)
    assert [replica.bare.weights.record.source.over for replica in box.replicas] == [
        ["/t/1", "/t/2"]] * 2


def test_a_tensor_is_asked_of_one_replica() -> None:
    box = begun()
    box.to_router.append(WeightsOrder(CLIENT, TensorCall("t", "x")))
    assert box.answer("t")["error"]["message"] == "there are no tensors"
    box = ClusterBox(settings())
    box.to_router.append(WeightsOrder(CLIENT, TensorCall("t", "x")))
    box.turn()
    assert box.answer("t")["error"]["message"] == "no replica is ready"


def test_prefixes_are_routed_by_the_weights_that_computed_them() -> None:
    box = ClusterBox(settings())
    prompt = [*range(1, 33)]

    def routed() -> int:
        box.submit(prompt, max_tokens=4)
        box.run()
        turns(box, 40)  # what it leaves in the cache is reported
        return int(box.router.health().gauges["routed_cached_tokens"])

    assert routed() == 0 and (before := routed()) >= 28
    update(box, "/b", clear_cache=False)
    assert routed() == before, "pages of the weights of before count as absent"
    assert routed() >= before + 28, "and its own are known again"


@pytest.mark.parametrize("seed", [*range(10), 17, 25])
def test_whoever_dies_each_token_is_of_the_version_that_is_told(seed: int) -> None:
    chance = random.Random(seed)
    box = ClusterBox(settings(3), ledger=True)
    paths: dict[int, str] = {}
    for number in range(1, 9):
        for _ in range(3):
            box.submit([chance.randrange(100), 2, 3], max_tokens=30, n=chance.randint(1, 2))
        mode = chance.choice(["wait", "keep", "retract"])
        paths[number * 100] = path = f"/{number}"
        fields = {"rid": f"w{number}", "mode": mode, "version": number * 100}
        order(box, path, **fields)
        for _ in range(chance.randint(1, 30)):
            box.turn(chance)
        if chance.random() < 0.5:
            box.kill(chance.randrange(3))
        if chance.random() < 0.3:
            box.new_router()
            box.repeat_unheard()
            box.to_router.append(WeightsOrder(CLIENT, WeightsCall("e", "state")))
        for _ in range(chance.randint(1, 20)):
            box.turn(chance)
        assert update(box, path, **fields)["version"] == number * 100
    box.repeat_unheard()
    box.run()
    turns(box, 1200)
    assert served(box) == [(800, "/8")] * 3
    assert_right(box, paths)
    for replica in box.replicas:
        assert not replica.bare.weights._waiting and not replica.bare.state.requests
    assert not box.router._weights._plans and not box.router.book.live
