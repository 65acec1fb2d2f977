"""The page pool: what is free, what is held, and what the debug books notice."""

from __future__ import annotations

import numpy as np
import pytest

from actorium.actors.scheduler.cache.page_allocator import (
    NO_PAGES,
    TREE,
    AccountingError,
    PageAllocator,
)


def test_pages_are_allocated_once_and_never_the_sink() -> None:
    pool = PageAllocator(9, 16, debug=True)
    pages = np.concatenate([pool.allocate(3, 1), pool.allocate(5, 2)])
    assert sorted(pages.tolist()) == list(range(1, 9))
    assert (pool.free, pool.used, pool.total, pool.tokens) == (0, 8, 8, 128)
    pool.audit([(1, pages[:3]), (2, pages[3:])], NO_PAGES)
    pool.release(pages[:3], 1)
    assert sorted(pool.allocate(3, 3).tolist()) == sorted(pages[:3].tolist())


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_pages_for_rounds_up(page_size: int) -> None:
    pool = PageAllocator(4, page_size)
    assert [pool.pages_for(n * page_size) for n in range(4)] == [0, 1, 2, 3]
    assert pool.pages_for(page_size + 1) == 2


def test_page_size_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="page_size: must be a power of two, got 12"):
        PageAllocator(4, 12)


def test_taking_more_than_is_free_is_refused() -> None:
    pool = PageAllocator(3, 1)
    with pytest.raises(AccountingError, match="3 pages wanted by 7, 2 free"):
        pool.allocate(3, 7)
    assert pool.free == 2


def test_double_free_names_page_owners_and_step() -> None:
    pool = PageAllocator(3, 1, debug=True)
    pages = pool.allocate(1, 5)
    pool.release(pages, 5)
    pool.step = 12
    with pytest.raises(AccountingError, match=r"step 12: page 1 is held by nobody \(free\), "
                                         "and sequence 5 gives it back"):
        pool.release(pages, 5)


def test_giving_another_sequences_page_names_both() -> None:
    pool = PageAllocator(3, 1, debug=True)
    pages = pool.allocate(1, 5)
    with pytest.raises(AccountingError, match="page 1 is held by sequence 5, and sequence 6 gives"):
        pool.release(pages, 6)


def test_double_free_is_noticed_without_debug() -> None:
    pool = PageAllocator(3, 1)
    pool.release(pool.allocate(1, 5), 5)
    with pytest.raises(AccountingError, match="page 1 comes back from 5, but nobody holds it"):
        pool.release(np.array([1], np.int32), 5)


def test_a_page_is_free_with_its_last_owner() -> None:
    pool = PageAllocator(5, 1, debug=True)
    pages = pool.allocate(2, 7)
    pool.mark_cached(pages)
    assert (pool.cached, pool.cached_only, pool.held) == (2, 0, 2)
    pool.share(pages, 8)
    pool.release(pages, 7)
    assert (pool.free, pool.cached_only, pool.held) == (2, 0, 2)
    pool.release(pages, 8)
    assert (pool.free, pool.cached_only, pool.held) == (2, 2, 0)
    pool.share(pages[:1], 9)
    assert (pool.cached_only, pool.held, pool.count_freed(pages[:1])) == (1, 1, 1)
    pool.mark_uncached(pages)
    assert (pool.free, pool.cached, pool.cached_only) == (3, 0, 0)
    pool.audit([(9, pages[:1])], NO_PAGES)


def test_wrong_owners_of_tree_pages_are_named() -> None:
    pool = PageAllocator(5, 1, debug=True)
    pages = pool.allocate(2, 7)
    with pytest.raises(AccountingError, match="held by sequence 7, and the prefix tree gives it "
                       "back"):
        pool.mark_uncached(pages)
    pool.release(pages, 7)
    with pytest.raises(AccountingError, match=r"nobody \(free\) and goes to the prefix tree"):
        pool.mark_cached(pages)
    with pytest.raises(AccountingError, match=r"nobody \(free\) and goes to sequence 3"):
        pool.share(pages, 3)


def test_uncaching_an_uncached_page_is_refused() -> None:
    pool = PageAllocator(5, 1)
    with pytest.raises(AccountingError, match="the prefix tree lets go of a page it does not keep"):
        pool.mark_uncached(pool.allocate(1, 7))


def test_audit_finds_a_lost_page_and_a_shared_one() -> None:
    pool = PageAllocator(4, 1, debug=True)
    pages = pool.allocate(2, 5)
    with pytest.raises(AccountingError, match="page 2 of sequence 5: 0 claims, 1 owners counted"):
        pool.audit([(5, pages[pages != 2])], NO_PAGES)
    with pytest.raises(AccountingError, match="page 1 is held by sequence 5.*sequence 6"):
        pool.audit([(5, pages), (6, np.array([1], np.int32))], NO_PAGES)
    with pytest.raises(AccountingError, match="page 2 is held by sequence 5.*prefix tree claim it"):
        pool.audit([(5, pages)], pages)


def test_audit_without_debug_still_counts() -> None:
    pool = PageAllocator(4, 1)
    pages = pool.allocate(2, 5)
    pool.audit([(5, pages)], NO_PAGES)
    with pytest.raises(AccountingError, match="page 1 of 1 owners: 2 claims"):
        pool.audit([(5, pages), (6, np.array([1], np.int32))], NO_PAGES)


def test_inconsistent_pages_are_quarantined_at_rest() -> None:
    pool = PageAllocator(7, 1)
    kept = pool.allocate(2, 5)
    pool.mark_cached(kept)
    pool.release(kept, 5)
    assert pool.count_inconsistent() == 0
    lost = pool.allocate(1, 6)
    pool._stack[0] = pool._stack[1]
    assert pool.count_inconsistent() == 3, "lost, free twice, overwritten"
    pool.quarantine()
    assert (pool.count_inconsistent(), pool.quarantined, pool.free) == (0, 3, 3)
    fresh = pool.allocate(3, 9)
    assert lost[0] not in fresh and set(kept.tolist()) <= set(fresh.tolist())
    with pytest.raises(AccountingError, match="0 free"):
        pool.allocate(1, 9)


def test_the_owner_of_the_tree_is_no_sid() -> None:
    assert TREE < 0
