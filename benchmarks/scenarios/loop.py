"""A scheduler core and a null worker in one process, for scenarios about the scheduler.

Messages are handed over as they are, without sockets or msgpack. The worker runs plans as they
come, so that with overlap the scheduler always plans one step ahead of the results it knows. The
clock goes on by a tick each step, or by what a step takes where its cost is given.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from actorium.actors.config.tree import Config, RecoveryConfig
from actorium.actors.core import Context
from actorium.actors.messages import (
    AbortRequest,
    Flush,
    Message,
    Open,
    StepResult,
    Stop,
    Submit,
    TokenBatch,
)
from actorium.actors.params import ResolvedParams, ResolvedPooling, TextParams
from actorium.actors.runtime.roles import WORKER
from actorium.actors.scheduler import scheduler_actor
from actorium.tools.null.null_worker import Cost, NullWorker

CLIENT = b"bench"
TICK_S = 0.001
"""Seconds that the clock of a `Loop` goes on by in a step without a cost."""
NOISE = 0.05
"""Relative deviation of a step's cost."""


@dataclass(slots=True)
class ReceivedTokens:
    sid: int
    rid: str
    index: int
    tokens: list[int] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    """When: a time for each batch of them."""
    cached: int | None = None
    """Cached prompt tokens, reported with the first token."""
    reason: str | None = None


class Loop:
    """`submit`, then `step` until `idle`; each step returns the sequences that have ended."""

    def __init__(self, config: Config, windows: tuple[int, ...] = (0,),
                 checkpoints: int | None = None, cost: Cost | None = None) -> None:
        """checkpoints: of a model with recurrent layers; None = it has none. cost: of steps on a
        CPU; None = they take no time."""
        self.now = 0.0
        config = msgspec.structs.replace(config, recovery=RecoveryConfig(restart=False))
        self.scheduler = scheduler_actor.build_core(
            Context(config, Path("/nonexistent"), "scheduler", 1, 0))
        self.worker = NullWorker(Context(config, Path("/nonexistent"), "worker-0", 1, 0), windows,
                                 checkpoints, cost=cost)
        self._costs, self._dice = cost is not None, random.Random(1)
        if cost is not None:
            self.worker.ready = msgspec.structs.replace(self.worker.ready, device="cpu")
        self.live: dict[int, ReceivedTokens] = {}
        """By sid."""
        self._results: deque[Message] = deque()
        self._ended: list[ReceivedTokens] = []
        self.worker.on_wake(self.now)
        self.scheduler.on_message(self.worker.ready, self.now)
        self._wake()

    def submit(self, rid: str, prompt: bytes, params: ResolvedParams, seed: int = 0,
               tenant: str = "",
               priority: int = 0, n: int = 1, deadline: float | None = None,
               pooling: ResolvedPooling | None = None) -> None:
        self.scheduler.on_message(Submit(
            rid=rid, client=CLIENT, prompt=prompt, n=n, params=params, text=TextParams(),
            seed=seed, deadline=deadline, tenant=tenant, priority=priority, pooling=pooling),
            self.now)

    def cancel(self, rid: str) -> None:
        self.scheduler.on_message(AbortRequest(rid=rid, client=CLIENT), self.now)

    def stop(self, heard: ReceivedTokens) -> None:
        self.scheduler.on_message(Stop(sid=heard.sid, tokens=len(heard.tokens)), self.now)

    def flush(self) -> None:
        """Drops all cached prefixes that no request holds."""
        self.scheduler.on_message(Flush(rid="flush", client=CLIENT), self.now)

    @property
    def idle(self) -> bool:
        """Whether every request has ended and the worker has no more results."""
        return not (self._results or self.scheduler.state.requests)

    def step(self) -> list[ReceivedTokens]:
        """Hand over the oldest result, let the worker run what comes of it."""
        if not self._results:
            self._wake()
        if self._results:
            result, spent = self._results.popleft(), TICK_S
            if self._costs and isinstance(result, StepResult):
                result = msgspec.structs.replace(
                    result, busy_us=int(result.busy_us * self._dice.gauss(1, NOISE)))
                spent = result.busy_us / 1e6
            self.now += spent
            self.scheduler.on_message(result, self.now)
            self._wake()
        else:
            self.now += TICK_S
        ended, self._ended = self._ended, []
        return ended

    def gauges(self) -> dict[str, float]:
        """Returns the gauges of a scheduler heartbeat."""
        return self.scheduler.health().gauges

    def _wake(self) -> None:
        for send in self.scheduler.on_wake(self.now):
            if send.to == WORKER:
                self.worker.on_message(send.message, self.now)
            elif isinstance(send.message, Open):
                opened = send.message
                self.live[opened.sid] = ReceivedTokens(opened.sid, opened.rid, opened.index)
            elif isinstance(send.message, TokenBatch):
                self._hear(send.message)
        self._results.extend(send.message for send in self.worker.on_wake(self.now))

    def _hear(self, batch: TokenBatch) -> None:
        tokens, at = np.frombuffer(batch.tokens, np.int32).tolist(), 0
        for sid, count in zip(np.frombuffer(batch.sids, np.int64).tolist(), batch.counts,
                              strict=True):
            self.live[sid].tokens += tokens[at:at + count]
            self.live[sid].came.append(self.now)
            at += count
        for event in batch.events:
            heard = self.live[event.sid]
            if event.cached_tokens is not None:
                heard.cached = event.cached_tokens
            if event.finish_reason is not None:
                heard.reason = event.finish_reason
                self._ended.append(self.live.pop(event.sid))
