"""Adapters in the scheduler: names, orders, admission, the prefix cache, deaths."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
from helpers_adapter_files import write_adapter
from helpers_scheduler import (
    CLIENT,
    Ring,
    assert_whole,
    cached,
    config,
    expected,
    gauges,
)

from actorium.actors.config.adapter_settings import AdapterConfig
from actorium.actors.core import LEDGER, Context
from actorium.actors.errors import BadModel
from actorium.actors.ledger.records import ADAPTERS, LedgerHistory, LedgerMeta
from actorium.actors.messages import (
    AdapterAnswer,
    AdapterCall,
    AdapterOrder,
    Control,
    ControlRequest,
    DropAdapter,
    LoadAdapter,
    NamedAdapter,
    Submit,
)
from actorium.actors.scheduler.adapter_file_reader import AdapterFileReader
from actorium.actors.scheduler.adapters import PATIENCE, AdapterTable
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.recovery.recovery_log import PriorRun
from actorium.actors.scheduler.request_state import salt_of


def ring_with(*names: str, seqs: int = 8, **settings: Any) -> Ring:
    """A ring with these adapters, each of its own content."""
    on = AdapterConfig(enable_lora=True, **settings)
    ring = Ring(msgspec.structs.replace(config(seqs=seqs), adapters=on))
    for content, name in enumerate(names):
        ring.load(name, content)
    ring.run()
    assert list(ring.names) == list(names)
    return ring


def sent(ring: Ring, kind: type) -> list[Any]:
    return [message for message in ring.sent if isinstance(message, kind)]


def test_requests_get_the_tokens_of_their_adapter() -> None:
    ring = ring_with("a", "b")
    prompt = list(range(40))
    rids = [ring.submit(prompt, seed=5, adapter=name) for name in ("a", "b", "", "a")]
    ring.run()
    assert_whole(ring)
    first, second, base, again = (ring.of(rid)[0].tokens for rid in rids)
    assert first == again
    assert len({tuple(tokens) for tokens in (first, second, base)}) == 3


def test_an_unknown_name_is_refused_and_harms_nobody() -> None:
    ring = ring_with("a")
    wrong, right = ring.submit(9, adapter="z"), ring.submit(9, adapter="a")
    ring.run()
    assert ring.of(wrong)[0].error_code == "unknown_adapter"
    assert ring.of(wrong)[0].events[0].error == "model: 'z' is not served here"
    assert ring.of(right)[0].reason == "length"


def test_an_engine_without_lora_refuses_adapters() -> None:
    ring = Ring(config())
    rid = ring.submit(9, adapter="a")
    ring.run()
    assert ring.of(rid)[0].error_code == "invalid_request"


# --- orders ---------------------------------------------------------------------------------------

def test_a_name_that_is_taken_gives_way_only_if_it_is_to() -> None:
    ring = ring_with("a")
    refused = ring.load("a", 5)
    ring.run()
    assert "is loaded already" in ring.reply(refused)["error"]["message"]  # type: ignore[index]
    replaced = ring.load("a", 5, replace=True)
    ring.run()
    (listed,) = ring.reply(replaced)["adapters"]  # type: ignore[index]
    assert (listed["name"], listed["digest"], listed["loaded"]) == ("a", "06" * 32, True)


def test_a_request_ends_with_the_adapter_that_it_began_with() -> None:
    ring = ring_with("a")
    before = ring.submit(20, max_tokens=30, adapter="a")
    ring.wake()
    for _ in range(3):
        ring.work()
        ring.deliver()
    ring.load("a", 7, replace=True)
    while ring.names["a"][0] != 8:
        assert ring.work() | ring.deliver()
    after = ring.submit(20, max_tokens=30, adapter="a")
    ring.unload("a")
    ring.run()
    assert_whole(ring)
    digests = [ring.of(rid)[0].digest[0] for rid in (before, after)]
    assert digests == [1, 8]
    assert gauges(ring)["adapters"] == gauges(ring)["adapters_held"] == 0
    assert len(sent(ring, DropAdapter)) == 2


def test_a_reload_under_the_same_name_never_meets_old_pages() -> None:
    ring = ring_with("a")
    prompt = list(range(64))
    ring.submit(prompt, adapter="a")
    ring.run()
    ring.load("a", 7, replace=True)
    ring.run()
    fresh = ring.submit(prompt, adapter="a")
    ring.run()
    assert cached(ring.of(fresh)[0]) == 0
    ring.load("a", 0, replace=True)
    ring.run()
    first = ring.submit(prompt, adapter="a")
    ring.run()
    assert cached(ring.of(first)[0]) > 0, "the first adapter's pages are still its own"
    assert_whole(ring)


def test_no_salt_stands_for_an_adapter() -> None:
    digest = bytes(range(32))
    adapted = salt_of(submit(adapter=NamedAdapter("a", "/a", digest)))
    for tenant in ("", "t"):
        for salt in (f"\1{digest.hex()}", f"\0\1{digest.hex()}", f"{digest.hex()}"):
            assert salt_of(submit(tenant=tenant, cache_salt=salt)) != adapted
    assert salt_of(submit(tenant="t", cache_salt="s")) == "t\0s"


def submit(**fields: Any) -> Submit:
    ring = Ring(config())
    return msgspec.structs.replace(ring.submits[ring.submit(4)], **fields)


def test_what_cannot_be_served_is_answered_with_the_reason() -> None:
    ring = ring_with("a")
    unreadable = ring.load("b", 0, error="adapter: /x: it is damaged")
    refused = ring.load("c", 1, path="/x/refused")
    unknown = ring.unload("d")
    ring.run()
    codes = {rid: ring.reply(rid)["error"] for rid in (unreadable, refused, unknown)}  # type: ignore[index]
    assert codes[unreadable] == {"code": "bad_model", "message": "adapter: /x: it is damaged"}
    assert codes[refused] == {"code": "bad_model", "message": "/x/refused: it is refused"}
    assert codes[unknown]["code"] == "unknown_adapter"
    assert list(ring.names) == ["a"] and gauges(ring)["adapters_held"] == 1


def test_an_order_that_is_sent_again_is_answered_again() -> None:
    ring = ring_with()
    rid = ring.load("a", 0)
    ring.load("a", 0, rid=rid)
    ring.run()
    assert len(ring.replies) == 1
    ring.load("a", 0, rid=rid)
    ring.run()
    assert len(ring.replies) == 2 and "adapters" in ring.reply(rid)  # type: ignore[operator]
    assert len(sent(ring, LoadAdapter)) == 1


def test_an_engine_that_sleeps_loads_nothing_and_keeps_what_it_has() -> None:
    ring = ring_with("a")
    ring.tell(ControlRequest(CLIENT, Control("s", "sleep")))
    ring.run()
    rid = ring.load("b", 1)
    ring.run()
    assert ring.reply(rid)["error"]["code"] == "unavailable"  # type: ignore[index]
    ring.tell(ControlRequest(CLIENT, Control("w", "wake")))
    ring.run()
    after = ring.submit(9, adapter="a")
    ring.run()
    assert ring.of(after)[0].reason == "length"
    assert_whole(ring)


# --- places, and the worker's memory --------------------------------------------------------------

def test_no_more_different_adapters_run_than_there_are_places() -> None:
    ring = ring_with("a", "b", "c", max_loras=2)
    for name in ("a", "b", "c", "", "a", "c", "b"):
        ring.submit(9, max_tokens=12, adapter=name)
    ring.wake()
    running = [gauges(ring)["adapters_running"]]
    while ring.work() | ring.deliver():
        running.append(gauges(ring)["adapters_running"])
    assert max(running) == 2
    assert_whole(ring)  # and the null worker has seen no third one


def test_whoever_waits_for_a_place_does_not_wait_for_ever() -> None:
    """Requests of another adapter come all the time."""
    ring = ring_with("a", "b", max_loras=1, seqs=2)
    ring.submit(9, max_tokens=8, adapter="a")
    ring.wake()
    waits = ring.submit(9, max_tokens=8, adapter="b")
    ring.wake()
    came = 0
    while not ring.of(waits)[0].reason:
        came += 1
        ring.submit(9, max_tokens=8, adapter="a")
        for _ in range(6):
            ring.work()
            ring.deliver()
    assert PATIENCE / 2 < came < 2 * PATIENCE
    ring.run()
    assert_whole(ring)


def test_the_least_recently_used_gives_way_in_the_workers_memory() -> None:
    ring = ring_with("a", "b", max_loras=1, max_cpu_loras=2)
    for name in ("a", "b", "a"):
        ring.submit(9, adapter=name)
        ring.run()
    ring.load("c", 2)
    ring.run()
    listed = {each["name"]: each["loaded"] for each in ring.core.state.adapters.listed()}  # type: ignore[union-attr]
    assert listed == {"a": True, "b": False, "c": True}
    ring.submit(9, adapter="b")
    ring.run()
    assert_whole(ring)
    assert gauges(ring)["adapter_evictions"] == 2


def test_as_many_as_wait_take_turns_in_little_memory() -> None:
    names = [f"n{i}" for i in range(6)]
    ring = ring_with(*names, max_loras=1, max_cpu_loras=1)
    for _ in range(2):
        for name in names:
            ring.submit(9, adapter=name)
    ring.run()
    assert_whole(ring)


def test_the_model_does_not_wait_for_an_adapter_that_is_read() -> None:
    ring = ring_with("a")
    ring.lose_worker()
    adapted = ring.submit(9, adapter="a")
    ring.wake()
    held = [ring.plans.popleft()]
    assert isinstance(held[0], LoadAdapter)
    base = ring.submit(9)
    ring.run()
    assert ring.of(base)[0].reason == "length" and not ring.of(adapted)[0].reason
    assert ring.scheduler.health().phase == "idle", "nothing hangs meanwhile"
    ring.plans.extend(held)
    ring.run()
    assert_whole(ring)


# --- deaths ---------------------------------------------------------------------------------------

def test_a_new_worker_gets_the_adapters_before_their_requests_go_on() -> None:
    ring = ring_with("a", "b")
    for name in ("a", "b", ""):
        ring.submit(20, max_tokens=30, adapter=name)
    ring.wake()
    for _ in range(5):
        ring.work()
        ring.deliver()
    ring.lose_worker()
    ring.run()
    assert_whole(ring)


def test_an_adapter_that_a_new_worker_cannot_serve_fails_its_requests_alone() -> None:
    ring = ring_with("a", "b")
    rids = [ring.submit(20, max_tokens=30, adapter=name) for name in ("a", "b")]
    ring.wake()
    for _ in range(5):
        ring.work()
        ring.deliver()
    ring.lose_worker()
    ring.wake()
    loads = [m for m in ring.plans if isinstance(m, LoadAdapter)]
    wrong = next(m for m in loads if m.adapter.digest[0] == 1)
    ring.plans.remove(wrong)
    ring.tell(AdapterAnswer(wrong.epoch, 0, wrong.adapter.number, "its files have changed"))
    ring.run()
    failed, other = (ring.of(rid)[0] for rid in rids)
    assert failed.error_code == "bad_model"
    assert failed.events[-1].error == "adapter: 'a': its files have changed"
    assert (other.tokens, other.reason) == expected(other)
    later = ring.submit(9, adapter="a")  # its files may be there again
    ring.run()
    assert ring.of(later)[0].reason == "length"


def core_of(epoch: int, settings: AdapterConfig, prior: PriorRun | None = None) -> SchedulerCore:
    whole = msgspec.structs.replace(config(), adapters=settings)
    whole = msgspec.structs.replace(whole, recovery=msgspec.structs.replace(
        whole.recovery, restart=True))
    return SchedulerCore(Context(whole, Path("/nowhere"), "scheduler", epoch, 0), prior)


def test_a_new_scheduler_knows_the_names_and_the_orders() -> None:
    settings = AdapterConfig(enable_lora=True, lora_modules=("a=/start",))
    ring = ring_with()
    ring.scheduler = core_of(2, settings)
    ring.lose_worker()
    ring.wake()
    order = AdapterOrder(CLIENT, AdapterCall("x", "load", "b", "/b"), bytes(32), 4, "org/base")
    ring.tell(order)
    sends = list(ring.scheduler.on_wake(1.0))
    loads = [send.message for send in sends if isinstance(send.message, LoadAdapter)]
    ring.tell(AdapterAnswer(2, 0, loads[0].adapter.number))
    records = [send.message for send in ring.scheduler.on_wake(1.0) if send.to == LEDGER]
    history = LedgerHistory().read(records)
    history.meta = LedgerMeta("boot", "")
    assert [record.kind for record in records if record.kind == ADAPTERS] == [ADAPTERS]
    again = core_of(3, settings, PriorRun(history, True, 2.0))
    table = again.state.adapters
    assert isinstance(table, AdapterTable) and not table.names.starting
    assert table.names.bound(NamedAdapter("b")) == NamedAdapter("b", "/b", bytes(32))
    table.on_order(order, False)
    _, (reply,) = table.pop_replies()
    assert b'"adapters"' in reply.json, "the order was carried out"
    # A new engine begins with what it is started with.
    fresh = core_of(1, settings, PriorRun(history, True, 2.0)).state.adapters
    assert fresh is not None and fresh.names.starting == {"a"} and not fresh.listed()


def test_all_adapters_of_the_start_are_read_before_the_engine_is_ready(tmp_path: Path) -> None:
    for name in "abc":
        write_adapter(tmp_path / name, lora_alpha=ord(name))
    settings = AdapterConfig(enable_lora=True, lora_modules=tuple(
        f"{name}={tmp_path / name}" for name in "abc"))
    core = core_of(1, settings)
    reader, woken = AdapterFileReader(settings, core.state.adapters), Event()
    core.on_message(msgspec.structs.replace(ring_with().worker.ready, epoch=1), 1.0)
    reader.on_start(woken.set)
    while core.state.adapters.names.starting:  # type: ignore[union-attr]
        assert core.health().phase == "starting" and woken.wait(10)
        woken.clear()
        for order in reader.pop_ready():
            core.on_message(order, 1.0)
        for load in [send.message for _ in range(2) for send in core.on_wake(1.0)]:
            if isinstance(load, LoadAdapter):
                core.on_message(AdapterAnswer(1, 0, load.adapter.number), 1.0)
        core.on_wake(1.0)
    assert core.health().phase == "ready"
    assert [each["rank"] for each in core.state.adapters.listed()] == [4, 4, 4]  # type: ignore[union-attr]


def test_an_engine_does_not_start_without_its_adapters() -> None:
    settings = AdapterConfig(enable_lora=True, lora_modules=("a=/start",))
    core = core_of(1, settings)
    core.on_message(msgspec.structs.replace(ring_with().worker.ready, epoch=1), 1.0)
    core.on_wake(1.0)
    assert core.health().phase == "starting"
    own = AdapterOrder(b"", AdapterCall("-", "load", "a", "/start"))
    with pytest.raises(BadModel, match="lora_modules: a: it is damaged"):
        core.on_message(msgspec.structs.replace(own, error="it is damaged"), 1.0)
    core = core_of(1, settings)
    core.on_message(msgspec.structs.replace(ring_with().worker.ready, epoch=1), 1.0)
    core.on_message(msgspec.structs.replace(own, digest=bytes(32)), 1.0)
    load = next(send.message for send in core.on_wake(1.0)
                if isinstance(send.message, LoadAdapter))
    core.on_message(AdapterAnswer(1, 0, load.adapter.number), 1.0)
    core.on_wake(1.0)
    assert core.health().phase == "ready"
