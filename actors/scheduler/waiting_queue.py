"""The sequences that wait for a slot, and the requests that have a deadline."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from actorium.actors.scheduler.request_state import RequestState, SequenceState


class WaitingQueue:
    """First come, first served; preempted sequences before all others. `queue_policies` has the
    other policies: they divide the queue into classes, of which there is one here."""

    policy = "fcfs"
    charges = False
    """Whether tenants are charged for what they are served: see `charge`."""

    def __init__(self) -> None:
        self._classes: dict[int | str, WaitingClass] = {}
        self._count = 0
        self.requests = 0
        """Requests with at least one sequence here."""
        self.tokens = 0
        """Of all sequences here: what is to be computed before they emit anything."""

    def __len__(self) -> int:
        return self._count

    def choose(self, cached: Callable[[SequenceState], int]) -> SequenceState | None:
        """The sequence to admit next; None if none waits. cached: its tokens in the prefix cache.
        """
        return self._classes[0].first if self._count else None

    def has_fair_share_left(self, tenant: str, places: int) -> bool:
        """Whether a tenant may join although `places` requests wait already."""
        return False

    def push(self, sequence: SequenceState, ran: bool = False) -> None:
        """Adds a sequence; `ran`: it was preempted."""
        self._classes.setdefault(self._class(sequence), WaitingClass()).push(sequence)
        self._changed(sequence, 1)

    def admit(self, sequence: SequenceState) -> None:
        """Removes a sequence that gets a slot."""
        self._leave(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence that has ended; raises `KeyError` if it is not here."""
        self._leave(sequence)
        self.finished(sequence, running=False)

    def finished(self, sequence: SequenceState, running: bool) -> None:
        """A sequence has ended; it ran, or waited."""

    def charge(self, tenant: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Charges a tenant for tokens that were served to it."""

    def _class(self, sequence: SequenceState) -> int | str:
        return 0

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
        """The first `count` or so: all preempted ones, if there are any, else fresh ones."""
        return list(islice((self._preempted or self._new).values(), count))

    def push(self, sequence: SequenceState) -> None:
        (self._preempted if sequence.preempted else self._new)[sequence.sid] = sequence

    def remove(self, sequence: SequenceState) -> None:
        """Raises `KeyError`."""
        del (self._preempted if sequence.preempted else self._new)[sequence.sid]


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
