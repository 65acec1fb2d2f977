"""Sends the requests of a load at their times and records what comes back.

`arrivals` says when each request is sent; `drive` sends them and measures each stream.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from msgspec import Struct

from actorium.actors.errors import ActoriumError, BadConfig
from actorium.tools.bench.datasets.sample import SampleRequest

REQUEST_SECONDS = 6 * 3600.0
"""Timeout of an answer, as in vLLM's benchmark: an overloaded server answers late."""


class StreamChunk(NamedTuple):
    text: str = ""
    """What it adds to the completion."""
    bears_token: bool = True
    """Whether there is a token in it, as far as can be seen."""
    total: int | None = None
    """Tokens of the completion so far, if reported."""
    prompt_tokens: int = 0
    """If reported."""
    cached_tokens: int = 0
    """Prompt tokens that the server had cached, if reported."""


Stream = Callable[[SampleRequest], AsyncIterator[StreamChunk]]
"""Sends a request and iterates over what comes back; raises `ActoriumError`."""


class RequestResult(Struct):
    """How one request went; times in seconds since the start of the run."""

    sent: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    times: list[float] = []
    """When each event with tokens came."""
    counts: list[int] = []
    """Tokens of each of them."""
    text: str = ""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.times)

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first event with tokens."""
        return self.times[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds from sending to the last event with tokens."""
        return self.times[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first one; 0 if there is but one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def itl(self) -> list[float]:
        """Seconds between one event with tokens and the next, as vLLM counts: a burst is one."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def itl_per_token(self) -> list[float]:
        """Returns inter-token latencies with the wait for a burst divided among its tokens."""
        return [gap / count for gap, count in zip(self.itl, self.counts[1:], strict=True)
                for _ in range(count)]


class StreamRecorder:
    """Makes a `RequestResult` of the chunks of one stream."""

    def __init__(self, sent: float, prompt_len: int) -> None:
        """prompt_len: as counted here, for a server that does not report it."""
        self.result = RequestResult(sent, prompt_len, times=[], counts=[])
        self._texts: list[str] = []
        self._reported = 0
        self._guessed = False

    def take(self, chunk: StreamChunk, now: float) -> None:
        """A chunk that came `now`."""
        result = self.result
        result.prompt_tokens = chunk.prompt_tokens or result.prompt_tokens
        result.cached_tokens = chunk.cached_tokens or result.cached_tokens
        if chunk.text:
            self._texts.append(chunk.text)
        count = 1 if chunk.bears_token else 0
        if chunk.total is not None:
            if self._guessed:
                self._reported = chunk.total
            else:
                count = chunk.total - self._reported
                self._reported = max(chunk.total, self._reported)
        elif count:
            self._guessed = True
        if count > 0:
            result.times.append(now)
            result.counts.append(count)

    def end(self) -> RequestResult:
        """Returns the result; a total reported only at the end is shared evenly among the
        events."""
        result = self.result
        result.text = "".join(self._texts)
        if self._guessed and self._reported and result.counts:
            events = len(result.counts)
            marks = [round(i * self._reported / events) for i in range(events + 1)]
            result.counts = [b - a for a, b in zip(marks, marks[1:], strict=False)]
        return result


async def drive(stream: Stream, requests: Sequence[SampleRequest], times: Sequence[float],
                concurrency: int | None, progress: Callable[[int], None]
                ) -> tuple[list[RequestResult], float]:
    """Sends every request at its time, at most `concurrency` (None = any number) at once.

    Returns what became of each, and the seconds that it all took. A request that waits here for
    others to end counts as sent when it goes. progress: how many are done.
    """
    gate = asyncio.Semaphore(concurrency or max(len(requests), 1))
    began, count = perf_counter(), 0

    async def send(request: SampleRequest, at: float) -> RequestResult:
        nonlocal count
        await asyncio.sleep(max(0.0, at - (perf_counter() - began)))
        async with gate:
            result = await _run_one(stream, request, began)
        count += 1
        progress(count)
        return result

    found = await asyncio.gather(*(send(r, t) for r, t in zip(requests, times, strict=True)))
    return list(found), perf_counter() - began


async def _run_one(stream: Stream, request: SampleRequest, began: float) -> RequestResult:
    recorder = StreamRecorder(perf_counter() - began, request.prompt_len)
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            async for chunk in stream(request):
                recorder.take(chunk, perf_counter() - began)
    except TimeoutError:
        recorder.result.error = f"no answer within {REQUEST_SECONDS:g} s"
    except ActoriumError as error:
        recorder.result.error = f"{error.code}: {error.message}"
    return recorder.end()


# --- arrivals -------------------------------------------------------------------------------------

class RampUp(NamedTuple):
    """A rate that grows over the load, as vLLM's --ramp-up-strategy."""

    strategy: str
    """linear | exponential."""
    start: float
    """Requests a second at first."""
    end: float

    def rate(self, share: float) -> float:
        """Requests a second after this share (0..1) of the requests."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * share
        return float(self.start * (self.end / self.start) ** share)

    def check(self) -> None:
        """Raise `BadConfig`, naming the flag."""
        if self.strategy not in ("linear", "exponential"):
            raise BadConfig("--ramp-up-strategy: must be linear or exponential, got "
                            f"{self.strategy!r}", "ramp_up_strategy")
        if not 0 < self.start <= self.end < math.inf:
            raise BadConfig("--ramp-up-start-rps: must be above 0 and at most --ramp-up-end-rps, "
                            f"got {self.start} and {self.end}", "ramp_up_start_rps")


def arrivals(number: int, rate: float, burstiness: float, seed: int,
             ramp_up: RampUp | None = None) -> list[float]:
    """Seconds from the start at which each request is sent.

    rate: requests a second, inf = all at once. The gaps are gamma distributed with shape
    `burstiness`: 1 is a Poisson process, less comes in bursts, more is steadier, inf is a clock.
    As in vLLM they are stretched so that the last of `number` requests comes at number / rate
    whatever the seed is; not with a `ramp_up`, whose rates are used instead of `rate`.
    """
    if math.isinf(rate) and ramp_up is None:
        return [0.0] * number
    rng = random.Random(seed)
    times, now = [], 0.0
    for index in range(number):
        here = rate if ramp_up is None else ramp_up.rate(index / max(number - 1, 1))
        now += (1 / here if math.isinf(burstiness)
                else rng.gammavariate(burstiness, 1 / (here * burstiness)))
        times.append(now)
    if ramp_up is not None or not now:
        return times
    return [time * number / rate / now for time in times]
