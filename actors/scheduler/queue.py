"""Who waits for a slot, and who for a deadline."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from actorium.actors.scheduler.requests import Request, Sequence


class WaitingQueue:
    """Sequences in the order of their admission: first come, preempted ones before all others."""

    def __init__(self) -> None:
        self._line: OrderedDict[int, Sequence] = OrderedDict()
        self.requests = 0
        """Requests with at least one sequence here."""

    def __len__(self) -> int:
        return len(self._line)

    @property
    def head(self) -> Sequence | None:
        return next(iter(self._line.values()), None)

    def push(self, sequence: Sequence) -> None:
        """Join at the end."""
        self._line[sequence.sid] = sequence
        self._count(sequence.request, 1)

    def push_front(self, sequence: Sequence) -> None:
        """Come back at the head, after a preemption."""
        self._line[sequence.sid] = sequence
        self._line.move_to_end(sequence.sid, last=False)
        self._count(sequence.request, 1)

    def pop(self) -> Sequence:
        _, sequence = self._line.popitem(last=False)
        self._count(sequence.request, -1)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Leave the line; raises `KeyError` if it is not in it."""
        del self._line[sequence.sid]
        self._count(sequence.request, -1)

    def _count(self, request: Request, change: int) -> None:
        before, request.waiting = request.waiting, request.waiting + change
        self.requests += bool(request.waiting) - bool(before)


class Deadlines:
    """A heap of live requests by deadline; ended ones are dropped when they come to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._added = 0

    def add(self, request: Request, live: int) -> None:
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

    def expired(self, now: float) -> Iterator[Request]:
        """Take out the requests whose time is over."""
        while (at := self.next()) is not None and at <= now:
            yield heapq.heappop(self._heap)[2]
