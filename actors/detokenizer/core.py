"""The detokenizer actor's core: tokens in, text out, stop strings found on the way.

All that happened to one client's sequences since the last wake goes out as one `TextBatch`. Tokens
are numbered: those seen before are dropped, so a batch may come twice. A sequence that the
scheduler opens anew (`Open.emitted`, after this actor was restarted) starts over: its first delta
has `start` 0 and the whole text, and the client drops what it already has.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from actorium.actors import models
from actorium.actors.core import CLIENT, Context, Health, Send
from actorium.actors.detokenizer.incremental import Detokenizer, NoText, make
from actorium.actors.detokenizer.sequence import Sequence
from actorium.actors.errors import ActoriumError, EngineUnavailable
from actorium.actors.messages import (
    Answer,
    Attach,
    Attached,
    Cancel,
    Delta,
    Open,
    Rejected,
    Reply,
    SequenceEvent,
    Stop,
    TextBatch,
    ToDetokenizer,
    ToDetokenizerFront,
    TokenBatch,
)
from actorium.actors.tokenizer.model import load_tokenizer

LOADING_BUDGET = 120.0
WORKING_BUDGET = 30.0
LOST_CLIENTS = 256
"""Vanished clients whose requests are remembered, should they come back and ask."""
NO_EVENT: dict[int, SequenceEvent] = {}


class DetokenizerCore:
    """See the module. Implements `actorium.actors.core.Core`."""

    inbox: Any = ToDetokenizer
    front: Any = ToDetokenizerFront

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._detokenizer: Detokenizer | None = None
        self._announced = False
        self._early: list[Any] = []
        self._live: dict[int, Sequence] = {}
        self._clients: dict[bytes, set[int]] = {}
        self._lost: dict[bytes, list[str]] = {}
        self._dirty: dict[int, Sequence] = {}
        self._out: list[Send] = []
        self._tokens = 0
        self._step = 0
        self._draining = False

    # --- Core ---------------------------------------------------------------------------------

    def on_message(self, message: Any, now: float) -> None:
        """Take an Open, a TokenBatch or a Reply to pass on (the shell drops it if its client is
        gone); Opens and TokenBatches that come before the tokenizer is loaded wait."""
        if isinstance(message, Reply):
            self._out.append(Send(CLIENT, Answer(message.rid, message.json), message.client))
        elif self._detokenizer is None:
            self._early.append(message)
        elif isinstance(message, TokenBatch):
            self._batch(message)
        else:
            self._open(message, self._detokenizer)

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        """Attach: answered with this incarnation's epoch, and with errors for the requests that
        were given up because the client was gone or did not read."""
        if isinstance(message, Attach):
            self._out.append(Send(CLIENT, Attached(self._ctx.epoch), client))
            if lost := self._lost.pop(client, None):
                deltas = [_lost_delta(rid) for rid in lost]
                self._out.append(Send(CLIENT, TextBatch(deltas), client))

    def on_client_gone(self, client: bytes, now: float) -> None:
        """The client cannot be reached any more: give its requests up."""
        sids = self._clients.get(client, set())
        rids = list(dict.fromkeys(self._live[sid].rid for sid in sorted(sids)))
        rids += [s.rid for s in self._dirty.values() if s.client == client and s.rid not in rids]
        if rids:
            self._lost[client] = self._lost.pop(client, []) + rids
            if len(self._lost) > LOST_CLIENTS:
                del self._lost[next(iter(self._lost))]
        for rid in rids:
            self._out.append(Send("scheduler", Cancel(rid, client)))
        for sid in list(sids):
            self._dirty.pop(sid, None)
            self._close(self._live[sid])

    def on_wake(self, now: float) -> Seq[Send]:
        """One TextBatch for each client that there is news for. The second wake loads: raises
        `BadModel`."""
        if not self._announced:  # let a heartbeat say "loading" before it blocks
            self._announced = True
            return []
        if self._detokenizer is None:
            self._load()
            for message in self._early:
                self.on_message(message, now)
            self._early = []
        out, self._out = self._out, []
        if self._dirty:
            by_client: dict[bytes, list[Delta]] = {}
            for seq in self._dirty.values():
                by_client.setdefault(seq.client, []).append(seq.delta())
            self._dirty = {}
            out.extend(Send(CLIENT, TextBatch(d), client) for client, d in by_client.items())
        return out

    def next_timer(self) -> float | None:
        """At once until loaded, then never."""
        return 0.0 if self._detokenizer is None else None

    def drain(self, now: float) -> None:
        """Go on until the live sequences have ended."""
        self._draining = True

    @property
    def done(self) -> bool:
        """True when no sequence lives and all is said."""
        return not (self._live or self._dirty or self._out or self._early)

    def health(self) -> Health:
        """Phase "loading" until the tokenizer is read; `step` counts batches."""
        if self._detokenizer is None:
            return Health("loading", 0, LOADING_BUDGET, {}, "tokenizer files")
        phase = "draining" if self._draining else "stepping" if self._live else "idle"
        return Health(phase, self._step, WORKING_BUDGET,
                      {"detokenizer_sequences": float(len(self._live)),
                       "detokenizer_tokens": float(self._tokens)})

    # --- work ---------------------------------------------------------------------------------

    def _load(self) -> None:
        config = self._ctx.config.model
        if config.skip_tokenizer:
            self._detokenizer = NoTextMaker()
            return
        path = models.resolve(config.model)
        self._detokenizer = make(load_tokenizer(path), path / "tokenizer.json")

    def _open(self, message: Open, detokenizer: Detokenizer) -> None:
        if message.sid in self._live:
            return
        prompt = memoryview(message.prompt).cast("i")
        stream = detokenizer.stream(prompt, message.text.skip_special_tokens)
        seq = self._live[message.sid] = Sequence(message, stream)
        self._clients.setdefault(message.client, set()).add(message.sid)
        if message.emitted:
            self._dirty[message.sid] = seq
            self._push(seq, memoryview(message.emitted).cast("i").tolist(), None)

    def _batch(self, message: TokenBatch) -> None:
        self._step += 1
        tokens = memoryview(message.tokens).cast("i").tolist()
        starts = memoryview(message.starts).cast("i").tolist()
        sids = memoryview(message.sids).cast("i").tolist()
        events = {e.sid: e for e in message.events} if message.events else NO_EVENT
        live, dirty = self._live, self._dirty
        if message.drafts:
            self._verified(message, sids, starts)
        for event in message.events:
            if (seq := live.get(event.sid)) is not None:
                seq.note(event)
        at = 0
        for sid, start, count in zip(sids, starts, message.counts, strict=True):
            end = at + count
            seq = live.get(sid)
            if seq is not None and count:
                dirty[sid] = seq
                self._row(seq, tokens[at:end], seq.seen - start, events.get(sid))
            at = end
        self._tokens += at
        for event in message.events:
            if (seq := live.get(event.sid)) is not None:
                self._finish(seq, event)

    def _verified(self, message: TokenBatch, sids: list[int], starts: list[int]) -> None:
        """Count drafts and those accepted: a stop string ends a sequence here, before the scheduler
        can tell. What the scheduler tells at an end replaces these counts."""
        first = message.firsts
        rows = zip(sids[first:], starts[first:], message.counts[first:], strict=True)
        for sid, start, count in rows:
            seq = self._live.get(sid)
            if seq is not None and seq.seen == start:
                seq.drafted += message.drafts
                seq.accepted += count - 1

    def _row(self, seq: Sequence, tokens: list[int], skip: int,
             event: SequenceEvent | None) -> None:
        """Tokens of one sequence, the first `skip` of them known already (< 0: some are lost)."""
        if skip < 0:
            self._fail(seq, f"{-skip} tokens were lost on the way to the detokenizer")
            return
        if event is not None and event.logprobs is not None:
            seq.add_logprobs(event.logprobs, tokens, skip)
        new = tokens[skip:] if skip else tokens
        if new:
            self._push(seq, new, None if event is None else event.stop_token)

    def _push(self, seq: Sequence, tokens: list[int], stop_token: int | None) -> None:
        before = seq.seen
        if seq.take(tokens, stop_token):
            beyond = len(tokens) - (seq.seen - before)
            seq.drop_logprobs(beyond)
            seq.accepted = max(seq.accepted - beyond, 0)
            self._out.append(Send("scheduler", Stop(seq.sid, seq.seen)))
            self._close(seq)

    def _finish(self, seq: Sequence, event: SequenceEvent) -> None:
        if event.finish_reason is None and event.error_code is None:
            return
        error = None
        if event.error_code is not None:
            error = Rejected(seq.rid, event.error_code, (event.error or "")[:4096])
        reason = "error" if error else event.finish_reason or "error"
        seq.end(reason, event.stop_token, error)
        self._dirty[seq.sid] = seq
        self._close(seq)

    def _fail(self, seq: Sequence, message: str) -> None:
        """An engine fault: end the sequence with an error, at the client and the scheduler."""
        seq.end("error", None, Rejected(seq.rid, ActoriumError.code, message))
        self._out.append(Send("scheduler", Cancel(seq.rid, seq.client)))
        self._close(seq)

    def _close(self, seq: Sequence) -> None:
        del self._live[seq.sid]
        mine = self._clients[seq.client]
        mine.discard(seq.sid)
        if not mine:
            del self._clients[seq.client]


class NoTextMaker:
    """skip_tokenizer: every stream is without text."""

    def stream(self, prompt: Seq[int], skip_special: bool) -> NoText:
        return NoText()


def _lost_delta(rid: str) -> Delta:
    why = Rejected(rid, EngineUnavailable.code, "given up: the client did not read its stream")
    return Delta(rid, 0, 0, "", b"", finish_reason="error", error=why)


def build(ctx: Context) -> DetokenizerCore:
    """The core of the role "detokenizer"."""
    return DetokenizerCore(ctx)
