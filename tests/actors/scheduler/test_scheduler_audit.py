"""The auditor: books broken on purpose are caught, and production goes on."""

from __future__ import annotations

from typing import Any

import helpers_scheduler
import msgspec
import pytest
from helpers_scheduler import Ring, cached, config, finish, gauges

from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.scheduler import core
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.cache.page_allocator import AccountingError
from actorium.actors.scheduler.scheduler_actor import build_core
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.slot_table import SlotTable
from actorium.tools.null.null_worker import BadPlan

SYSTEM = list(range(50, 114))


def sabotaged(settings: Config, windows: tuple[int, ...] = (0,)) -> None:
    """A run that would end well."""
    ring = Ring(settings, windows=windows)
    (first,) = finish(ring, SYSTEM, max_tokens=16)
    finish(ring, [*SYSTEM, *first.tokens, 1, 2, 3], [*SYSTEM, 5, 6], list(range(300, 340)),
        max_tokens=40)


SETTINGS = config(page_size=16, pool_tokens=600, chunk=40)
BLIND = msgspec.structs.replace(SETTINGS, memory=msgspec.structs.replace(
    SETTINGS.memory, debug_memory=False))
"""No debug books: only the worker looks (see `blind`)."""


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler keeps no debug books, the worker still checks what it reads."""
    def without_books(context: Context) -> core.SchedulerCore:
        return build_core(context._replace(config=BLIND))

    monkeypatch.setattr(helpers_scheduler, "build_core", without_books)


def test_an_unharmed_run_passes_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotaged(SETTINGS)
    sabotaged(SETTINGS, windows=(0, 24))
    blind(monkeypatch)
    sabotaged(SETTINGS)


def free_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    release = KVCacheManager.release

    def twice(self: KVCacheManager, pages: Any, owner: int) -> None:
        release(self, pages, owner)
        release(self, pages, owner)

    monkeypatch.setattr(KVCacheManager, "release", twice)


def share_a_partial_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree gets a page whose last position was never computed."""
    cache = SchedulerState.cache_prefix

    def whole(self: SchedulerState, sequence: Any, pages: Any, computed: int) -> None:
        cache(self, sequence, pages, computed + (computed > sequence.total))

    monkeypatch.setattr(SchedulerState, "cache_prefix", whole)


def reuse_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page goes back while a step that writes and reads it is still to come."""
    plan_decode = SlotTable.plan_decode
    rings: list[SchedulerState] = []
    reset_pools = SchedulerState.reset_pools

    def keep(self: SchedulerState, *args: Any) -> None:
        rings.append(self)
        reset_pools(self, *args)

    def early(self: SlotTable, rows: Any) -> None:
        plan_decode(self, rows)
        for slot in rows.slots[:1].tolist():
            pages = self.pages_of(slot)
            if self.len_lo[slot] % 7 == 0:
                rings[-1].kv_cache.pools[0].release(pages[0][-1:], int(self.sid[slot]))

    monkeypatch.setattr(SchedulerState, "reset_pools", keep)
    monkeypatch.setattr(SlotTable, "plan_decode", early)


@pytest.mark.parametrize(("break_it", "says"), [
    (free_twice, "held by nobody .free., and sequence 1 gives it back|"
                 "held by the prefix tree, and sequence 1 gives it back"),
    (reuse_too_early, "step [0-9]+: page [0-9]+ is held by .*sequence 1"),
])
def test_the_audit_detects_wrong_books(monkeypatch: pytest.MonkeyPatch, break_it: Any,
                                       says: str) -> None:
    break_it(monkeypatch)
    with pytest.raises(AccountingError, match=says):
        sabotaged(SETTINGS)


def test_the_worker_catches_a_partial_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Books cannot see it: every page has its owners. What the page holds is wrong."""
    share_a_partial_page(monkeypatch)
    with pytest.raises(BadPlan, match="does not hold position 79"):
        sabotaged(SETTINGS)


@pytest.mark.parametrize("break_it", [free_twice, reuse_too_early])
def test_without_debug_counts_and_content_still_detect_faults(
        monkeypatch: pytest.MonkeyPatch, break_it: Any) -> None:
    blind(monkeypatch)
    break_it(monkeypatch)
    with pytest.raises((AccountingError, BadPlan)):
        sabotaged(SETTINGS)


def test_pages_freed_inside_a_window_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    free_behind = SlotTable.free_behind_windows

    def early(self: SlotTable, slots: Any, positions: Any, memory: KVCacheManager) -> None:
        free_behind(self, slots, positions + 16, memory)

    monkeypatch.setattr(SlotTable, "free_behind_windows", early)
    with pytest.raises(BadPlan, match="slot [0-9]+ has no page for position|does not hold"):
        sabotaged(config(page_size=16, pool_tokens=600, chunk=40, cache=False), windows=(24,))


def test_production_quarantines_doubtful_pages_and_reports_it(
        monkeypatch: pytest.MonkeyPatch) -> None:
    blind(monkeypatch)
    ring = Ring(SETTINGS)
    finish(ring, SYSTEM)
    pool = ring.scheduler.state.kv_cache.pools[0]
    total = pool.total
    pool.allocate(2, 99)
    finish(ring, list(range(300, 340)))
    assert gauges(ring)["quarantined_pages"] == 2
    assert "did not balance: [2] pages" in ring.scheduler.health().detail
    assert (pool.free, gauges(ring)["cached_pages"]) == (total - 2, 0)
    assert [cached(h) for h in finish(ring, SYSTEM, SYSTEM)] == [0, 48], "it goes on, and caches"
    assert gauges(ring)["quarantined_pages"] == 2


def test_a_large_pool_is_not_audited_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last token would wait for that: 9,000 pages are looked at once in three steps."""
    audited: list[int] = []
    repair = KVCacheManager.repair

    def counted(self: KVCacheManager) -> str | None:
        audited.append(ring.worked)
        return repair(self)

    monkeypatch.setattr(KVCacheManager, "repair", counted)
    large = config(page_size=16, pool_tokens=16 * 9000)
    memory = msgspec.structs.replace(large.memory, debug_memory=False)
    ring = Ring(msgspec.structs.replace(large, memory=memory))
    for number in range(12):
        finish(ring, [number, 1, 2], max_tokens=1)
    assert ring.worked == 12 and audited == [3, 6, 9, 12]
