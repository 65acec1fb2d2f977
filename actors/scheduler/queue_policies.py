"""The sequences that wait for a slot, in the order of the engine's policy, and the requests that
have a deadline.

Policies are first come, first served, lpm, priority, and fair. Each is a key by which the waiting
sequences are sorted, the smallest first, and sees one sequence of each class (a class is a
priority, or a tenant; and of these those with one adapter), so that a long queue costs nothing; lpm
sees the first `LOOKED_AT` of each. Background sequences are classes of their own, which under every
policy come after all others. No clock is read.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import TypeAlias

from actorium.actors.config.retention import IDLE_TENANTS
from actorium.actors.messages import BACKGROUND
from actorium.actors.scheduler.request_state import RequestState, SequenceState

PATIENCE = 64
"""Under lpm: how often a sequence may be passed over before it goes first."""
LOOKED_AT = 32
"""Waiting sequences whose cached prefixes lpm compares."""
ClassName: TypeAlias = tuple[int | str, bytes]
"""(priority, tenant or 0, digest of the adapter)"""


# --- keys -----------------------------------------------------------------------------------------

def fcfs_key(s: SequenceState) -> tuple[bool, int]:
    """Returns the key of first come, first served: preempted ones before all others, then by
    arrival (sids are given in that order)."""
    return not s.preempted, s.sid


def priority_key(s: SequenceState) -> tuple[int, bool, int]:
    """Returns the key of the highest priority; within it, of `fcfs_key`."""
    return -s.priority, not s.preempted, s.sid


def lpm_key(s: SequenceState, cached: int, patience: int = PATIENCE) -> tuple[bool, bool, int, int]:
    """Returns the key of the longest cached prefix (`cached` tokens), ties by arrival; preempted
    ones before all others.

    It keeps what the cache holds in use before it is evicted (SGLang, arXiv 2312.07104, section 3).
    A sequence that was passed over more than `patience` times goes before all but the preempted,
    so that none starves: each may wait for `patience` others and those that came before it.
    """
    due = s.preempted or s.passed > patience
    return not s.preempted, not due, 0 if due else -cached, s.sid


def fair_key(s: SequenceState, served: Mapping[str, float]) -> tuple[float, bool, int]:
    """Returns the key of the tenant that was served least (`VirtualTokenCounter.served`); within
    it, and between tenants served alike, of `fcfs_key`."""
    return served.get(s.tenant, 0.0), not s.preempted, s.sid


# --- the queue ------------------------------------------------------------------------------------

class WaitingQueue:
    """The waiting sequences under one policy."""

    def __init__(self, policy: str = "fcfs", weights: Mapping[str, float] | None = None) -> None:
        """policy: fcfs | lpm | priority | fair; weights: of tenants, for fair."""
        self.policy = policy
        self.fair = VirtualTokenCounter(weights or {}) if policy == "fair" else None
        """What tenants are charged for; None = they are not."""
        self._classes: dict[ClassName, WaitingClass] = {}
        self._count = 0
        self.requests = 0
        """Requests with at least one sequence here."""
        self.pooled = 0
        """Sequences of which nothing will be sampled."""
        self.tokens = 0
        """Of all sequences here: what is to be computed before they emit anything."""

    def __len__(self) -> int:
        return self._count

    def choose(self, cached: Callable[[SequenceState], int],
               blocked: Callable[[bytes], bool] | None = None) -> SequenceState | None:
        """Returns the sequence to admit next; None if none may be. cached: its tokens in the prefix
        cache; blocked: whether an adapter keeps its sequences waiting, None = none does."""
        classes = self._classes if blocked is None else {
            name: waiting for name, waiting in self._classes.items() if not blocked(name[1])}
        several = [waiting for name, waiting in classes.items() if name[0] != BACKGROUND]
        if not several:
            return min((waiting.first for waiting in classes.values()), key=fcfs_key, default=None)
        if self.policy == "lpm":
            return min((s for waiting in several for s in waiting.head(LOOKED_AT)),
                       key=lambda s: lpm_key(s, cached(s)))
        firsts = [waiting.first for waiting in several]
        if self.policy == "fcfs":
            return min(firsts, key=fcfs_key)
        if self.fair is None:
            return min(firsts, key=priority_key)
        served = self.fair.served
        return min(firsts, key=lambda s: fair_key(s, served))

    @property
    def foreground(self) -> bool:
        """A sequence waits that is not a background one."""
        return any(name != BACKGROUND for name, _ in self._classes)

    def has_fair_share_left(self, tenant: str, places: int) -> bool:
        """Returns whether a tenant may join although `places` requests wait already: under the fair
        policy one with less than an equal share of them, so that no flood shuts others out. Twice
        as many never wait."""
        return self.fair is not None and self.requests < 2 * places and \
            self.fair.waiting(tenant) < places // self.fair.backlogged_with(tenant)

    def push(self, sequence: SequenceState, ran: bool = False) -> None:
        """Adds a sequence; `ran`: it was preempted."""
        self._classes.setdefault(self._class(sequence), WaitingClass()).push(sequence)
        self._changed(sequence, 1)
        if self.fair is not None:
            (self.fair.preempt if ran else self.fair.arrive)(sequence.tenant)

    def admit(self, sequence: SequenceState) -> None:
        """Removes a sequence that gets a slot."""
        if self.policy == "lpm" and not sequence.background:
            for (name, _), waiting in self._classes.items():
                for other in waiting.head(LOOKED_AT) if name != BACKGROUND else ():
                    other.passed += other.sid < sequence.sid
        self._leave(sequence)
        if self.fair is not None:
            self.fair.admit(sequence.tenant)

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence that has ended; raises `KeyError` if it is not here."""
        self._leave(sequence)
        self.finished(sequence, running=False)

    def finished(self, sequence: SequenceState, running: bool) -> None:
        """Takes note that a sequence has ended; it ran, or waited."""
        if self.fair is not None:
            self.fair.leave(sequence.tenant, running)

    def _class(self, sequence: SequenceState) -> ClassName:
        if self.policy == "priority" or sequence.background:
            return sequence.priority, sequence.adapter
        return sequence.tenant if self.policy == "fair" else 0, sequence.adapter

    def _leave(self, sequence: SequenceState) -> None:
        name = self._class(sequence)
        waiting = self._classes[name]
        waiting.remove(sequence)
        if not waiting:
            del self._classes[name]
        self._changed(sequence, -1)

    def _changed(self, sequence: SequenceState, change: int) -> None:
        self._count += change
        self.tokens += change * (sequence.prompt_len + len(sequence.emitted))
        self.pooled += change * sequence.pooled
        request = sequence.request
        before, request.waiting = request.waiting, request.waiting + change
        self.requests += bool(request.waiting) - bool(before)


