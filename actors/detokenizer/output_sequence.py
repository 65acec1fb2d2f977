"""One sequence on its way to text: what was emitted, what is held back, what to say next."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from actorium.actors.detokenizer.incremental import IncrementalDetokenizer
from actorium.actors.detokenizer.stop_strings import StopMatch, StopRegexChecker, StopStringChecker
from actorium.actors.messages import (
    Delta,
    Open,
    Pooled,
    Rejected,
    RoutedExperts,
    RowExperts,
    RowLogprobs,
    SequenceEvent,
    TokenBatch,
    TokenLogprob,
    Usage,
    add_experts,
    joined_experts,
)
from actorium.actors.params import TextParams
from actorium.actors.runtime.inflight_journal import name_of
from actorium.actors.tracing.trace_messages import TracedText

FINISHED_BY_STOP = "stop"
Key = tuple[bytes, str, int]
"""(client, rid, index)"""


class OutputSequence:
    """A live sequence. Tokens go in by `append_tokens`, deltas come out of `delta`."""

    __slots__ = ("sid", "rid", "index", "client", "resume_seconds", "name", "prompt_tokens",
                 "created", "cached", "seen", "gap_end", "asked_at", "drafted", "accepted",
                 "finish_reason", "stop_reason", "error", "trace", "first_at", "_prompt",
                 "_stream", "_stops", "_min_tokens", "_include_stop", "_text", "_tokens", "_start",
                 "_logprobs", "_prompt_logprobs", "_prompt_told", "_pooled", "_experts", "runs")

    def __init__(self, message: Open, stream: IncrementalDetokenizer, now: float = 0.0) -> None:
        self.sid = message.sid
        self.rid = message.rid
        self.index = message.index
        self.client = message.client
        self.resume_seconds = message.resume_seconds
        """Seconds for which it outlives its client."""
        self.name = request_name(message)
        """Of its request, in the journal."""
        self.prompt_tokens = message.prompt_before + len(message.prompt) // 4
        self.created = message.created
        self.cached = 0
        self.seen = 0
        """Tokens taken so far."""
        self.gap_end = 0
        """Number of tokens by a batch whose own could not be taken, since those before them have
        not come: until then the sequence cannot end."""
        self.asked_at = -math.inf
        """When the scheduler was asked for those, and has not answered."""
        self.drafted = self.accepted = 0
        """Drafts verified for it, and those accepted."""
        self.runs = list(message.weights)
        """See `WeightsRuns`."""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: Rejected | None = None
        self.trace = None if message.end is not None else message.trace
        """None = no span is made of it: of one that had ended before, its first life has made one.
        """
        self.first_at = now
        """When its first token came, or it was opened; CLOCK_MONOTONIC seconds."""
        self._prompt = message.prompt
        params = message.text
        self._stream = stream
        self._stops = _stop_checker(params)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop
        self._text = ""
        self._tokens: list[int] = []
        self._start = 0
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._prompt_told = False
        self._pooled: Pooled | None = None
        self._experts: list[RowExperts] = []

    @property
    def key(self) -> Key:
        """What it is to its client."""
        return self.client, self.rid, self.index

    def traced(self, now: float) -> TracedText:
        """Returns what its span is made of, at its end."""
        assert self.trace is not None
        return TracedText(self.trace, self.rid, self.index, self.first_at, now, self.seen)

    @property
    def nothing_sent(self) -> bool:
        """No token of it was sent to its client yet."""
        return self._start == 0

    @property
    def weight(self) -> int:
        """Size of what waits to be sent: tokens, and alternatives of their logprobs."""
        entries = self._logprobs
        numbers = len(self._pooled.data) // 4 if self._pooled else 0
        return len(self._tokens) + numbers + sum(1 + len(e.top) for e in entries or ())

    def append_tokens(self, tokens: Sequence[int], stop_token: int | None = None) -> bool:
        """Takes the next tokens. Returns whether a stop string matched, which ends the sequence
        there.

        `stop_token`: the last of `tokens` ended the sequence; like a stop string it is part of
        the text only on request.
        """
        if self._stops is None and stop_token is None:
            push = self._stream.push
            self._text += push(tokens[0]) if len(tokens) == 1 else "".join(map(push, tokens))
            self._tokens += tokens
            self.seen += len(tokens)
            return False
        last = len(tokens) - 1
        for i, token in enumerate(tokens):
            self._tokens.append(token)
            self.seen += 1
            if i == last and stop_token is not None and not self._include_stop:
                break
            if self._show(self._stream.push(token)):
                return True
        return False

    def _show(self, piece: str) -> bool:
        if self._stops is None:
            self._text += piece
            return False
        out = self._stops.feed(piece, self.seen > self._min_tokens)
        if isinstance(out, StopMatch):
            self._text += out.text
            self.finish_reason, self.stop_reason = FINISHED_BY_STOP, out.stop
            return True
        self._text += out
        return False

    def finish(self, reason: str, stop_reason: int | None, error: Rejected | None) -> None:
        """Ends the sequence as the scheduler has: nothing is held back any more."""
        tail = self._stream.flush()
        if self._stops is not None:
            out = self._stops.feed(tail, armed=False)
            assert isinstance(out, str)
            tail = out + self._stops.flush()
        self._text += tail
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def add_logprobs(self, rows: Sequence[RowLogprobs], tokens: Sequence[int], skip: int) -> None:
        """Adds the logprobs of `tokens`, row after row; the first `skip` of them are known."""
        entries: list[TokenLogprob] = []
        for row in rows:
            at = len(entries)
            entries += expand(row, tokens[at:at + len(row.chosen) // 4])
        self._logprobs = (self._logprobs or []) + entries[skip:]

    def drop_logprobs(self, count: int) -> None:
        """Drops the logprobs of `count` tokens that lie beyond a stop string."""
        if self._logprobs is not None and count:
            del self._logprobs[-count:]

    def apply_event(self, event: SequenceEvent) -> None:
        """Applies what an event reports beside tokens: cached tokens, drafts, prompt logprobs, a
        vector."""
        self._pooled = event.pooled or self._pooled
        if event.cached_tokens is not None:
            self.cached = event.cached_tokens
        if event.draft_tokens is not None:
            self.drafted, self.accepted = event.draft_tokens, event.accepted_tokens or 0
        if event.weights is not None and (
                not self.runs or self.runs[-1][0] < event.weights[0]):
            self.runs.append(event.weights)
        if event.prompt_logprobs is not None:
            self.add_prompt_logprobs(event.prompt_logprobs)
        if event.experts is not None:
            self.add_experts([event.experts])

    def add_experts(self, experts: Sequence[RowExperts]) -> None:
        """Adds the experts of consecutive tokens, as far as they are new; they go out at the end.
        """
        for own in experts:
            add_experts(self._experts, own)

    def add_prompt_logprobs(self, row: RowLogprobs) -> None:
        """Adds the logprobs of prompt positions from `row.start` on; they go out with the first
        token."""
        if self._prompt_told:
            return
        if self._prompt_logprobs is None:
            self._prompt_logprobs = [None] * self.prompt_tokens
        count = len(row.chosen) // 4
        tokens = array("i", self._prompt[4 * row.start:4 * (row.start + count)])
        for i, entry in enumerate(expand(row, tokens)):
            self._prompt_logprobs[row.start + i] = entry

    def _joined_experts(self) -> RoutedExperts | None:
        """Returns those of the prompt and of all tokens but the last, which is never computed."""
        if not self._experts:
            return None
        return joined_experts(self._experts).part(0, max(self.prompt_tokens + self.seen - 1, 0))

    def delta(self) -> Delta:
        """Returns everything since the last delta. Tokens may be ahead of the text, which is held
        back."""
        usage, runs, experts = None, list[tuple[int, int]](), None
        if self.finish_reason is not None:  # a stop string may lie before the last ones
            runs = [run for run in self.runs if run[0] < max(self.seen, 1)]
            experts = self._joined_experts()
            usage = Usage(self.prompt_tokens, self.cached, self.seen, self.drafted, self.accepted,
                          runs[-1][1] if runs else 0)
        prompt_logprobs = None
        if self._prompt_logprobs is not None and (self.seen or self.finish_reason is not None):
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
            self._prompt_told = True
        made = Delta(self.rid, self.index, self._start, self._text,
                     array("i", self._tokens).tobytes(), self._logprobs, prompt_logprobs,
                     self.finish_reason, self.stop_reason, usage, self.error,
                     *((0, 0) if self._start else (self.prompt_tokens, self.created)),
                     self._pooled, runs, experts)
        self._text = ""
        self._tokens = []
        self._start = self.seen
        self._logprobs = None
        return made


def _stop_checker(params: TextParams) -> StopStringChecker | StopRegexChecker | None:
    if params.stop_regex:
        return StopRegexChecker(params.stop, params.stop_regex, params.include_stop)
    return StopStringChecker(params.stop, params.include_stop) if params.stop else None


def expand(row: RowLogprobs, tokens: Sequence[int]) -> list[TokenLogprob]:
    """Returns the columns of `row` as one entry a token; as many as both have."""
    chosen, ranks = array("f", row.chosen), array("i", row.ranks)
    ids, values = array("i", row.top_ids), array("f", row.top_logprobs)
    count = min(len(chosen), len(tokens))
    k = len(ids) // len(chosen) if len(chosen) else 0
    return [TokenLogprob(tokens[i], chosen[i], ranks[i],
                         list(zip(ids[i * k:i * k + k], values[i * k:i * k + k], strict=True)))
            for i in range(count)]


def count_drafts(live: Mapping[int, OutputSequence], batch: TokenBatch, sids: Sequence[int],
                 starts: Sequence[int]) -> None:
    """Counts a batch's drafts and those accepted: a stop string ends a sequence here before the
    scheduler knows. The scheduler's counts at an end replace these."""
    first = batch.firsts
    drafts = batch.draft_counts or bytes([batch.drafts]) * (len(sids) - first)
    rows = zip(sids[first:], starts[first:], batch.counts[first:], drafts, strict=True)
    for sid, start, count, drafted in rows:
        seq = live.get(sid)
        if seq is not None and seq.seen == start:
            seq.drafted += drafted
            seq.accepted += count - 1


def request_name(message: Open) -> bytes:
    """Returns the journal's name of a sequence's request."""
    return name_of(message.client, message.rid.encode())
