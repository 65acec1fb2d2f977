"""Whom to preempt when pages run out, and how many pages admission keeps free so that it seldom is.

Pure: functions of a small view of the running sequences; `AdmissionReserve` is a state that reads
no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
    """Index of the sequence to preempt; None if there is none whose preemption would help.

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
        able[_oldest_of_highest(order, priority)] = False
    candidates = np.flatnonzero(able)
    keys = (-order[candidates], running.recompute[candidates], priority[candidates])
    return next(filter(running.frees, candidates[np.lexsort(keys)].tolist()), None)


def _oldest_of_highest(order: Ints, priority: Ints) -> int:
    highest = np.flatnonzero(priority == priority.max())
    return int(highest[np.argmin(order[highest])])


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
        """Tokens to keep free beside those that a new sequence takes.

        `remaining_tokens_sum`: what the running sequences may yet emit, each clipped to `CLIP`;
        0 with nothing running, so that whatever fits is admitted then.
        """
        least = max(self.ratio * remaining_tokens_sum, self._growth * running)
        return min(math.ceil(least), remaining_tokens_sum)

    def on_preemption(self) -> None:
        """A running sequence was preempted for lack of pages."""
        self.ratio = min(1.0, self.ratio + self._rise)

    def on_step(self) -> None:
        """A step was planned."""
        self.ratio = max(self._minimum, self.ratio - self._decay)
