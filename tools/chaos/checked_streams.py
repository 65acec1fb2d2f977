"""Clients that stream requests whose every token is known beforehand and check each, and the time
that streams were silent because of a fault.

Errors are collected, not raised: a run goes on, and its report lists everything.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.client.calls import AsyncDeltaStream
from actorium.actors.client.requests import Request, StreamDelta
from actorium.actors.errors import ActoriumError
from actorium.actors.params import PoolingParams, ResolvedPooling, SamplingParams
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.null.null_worker import VOCAB, hash_tokens, pooled_tokens

NEW = 3.0
"""Seconds after a fault in which a new request counts as affected by it."""


@dataclass
class Episode:
    """One fault, and the longest silence after it of each stream that was open."""

    name: str
    at: float
    longest: dict[int, float] = field(default_factory=dict)


class Gaps:
    """Silences by fault. A stream's gap counts for the last fault before the gap's end."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []

    def fault(self, name: str, now: float) -> None:
        self.episodes.append(Episode(name, now))

    def record(self, stream: int, begun: float, last: float, now: float) -> None:
        """Records that a stream begun at `begun` received something at `now`, after nothing since
        `last`."""
        if self.episodes:
            episode = self.episodes[-1]
            if begun <= episode.at + NEW:
                gap = now - max(last, min(episode.at, now))
                longest = episode.longest
                longest[stream] = max(longest.get(stream, 0.0), gap)


    def summary(self) -> dict[str, dict[str, float]]:
        """Returns streams, p50, p99 and max in seconds: by name of the fault, by its kind (the
        first word), and for "all"."""
        by_name: dict[str, list[float]] = {}
        for episode in self.episodes:
            for name in dict.fromkeys(("all", episode.name.split()[0], episode.name)):
                by_name.setdefault(name, []).extend(episode.longest.values())
        return {name: {"streams": len(found), "p50": quantile(found, 0.5),
                       "p99": quantile(found, 0.99), "max": quantile(found, 1.0)}
                for name, found in by_name.items()}


