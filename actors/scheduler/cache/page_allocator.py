"""A page pool: how many owners each page has and, in debug mode, who they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
NO_PAGES: Ints = np.empty(0, np.int32)
TREE = -1
"""Owner: the prefix tree. Sequences own by their sid, which is above 0."""


class AccountingError(RuntimeError):
    """The pool is inconsistent; the message names the page (or slot), its owners and the step."""


class PageAllocator:
    """Pages 1..pages-1, allocated from a stack; page 0 is the padding sink and never allocated.

    A page has one owner for each sequence that names it in its page tables, and one more while the
    prefix tree keeps it; without owners it is free. With `debug` owners are known by name, and
    every operation is checked.
    """

    def __init__(self, pages: int, page_size: int, debug: bool = False) -> None:
        """`page_size` must be a power of two: raises `ValueError`."""
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size: must be a power of two, got {page_size}")
        self.total = max(pages - 1, 0)
        self.page_size = page_size
        self.free = self.total
        self.cached = 0
        """Pages that the tree keeps."""
        self.cached_only = 0
        """Pages that only the tree keeps."""
        self.quarantined = 0
        """Pages taken out of use because their owner counts were inconsistent."""
        self.step = 0
        """The step being planned, for messages."""
        self._shift = page_size.bit_length() - 1
        self._stack = np.arange(self.total, 0, -1, dtype=np.int32)
        self._count = np.zeros(self.total + 1, np.int32)
        self._in_tree = np.zeros(self.total + 1, np.bool_)
        self._owners: dict[int, set[int]] | None = {} if debug else None

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def held(self) -> int:
        """Returns the number of pages that sequences hold (some of them cached as well)."""
        return self.used - self.cached_only - self.quarantined

    @property
    def usable(self) -> int:
        """Returns the number of pages that are not quarantined."""
        return self.total - self.quarantined

    @property
    def tokens(self) -> int:
        """Returns how many tokens all usable pages hold."""
        return self.usable << self._shift

    def pages_for(self, tokens: int) -> int:
        """Returns how many pages `tokens` tokens need, the last one perhaps partly filled."""
        return (tokens + self.page_size - 1) >> self._shift

    # --- sequences -------------------------------------------------------------------------------

    def allocate(self, count: int, owner: int | Longs) -> Ints:
        """Returns i4[count] fresh pages. `owner`: one sid, or one per page.

        Raises `AccountingError` when fewer are free: callers check `free` first.
        """
        if count > self.free:
            raise AccountingError(f"step {self.step}: {count} pages wanted by {owner}, "
                                  f"{self.free} free")
        self.free -= count
        pages = self._stack[self.free:self.free + count].copy()
        if self._owners is not None:
            self._add_owners(pages, owner, first=True)
        self._count[pages] = 1
        return pages

    def share(self, pages: Ints, owner: int) -> None:
        """Adds an owner to pages that are in the tree."""
        if self._owners is not None:
            self._add_owners(pages, owner, first=False)
        counts = self._count[pages] + 1
        self.cached_only -= int(np.count_nonzero(counts == 2))
        self._count[pages] = counts

    def release(self, pages: Ints, owner: int | Longs) -> None:
        """Removes an owner (one sid, or one per page) from pages; those without another owner
        become free.

        Several owners may release one page in the same call.
        """
        if not len(pages):
            return
        if self._owners is not None:
            self._remove_owners(pages, owner)
        times: int | NDArray[np.int64] = 1
        if not isinstance(owner, int):
            pages, times = np.unique(pages, return_counts=True)
        left = (self._count[pages] - times).astype(np.int32)
        if left.min() < 0:
            raise AccountingError(f"step {self.step}: page {pages[int(left.argmin())]} comes back "
                                  f"from {owner}, but nobody holds it")
        self._count[pages] = left
        self._release(pages[left == 0])
        self.cached_only += int(np.count_nonzero(self._in_tree[pages] & (left == 1)))

    # --- the tree --------------------------------------------------------------------------------

    def mark_cached(self, pages: Ints) -> None:
        """Makes the tree an owner of pages that a sequence holds."""
        if self._owners is not None:
            self._add_owners(pages, TREE, first=False)
        self._count[pages] += 1
        self._in_tree[pages] = True
        self.cached += len(pages)

    def mark_uncached(self, pages: Ints) -> None:
        """Removes the tree as an owner; pages without another owner become free."""
        if not len(pages):
            return
        if self._owners is not None:
            self._remove_owners(pages, TREE)
        if not self._in_tree[pages].all():
            raise AccountingError(f"step {self.step}: the prefix tree lets go of a page it does "
                                  f"not keep, one of {pages[~self._in_tree[pages]]}")
        left = self._count[pages] - 1
        self._count[pages] = left
        self._in_tree[pages] = False
        self.cached -= len(pages)
        spare = pages[left == 0]
        self.cached_only -= len(spare)
        self._release(spare)

    def single_owner(self, pages: Ints) -> NDArray[np.bool_]:
        """Returns a mask of these pages: which have one owner only."""
        alone: NDArray[np.bool_] = self._count[pages] == 1
        return alone

    def count_freed(self, pages: Ints) -> int:
        """Returns how many of a sequence's pages would be free, or owned by the tree alone, without
        it."""
        return int(np.count_nonzero(self._count[pages] - self._in_tree[pages] == 1))

    def _release(self, pages: Ints) -> None:
        if self.free + len(pages) > self.total:
            raise AccountingError(f"step {self.step}: {len(pages)} pages come back, "
                                  f"{self.used} are outstanding")
        self._stack[self.free:self.free + len(pages)] = pages
        self.free += len(pages)

    # --- who ------------------------------------------------------------------------------------

    def _add_owners(self, pages: Ints, owner: int | Longs, first: bool) -> None:
        assert self._owners is not None
        for page, who in zip(pages.tolist(), _each(owner, len(pages)), strict=True):
            owners = self._owners.setdefault(page, set())
            if page == 0 or bool(owners) == first or who in owners:
                raise AccountingError(f"step {self.step}: page {page} is held by {_names(owners)} "
                                      f"and goes to {_names({who})}")
            owners.add(who)

    def _remove_owners(self, pages: Ints, owner: int | Longs) -> None:
        assert self._owners is not None
        for page, who in zip(pages.tolist(), _each(owner, len(pages)), strict=True):
            owners = self._owners.get(page, set())
            if who not in owners:
                raise AccountingError(f"step {self.step}: page {page} is held by {_names(owners)}, "
                                      f"and {_names({who})} gives it back")
            owners.remove(who)

    # --- audits ---------------------------------------------------------------------------------

    def audit(self, holders: Iterable[tuple[int, Ints]], cached: Ints) -> None:
        """Checks the owners of every page against those who should hold it.

        holders: (sid, its pages); cached: the tree's pages. Raises `AccountingError` at the first
        page with other owners, or wrongly on (or off) the free list.
        """
        claims = np.zeros(self.total + 1, np.int32)
        for sid, pages in holders:
            if self._owners is not None:
                self._claimed(pages, sid)
            claims += np.bincount(pages, minlength=len(claims)).astype(np.int32)
        if self._owners is not None:
            self._claimed(cached, TREE)
        in_tree = np.bincount(cached, minlength=len(claims))
        claims += in_tree.astype(np.int32)
        free = np.bincount(self._stack[:self.free], minlength=len(claims))
        free_rightly = (claims == 0) & (free == 1)
        bad = ~(free_rightly | (claims > 0) & (free == 0)) | (claims != self._count)
        bad |= (in_tree == 1) != self._in_tree
        bad[0] = claims[0] + free[0] > 0
        for page in np.flatnonzero(bad)[:1].tolist():
            raise AccountingError(
                f"step {self.step}: page {page} of {self._whose(page)}: {claims[page]} claims, "
                f"{self._count[page]} owners counted, in the tree {in_tree[page]} times, "
                f"free {free[page]} times")
        self._audit_sums(in_tree)

    def _audit_sums(self, in_tree: NDArray[np.int64]) -> None:
        spare = int(np.count_nonzero(in_tree.astype(bool) & (self._count == 1)))
        if (self.cached, self.cached_only) != (int(in_tree.sum()), spare):
            raise AccountingError(f"step {self.step}: {self.cached} cached and {self.cached_only} "
                                  f"spare pages counted, {int(in_tree.sum())} and {spare} found")

    def _claimed(self, pages: Ints, who: int) -> None:
        assert self._owners is not None
        for page in pages.tolist():
            if who not in self._owners.get(page, ()):
                raise AccountingError(f"step {self.step}: page {page} is held by "
                                      f"{self._whose(page)}, the books of {_names({who})} claim it")

    def _whose(self, page: int) -> str:
        if self._owners is None:
            return f"{self._count[page]} owners"
        return _names(self._owners.get(page, set()))

    def count_inconsistent(self) -> int:
        """Counts, while no sequence is present, the pages outside quarantine that are neither free
        exactly once nor owned by the tree alone. A few whole-pool operations."""
        return self.total - int(np.count_nonzero(self._fine())) - self.quarantined

    def quarantine(self) -> None:
        """Frees every page, while no sequence is present and the tree is empty, but for those whose
        owners are inconsistent; these stay out of use."""
        good = np.flatnonzero(self._fine()).astype(np.int32)
        self._stack[:len(good)] = good[::-1]
        self.free, self.quarantined = len(good), self.total - len(good)
        self._count[good] = 0
        self._in_tree[:] = False
        self.cached = self.cached_only = 0

    def _fine(self) -> NDArray[np.bool_]:
        """Returns the mask of pages that are free exactly once, or owned by the tree alone."""
        found = np.bincount(self._stack[:self.free], minlength=self.total + 1)
        fine = np.where(self._in_tree, (found == 0) & (self._count == 1),
                        (found == 1) & (self._count == 0))
        fine[0] = False
        return fine


def _each(owner: int | Longs, count: int) -> list[int]:
    return [owner] * count if isinstance(owner, int) else owner.tolist()


def _names(owners: Iterable[int]) -> str:
    names = ["the prefix tree" if who == TREE else f"sequence {who}" for who in sorted(owners)]
    return " and ".join(names) or "nobody (free)"
