"""Steps that emit several tokens a row: the length interval, and logprobs beside the tokens."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from helpers_scheduler import Ring, assert_whole, config

from actorium.actors.config.tree import MemoryConfig
from actorium.actors.messages import PageGroup, RowLogprobs
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.slot_table import SlotTable

WINDOW = 3


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("page_size", "tokens"), [(1, 4096), (1, 100), (2, 100), (16, 128)])
def test_windows_of_several_tokens(overlap: bool, page_size: int, tokens: int) -> None:
    ring = Ring(config(page_size=page_size, pool_tokens=tokens, chunk=30, overlap=overlap,
                       speculative="mtp:2,fixed"), acceptance=(0.7, 0.5))
    for i in range(16):
        ring.submit(1 + 5 * i % 23, max_tokens=1 + 11 * i % 70)
    ring.run(random.Random(tokens))
    assert_whole(ring)
    if tokens == 100:
        assert ring.scheduler.health().gauges["preemptions"] > 0


@pytest.mark.parametrize("acceptance", [(0.0,), (0.5,), (1.0,)])
def test_the_interval_opens_with_each_plan_and_closes_with_its_result(
        acceptance: tuple[float, ...]) -> None:
    ring = Ring(config(speculative="mtp:2,fixed"), acceptance=acceptance)
    ring.submit(4, max_tokens=40)
    ring.wake()
    table = ring.scheduler.state.table
    assert (table.len_lo[1], table.len_hi[1]) == (6, 8)
    ring.work()
    ring.deliver()
    assert (table.len_lo[1], table.len_hi[1]) == (7, 11)
    while ring.heard[1].reason is None:
        told = 4 + len(ring.heard[1].tokens)
        decodes = ring.in_flight
        assert table.len_lo[1] == told + decodes
        assert table.len_hi[1] == told + WINDOW * decodes
        ring.work()
        ring.deliver()
    ring.run()
    assert_whole(ring)


def test_pages_are_reserved_for_the_upper_end() -> None:
    table = SlotTable(3, 4, WINDOW)
    table.len_lo[1], table.len_hi[1], table.end[1], table.held[1] = 5, 9, 100, 2
    table._mark(np.array([1]))
    table.start_decoding(1)
    assert table.needing_pages(table.decode_rows()).tolist() == [1]


def test_pages_go_to_those_who_lack_them() -> None:
    """One slot lacks two pages, the other (which only asked early) none: two pages, not one each.
    """
    table = SlotTable(3, 4, WINDOW)
    memory = KVCacheManager([PageGroup(3)], 4, MemoryConfig(debug_memory=True))
    for slot, length in ((1, 12), (2, 4)):
        table.sid[slot], table.end[slot] = 10 + slot, 100
        table.len_lo[slot] = table.len_hi[slot] = length
        table.held[slot] = 2
    slots = np.array([1, 2], np.int32)
    assert table.grow(slots, memory, early=True, spared=0) is None
    appends = table.grow(slots, memory, early=False, spared=0)
    assert appends is not None
    rows = np.frombuffer(appends, np.int32).reshape(-1, 3).tolist()
    assert [row[:2] for row in rows] == [[1, 2], [1, 3]] and memory.pools[0].free == 0
    assert table.held[[1, 2]].tolist() == [4, 2]


# --- logprobs ------------------------------------------------------------------------------------

def logprobs(row: int, start: int, count: int) -> RowLogprobs:
    """Recognisable by its numbers: position p has log-probability -p and top ids 2p, 2p+1."""
    positions = np.arange(start, start + count)
    top = np.stack((2 * positions, 2 * positions + 1), 1)
    return RowLogprobs(row=row, start=start, chosen=(-positions).astype(np.float32).tobytes(),
                       ranks=positions.astype(np.int32).tobytes(),
                       top_ids=top.astype(np.int32).tobytes(),
                       top_logprobs=top.astype(np.float32).tobytes())


def answer(ring: Ring, prompt: list[RowLogprobs], sampled: list[RowLogprobs]) -> None:
    """Work on a plan, add logprobs to its result, deliver it."""
    ring.work()
    ring.results[-1] = msgspec.structs.replace(ring.results[-1], prompt_logprobs=prompt,
                                               logprobs=sampled)
    ring.deliver()


def test_logprobs_go_with_the_event_of_their_sequence() -> None:
    ring = Ring(config())
    ring.submit(4, max_tokens=3, logprobs=2)
    ring.submit(4, max_tokens=3)
    ring.wake()
    answer(ring, [], [logprobs(0, 0, 1)])
    answer(ring, [], [logprobs(0, 0, 1)])
    ring.run()
    first, second = ring.heard[1].events[:2]
    assert first.cached_tokens == 0 and first.logprobs == logprobs(0, 0, 1)
    assert second.cached_tokens is None and second.logprobs == logprobs(0, 0, 1)
    assert all(e.logprobs is None for e in ring.heard[2].events)
    assert_whole(ring)


def test_prompt_logprobs_are_reported_once_though_computed_twice() -> None:
    ring = Ring(config(chunk=5))
    ring.submit(12, max_tokens=3, prompt_logprobs=2)
    ring.wake()
    answer(ring, [logprobs(1, 1, 4)], [])
    ring.lose_worker()
    ring.wake()
    answer(ring, [logprobs(1, 1, 2)], [])
    answer(ring, [logprobs(1, 3, 7)], [])
    answer(ring, [logprobs(1, 10, 2)], [])
    ring.run()
    told = [e.prompt_logprobs for e in ring.heard[1].events if e.prompt_logprobs]
    assert told == [logprobs(1, 1, 4), logprobs(1, 5, 5), logprobs(1, 10, 2)]
    assert_whole(ring)
