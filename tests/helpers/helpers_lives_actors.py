"""The worker, the detokenizer and the clients of `helpers_lives`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from helpers_scheduler import ints

from actorium.actors.messages import (
    Hello,
    Open,
    Pooled,
    RowLogprobs,
    SequenceEvent,
    StepPlan,
    Stop,
    TokenBatch,
    Unknown,
)
from actorium.tools.null import null_worker

Key = tuple[str, int]
"""(rid, choice)"""


class Worker(null_worker.NullWorker):
    """A worker that reports logprobs and dies of plans with a poisonous seed."""

    poison: frozenset[int] = frozenset()

    fickle = False
    """Other tokens in each life (as numerics that depend on the batch may have it): what is
    committed must not be computed again."""

    def _sample(self, rows: Any, reach: Any) -> Any:
        self._rows_told = rows
        tokens, counts, finish = super()._sample(rows, reach)
        if self.fickle:
            tokens = (tokens + 31 * self._epoch + 7 * self.ready.epoch) % null_worker.VOCAB
        return tokens, counts, finish

    def _check_emitted(self, admit: Any) -> None:
        if not self.fickle:
            super()._check_emitted(admit)

    def run(self, plan: StepPlan) -> Any:
        result = super().run(plan)
        tokens, at, told = np.frombuffer(result.tokens, np.int32), 0, []
        for row, (slot, count) in enumerate(zip(self._rows_told.tolist(), result.counts,
                                                strict=True)):
            mine, at = tokens[at:at + count], at + count
            admit = self._admits[slot]
            if admit is not None and admit.params.logprobs >= 0 and count:
                f4 = mine.astype(np.float32).tobytes()
                told.append(RowLogprobs(row, 0, f4, mine.tobytes(), mine.tobytes(), f4))
        return msgspec.structs.replace(result, logprobs=told)

    def poisoned(self, plan: StepPlan) -> bool:
        """Whether a sequence that the plan computes kills the worker."""
        slots = {*ints(plan.decode), *ints(plan.extend)[::2]}
        admits = [*plan.admit, *(a for a in self._admits if a is not None and a.slot in slots)]
        return any(a.seed in self.poison for a in admits)


@dataclass
class Told:
    """What a client has received of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    pooled: Pooled | None = None


@dataclass
class Seq:
    """A sequence, as the detokenizer knows it."""

    key: Key
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    gap_end: int = 0
    """There are so many tokens, some of which have not come."""
    drafted: int = 0
    accepted: int = 0


