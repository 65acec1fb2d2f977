"""Sleep and pause, one order at a time; deaths among them are in `test_sleep_lives.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_scheduler import CLIENT, Ring, config

from actorium.actors.core import Context
from actorium.actors.health import PAUSED, SLEEPING, WAKING
from actorium.actors.ledger.records import (
    ACTIVITY,
    META,
    ActivityRecord,
    LedgerHistory,
    LedgerMeta,
    make_record,
)
from actorium.actors.messages import Control, ControlRequest, Ready, Reload, Unload, Unloaded
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.recovery.recovery_log import PriorRun
from actorium.tools.null import null_worker


def order(ring: Ring, what: str, rid: str = "", **fields: Any) -> dict[str, Any] | None:
    """Gives an order and lets all move until it rests; the answer, if there is one by then."""
    rid = rid or f"c{len(ring.replies)}{what}"
    ring.tell(ControlRequest(CLIENT, Control(rid, what, **fields)))  # type: ignore[arg-type]
    ring.run()
    return answer(ring, rid)


def answer(ring: Ring, rid: str) -> dict[str, Any] | None:
    found = [msgspec.json.decode(reply.json) for reply in ring.replies if reply.rid == rid]
    assert len(found) <= 1
    return found[0] if found else None


def right(ring: Ring, rid: str) -> bool:
    """Whether a request has ended with all its tokens."""
    (heard,) = ring.of(rid)
    start, count = len(heard.submit.prompt) // 4, heard.submit.params.max_tokens
    return heard.reason == "length" and heard.tokens == [
        null_worker.next_token(heard.submit.seed, start + i, null_worker.VOCAB)
        for i in range(count)]


def begun(seqs: int = 2, **settings: Any) -> tuple[Ring, str]:
    """A ring in which a request runs, and has emitted some tokens."""
    ring = Ring(config(seqs=seqs, **settings))
    rid = ring.submit(20, max_tokens=12)
    ring.wake()
    for _ in range(4):
        ring.work()
        ring.deliver()
    assert 0 < len(ring.of(rid)[0].tokens) < 12
    return ring, rid


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_waits_for_what_runs_and_holds_what_comes(level: int) -> None:
    ring, first = begun()
    ring.tell(ControlRequest(CLIENT, Control("s", "sleep", level)))
    second = ring.submit(9)
    ring.wake()
    assert answer(ring, "s") is None, "one runs"
    ring.run()
    assert right(ring, first) and answer(ring, "s") == {
        "sleeping": level, "paused": False, "cache_kept": False}
    health = ring.scheduler.health()
    assert (health.phase, health.gauges["sleep_level"]) == (SLEEPING, level)
    assert health.gauges["held_pages"] == 0 and not ring.of(second)[0].tokens
    assert isinstance(ring.sent[-1], Unload) == (level == 1)

    ring.tell(ControlRequest(CLIENT, Control("w", "wake")))
    if level == 2:
        ring.lose_worker()  # a new one
    ring.wake()
    assert ring.scheduler.health().phase == (WAKING if level == 1 else "stepping")
    ring.run()
    assert answer(ring, "w") == {"sleeping": 0, "paused": False, "cache_kept": False}
    assert right(ring, second) and ring.core._worker_restarts == 0
    ring.assert_at_rest()


def test_what_is_kept_goes_on_and_what_is_aborted_ends() -> None:
    ring, first = begun()
    assert order(ring, "sleep", mode="keep") is not None
    assert not ring.of(first)[0].reason
    order(ring, "wake")
    assert right(ring, first)
    ring, first = begun()
    assert order(ring, "sleep", mode="abort") is not None
    assert ring.of(first)[0].reason == "abort"


def test_a_pause_holds_back_what_has_not_begun_or_everything() -> None:
    ring, first = begun()
    ring.tell(ControlRequest(CLIENT, Control("p", "pause")))
    second = ring.submit(9)
    ring.run()
    assert answer(ring, "p") is not None and right(ring, first)
    assert ring.scheduler.health().phase == PAUSED and not ring.of(second)[0].tokens
    order(ring, "resume")
    assert right(ring, second)

    ring, first = begun()
    order(ring, "pause", mode="keep")
    seen = len(ring.of(first)[0].tokens)
    assert ring.scheduler.health().gauges["running"] == 1 and seen < 12
    ring.run()
    assert len(ring.of(first)[0].tokens) == seen
    order(ring, "resume")
    assert right(ring, first)


@pytest.mark.parametrize(("mode", "clear", "running", "cached"), [
    ("keep", False, 1, True), ("keep", True, 0, False), ("retract", False, 0, True),
    ("wait", True, 0, False)])
def test_what_a_pause_leaves_in_the_cache(mode: str, clear: bool, running: int,
                                          cached: bool) -> None:
    ring, first = begun()
    order(ring, "pause", mode=mode, clear_cache=clear)
    gauges = ring.scheduler.health().gauges
    assert gauges["running"] == running and bool(gauges["cached_pages"]) == cached
    order(ring, "resume")
    assert right(ring, first)


def test_an_idle_engine_sleeps_until_a_request_comes() -> None:
    settings = config()
    ring = Ring(msgspec.structs.replace(settings, scheduler=msgspec.structs.replace(
        settings.scheduler, sleep_after=30.0)))
    first = ring.submit(5)
    ring.run()
    due = ring.scheduler.next_timer()
    assert right(ring, first) and due == ring.now + 30
    ring.now += 29.9
    ring.run()
    assert ring.scheduler.health().phase != SLEEPING
    ring.now += 0.2
    ring.run()
    assert ring.scheduler.health().phase == SLEEPING
    assert ring.scheduler.next_timer() is None, "it asks for no processor time"
    second = ring.submit(5)
    ring.run()
    assert right(ring, second) and ring.scheduler.health().gauges["sleep_level"] == 0
    order(ring, "sleep")
    third = ring.submit(5)
    ring.run()
    assert not ring.of(third)[0].tokens, "an order is an order"


def test_an_order_is_answered_when_another_one_takes_its_place() -> None:
    ring, first = begun()
    ring.tell(ControlRequest(CLIENT, Control("s", "sleep")))
    ring.wake()
    assert order(ring, "wake", "w") == {"sleeping": 0, "paused": False, "cache_kept": False}
    assert answer(ring, "s") == answer(ring, "w")
    assert right(ring, first)


def test_an_order_that_is_repeated_is_not_obeyed_twice() -> None:
    """A client that has lost the answer sends it again: what has come since is not aborted."""
    ring, _ = begun()
    order(ring, "pause", "p", mode="abort")
    later = ring.submit(5)
    ring.replies.clear()
    assert order(ring, "pause", "p", mode="abort") is not None
    assert not ring.of(later)[0].reason
    order(ring, "resume")
    assert right(ring, later)


def test_deadlines_pass_and_requests_are_aborted_in_a_sleep() -> None:
    ring = Ring(config())
    order(ring, "sleep")
    late, given_up = ring.submit(5, deadline=ring.now + 1), ring.submit(5)
    ring.run()
    assert ring.scheduler.next_timer() == ring.now + 1
    ring.now += 2
    ring.cancel(given_up)
    ring.run()
    assert [ring.of(rid)[0].reason for rid in (late, given_up)] == ["deadline", "abort"]


def test_an_engine_that_stops_ends_a_pause_and_fails_what_a_sleep_holds() -> None:
    ring, first = begun()
    order(ring, "pause", mode="keep")
    ring.scheduler.drain(ring.now)
    ring.run()
    assert right(ring, first) and ring.scheduler.done
    ring, first = begun()
    order(ring, "sleep", mode="keep")
    ring.scheduler.drain(ring.now)
    ring.run()
    assert ring.of(first)[0].error_code == "unavailable" and ring.scheduler.done


def test_a_worker_that_comes_up_in_a_sleep_is_unloaded() -> None:
    ring = Ring(config())
    order(ring, "sleep")
    ring.lose_worker()  # it was killed
    ring.run()
    assert isinstance(ring.sent[-1], Unload) and ring.scheduler.health().phase == SLEEPING
    assert ring.scheduler.health().gauges["sleep_level"] == 1
    order(ring, "wake")
    assert isinstance(ring.sent[-1], Reload)
    first = ring.submit(5)
    ring.run()
    assert right(ring, first)


def test_all_ranks_are_waited_for() -> None:
    settings = config()
    ring = Ring(msgspec.structs.replace(settings, device=msgspec.structs.replace(
        settings.device, tensor_parallel_size=2)), start=False)
    (ready,) = ring.worker.on_wake(ring.now)
    for rank in (0, 1):
        ring.tell(msgspec.structs.replace(ready.message, rank=rank))
    ring.wake()
    assert order(ring, "sleep", "s") is None, "rank 0 alone"
    ring.tell(Unloaded(ring.core._epoch, 1))
    ring.wake()
    assert answer(ring, "s") is not None
    ring.tell(ControlRequest(CLIENT, Control("w", "wake")))
    ring.run()
    assert answer(ring, "w") is None
    ready_again: Ready = msgspec.structs.replace(ready.message, rank=1)
    ring.tell(ready_again)
    ring.run()
    assert answer(ring, "w") is not None


@pytest.mark.parametrize(("epoch", "phase"), [(1, "starting"), (2, SLEEPING)])
def test_a_new_engine_begins_awake(epoch: int, phase: str) -> None:
    """And a scheduler that is started again does not."""
    history = LedgerHistory().read([
        make_record(META, LedgerMeta("boot", "")),
        make_record(ACTIVITY, ActivityRecord(level=1)),
        make_record(ACTIVITY, ActivityRecord(level=2, paused="keep", asleep=True))])
    core = SchedulerCore(Context(config(), Path("/nowhere"), "scheduler", epoch, 0),
                         PriorRun(history, True, 100.0))
    core.on_wake(100.0)
    assert core.health().phase == phase
    assert core.health().gauges["paused"] == (epoch > 1)
    written = [record for records in core.live_records() for record in records]
    assert any(kind == ACTIVITY for kind, _ in written) == (epoch > 1)
