"""Other weights while requests run: each token is of one version, and none is computed from what
another has left in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_scheduler import CLIENT, Heard, Ring, config

from actorium.actors.core import Context
from actorium.actors.ledger.records import (
    META,
    WEIGHTS,
    LedgerHistory,
    LedgerMeta,
    WeightsRecord,
    make_record,
)
from actorium.actors.messages import (
    Control,
    ControlRequest,
    PrepareWeights,
    Ready,
    StepPlan,
    TensorCall,
    UpdateWeights,
    WeightsAnswer,
    WeightsCall,
    WeightsOrder,
    WeightsSource,
)
from actorium.actors.params import ResolvedPooling
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.recovery.recovery_log import PriorRun
from actorium.tools.null import null_worker


def order(ring: Ring, path: str = "/b", rid: str = "", what: str = "update",
          **fields: Any) -> str:
    """Gives an order; its name."""
    rid = rid or f"w{len(ring.replies)}{path}"
    ring.tell(WeightsOrder(CLIENT, WeightsCall(rid, what, path, **fields)))  # type: ignore[arg-type]
    return rid


def answer(ring: Ring, rid: str) -> dict[str, Any] | None:
    found = [msgspec.json.decode(reply.json) for reply in ring.replies if reply.rid == rid]
    return found[-1] if found else None


def digest(path: str = "/b", *over: str) -> bytes:
    return null_worker.weights_digest(WeightsSource(path, list(over)))


def runs_of(heard: Heard) -> list[tuple[int, int]]:
    return [event.weights for event in heard.events if event.weights is not None]


def right(heard: Heard, digests: list[bytes], count: int = 12) -> bool:
    """Whether each token is of the version that is told for it. digests: of the versions."""
    runs, start, want = [(0, 0), *runs_of(heard)], len(heard.submit.prompt) // 4, []
    for at in range(count):
        version = [number for first, number in runs if first <= at][-1]
        seed = null_worker.adapted_seed(heard.submit.seed, digests[version])
        want.append(null_worker.next_token(seed, start + at, null_worker.VOCAB))
    return heard.reason == "length" and heard.tokens == want


def begun(acceptance: tuple[float, ...] = (), **settings: Any) -> tuple[Ring, str]:
    """A ring in which a request runs, and has emitted some tokens."""
    ring = Ring(config(seqs=3, **settings), acceptance=acceptance)
    rid = ring.submit(40, max_tokens=12)
    step(ring, 3)
    assert 0 < len(ring.of(rid)[0].tokens) < 12
    return ring, rid


def step(ring: Ring, times: int) -> None:
    ring.wake()
    for _ in range(times):
        ring.work()
        ring.deliver()


def test_requests_that_run_end_first_and_new_ones_wait() -> None:
    ring, old = begun()
    rid = order(ring)
    step(ring, 4)  # it is read meanwhile
    new = ring.submit(30, max_tokens=12)
    step(ring, 2)
    assert not ring.of(new)[0].tokens
    assert answer(ring, rid) is None
    ring.run()
    assert answer(ring, rid) == {"version": 1, "path": "/b", "seconds": 0.0, "read_seconds": 0.0}
    assert runs_of(ring.of(old)[0]) == [] and right(ring.of(old)[0], [b""])
    assert runs_of(ring.of(new)[0]) == [(0, 1)] and right(ring.of(new)[0], [b"", digest()])
    ring.assert_at_rest()


@pytest.mark.parametrize("mode", ["keep", "retract"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_requests_that_run_go_on_with_the_new_weights(mode: str, drafts: int) -> None:
    """What they have emitted stays, and no plan is under way while the weights change; where they
    are retracted, nothing of the old weights is computed with."""
    ring, old = begun((0.5, 0.5)[:drafts], speculative=f"mtp:{drafts},fixed" if drafts else "off")
    before = len(ring.of(old)[0].tokens)
    rid = order(ring, mode=mode)
    new = ring.submit(30, max_tokens=12)
    ring.run()
    assert (answer(ring, rid) or {})["version"] == 1
    (first, number), = runs_of(ring.of(old)[0])
    assert number == 1 and before <= first < 12
    assert right(ring.of(old)[0], [b"", digest()]) and right(ring.of(new)[0], [b"", digest()])
    assert ring.of(old)[0].reason == "length"
    admits = [admit for plan in ring.sent if isinstance(plan, StepPlan) for admit in plan.admit]
    assert len(admits) == (4 if mode == "retract" else 2)
    assert [admit.cached_len for admit in admits] == [0] * len(admits)
    ring.assert_at_rest()


def test_requests_that_run_are_aborted() -> None:
    ring, old = begun()
    rid = order(ring, mode="abort")
    step(ring, 4)
    new = ring.submit(30, max_tokens=12)
    ring.run()
    assert ring.of(old)[0].reason == "abort" and right(ring.of(new)[0], [b"", digest()])
    assert (answer(ring, rid) or {})["version"] == 1


@pytest.mark.parametrize("clear", [True, False])
def test_no_prefix_is_shared_across_versions(clear: bool) -> None:
    """Also what runs across the change leaves nothing for others; within a version they share."""
    ring = Ring(config(seqs=3))
    prompt = list(range(40))

    def ask() -> Heard:
        rid = ring.submit(prompt, max_tokens=12)
        ring.run()
        return ring.of(rid)[0]

    def cached(heard: Heard) -> int:
        return next(e.cached_tokens for e in heard.events if e.cached_tokens is not None)

    assert cached(ask()) == 0 and cached(ask()) > 0
    across = ring.submit(prompt, max_tokens=12)
    step(ring, 3)
    order(ring, mode="keep", clear_cache=clear)
    ring.run()
    assert ring.of(across)[0].reason == "length"
    assert cached(ask()) == 0, "the new weights have computed nothing of it yet"
    assert cached(ask()) > 0
    order(ring, "/c", clear_cache=clear)
    ring.run()
    assert cached(ask()) == 0
    order(ring, "/b", clear_cache=clear)  # the same files again are the same numbers
    ring.run()
    assert (cached(ask()) > 0) == (not clear)
    ring.state.audit()


def test_a_refusal_changes_nothing() -> None:
    ring, old = begun()
    rid = order(ring, "/x/refused", mode="keep")
    ring.run()
    error = (answer(ring, rid) or {})["error"]
    assert error == {"code": "bad_model", "message": "/x/refused: it is refused"}
    assert runs_of(ring.of(old)[0]) == [] and right(ring.of(old)[0], [b""])
    assert ring.core.weights.record == WeightsRecord()


def test_tensors_lie_over_the_files_in_use() -> None:
    """Those of a part of the model over those before; a directory stands for itself again."""
    ring = Ring(config(seqs=3))
    for fields, source in (
            ({"path": "/b"}, WeightsSource("/b")),
            ({"path": "", "tensors": "/r/1"}, WeightsSource("/b", ["/r/1"])),
            ({"path": "", "tensors": "/r/2"}, WeightsSource("/b", ["/r/1", "/r/2"])),
            ({"path": "/c"}, WeightsSource("/c"))):
        order(ring, **fields)
        ring.wake()
        told = next(m for m in ring.plans if isinstance(m, PrepareWeights))
        assert told.source == source
        ring.run()
    assert ring.core.weights.record.version == 4


def test_an_order_that_is_repeated_is_carried_out_once() -> None:
    """While it waits, and when its answer was lost."""
    ring, _ = begun()
    rid = order(ring)
    order(ring, rid=rid)
    ring.run()
    order(ring, rid=rid)
    ring.run()
    assert ring.core.weights.record.version == 1
    assert [reply.rid for reply in ring.replies] == [rid, rid]


def test_versions_are_counted_or_given() -> None:
    ring = Ring(config(seqs=3))
    for asked, want in ((5, 5), (0, 6), (6, None), (9, 9)):
        rid = order(ring, version=asked)
        ring.run()
        said = answer(ring, rid) or {}
        assert said.get("version") == want
        if want is None:
            assert said["error"]["message"] == "weight_version: must be above 6, got 6"


def test_a_paused_engine_changes_its_weights_where_it_stands() -> None:
    """As trainers do: pause, update, go on."""
    ring, old = begun()
    ring.tell(ControlRequest(CLIENT, Control("p", "pause", mode="keep")))
    ring.run()
    before = len(ring.of(old)[0].tokens)
    rid = order(ring)
    ring.run()
    assert (answer(ring, rid) or {})["version"] == 1 and len(ring.of(old)[0].tokens) == before
    ring.tell(ControlRequest(CLIENT, Control("r", "resume")))
    ring.run()
    assert runs_of(ring.of(old)[0]) == [(before, 1)] and right(ring.of(old)[0], [b"", digest()])


def test_a_worker_that_dies_while_it_reads_leaves_the_old_version() -> None:
    ring, old = begun()
    rid = order(ring, mode="keep")
    step(ring, 5)
    assert any(isinstance(m, UpdateWeights) for m in ring.plans)
    ring.lose_worker()
    ring.run()
    assert (answer(ring, rid) or {})["error"]["code"] == "unavailable"
    assert ring.core.weights.record.version == 0 and right(ring.of(old)[0], [b""])


def test_the_worker_knows_what_it_serves() -> None:
    """One that has changed, and died before it said so, is followed by one that has the new
    weights: these are a version. Requests go on from what they have emitted."""
    ring, old = begun()
    rid = order(ring, mode="keep")
    step(ring, 5)
    before = len(ring.of(old)[0].tokens)
    source = WeightsSource("/b", [], digest())
    ring.plans.clear()
    ring.worker = ring.new_worker(ring.worker.ready.epoch + 1)
    ring.worker.ready = msgspec.structs.replace(ring.worker.ready, weights=source)
    ring.worker.on_wake(0.0)
    ring.tell(ring.worker.ready)
    ring.run()
    assert (answer(ring, rid) or {})["version"] == 1
    assert runs_of(ring.of(old)[0]) == [(before, 1)] and right(ring.of(old)[0], [b"", digest()])


def test_the_ledger_knows_the_version() -> None:
    """A scheduler that is started again counts on, and a new engine begins at 0."""
    record = WeightsRecord(7, WeightsSource("/b", [], digest()), [(CLIENT, "w")])
    history = LedgerHistory().read([make_record(META, LedgerMeta("boot", "model")),
                                    make_record(WEIGHTS, record)])
    for epoch, want in ((2, record), (1, WeightsRecord())):
        core = SchedulerCore(Context(config(), Path("/nowhere"), "scheduler", epoch, 0),
                             PriorRun(history, True, 0.0))
        assert core.weights.record == want and core.state.weights == want.version
        assert core.health().gauges["weight_version"] == want.version


def test_all_ranks_answer() -> None:
    """The version counts when the last one computes with it."""
    settings = config(seqs=2)
    settings = msgspec.structs.replace(settings, device=msgspec.structs.replace(
        settings.device, tensor_parallel_size=2))
    core = SchedulerCore(Context(settings, Path("/nowhere"), "scheduler", 1, 0))
    worker = Ring(config(seqs=2), start=False).worker.ready
    for rank in (0, 1):
        core.on_message(msgspec.structs.replace(worker, rank=rank), 1.0)
    core.on_message(WeightsOrder(CLIENT, WeightsCall("w", "update", "/b")), 1.0)
    sent = [send.message for send in core.on_wake(1.0)]
    (asked,) = [message for message in sent if isinstance(message, PrepareWeights)]
    source = WeightsSource("/b", [], digest())
    for prepared, rank, version in ((True, 1, 0), (True, 0, 0), (False, 1, 0), (False, 0, 1)):
        core.on_message(WeightsAnswer(1, rank, asked.number, source, prepared=prepared), 2.0)
        sent = [send.message for send in core.on_wake(2.0)]
        assert (UpdateWeights(1, asked.number) in sent) == (prepared and not rank)
        assert core.weights.record.version == version
    core.on_message(WeightsOrder(CLIENT, WeightsCall("v", "update", "/c")), 3.0)
    core.on_wake(3.0)
    core.on_message(WeightsAnswer(1, 0, 2, source, prepared=True), 4.0)
    core.on_message(WeightsAnswer(1, 1, 2, source, "no such tensor", prepared=True), 4.0)
    sent = [send.message for send in core.on_wake(4.0)]
    assert UpdateWeights(1, 2, take=False) in sent, "the other one need not keep it"
    assert core.weights.record.version == 1


def test_a_tensor_is_asked_for() -> None:
    ring = Ring(config(seqs=2))
    ring.tell(WeightsOrder(CLIENT, TensorCall("t", "model.norm.weight", 3)))
    ring.run()
    assert (answer(ring, "t") or {})["error"]["message"] == "there are no tensors"


def test_a_sleeping_engine_refuses() -> None:
    ring = Ring(config(seqs=2))
    ring.tell(ControlRequest(CLIENT, Control("s", "sleep")))
    ring.run()
    for call in (WeightsCall("w", "update", "/b"), TensorCall("t", "x")):
        ring.tell(WeightsOrder(CLIENT, call))
        ring.run()
        assert "the engine sleeps" in (answer(ring, call.rid) or {})["error"]["message"]
    assert isinstance(ring.worker.ready, Ready)


@pytest.mark.parametrize("mode", ["keep", "retract", "wait"])
def test_what_is_pooled_is_of_one_version(mode: str) -> None:
    """A prompt whose chunks would be of two versions is computed anew by the later one."""
    ring = Ring(config(chunk=16))
    rid = ring.submit(160, pooling=ResolvedPooling("hidden_states", every_row=True, layers=(-1,)))
    step(ring, 3)
    order(ring, mode=mode)
    ring.run()
    (heard,) = ring.of(rid)
    version = 0 if mode == "wait" else 1
    assert heard.pooled is not None and heard.pooled.weight_version == version
    assert runs_of(heard) == [(0, 1)] * version
    plans = [plan for plan in ring.sent if isinstance(plan, StepPlan)]
    assert sum(len(plan.admit) for plan in plans) == 1 + version
    ring.assert_at_rest()


def test_an_engine_that_sleeps_by_itself_wakes_for_an_update() -> None:
    settings = config(seqs=2)
    ring = Ring(msgspec.structs.replace(settings, scheduler=msgspec.structs.replace(
        settings.scheduler, sleep_after=30.0)))
    ring.run()
    ring.now += 30.1
    ring.run()
    assert ring.scheduler.sleep.level == 1
    rid = order(ring)
    ring.run()
    assert (answer(ring, rid) or {})["version"] == 1 and not ring.scheduler.sleep.level
    ring.now += 30.1
    ring.run()
    assert ring.scheduler.sleep.level == 1, "and sleeps again"