class Reader:
    """A detokenizer with what its clients know, which outlives it."""

    def __init__(self, stops: dict[Key, int], to_scheduler: deque[Any]) -> None:
        """stops: tokens after which a stop string matches."""
        self.received: dict[Key, Told] = {}
        self.unknown: set[str] = set()
        """Requests that the scheduler does not know."""
        self.failed: set[str] = set()
        """Requests that an error has ended, with all their choices, as the client's core does it:
        one that is sent again when it is forgotten may be refused, with a single end."""
        self._stops, self._to_scheduler = stops, to_scheduler
        self._epoch = self._fence = 0
        self._seqs: dict[int, Seq] = {}

    def begin_anew(self) -> None:
        """Restarts after it was killed."""
        self._epoch += 1
        self._seqs, self._fence = {}, 0
        self._say_hello()

    def _say_hello(self) -> None:
        self._to_scheduler.append(Hello("detokenizer", self._epoch))

    def take(self, message: Any) -> None:
        """Applies one message of the scheduler."""
        if isinstance(message, Unknown):
            self.unknown.add(message.rid)
        elif isinstance(message, Open | TokenBatch) and message.epoch >= self._fence:
            self._fence = message.epoch
            if isinstance(message, Open):
                self._open(message)
            else:
                self._take_batch(message)

    def _open(self, opened: Open) -> None:
        key = opened.rid, opened.index
        known = self._seqs.get(opened.sid)
        if known is None or known.key != key or opened.again:
            if known is not None and known.key == key and len(opened.emitted) // 4 < len(
                    known.tokens):
                return
            known = self._seqs[opened.sid] = Seq(key)
            self._tell(known, 0, None)
        skip, tokens = len(known.tokens), ints(opened.emitted)
        logprobs = [float(x) for row in opened.emitted_logprobs
                    for x in np.frombuffer(row.chosen, np.float32)]
        if opened.logprobs >= 0:
            assert logprobs == [float(t) for t in tokens], "logprobs of all that was emitted"
        if len(tokens) >= skip:
            known.drafted, known.accepted = opened.draft_tokens, opened.accepted_tokens
        if tokens[skip:]:
            self._push(opened.sid, known, tokens[skip:], logprobs[skip:])
        if opened.end is not None:
            self._end(opened.sid, known, opened.end)

    def _take_batch(self, batch: TokenBatch) -> None:
        events = {event.sid: event for event in batch.events}
        at, all_tokens = 0, ints(batch.tokens)
        sids = np.frombuffer(batch.sids, np.int64).tolist()
        columns = zip(sids, ints(batch.starts), batch.counts, strict=True)
        for index, (sid, start, count) in enumerate(columns):
            tokens, at = all_tokens[at:at + count], at + count
            seq = self._seqs.get(sid)
            if seq is None or seq.ended:
                continue
            skip = len(seq.tokens) - start
            if skip < 0:
                seq.gap_end = start + count
                self._say_hello()
                continue
            if skip == 0 and index >= batch.firsts and batch.drafts:
                seq.drafted += batch.drafts
                seq.accepted += count - 1
            row = events[sid].logprobs if sid in events else None
            logprobs = [] if row is None else np.frombuffer(row.chosen, np.float32).tolist()
            self._push(sid, seq, tokens[skip:], logprobs[skip:])
        for event in batch.events:
            seq = self._seqs.get(event.sid)
            if seq is not None and len(seq.tokens) >= seq.gap_end:
                self._end(event.sid, seq, event)

    def _push(self, sid: int, seq: Seq, tokens: list[int], logprobs: list[float]) -> None:
        if seq.ended:
            return
        start = len(seq.tokens)
        seq.tokens += tokens
        seq.logprobs += logprobs
        stop = self._stops.get(seq.key, 10**9)
        if len(seq.tokens) >= stop:
            del seq.tokens[stop:], seq.logprobs[stop:]
            seq.ended = True
            self._to_scheduler.append(Stop(sid, stop))
            self._tell(seq, start, SequenceEvent(sid, finish_reason="stop"))
        else:
            self._tell(seq, start, None)

    def _end(self, sid: int, seq: Seq, event: SequenceEvent) -> None:
        if event.finish_reason is not None and not seq.ended:
            counts = event.draft_tokens or 0, event.accepted_tokens or 0
            assert counts == (seq.drafted, seq.accepted), "drafts counted in two ways"
            seq.ended = True
            self._tell(seq, len(seq.tokens), event)

    def _tell(self, seq: Seq, start: int, event: SequenceEvent | None) -> None:
        """To the client, who drops what it knows."""
        told = self.received.setdefault(seq.key, Told())
        if event is not None and event.error_code is not None:
            self.failed.add(seq.key[0])
        if told.reason is not None:
            both = min(len(told.tokens), len(seq.tokens))
            assert told.tokens[:both] == seq.tokens[:both], "a told token has changed"
            return
        assert start <= len(told.tokens), "a gap"
        for mine, new in ((told.tokens, seq.tokens), (told.logprobs, seq.logprobs)):
            common = min(len(mine), len(new))
            assert mine[:common] == new[:common], "a committed token has changed"  # type: ignore[index]
            mine += new[common:]  # type: ignore[operator]
        if event is not None:
            told.reason, told.error = event.finish_reason, event.error_code
            told.pooled = event.pooled
