"""Scheduling policies: who is admitted next, who is preempted, what admission keeps free.

Pure: every function sees a small view of the queue or of the running sequences and returns a
choice; `VirtualTokenCounter` and `AdmissionReserve` are the two small states that some choices
need, and read no clock. The scheduler decides nothing by itself that could be decided here.

The order of the waiting is a key that sorts (smallest first). `fcfs_key` and `priority_key` do not
change while a sequence waits, so that a queue may keep itself sorted by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actorium.actors.config.retention import IDLE_TENANTS

PATIENCE = 64
"""Under lpm: how often a sequence may be passed over before it goes first."""
CLIP = 4096
"""Tokens at most that one sequence counts for in `AdmissionReserve.needed`: requests that name no
max_tokens may run to the end of the context, but seldom do (as SGLang clips its estimate)."""

Ints: TypeAlias = NDArray[np.integer[Any]]


class WaitingView(NamedTuple):
    """One waiting sequence, as a policy sees it."""

    sid: int
    tenant: str
    priority: int
    """Higher goes first, under the priority policy."""
    arrival: int
    """Running number, earlier = smaller; a preempted sequence keeps its own."""
    tokens: int
    """Tokens that it must hold."""
    cached: int
    """Tokens of it found in the prefix cache at the last look (0 where nobody looked)."""
    preempted: bool
    """It has run before and holds progress: first of its class."""
    passed: int = 0
    """How often one that came later was admitted before it."""


# --- whom to admit next ---------------------------------------------------------------------------
# Each takes at least one waiting sequence (ValueError else) and returns the index of one.

def fcfs_key(w: WaitingView) -> tuple[bool, int]:
    """Preempted first, then by arrival."""
    return not w.preempted, w.arrival


def priority_key(w: WaitingView) -> tuple[int, bool, int]:
    """Higher priority first, within one preempted first, then by arrival."""
    return -w.priority, not w.preempted, w.arrival


def next_fcfs(waiting: Sequence[WaitingView]) -> int:
    """First come, first served; preempted ones before all others."""
    return min(range(len(waiting)), key=lambda i: fcfs_key(waiting[i]))


def next_priority(waiting: Sequence[WaitingView]) -> int:
    """The highest priority; within it preempted ones first, then by arrival."""
    return min(range(len(waiting)), key=lambda i: priority_key(waiting[i]))


def next_lpm(waiting: Sequence[WaitingView], patience: int = PATIENCE) -> int:
    """The longest cached prefix, ties by arrival; preempted ones before all others.

    It keeps what the cache holds in use before it is evicted (SGLang, arXiv 2312.07104, section 3).
    A sequence that was passed over more than `patience` times goes before all but the preempted,
    so that nobody starves: each may wait for `patience` others and those that came before it.
    """
    def key(i: int) -> tuple[bool, bool, int, int]:
        w = waiting[i]
        due = w.preempted or w.passed > patience
        return not w.preempted, not due, 0 if due else -w.cached, w.arrival

    return min(range(len(waiting)), key=key)


def passed_over(waiting: Iterable[WaitingView], chosen: WaitingView) -> list[int]:
    """sids of those whose `passed` rises by one when `chosen` is admitted (it is none of them)."""
    return [w.sid for w in waiting if w.arrival < chosen.arrival]


def next_fair(waiting: Sequence[WaitingView], served: Mapping[str, float]) -> int:
    """The tenant that was served least (`VirtualTokenCounter.served`), within it as `next_fcfs`;
    tenants served alike: whose sequence came first.

    A tenant's first alone may stand in the view for all of its sequences: the choice is the same.
    """
    def key(i: int) -> tuple[float, bool, int]:
        w = waiting[i]
        return served.get(w.tenant, 0.0), not w.preempted, w.arrival

    return min(range(len(waiting)), key=key)


# --- fair shares ----------------------------------------------------------------------------------

class VirtualTokenCounter:
    """Tokens served to each tenant, divided by its weight: the Virtual Token Counter.

    Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588, algorithm 2, with
    weights. A tenant with sequences waiting is backlogged; among those the one with
    the lowest counter goes first. One that becomes backlogged is lifted to the lowest counter of
    those that are (if there are none: to that of the last that was), so that nobody saves up time
    in which it asked for nothing. A preempted sequence comes back without a lift: its tenant did
    not stop asking.

    Told of each move of each sequence: `arrive`, `admit`, `preempt`, `leave`. Charge the prompt
    when a sequence is first admitted and the completion as it comes; what a preemption makes
    recomputed is not served again and costs nothing.

    Bounded: counters of at most `keep` tenants without sequences are kept. Those that a lift would
    hide anyway go first, which changes nothing, then the lowest (their debt is forgiven).
    """

    def __init__(self, weights: Mapping[str, float] = MappingProxyType({}),
                 prompt_price: float = 1.0, completion_price: float = 2.0,
                 keep: int = IDLE_TENANTS) -> None:
        """`weights`: share of a tenant, above 0; 1 for those not named."""
        if not all(0 < w < math.inf for w in weights.values()):
            raise ValueError("tenant_weights: every weight must be above 0 and finite")
        self._weights = dict(weights)
        self._prompt_price, self._completion_price = prompt_price, completion_price
        self._keep = keep
        self._counters: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._floor = 0.0
        self._last = ""

    @property
    def served(self) -> Mapping[str, float]:
        """Tenant -> virtual tokens: every tenant that waits or runs is in it."""
        return MappingProxyType(self._counters)

    def waiting(self, tenant: str) -> int:
        """Its waiting sequences."""
        return self._waiting.get(tenant, 0)

    def backlogged_with(self, tenant: str) -> int:
        """Tenants that have sequences waiting, once this one has."""
        return len(self._waiting) + (tenant not in self._waiting)

    def arrive(self, tenant: str) -> None:
        """A new sequence of it waits."""
        if tenant not in self._waiting:
            self._lift(tenant)
        _more(self._waiting, tenant)

    def admit(self, tenant: str) -> None:
        """A waiting sequence of it runs."""
        self._unwait(tenant)
        _more(self._running, tenant)

    def preempt(self, tenant: str) -> None:
        """A running sequence of it waits again."""
        _less(self._running, tenant)
        _more(self._waiting, tenant)

    def leave(self, tenant: str, running: bool) -> None:
        """A sequence of it is over; it ran, or waited."""
        if running:
            _less(self._running, tenant)
        else:
            self._unwait(tenant)
        if len(self._counters) > len(self._waiting) + len(self._running) + self._keep:
            self._forget()

    def charge(self, tenant: str, prompt_tokens: int, completion_tokens: int) -> None:
        """So many tokens were served to it."""
        cost = self._prompt_price * prompt_tokens + self._completion_price * completion_tokens
        before = self._counters.get(tenant, self._floor)
        self._counters[tenant] = before + cost / self._weights.get(tenant, 1.0)

    def _unwait(self, tenant: str) -> None:
        if self._waiting[tenant] == 1:
            self._raise_floor()
            self._last = tenant
        _less(self._waiting, tenant)

    def _raise_floor(self) -> None:
        """The floor is the lowest counter of the backlogged. It never falls."""
        if self._waiting:
            level = min(self._counters[tenant] for tenant in self._waiting)
        else:
            level = self._counters.get(self._last, 0.0)
        self._floor = max(self._floor, level)

    def _lift(self, tenant: str) -> None:
        self._raise_floor()
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)

    def _forget(self) -> None:
        """Keep half of `keep` idle tenants: those with the highest counters, above the floor."""
        self._raise_floor()
        counters = self._counters
        idle = [t for t in counters if t not in self._waiting and t not in self._running]
        idle.sort(key=counters.__getitem__)
        surplus = len(idle) - self._keep // 2
        for i, tenant in enumerate(idle):
            if i < surplus or counters[tenant] <= self._floor:
                del counters[tenant]


def _more(counts: dict[str, int], tenant: str) -> None:
    counts[tenant] = counts.get(tenant, 0) + 1


def _less(counts: dict[str, int], tenant: str) -> None:
    """Raises `KeyError` if there is none."""
    if counts[tenant] == 1:
        del counts[tenant]
    else:
        counts[tenant] -= 1


# --- whom to preempt ------------------------------------------------------------------------------

class RunningView(NamedTuple):
    """The running sequences as columns, each an integer array [n]."""

    order: Ints
    """Order of admission, earlier = smaller; no two alike."""
    priority: Ints
    recompute: Ints
    """Tokens to compute again, were it preempted (what the prefix cache would keep left out)."""
    count_freed: Ints
    """Pages that would become free or evictable."""


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
    able = running.count_freed > 0
    if below is not None:
        able &= priority < below
    else:
        able[_oldest_of_highest(order, priority)] = False
    candidates = np.flatnonzero(able)
    if not len(candidates):
        return None
    keys = (-order[candidates], running.recompute[candidates], priority[candidates])
    return int(candidates[np.lexsort(keys)[0]])


def _oldest_of_highest(order: Ints, priority: Ints) -> int:
    highest = np.flatnonzero(priority == priority.max())
    return int(highest[np.argmin(order[highest])])


# --- what admission promises ----------------------------------------------------------------------

def misses_deadline(deadline: float | None, now: float, tokens_ahead: int, own_tokens: int,
                    tokens_per_second: float | None) -> bool:
    """True if a deadline passes before the work is done even by an optimistic estimate.

    `tokens_ahead` are to be computed before it begins, `own_tokens` until it ends; the rate is the
    best that the engine has shown, None (or 0) = not known: then only the past cannot be met.
    Times in seconds of one clock; a deadline of None can always be met.
    """
    if deadline is None:
        return False
    if now >= deadline:
        return True
    if not tokens_per_second:
        return False
    return now + (tokens_ahead + own_tokens) / tokens_per_second > deadline


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
