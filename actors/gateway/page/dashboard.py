"""`/dashboard/events`: the engine's state, once a second, while a client watches.

However many clients watch, the engine is asked once. Rates are differences of the scheduler's
counters between two of its heartbeats, divided by the time between them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from time import monotonic, time
from typing import NamedTuple

import msgspec
from msgspec import Struct
from starlette.requests import Request as HttpRequest

from actorium.actors.config.retention import DASHBOARD_SAMPLES
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.api.model_routes import card
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.replies import EventStream, sse_event
from actorium.actors.health import (
    CounterReading,
    Growth,
    growth,
    read_counters,
    state_of,
    why_not_ready,
)
from actorium.actors.messages import ActorStatus, Status

LOG = logging.getLogger("actorium.gateway")
PERIOD = 1.0
PATIENCE = 2.0
"""Seconds that the watchdog has for an answer."""
_DRAFTS, _ACCEPTED = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
_SUMS = ("tokens", "prompt_tokens", "steps", "busy_us", _DRAFTS, _ACCEPTED)
_NEW_BEAT = 0.05
"""The least seconds between two heartbeats: less is the same one, seen twice."""


QUEUES = {"gateway": "http_open", "tokenizer": "tokenizer_waiting", "media": "media_waiting",
          "scheduler": "waiting", "detokenizer": "detokenizer_sequences"}
"""Gauge of what an actor has to do, by its role without a number."""


class ActorLine(Struct, frozen=True):
    """One actor."""

    role: str
    phase: str
    """`health.SILENT` where it claims to work and is not heard of."""
    epoch: int
    """1 = it was never started again."""
    pid: int = 0
    beat_age: float = 0.0
    """Seconds since its last heartbeat."""
    queue: int | None = None
    """What its gauge of `QUEUES` says."""
    detail: str = ""


class ModelLine(Struct, frozen=True):
    """One model of a server of several."""

    name: str
    state: str
    """As `/v1/models` has it."""
    in_use: int
    """Requests that its engine serves."""
    memory: int
    """Bytes that its engine is planned to take; 0 = not known yet."""
    says: str
    """How far it is, or why it failed."""


class DashboardSample(Struct, frozen=True):
    """A moment. None = not known: nothing was done that could have been measured."""

    at: float
    """Seconds since 1970."""
    ready: bool
    why: str = ""
    """Why it is not ready; empty when it is."""
    tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    running: int | None = None
    """Sequences."""
    waiting: int | None = None
    pages: int | None = None
    pages_used: int | None = None
    """Pages that sequences hold."""
    pages_cached: int | None = None
    """Pages in the prefix cache."""
    pages_quarantined: int | None = None
    resumed: int | None = None
    """Sequences that went on after the death of a worker or a scheduler, since the start."""
    step_ms: float | None = None
    """A step of the worker, in milliseconds."""
    acceptance: float | None = None
    """Drafts accepted, of those verified; 0 to 1."""
    actors: list[ActorLine] = []
    models: list[ModelLine] = []
    """Of a server of several."""


class Rates(NamedTuple):
    """Rates from two readings."""

    tokens: float | None = None
    prompt_tokens: float | None = None
    step_ms: float | None = None
    acceptance: float | None = None


class DashboardSampler:
    """Makes samples from the watchdog's answers. Pure: the time is passed in."""

    def __init__(self) -> None:
        self._before: CounterReading | None = None
        self._rates = Rates()

    def sample(self, status: Status, draining: bool, at: float, now: float) -> DashboardSample:
        """`at`: seconds since 1970; `now`: CLOCK_MONOTONIC seconds."""
        why = _why(status, draining)
        actors = [_line(one) for one in status.actors]
        actors.sort(key=lambda line: line.role)
        found = next((one for one in status.actors if one.role == "scheduler"), None)
        if found is None or "running" not in found.gauges:
            return DashboardSample(at, not why, why, actors=actors)
        rates, gauges = self._look(found, now), found.gauges

        def whole(*names: str) -> int:
            return int(sum(gauges.get(name, 0.0) for name in names))

        held = whole("held_pages")
        return DashboardSample(
            at, not why, why, rates.tokens, rates.prompt_tokens, whole("running"),
            whole("waiting"), whole("free_pages", "used_pages"), held,
            max(0, whole("used_pages") - held - whole("quarantined_pages")),
            whole("quarantined_pages"), whole("resumed_sequences"), rates.step_ms,
            rates.acceptance, actors)

    def _look(self, scheduler: ActorStatus, now: float) -> Rates:
        """Returns the rates since the last heartbeat; between heartbeats the previous ones."""
        before, new = self._before, read_counters(scheduler, _SUMS, now)
        if before is None or before.epoch != new.epoch or new.at - before.at > _NEW_BEAT:
            self._before, self._rates = new, _rates(growth(before, new))
        return self._rates


