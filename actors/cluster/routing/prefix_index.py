"""Which replica has which prefixes: the router's index of the numbers of their pages.

Two different prefixes share a number (`page_numbers`) once in 2**64: then a request is routed to
where less is cached than was thought.

A replica reports its cache by deltas that are numbered (`replica_link`). After a gap, a new
scheduler or a death nothing is known of its cache until it has reported all of it; meanwhile
decisions about it are blind, and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set

import numpy as np

from actorium.actors.cluster.cluster_messages import CacheDelta
from actorium.actors.scheduler.cache.page_numbers import Hashes

MOST_PAGES = 1 << 20
"""Pages in the index; what comes beyond that is not learnt, and not missed: it is a guess less."""
SOON_PAGES = 1 << 15
SOON = 10.0
"""Seconds for which the pages of a request that was sent to a replica count as held there although
it has not reported them: requests with the same prefix right behind it follow it."""


class PrefixIndex:
    """Sets of replicas are bits of an int."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._next: dict[int, int] = {}
        """By replica: the number of the delta that comes next; none = nothing is known."""
        self._soon: dict[int, tuple[int, float]] = {}
        """Pages that will come: replica, and until when that is believed."""
        self._expected: deque[tuple[tuple[int, float], list[int]]] = deque()
        """The same by request, the oldest first, with its pages."""
        self._listed = 0
        """Pages there: of requests with one prefix each has its own."""
        self.resyncs = 0

    def __len__(self) -> int:
        return len(self._holders)

    def knows_all(self, replicas: Set[int]) -> bool:
        """Whether anything is known of the caches of all of these."""
        return self._next.keys() >= replicas

    def knows(self, replica: int) -> bool:
        """Whether anything is known of its cache."""
        return replica in self._next

    def apply(self, replica: int, delta: CacheDelta) -> bool:
        """Applies a replica's delta; False if one was missed, and the whole cache is needed."""
        if delta.sequence == 0:
            self.forget(replica)
        elif self._next.get(replica) != delta.sequence:
            self.resyncs += self.knows(replica)
            self.forget(replica)
            return False
        self._next[replica] = delta.sequence + 1
        holders, bit = self._holders, 1 << replica
        for page in np.frombuffer(delta.added, np.uint64).tolist():
            known = holders.get(page)
            if known is not None:
                holders[page] = known | bit
            elif len(holders) < MOST_PAGES:
                holders[page] = bit
        for page in np.frombuffer(delta.removed, np.uint64).tolist():
            self._drop(page, bit)
        return True

    def forget(self, replica: int) -> None:
        """Nothing is known of its cache any more, nor expected of it."""
        for page in [page for page, (index, _) in self._soon.items() if index == replica]:
            del self._soon[page]
        if self._next.pop(replica, None) is None:
            return
        bit = 1 << replica
        for page in [page for page, held in self._holders.items() if held & bit]:
            self._drop(page, bit)

    def expect(self, pages: Hashes, replica: int, now: float) -> None:
        """These pages will soon be at a replica."""
        soon, expected = self._soon, self._expected
        entry, numbers = (replica, now + SOON), pages.tolist()
        soon.update(dict.fromkeys(numbers, entry))
        expected.append((entry, numbers))
        self._listed += 1 + len(numbers)
        while expected and (expected[0][0][1] <= now or self._listed > SOON_PAGES):
            old, numbers = expected.popleft()
            self._listed -= 1 + len(numbers)
            for page in numbers:
                if soon.get(page) is old:
                    del soon[page]

    def match(self, pages: Hashes, replicas: Sequence[int], now: float) -> dict[int, int]:
        """How many pages of a prefix each of these replicas has, from the first on."""
        counts = dict.fromkeys(replicas, len(pages))
        left = sum(1 << replica for replica in replicas)
        held, expected = self._holders.get, self._soon.get
        for count, page in enumerate(pages.tolist()):
            holders = held(page, 0)
            soon = expected(page)
            if soon is not None and soon[1] > now:
                holders |= 1 << soon[0]
            lost = left & ~holders
            if lost:
                left &= holders
                while lost:
                    counts[lost.bit_length() - 1] = count
                    lost ^= 1 << lost.bit_length() - 1
                if not left:
                    break
        return counts

    def reported_prefix(self, pages: Hashes, replica: int) -> int:
        """As `match` of one replica, by what it has said alone."""
        numbers = pages.tolist()
        return next((count for count, page in enumerate(numbers)
                     if not self._holders.get(page, 0) >> replica & 1), len(numbers))

    def _drop(self, page: int, bit: int) -> None:
        held = self._holders.get(page, 0) & ~bit
        if held:
            self._holders[page] = held
        else:
            self._holders.pop(page, None)