class WaitingClass:
    """Sequences that a policy treats alike: preempted ones first, then by arrival."""

    def __init__(self) -> None:
        self._preempted: dict[int, SequenceState] = {}
        """Preempted ones, by sid: few."""
        self._new: OrderedDict[int, SequenceState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new)

    @property
    def first(self) -> SequenceState:
        if self._preempted:
            return self._preempted[min(self._preempted)]
        return next(iter(self._new.values()))

    def head(self, count: int) -> list[SequenceState]:
        """Returns the first `count` or so: all preempted ones, if there are any, else fresh ones.
        """
        return list(islice((self._preempted or self._new).values(), count))

    def push(self, sequence: SequenceState) -> None:
        (self._preempted if sequence.preempted else self._new)[sequence.sid] = sequence

    def remove(self, sequence: SequenceState) -> None:
        """Raises `KeyError`."""
        del (self._preempted if sequence.preempted else self._new)[sequence.sid]


# --- fair shares ----------------------------------------------------------------------------------

class VirtualTokenCounter:
    """Tokens served to each tenant, divided by its weight: the Virtual Token Counter.

    Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588, algorithm 2, with
    weights. A tenant with sequences waiting is backlogged; among those the one with
    the lowest counter goes first. One that becomes backlogged is lifted to the lowest counter of
    those that are (if there are none: to that of the last that was), so that none saves up time
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
        """Returns the number of its waiting sequences."""
        return self._waiting.get(tenant, 0)

    def backlogged_with(self, tenant: str) -> int:
        """Tenants that have sequences waiting, once this one has."""
        return len(self._waiting) + (tenant not in self._waiting)

    def arrive(self, tenant: str) -> None:
        """Counts a new sequence that waits."""
        if tenant not in self._waiting:
            self._lift(tenant)
        _more(self._waiting, tenant)

    def admit(self, tenant: str) -> None:
        """Counts a waiting sequence that runs from now on."""
        self._unwait(tenant)
        _more(self._running, tenant)

    def preempt(self, tenant: str) -> None:
        """Counts a running sequence that waits again."""
        _less(self._running, tenant)
        _more(self._waiting, tenant)

    def leave(self, tenant: str, running: bool) -> None:
        """Removes a sequence that is over; it ran, or waited."""
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
        """Raises the floor to the lowest counter of the backlogged. It never falls."""
        if self._waiting:
            level = min(self._counters[tenant] for tenant in self._waiting)
        else:
            level = self._counters.get(self._last, 0.0)
        self._floor = max(self._floor, level)

    def _lift(self, tenant: str) -> None:
        self._raise_floor()
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor)

    def _forget(self) -> None:
        """Keeps half of `keep` idle tenants: those with the highest counters, above the floor."""
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


# --- deadlines ------------------------------------------------------------------------------------

class Deadlines:
    """A heap of live requests by deadline; ended ones are dropped when they come to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState]] = []
        self._added = 0

    def add(self, request: RequestState, live: int) -> None:
        """Watches a request; `live` (how many there are) bounds how many ended ones are kept."""
        deadline = request.submit.deadline
        if deadline is None:
            return
        if len(self._heap) > 2 * live + 64:
            self._heap = [entry for entry in self._heap if entry[2].live]
            heapq.heapify(self._heap)
        self._added += 1
        heapq.heappush(self._heap, (deadline, self._added, request))

    def next(self) -> float | None:
        """Returns the earliest deadline of a live request."""
        while self._heap and not self._heap[0][2].live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> Iterator[RequestState]:
        """Yields and removes the requests whose time is over."""
        while (at := self.next()) is not None and at <= now:
            yield heapq.heappop(self._heap)[2]
