"""The page pool: what is free, what is held, and what the debug books notice."""

from __future__ import annotations

import numpy as np
import pytest

from actorium.actors.scheduler.pages import BooksError, NoCache, PagePool


def test_pages_come_once_and_never_the_sink() -> None:
    pool = PagePool(9, 16, debug=True)
    pages = np.concatenate([pool.take(3, 1), pool.take(5, 2)])
    assert sorted(pages.tolist()) == list(range(1, 9))
    assert (pool.free, pool.used, pool.total, pool.tokens) == (0, 8, 8, 128)
    pool.audit([(1, pages[:3]), (2, pages[3:])])
    pool.give(pages[:3], 1)
    assert sorted(pool.take(3, 3).tolist()) == sorted(pages[:3].tolist())


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_pages_for_rounds_up(page_size: int) -> None:
    pool = PagePool(4, page_size)
    assert [pool.pages_for(n * page_size) for n in range(4)] == [0, 1, 2, 3]
    assert pool.pages_for(page_size + 1) == 2


def test_page_size_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="page_size: must be a power of two, got 12"):
        PagePool(4, 12)


def test_taking_more_than_is_free_is_refused() -> None:
    pool = PagePool(3, 1)
    with pytest.raises(BooksError, match="3 pages wanted by 7, 2 free"):
        pool.take(3, 7)
    assert pool.free == 2


def test_double_free_names_page_and_owners() -> None:
    pool = PagePool(3, 1, debug=True)
    pages = pool.take(1, 5)
    pool.give(pages, 5)
    with pytest.raises(BooksError, match=r"page 1 is held by nobody \(free\).*sequence 5"):
        pool.give(pages, 5)


def test_giving_another_sequences_page_names_both() -> None:
    pool = PagePool(3, 1, debug=True)
    pages = pool.take(1, 5)
    with pytest.raises(BooksError, match="page 1 is held by sequence 5.*sequence 6"):
        pool.give(pages, 6)


def test_double_free_is_noticed_without_debug_when_it_overflows() -> None:
    pool = PagePool(3, 1)
    with pytest.raises(BooksError, match="1 pages of 5 come back, 0 are outstanding"):
        pool.give(np.array([1], np.int32), 5)


def test_audit_finds_a_lost_page_and_a_shared_one() -> None:
    pool = PagePool(4, 1, debug=True)
    pages = pool.take(2, 5)
    with pytest.raises(BooksError, match="page 2 of sequence 5 is in the books 0 times"):
        pool.audit([(5, pages[pages != 2])])
    with pytest.raises(BooksError, match="page 1 is held by sequence 5.*sequence 6"):
        pool.audit([(5, pages), (6, np.array([1], np.int32))])


def test_no_cache_knows_nothing_and_keeps_nothing() -> None:
    pages, length = NoCache().match(np.arange(40, dtype=np.int32))
    assert len(pages) == 0 and length == 0
    held = np.array([3, 4], np.int32)
    assert NoCache().commit(np.arange(2, dtype=np.int32), held) is held