def crowding() -> float:
    """Returns how many processes want each processor, at least 1: so much longer all takes."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def quantile(values: list[float], share: float) -> float:
    """Returns the smallest value with `share` of all at or below it; 0 if there are none."""
    if not values:
        return 0.0
    return round(sorted(values)[max(math.ceil(share * len(values)) - 1, 0)], 4)


LATEST = 90.0
"""Seconds within which a request must have ended, on a machine that has nothing else to do."""
CLEAN = 500
"""Prompts are made of smaller tokens than this."""
REFUSED = ("queue_full", "unavailable")
"""Codes of refusals that are not errors."""


@dataclass
class CheckedRequest:
    """One request, and what its stream has returned so far."""

    prompt: list[int]
    params: SamplingParams
    pooling: PoolingParams | None = None
    """A vector is wanted, not a completion."""
    begun: float = 0.0
    last: float = 0.0
    """When something new last arrived."""
    number: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    ended: int = 0
    """Choices that have ended."""
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.params.n)]
        self._expected = [self._tokens_of(index) for index in range(self.params.n)]

    def _tokens_of(self, index: int) -> list[int]:
        if self.pooling is not None:
            return []
        most, seed = self.params.max_tokens, self.params.seed
        assert most is not None and seed is not None
        places = np.arange(len(self.prompt), len(self.prompt) + most, dtype=np.uint64)
        seeds = np.full(most, choice_seed(seed, index), np.uint64)
        return hash_tokens(seeds, places, VOCAB).tolist()

    def apply(self, delta: StreamDelta) -> None:
        """Checks a delta, token by token, skipping what is known already."""
        have, expected = self.tokens[delta.index], self._expected[delta.index]
        for token in delta.token_ids:
            at = len(have)
            if at >= len(expected):
                self.wrong.append(f"token {at} of {len(expected)} (duplicated?)")
            elif token != expected[at]:
                self.wrong.append(f"token {at} is {token} instead of {expected[at]}")
            have.append(token)
        if delta.finish_reason is not None:
            self.ended += 1
            self._check_end(delta, len(have), len(expected))

    def _check_end(self, delta: StreamDelta, got: int, wanted: int) -> None:
        if self.pooling is not None:
            want = pooled_tokens(np.array(self.prompt, np.int32), ResolvedPooling("embed"))
            if delta.finish_reason != "stop" or delta.pooled != want:
                self.wrong.append(f"ended with {delta.finish_reason} and another vector")
        elif delta.finish_reason != "length":
            self.wrong.append(f"ended with {delta.finish_reason} after {got} of {wanted} tokens")
        elif got != wanted:
            self.wrong.append(f"ended with {got} tokens instead of {wanted}")
        elif delta.usage is None or delta.usage.completion_tokens != wanted:
            self.wrong.append(f"usage says {delta.usage}, {wanted} tokens came")

    @property
    def count(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)


class RequestMaker:
    def __init__(self, seed: int, tokens: tuple[int, int], prompt: int = 200,
                 pooled: float = 0.0) -> None:
        """tokens: shortest and longest completion; prompt: longest prompt; pooled: share of the
        requests that are for vectors."""
        self._pooled = pooled
        self._random = random.Random(seed)
        self._tokens, self._longest = tokens, prompt
        self._shared = [self._random.randrange(CLEAN) for _ in range(prompt)]

    def make(self, poison: int | None = None) -> CheckedRequest:
        """Returns the next request; `poison` is a token to put into its prompt."""
        chance = self._random
        shared = self._shared[:chance.randrange(self._longest)] if chance.random() < 0.5 else []
        own = [chance.randrange(CLEAN) for _ in range(1 + chance.randrange(self._longest // 2))]
        prompt = [*shared, *own, *([] if poison is None else [poison])]
        if poison is None and self._pooled and chance.random() < self._pooled:
            return CheckedRequest(prompt, SamplingParams(), PoolingParams(task="embed"))
        return CheckedRequest(prompt, SamplingParams(
            max_tokens=chance.randint(*self._tokens), seed=chance.getrandbits(62),
            n=2 if chance.random() < 0.05 and poison is None else 1, ignore_eos=True))

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability


@dataclass
class TrafficTally:
    requests: int = 0
    tokens: int = 0
    complete: int = 0
    aborted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """Counts by error code."""
    wrong: list[str] = field(default_factory=list)

    def settle(self, want: CheckedRequest) -> None:
        self.tokens += want.count
        self.wrong += [f"request {want.number}: {text}" for text in want.wrong[:3]]


class Traffic:
    """The streams of one or more clients, each checked."""

    def __init__(self, maker: RequestMaker, gaps: Gaps | None = None, aborts: float = 0.0,
                 latest: float = LATEST) -> None:
        """aborts: share of the requests that are aborted in the middle; latest: seconds within
        which each must have ended."""
        self.tally, self.gaps, self._latest = TrafficTally(), gaps or Gaps(), latest * crowding()
        self._maker, self._aborts = maker, aborts
        self.live: dict[int, CheckedRequest] = {}

    async def send(self, client: AsyncClient, want: CheckedRequest) -> str | None:
        """Runs one request to its end; returns the code of its error, if any."""
        self.tally.requests += 1
        want.number = self.tally.requests
        want.begun = want.last = monotonic()
        self.live[want.number] = want
        stream = AsyncDeltaStream(client, Request(prompt=want.prompt, params=want.params,
                                                  pooling=want.pooling))
        try:
            async with asyncio.timeout(self._latest):
                await self._read(stream, want)
        except TimeoutError:
            want.wrong.append(f"has not ended in {self._latest:g} s ({want.count} tokens came)")
        except ActoriumError as error:
            return self._failed(error, want)
        finally:
            await stream.aclose()
            del self.live[want.number]
            self.tally.settle(want)
        return None

    def _failed(self, error: ActoriumError, want: CheckedRequest) -> str:
        if error.code in REFUSED and not want.count:
            self.tally.refused[error.code] += 1
        else:
            self.tally.failed[error.code] += 1
        return error.code

    async def _read(self, stream: AsyncDeltaStream, want: CheckedRequest) -> None:
        give_up = 1 + want.count
        abort = self._maker.chance(self._aborts)
        async for delta in stream:
            now = monotonic()
            self.gaps.record(want.number, want.begun, want.last, now)
            want.last = now
            want.apply(delta)
            if abort and want.count > give_up:
                self.tally.aborted += 1
                return
        if want.ended == want.params.n:
            self.tally.complete += 1
        else:
            want.wrong.append(f"its stream ended after {want.ended} of {want.params.n} choices")

    async def keep(self, client: AsyncClient, streams: int, until: asyncio.Event) -> None:
        """Keeps so many requests running, each followed by another until the event; then waits for
        the rest."""
        async def again() -> None:
            while not until.is_set():
                code = await self.send(client, self._maker.make())
                if code is not None:
                    await asyncio.sleep(0.2)  # refused: tries again later, as a client would
        await asyncio.gather(*(again() for _ in range(streams)))
