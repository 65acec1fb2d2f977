"""Who waits for a slot, and who for a deadline."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from actorium.actors.scheduler.request_state import RequestState, SequenceState
from actorium.actors.scheduler.scheduling_policy import (
    VirtualTokenCounter,
    WaitingView,
    next_fair,
    next_lpm,
    next_priority,
)

LOOKED_AT = 32
"""Waiting sequences whose cached prefixes lpm compares."""


class WaitingQueue:
    """The waiting sequences, in classes that a policy treats alike: one for fcfs and lpm, one a
    priority, one a tenant. Within a class preempted ones come first, then the order of arrival.

    A policy sees one sequence of each class, so that a long queue costs nothing; lpm sees the
    first `LOOKED_AT`.
    """

    def __init__(self, policy: str = "fcfs", weights: Mapping[str, float] | None = None) -> None:
        """policy: fcfs | lpm | priority | fair; weights: of tenants, for fair."""
        self.policy = policy
        self.fair = VirtualTokenCounter(weights or {}) if policy == "fair" else None
        self._classes: dict[int | str, WaitingClass] = {}
        self._count = 0
        self.requests = 0
        """Requests with at least one sequence here."""
        self.tokens = 0
        """Of all sequences here: what is to be computed before they emit anything."""

    def __len__(self) -> int:
        return self._count

    def choose(self, cached: Callable[[SequenceState], int]) -> SequenceState | None:
        """Whom to admit next; None if nobody waits. cached: tokens of a sequence in the cache."""
        if not self._count:
            return None
        if self.policy == "fcfs":
            return self._classes[0].first
        seen = self._seen()
        look = cached if self.policy == "lpm" else _not_asked
        view = [_view(sequence, look) for sequence in seen]
        if self.policy == "lpm":
            return seen[next_lpm(view)]
        if self.fair is not None:
            return seen[next_fair(view, self.fair.served)]
        return seen[next_priority(view)]

    def has_fair_share_left(self, tenant: str, most: int) -> bool:
        """Whether a tenant may join though `most` requests wait: under the fair policy, as long as
        it has less than an equal share of these places, so that nobody's flood shuts others out.
        Twice as many never wait."""
        return self.fair is not None and self.requests < 2 * most and \
            self.fair.waiting(tenant) < most // self.fair.backlogged_with(tenant)

    def _seen(self) -> list[SequenceState]:
        if self.policy == "lpm":
            return self._classes[0].front(LOOKED_AT)
        return [line.first for line in self._classes.values()]

    def push(self, sequence: SequenceState, ran: bool = False) -> None:
        """Join; `ran`: from a slot."""
        self._classes.setdefault(self._class(sequence), WaitingClass()).push(sequence)
        self._changed(sequence, 1)
        if self.fair is not None:
            (self.fair.preempt if ran else self.fair.arrive)(sequence.tenant)

    def admit(self, sequence: SequenceState) -> None:
        """Leave the queue for a slot."""
        if self.policy == "lpm":
            for other in self._classes[0].front(LOOKED_AT):
                other.passed += other.sid < sequence.sid
        self._leave(sequence)
        if self.fair is not None:
            self.fair.admit(sequence.tenant)

    def remove(self, sequence: SequenceState) -> None:
        """Leave for good; raises `KeyError` if it is not here."""
        self._leave(sequence)
        self.finished(sequence, running=False)

    def finished(self, sequence: SequenceState, running: bool) -> None:
        """A sequence is over; it ran, or waited."""
        if self.fair is not None:
            self.fair.leave(sequence.tenant, running)

    def _class(self, sequence: SequenceState) -> int | str:
        if self.policy == "priority":
            return sequence.priority
        return sequence.tenant if self.policy == "fair" else 0

    def _leave(self, sequence: SequenceState) -> None:
        name = self._class(sequence)
        line = self._classes[name]
        line.remove(sequence)
        if not line:
            del self._classes[name]
        self._changed(sequence, -1)

    def _changed(self, sequence: SequenceState, change: int) -> None:
        self._count += change
        self.tokens += change * (sequence.prompt_len + len(sequence.emitted))
        request = sequence.request
        before, request.waiting = request.waiting, request.waiting + change
        self.requests += bool(request.waiting) - bool(before)


class WaitingClass:
    """One class of the queue."""

    def __init__(self) -> None:
        self._back: dict[int, SequenceState] = {}
        """Preempted ones, by sid: few."""
        self._fresh: OrderedDict[int, SequenceState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._back) + len(self._fresh)

    @property
    def first(self) -> SequenceState:
        if self._back:
            return self._back[min(self._back)]
        return next(iter(self._fresh.values()))

    def front(self, count: int) -> list[SequenceState]:
        """The first `count` or so: all preempted ones, if there are any, else fresh ones."""
        return list(islice((self._back or self._fresh).values(), count))

    def push(self, sequence: SequenceState) -> None:
        (self._back if sequence.preempted else self._fresh)[sequence.sid] = sequence

    def remove(self, sequence: SequenceState) -> None:
        """Raises `KeyError`."""
        del (self._back if sequence.preempted else self._fresh)[sequence.sid]


def _not_asked(sequence: SequenceState) -> int:
    return 0


def _view(s: SequenceState, cached: Callable[[SequenceState], int]) -> WaitingView:
    return WaitingView(s.sid, s.tenant, s.priority, s.sid, s.prompt_len + len(s.emitted), cached(s),
                       s.preempted, s.passed)


class Deadlines:
    """A heap of live requests by deadline; ended ones are dropped when they come to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState]] = []
        self._added = 0

    def add(self, request: RequestState, live: int) -> None:
        """Watch a request; `live` (how many there are) bounds how many ended ones are kept."""
        deadline = request.submit.deadline
        if deadline is None:
            return
        if len(self._heap) > 2 * live + 64:
            self._heap = [entry for entry in self._heap if entry[2].live]
            heapq.heapify(self._heap)
        self._added += 1
        heapq.heappush(self._heap, (deadline, self._added, request))

    def next(self) -> float | None:
        """The earliest deadline of a live request."""
        while self._heap and not self._heap[0][2].live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> Iterator[RequestState]:
        """Take out the requests whose time is over."""
        while (at := self.next()) is not None and at <= now:
            yield heapq.heappop(self._heap)[2]
