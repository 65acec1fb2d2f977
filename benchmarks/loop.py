"""A scheduler core and a null worker in one process, for benchmarks of the scheduler's memory.

Messages are handed over as they are, without sockets or msgpack. The worker runs plans as they
come, so that with overlap the scheduler always plans one step ahead of the results it knows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from actorium.actors.config.tree import Config, RecoveryConfig
from actorium.actors.core import Context
from actorium.actors.messages import Cancel, Flush, Open, StepResult, Stop, Submit, TokenBatch
from actorium.actors.params import Resolved, TextParams
from actorium.actors.runtime.roles import WORKER
from actorium.actors.scheduler import scheduler_actor
from actorium.tools.null.null_worker import NullWorker

CLIENT = b"bench"
TICK_S = 0.001
"""Seconds that the clock of a `Loop` goes on by each step."""


@dataclass(slots=True)
class Heard:
    """What a detokenizer would know of one sequence."""

    sid: int
    rid: str
    index: int
    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    """Prompt tokens found in the cache, told with the first token."""
    reason: str | None = None


class Loop:
    """`submit`, then `step` until `idle`; each step returns the sequences that have ended."""

    def __init__(self, config: Config, windows: tuple[int, ...] = (0,),
                 checkpoints: int | None = None) -> None:
        """checkpoints: of a model with recurrent layers; None = it has none."""
        self.now = 0.0
        config = msgspec.structs.replace(config, recovery=RecoveryConfig(restart=False))
        self.scheduler = scheduler_actor.build(Context(config, Path("/nonexistent"), "scheduler", 1,
                                                       0))
        self.worker = NullWorker(Context(config, Path("/nonexistent"), "worker-0", 1, 0), windows,
                                 checkpoints)
        self.live: dict[int, Heard] = {}
        """By sid."""
        self._results: deque[StepResult] = deque()
        self._ended: list[Heard] = []
        for send in self.worker.on_wake(self.now):
            self.scheduler.on_message(send.message, self.now)
        self._wake()

    def submit(self, rid: str, prompt: bytes, params: Resolved, seed: int = 0, tenant: str = "",
               priority: int = 0, n: int = 1, deadline: float | None = None) -> None:
        """Submit a prompt (i4 tokens)."""
        self.scheduler.on_message(Submit(
            rid=rid, client=CLIENT, prompt=prompt, n=n, params=params, text=TextParams(),
            seed=seed, deadline=deadline, tenant=tenant, priority=priority), self.now)

    def cancel(self, rid: str) -> None:
        """The client gives a request up."""
        self.scheduler.on_message(Cancel(rid=rid, client=CLIENT), self.now)

    def stop(self, heard: Heard) -> None:
        """A stop string has matched."""
        self.scheduler.on_message(Stop(sid=heard.sid, tokens=len(heard.tokens)), self.now)

    def flush(self) -> None:
        """Forget all cached prefixes that nobody holds."""
        self.scheduler.on_message(Flush(rid="flush", client=CLIENT), self.now)

    @property
    def idle(self) -> bool:
        """Every request has ended, and the worker has nothing more to tell."""
        return not (self._results or self.scheduler.state.requests)

    def step(self) -> list[Heard]:
        """Hand over the oldest result, let the worker run what comes of it."""
        if self._results:
            self.scheduler.on_message(self._results.popleft(), self.now)
        self._wake()
        self.now += TICK_S
        ended, self._ended = self._ended, []
        return ended

    def gauges(self) -> dict[str, float]:
        """What a heartbeat of the scheduler tells."""
        return self.scheduler.health().gauges

    def _wake(self) -> None:
        for send in self.scheduler.on_wake(self.now):
            if send.to == WORKER:
                self.worker.on_message(send.message, self.now)
            elif isinstance(send.message, Open):
                opened = send.message
                self.live[opened.sid] = Heard(opened.sid, opened.rid, opened.index)
            elif isinstance(send.message, TokenBatch):
                self._hear(send.message)
        self._results.extend(send.message for send in self.worker.on_wake(self.now))

    def _hear(self, batch: TokenBatch) -> None:
        tokens, at = np.frombuffer(batch.tokens, np.int32).tolist(), 0
        for sid, count in zip(np.frombuffer(batch.sids, np.int64).tolist(), batch.counts,
                              strict=True):
            self.live[sid].tokens += tokens[at:at + count]
            at += count
        for event in batch.events:
            heard = self.live[event.sid]
            if event.cached_tokens is not None:
                heard.cached = event.cached_tokens
            if event.finish_reason is not None:
                heard.reason = event.finish_reason
                self._ended.append(self.live.pop(event.sid))
