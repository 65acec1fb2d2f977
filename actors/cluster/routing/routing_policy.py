"""Routing policies: which replica gets a request. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from operator import mul

from msgspec import Struct

from actorium.actors.cluster.request_book import RoutedRequest
from actorium.actors.cluster.routing.prefix_index import PrefixIndex
from actorium.actors.messages import Submit
from actorium.actors.runtime.splitmix64 import splitmix64
from actorium.actors.scheduler.cache.page_numbers import Hashes, prefix_hashes, root_hash
from actorium.actors.scheduler.cache.radix_cache import prompt_key
from actorium.actors.scheduler.request_state import salt_of

FIRST_RATE = 4000.0
"""Prompt tokens a second of a replica of which nothing has been measured."""
SEQUENCE = 0.004
"""Seconds of computing elsewhere that are worth one running sequence less beside a request."""
HALF_LIFE = 30.0
"""Seconds after which a rate that was measured counts half beside those of other replicas: one that
was slow for a moment would get no prompts, and never be seen to be fast again."""
FULL = 10.0
"""Seconds that a request is taken to wait at a replica with twice as many sequences as slots."""


class ReplicaView(Struct):
    """What the router knows of a replica."""

    index: int
    role: str
    """Of its scheduler, as a path from the cluster's run directory; or that of the nodes' actor."""
    node: str = ""
    """Empty = the head's own."""
    life: int = 0
    """Of its scheduler: what an older one says is dropped."""
    seen: int = 0
    """Number of the last order that it received."""
    fence: int = 0
    """Number of the last order that took a request away: before receiving it, it gets none."""
    asked: int = 0
    """Number of the last question what it knows: an answer to an earlier one is out of date."""
    last_message_at: float = 0.0
    """Time of its last message, CLOCK_MONOTONIC seconds."""
    ready: bool = False
    synced: bool = False
    """Its inventory has been read."""
    sequences: int = 0
    """Sequences placed there that have not ended."""
    backlog: int = 0
    """Prompt tokens of requests placed there that have no token yet, less what was cached."""
    routed: int = 0
    """Requests that it got."""
    resyncing: bool = False
    """It was asked for all of its cache."""
    rate: float = FIRST_RATE
    """Prompt tokens that it computes in a second that goes into nothing else, as measured."""
    measured: float = -inf
    """When that was, last."""
    gauges: dict[str, float] = {}
    closed: bool = False
    """It is drained, or leaves: it gets no requests."""
    lost: bool = False
    """It was connected, and sends nothing any more."""
    weights: int = 0
    """Version of the weights that it serves."""
    behind: str = ""
    """Why it takes no requests: it has not the cluster's weights; empty = it has."""
    migrated_in: int = 0
    migrated_out: int = 0
    """Requests that came from another replica after they had begun, or went to one."""
    reasons: dict[str, int] = {}
    """Why it got its requests: as of `PrefixRouting.counts`."""

    @property
    def takes_requests(self) -> bool:
        return (self.ready and self.synced and self.seen >= self.fence and not self.closed
                and not self.behind)


class RoutingPolicy:
    """The base of policies: the replica with the fewest sequences."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Of decisions, for the heartbeat."""
        self.weights_name = ""
        """What stands for the weights in names of prefixes (`name_of`)."""

    def choose(self, request: RoutedRequest, among: Sequence[ReplicaView], now: float
               ) -> ReplicaView:
        """One of `among`, of which there is at least one."""
        return min(among, key=lambda view: (view.sequences, view.routed))


class RoundRobinRouting(RoutingPolicy):
    """One after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def choose(self, request: RoutedRequest, among: Sequence[ReplicaView], now: float
               ) -> ReplicaView:
        later = [view for view in among if view.index > self._last]
        chosen = (later or among)[0]
        self._last = chosen.index
        return chosen


class RandomRouting(RoutingPolicy):
    """At random, from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed, self._count = seed, 0

    def choose(self, request: RoutedRequest, among: Sequence[ReplicaView], now: float
               ) -> ReplicaView:
        self._count += 1
        return among[splitmix64(self._seed, self._count) % len(among)]


