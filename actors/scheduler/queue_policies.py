"""Queue policies beside first come, first served: lpm, priority, fair.

Pure: every function sees a small view of the queue and returns a choice; `VirtualTokenCounter` is
the state that fair sharing needs, and reads no clock. The order of the waiting is a key that sorts,
the smallest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from actorium.actors.config.retention import IDLE_TENANTS
from actorium.actors.scheduler.request_state import SequenceState
from actorium.actors.scheduler.waiting_queue import WaitingQueue

PATIENCE = 64
"""Under lpm: how often a sequence may be passed over before it goes first."""
LOOKED_AT = 32
"""Waiting sequences whose cached prefixes lpm compares."""


class PolicyQueue(WaitingQueue):
    """A waiting queue under another policy. The policy sees one sequence of each class (a class is
    a priority, or a tenant), so that a long queue costs nothing; lpm has one class and sees its
    first `LOOKED_AT`."""

    def __init__(self, policy: str, weights: Mapping[str, float] | None = None) -> None:
        """policy: lpm | priority | fair; weights: of tenants, for fair."""
        super().__init__()
        self.policy = policy
        self.fair = VirtualTokenCounter(weights or {}) if policy == "fair" else None
        self.charges = self.fair is not None

    def choose(self, cached: Callable[[SequenceState], int]) -> SequenceState | None:
        if not len(self):
            return None
        if self.policy == "lpm":
            seen = self._classes[0].head(LOOKED_AT)
            return seen[next_lpm([_view(sequence, cached(sequence)) for sequence in seen])]
        seen = [waiting.first for waiting in self._classes.values()]
        view = [_view(sequence) for sequence in seen]
        if self.fair is not None:
            return seen[next_fair(view, self.fair.served)]
        return seen[next_priority(view)]

    def has_fair_share_left(self, tenant: str, places: int) -> bool:
        """Under the fair policy a tenant may join a full queue as long as it has less than an equal
        share of its places, so that nobody's flood shuts others out. Twice as many never wait."""
        return self.fair is not None and self.requests < 2 * places and \
            self.fair.waiting(tenant) < places // self.fair.backlogged_with(tenant)

    def push(self, sequence: SequenceState, ran: bool = False) -> None:
        super().push(sequence, ran)
        if self.fair is not None:
            (self.fair.preempt if ran else self.fair.arrive)(sequence.tenant)

    def admit(self, sequence: SequenceState) -> None:
        if self.policy == "lpm":
            for other in self._classes[0].head(LOOKED_AT):
                other.passed += other.sid < sequence.sid
        super().admit(sequence)
        if self.fair is not None:
            self.fair.admit(sequence.tenant)

    def finished(self, sequence: SequenceState, running: bool) -> None:
        if self.fair is not None:
            self.fair.leave(sequence.tenant, running)

    def charge(self, tenant: str, prompt_tokens: int, completion_tokens: int) -> None:
        if self.fair is not None:
            self.fair.charge(tenant, prompt_tokens, completion_tokens)

    def _class(self, sequence: SequenceState) -> int | str:
        if self.policy == "priority":
            return sequence.priority
        return sequence.tenant if self.policy == "fair" else 0


def new_queue(policy: str, weights: Mapping[str, float] | None = None) -> WaitingQueue:
    """The queue of a policy: fcfs | lpm | priority | fair."""
    return WaitingQueue() if policy == "fcfs" else PolicyQueue(policy, weights)


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
        """Charges a tenant for tokens that were served to it."""
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


def _view(s: SequenceState, cached: int = 0) -> WaitingView:
    return WaitingView(s.sid, s.tenant, s.priority, s.sid, s.prompt_len + len(s.emitted), cached,
                       s.preempted, s.passed)
