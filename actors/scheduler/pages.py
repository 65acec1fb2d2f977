"""The page pool's books: which pages are free and, in debug mode, who holds the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
NO_PAGES: Ints = np.empty(0, np.int32)


class BooksError(RuntimeError):
    """The books do not balance; the message names the page (or slot) and its owners."""


class PagePool:
    """Pages 1..pages-1, handed out from a stack; page 0 is the padding sink and never leaves.

    With `debug` every page has an owner (a sid; 0 = free), and taking, giving back and `audit`
    check it.
    """

    def __init__(self, pages: int, page_size: int, debug: bool = False) -> None:
        """`page_size` must be a power of two: raises `ValueError`."""
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size: must be a power of two, got {page_size}")
        self.total = max(pages - 1, 0)
        self.page_size = page_size
        self.free = self.total
        self._shift = page_size.bit_length() - 1
        self._stack = np.arange(self.total, 0, -1, dtype=np.int32)
        self._owner: Ints | None = np.zeros(pages, np.int32) if debug else None

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.total << self._shift

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps in part."""
        return (tokens + self.page_size - 1) >> self._shift

    def take(self, count: int, owner: int | Ints) -> Ints:
        """i4[count] fresh pages. `owner`: one sid, or one a page.

        Raises `BooksError` when fewer are free: callers look at `free` first.
        """
        if count > self.free:
            raise BooksError(f"{count} pages wanted by {owner}, {self.free} free")
        self.free -= count
        pages = self._stack[self.free:self.free + count].copy()
        if self._owner is not None:
            self._expect(pages, 0)
            self._owner[pages] = owner
        return pages

    def give(self, pages: Ints, owner: int) -> None:
        """Take pages back from the sequence `owner`."""
        if self._owner is not None:
            self._expect(pages, owner)
            self._owner[pages] = 0
        if self.free + len(pages) > self.total:
            raise BooksError(f"{len(pages)} pages of {owner} come back, "
                             f"{self.used} are outstanding")
        self._stack[self.free:self.free + len(pages)] = pages
        self.free += len(pages)

    def _expect(self, pages: Ints, owner: int) -> None:
        assert self._owner is not None
        found = self._owner[pages]
        for at in np.flatnonzero((found != owner) | (pages == 0))[:1]:
            raise BooksError(f"page {pages[at]} is held by {_name(int(found[at]))}, "
                             f"the books of {_name(owner)} claim it")

    def audit(self, holders: Iterable[tuple[int, Ints]]) -> None:
        """Check that every page is free or held, exactly once. `holders`: (sid, its pages).

        Raises `BooksError` naming the page and its owners. Without `debug` it checks nothing.
        """
        if self._owner is None:
            return
        seen = np.zeros(self.total + 1, np.int32)
        for sid, pages in holders:
            self._expect(pages, sid)
            seen[pages] += 1
        self._expect(self._stack[:self.free], 0)
        seen += np.bincount(self._stack[:self.free], minlength=self.total + 1).astype(np.int32)
        for page in np.flatnonzero(seen[1:] != 1)[:1] + 1:
            raise BooksError(f"page {page} of {_name(int(self._owner[page]))} "
                             f"is in the books {seen[page]} times")


def _name(owner: int) -> str:
    return f"sequence {owner}" if owner else "nobody (free)"


class PrefixCache(Protocol):
    """Where a prefix cache plugs in: asked at admission, told when a sequence leaves its slot."""

    def match(self, tokens: Ints) -> tuple[Ints, int]:
        """Filled pages of the longest known prefix, and its length (a multiple of the page)."""

    def commit(self, tokens: Ints, pages: Ints) -> Ints:
        """Offer a leaving sequence's `pages`, filled with `tokens`; returns those not kept."""


class NoCache:
    """Nothing is ever reused."""

    def match(self, tokens: Ints) -> tuple[Ints, int]:
        return NO_PAGES, 0

    def commit(self, tokens: Ints, pages: Ints) -> Ints:
        return pages