def _line(actor: ActorStatus) -> ActorLine:
    queue = actor.gauges.get(QUEUES.get(actor.role.partition("-")[0], ""))
    return ActorLine(actor.role, state_of(actor), actor.epoch, actor.pid, round(actor.beat_age, 1),
                     None if queue is None else int(queue), actor.detail)


def _rates(grown: Growth | None) -> Rates:
    if grown is None:
        return Rates()
    steps, drafts = grown.counts["steps"], grown.counts[_DRAFTS]
    return Rates(grown.rate("tokens"), grown.rate("prompt_tokens"),
                 grown.counts["busy_us"] / steps / 1e3 if steps else None,
                 grown.counts[_ACCEPTED] / drafts if drafts else None)


def _why(status: Status, draining: bool) -> str:
    return "the engine is stopping" if draining else why_not_ready(status)


class Dashboard:
    """One gateway's dashboard."""

    def __init__(self, gateway: GatewayState, period: float = PERIOD) -> None:
        self._gateway, self._period = gateway, period
        self._samples: deque[tuple[int, bytes]] = deque(maxlen=DASHBOARD_SAMPLES)
        self._count = 0
        self._news = asyncio.Event()
        self._sampling: asyncio.Task[None] | None = None
        self.viewers = 0

    async def serve(self, http: HttpRequest) -> EventStream:
        """Handles the route."""
        return EventStream(self.events())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the last sample, then one each period. Ends when the engine is to stop."""
        self.viewers += 1
        if self._sampling is None:
            self._sampling = asyncio.ensure_future(self._sample())
        sent = 0
        try:
            while not self._gateway.draining:
                if sent == self._count:
                    await self._news.wait()
                new = [encoded for number, encoded in self._samples if number > sent]
                sent = self._count
                yield b"".join(new)
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._sampling.cancel()
                self._sampling = None

    async def _sample(self) -> None:
        sampler, loop = DashboardSampler(), asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._publish(await self._ask(sampler))
            due = max(due + self._period, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _ask(self, sampler: DashboardSampler) -> DashboardSample:
        try:
            status = await self._gateway.engine.client.status(PATIENCE)
        except ActoriumError as error:
            return DashboardSample(time(), False, error.message)
        except Exception as error:  # clients wait for the next sample
            LOG.exception("the dashboard asked in vain")
            return DashboardSample(time(), False, f"{type(error).__name__}: {error}")
        sample = sampler.sample(status, self._gateway.draining, time(), monotonic())
        return msgspec.structs.replace(sample, models=await self._models())

    async def _models(self) -> list[ModelLine]:
        if self._gateway.models is None:
            return []
        try:
            listed = await self._gateway.models.models()
        except HttpError:  # the manager is being started again
            return []
        return [ModelLine(one.id, one.status.value, one.status.in_use, one.status.memory,
                          one.status.message) for one in map(card, listed.models)]

    def _publish(self, sample: DashboardSample) -> None:
        self._count += 1
        self._samples.append((self._count, sse_event(sample)))
        self._news.set()
        self._news = asyncio.Event()