class PrefixRouting(RoutingPolicy):
    """The replica at which the first token is expected soonest.

    That is after the prompt tokens that wait there and those of this one that its cache lacks, at
    the rate that was measured there, and a delay for what it decodes; a replica whose slots are
    taken makes it wait for one besides. What is cached where decides by this alone: conversations
    stay where their prefix is, until that costs more than to compute it elsewhere.
    """

    def __init__(self, index: PrefixIndex, page_size: int, slots: int) -> None:
        """slots: sequences that a replica runs at once."""
        super().__init__()
        self._index, self._page_size, self._slots = index, page_size, slots
        self.counts = Counter(routed_by_prefix=0, routed_by_load=0, routed_blind=0,
                              routed_cached_tokens=0, routed_prompt_tokens=0)

    def choose(self, request: RoutedRequest, among: Sequence[ReplicaView], now: float
               ) -> ReplicaView:
        pages = pages_of(request.submit, self._page_size, self.weights_name)
        cached_pages = self._index.match(pages, [view.index for view in among], now)
        tokens = len(request.submit.prompt) // 4
        costs = []
        for view, rate in zip(among, believed_rates(among, now), strict=True):
            cached = min(cached_pages[view.index] * self._page_size, tokens - 1)
            costs.append((self._seconds(view, tokens - cached, rate), view.sequences, view.routed))
        chosen = among[costs.index(min(costs))]
        cached = cached_pages[chosen.index] * self._page_size
        most = max(cached_pages.values())
        blind = not self._index.knows_all(cached_pages.keys())
        why = ("routed_blind" if blind else "routed_by_prefix"
               if most and cached_pages[chosen.index] == most else "routed_by_load")
        self.counts[why] += 1
        chosen.reasons[why] = chosen.reasons.get(why, 0) + 1
        self.counts["routed_cached_tokens"] += min(cached, tokens)
        self.counts["routed_prompt_tokens"] += tokens
        request.uncached = max(tokens - cached, 1)
        reported_pages = self._index.reported_prefix(
            pages[:max(tokens - 1, 0) // self._page_size], chosen.index)
        request.reported_tokens = 0 if request.begun else reported_pages * self._page_size
        self._index.expect(pages, chosen.index, now)
        return chosen

    def _seconds(self, view: ReplicaView, uncached: int, rate: float) -> float:
        """Until the first token of a prompt with so many tokens that are not cached."""
        wait = FULL * max(0.0, view.sequences / self._slots - 1)
        return (view.backlog + uncached) / rate + SEQUENCE * view.sequences + wait


def believed_rates(views: Sequence[ReplicaView], now: float) -> list[float]:
    """Prompt tokens a second of each: as measured, or, the longer ago that was, as others have."""
    weights = [0.5 ** ((now - view.measured) / HALF_LIFE) for view in views]
    total = sum(weights)
    if not total:
        return [view.rate for view in views]
    usual = sum(map(mul, weights, [view.rate for view in views])) / total
    return [usual + weight * (view.rate - usual)
            for view, weight in zip(views, weights, strict=True)]


def pages_of(submit: Submit, page_size: int, weights_name: str = "") -> Hashes:
    """The numbers of a prompt's whole pages; those of images and of embeddings differ as the
    caches' keys do."""
    return prefix_hashes(prompt_key(submit.prompt, submit, page_size), page_size,
                         root_hash(weights_name + salt_of(submit)))


def new_routing_policy(routing: str, seed: int, index: PrefixIndex, page_size: int, slots: int
                       ) -> RoutingPolicy:
    """The policy of that name."""
    if routing == "round_robin":
        return RoundRobinRouting()
    return RandomRouting(seed) if routing == "random" else PrefixRouting(index, page_size, slots)
