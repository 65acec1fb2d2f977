"""May a waiting sequence be admitted, and who is preempted when pages run out.

A sequence is admitted if all pools have pages for its prompt (`AdmissionRoom.fits`), beside what
was promised to those that still extend and what running ones are expected to emit
(`AdmissionReserve`). When pages run out all the same, `choose_victim` says who waits again. What
the prefix cache evicts to make room is `cache/eviction.py`'s. No clock is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actorium.actors.messages import BACKGROUND
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.cache.radix_cache import PrefixMatch
from actorium.actors.scheduler.request_state import SequenceState
from actorium.actors.scheduler.slot_table import SlotTable

CLIP = 4096
"""Tokens at most that one sequence counts for in `AdmissionReserve.needed`: requests that name no
max_tokens may run to the end of the context, but seldom do (as SGLang clips its estimate)."""

Ints: TypeAlias = NDArray[np.integer[Any]]


class RunningView(NamedTuple):
    """The running sequences as columns, each an integer array [n]."""

    order: Ints
    """Order of admission, earlier = smaller; no two alike."""
    priority: Ints
    recompute: Ints
    """Tokens to compute again, were it preempted (what the prefix cache would keep left out)."""
    frees: Callable[[int], bool]
    """Whether the preemption of one of them, by index, would make a page free or evictable. This
    reads its whole page table, so it is asked of the first in line alone, mostly."""


def choose_victim(running: RunningView, below: int | None = None) -> int | None:
    """Returns the index of the sequence to preempt; None if there is none whose preemption would
    help.

    The lowest priority first; within it the fewest tokens to recompute among those that free at
    least a page; ties: the latest admitted. Never the oldest of the highest priority, so that
    someone always finishes. `below` = only priorities lower than this: to make room for a waiting
    sequence of that priority (then the protected one is not among them, or nothing better runs).
    """
    order, priority = running.order, running.priority
    if not len(order):
        return None
    if below is not None:
        able = priority < below
    else:
        able = np.ones(len(order), np.bool_)
        highest = np.flatnonzero(priority == priority.max())
        able[highest[np.argmin(order[highest])]] = False
    candidates = np.flatnonzero(able)
    keys = (-order[candidates], running.recompute[candidates], priority[candidates])
    return next(filter(running.frees, candidates[np.lexsort(keys)].tolist()), None)


class AdmissionReserve:
    """How many tokens admission keeps free for what running sequences will yet emit.

    A ratio of what they still may emit: it starts at `initial`, rises by `rise` with each
    preemption for lack of pages, and decays linearly, by (initial - minimum) / `decay_steps` a
    step, to `minimum` (as SGLang's new_token_ratio). So a workload that ends early is packed ever
    tighter, and one that does not is left room after the first few preemptions.
    """

    def __init__(self, initial: float = 0.3, minimum: float = 0.05, rise: float = 0.1,
                 decay_steps: int = 1200, growth: int = 16) -> None:
        """`growth`: tokens kept free for each running sequence whatever the ratio is: one admitted
        with less would be preempted again at once."""
        if not 0 <= minimum <= initial <= 1 or rise <= 0 or decay_steps < 1 or growth < 0:
            raise ValueError("reserve: 0 <= minimum <= initial <= 1, rise > 0, decay_steps >= 1 "
                             "and growth >= 0 are needed")
        self.ratio = initial
        self._minimum, self._rise, self._growth = minimum, rise, growth
        self._decay = (initial - minimum) / decay_steps

    def needed(self, remaining_tokens_sum: int, running: int) -> int:
        """Returns how many tokens to keep free beside those that a new sequence takes.

        `remaining_tokens_sum`: what the running sequences may yet emit, each clipped to `CLIP`;
        0 with nothing running, so that whatever fits is admitted then.
        """
        least = max(self.ratio * remaining_tokens_sum, self._growth * running)
        return min(math.ceil(least), remaining_tokens_sum)

    def on_preemption(self) -> None:
        """Raises the ratio: a running sequence was preempted for lack of pages."""
        self.ratio = min(1.0, self.ratio + self._rise)

    def on_step(self) -> None:
        """Lowers the ratio: a step was planned."""
        self.ratio = max(self._minimum, self.ratio - self._decay)


class AdmissionRoom:
    """The pages that admission reckons with, and their reserve."""

    def __init__(self, table: SlotTable, kv_cache: KVCacheManager,
                 prefilling: Sequence[SequenceState], chunk: int, growth: int) -> None:
        """prefilling: the running sequences that still extend; chunk: tokens that a step may
        compute; growth: see `AdmissionReserve`."""
        self.reserve = AdmissionReserve(growth=growth)
        self._table, self._kv_cache = table, kv_cache
        self._prefilling, self._most_extended = prefilling, chunk + table.ahead

    def fits(self, length: int, match: PrefixMatch | None) -> bool:
        """Returns whether all pools have pages for `length` tokens of a sequence beside what the
        running ones were promised and are expected to want."""
        left = [self._pages_left(group, length, match)
                for group in range(len(self._kv_cache.pools))]
        running = self._table.num_running
        if min(left) >= running * self._kv_cache.pages_for(CLIP):
            return True
        growth = self._kv_cache.pages_for(self.reserve.needed(self._table.remaining(CLIP), running))
        return all(spare >= (min(growth, 2 * running) if window else growth)
                   for spare, window in zip(left, self._kv_cache.windows, strict=True))

    def _pages_left(self, group: int, length: int, match: PrefixMatch | None) -> int:
        """Returns how many pages of a group stay available when a sequence of `length` tokens is
        admitted."""
        kv_cache = self._kv_cache
        left = (kv_cache.available(group) - self._reserved_pages(group)
                - kv_cache.max_held(group, length, self._most_extended))
        if match is not None and match.length:
            own = match.pages[group]
            own = own[own > 0] if kv_cache.windows[group] else own
            # Those that only the tree holds are available now and will not be then.
            left += len(own) - int(np.count_nonzero(kv_cache.pools[group].single_owner(own)))
        return left

    def _reserved_pages(self, group: int) -> int:
        """Returns how many pages the sequences that still extend were admitted for and do not hold
        yet."""
        table = self._table
        return sum(max(self._kv_cache.max_held(group, table.reach(s.total, s.end),
                                               self._most_extended)
                       - table.holds(group, s.slot), 0) for s in self._prefilling)

    def reserved_pages(self) -> int:
        """Returns the most pages of any group that extending sequences will still want."""
        if not self._prefilling:
            return 0
        return max(self._reserved_pages(group) for group in range(len(self._kv_cache.pools)))

    def pick_victim(self, by_priority: bool, below: int | None = None) -> SequenceState | None:
        """Returns the sequence to preempt to make room (for one of priority `below`); None = there
        is none. by_priority: under the priority policy; under the others all priorities count alike
        but that of background sequences."""
        table = self._table
        slots = table.occupied()
        given = [table.sequences[slot].priority for slot in slots]  # type: ignore[union-attr]
        priority = np.array(given, np.int64)
        if not by_priority:
            priority[priority != BACKGROUND] = 0
        index = choose_victim(RunningView(table.order[slots], priority, table.len_lo[slots],
                                          lambda i: table.frees(slots[i], self._kv_cache)), below)
        return None if index is None else table.sequences[slots[index]]
