"""The detokenizer actor's core: tokens in, text out, stop strings found on the way.

All that happened to one client's sequences since the last wake goes out as one `TextBatch`. What a
client cannot be told now, because it reads slowly or is not connected, is merged until it can.

Nothing here outlives the actor. A new incarnation says `Hello` to the scheduler and is told every
sequence anew (`Open` with what was emitted): it starts over, its first delta has `start` 0 and the
whole text, and the client drops what it has. Tokens are numbered: those seen before are dropped; if
some were missed, `Hello` again. What an older scheduler says after a newer one is dropped, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from actorium.actors.core import CLIENT, Context, Core, Health, Send
from actorium.actors.detokenizer.client_connections import ClientConnections
from actorium.actors.detokenizer.ended_sequences import EndedSequences, error_delta, unknown
from actorium.actors.detokenizer.incremental import TokenDecoder, load
from actorium.actors.detokenizer.output_sequence import OutputSequence, count_drafts, request_name
from actorium.actors.detokenizer.refusals import QuarantinedRequests
from actorium.actors.errors import Aborted, Quarantined
from actorium.actors.messages import (
    Answer,
    Attach,
    Attached,
    Cancel,
    Delta,
    Hello,
    Open,
    Rejected,
    Reply,
    SequenceEvent,
    Stop,
    TextBatch,
    ToDetokenizer,
    ToDetokenizerFront,
    TokenBatch,
    Unknown,
)
from actorium.actors.runtime.inflight_journal import NOBODY, InflightJournal, open_journal

LOADING_BUDGET = 120.0
WORKING_BUDGET = 30.0
ASK_AGAIN = 0.5
"""Seconds until the scheduler is asked once more for what was missed."""
NO_EVENT: dict[int, SequenceEvent] = {}


class DetokenizerCore(Core):
    """See the module."""

    inbox: Any = ToDetokenizer
    front: Any = ToDetokenizerFront
    journal: InflightJournal

    def __init__(self, ctx: Context, journal: InflightJournal | None = None) -> None:
        self._ctx = ctx
        self.journal = journal or InflightJournal(actor="detokenizer")
        self._refusals = QuarantinedRequests(self.journal)
        self._detokenizer: TokenDecoder | None = None
        self._announced = False
        self._early: list[Any] = []
        self._live: dict[int, OutputSequence] = {}
        self._clients: dict[bytes, set[int]] = {}
        self._readers = ClientConnections()
        self._departed = EndedSequences()
        self._fence = 0
        """Highest epoch of a scheduler so far."""
        self._asked = -math.inf
        self._dirty: dict[int, OutputSequence] = {}
        self._out: list[Send] = []
        self._tokens = self._repeated = 0
        self._step = 0
        self._draining = False

    # --- Core ---------------------------------------------------------------------------------

    def on_message(self, message: Any, now: float) -> None:
        """Take an Open, a TokenBatch, an Unknown, or a Reply to pass on (the shell drops it if its
        client is gone). What needs the tokenizer waits until it is loaded."""
        if isinstance(message, Reply):
            self._out.append(Send(CLIENT, Answer(message.rid, message.json), message.client))
        elif self._detokenizer is None:
            self._early.append(message)
        elif isinstance(message, TokenBatch):
            self._batch(message, now)
        elif isinstance(message, Open):
            self._take_open(message, self._detokenizer, now)
        else:
            self._unknown(message)

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        """Attach: answered with this incarnation's epoch, and with errors for the requests that
        were given up because the client was gone or did not read."""
        if isinstance(message, Attach):
            self._readers.here(client)
            self._out.append(Send(CLIENT, Attached(self._ctx.epoch), client))
            self._tell_lost(client)

    def on_client_gone(self, client: bytes, now: float) -> None:
        """The client cannot be reached: its requests are given up unless it comes back soon."""
        if client in self._clients or any(s.client == client for s in self._dirty.values()):
            self._readers.gone(client, now)
        else:
            self._readers.forget(client)

    def on_client_slow(self, client: bytes, slow: bool, now: float) -> None:
        """The client does not read what is sent, or has read it all."""
        if slow:
            self._readers.slow.add(client)
        else:
            self._readers.slow.discard(client)
            self._tell_lost(client)

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """The scheduler does not read: what it is sent is dropped until it does."""
        return role == "scheduler"

    def on_peer_back(self, role: str, now: float) -> None:
        """It reads again: what it tells of all sequences shows what of ours it has missed."""
        self._out.append(self._hello())

    def on_wake(self, now: float) -> Sequence[Send]:
        """One TextBatch for each client that there is news for. The second wake loads: raises
        `BadModel`."""
        if not self._announced:  # let a heartbeat say "loading" before it blocks
            self._announced = True
            return [self._hello()]
        if self._detokenizer is None:
            self._detokenizer = load(self._ctx.config.model)
            for message in self._early:
                self.on_message(message, now)
            self._early = []
        readers = self._readers
        for client in readers.silent(self._clients, now):
            self._out.append(Send(CLIENT, TextBatch([]), client))
        if not readers.all_open:
            self._look_after(readers, now)
        news = self._news(readers) if self._dirty else []
        out, self._out = self._out, []
        return out + news

    def _news(self, readers: ClientConnections) -> list[Send]:
        """A TextBatch for each client with news that can be told now."""
        by_client: dict[bytes, list[Delta]] = {}
        waiting: dict[int, OutputSequence] = {}
        everybody = readers.all_open
        broken: list[tuple[OutputSequence, BaseException]] = []
        self.journal.put(NOBODY)
        for sid, seq in self._dirty.items():
            if everybody or not readers.shut(seq.client):
                self.journal.turn_to(seq.name)
                try:
                    by_client.setdefault(seq.client, []).append(seq.delta())
                except BaseException as error:
                    broken.append((seq, error))
            else:
                waiting[sid] = seq
        self.journal.clear()
        self._dirty = waiting
        for seq, raised in broken:
            self._quarantine(seq, raised)
        readers.told(by_client)
        return [Send(CLIENT, TextBatch(news), client) for client, news in by_client.items()]

    def _look_after(self, readers: ClientConnections, now: float) -> None:
        """Give up who is away for too long or far behind; knock at the others."""
        for client in readers.overdue(now):
            self._give_up(client, math.inf if self._draining else now - readers.away[client].since)
        for client in readers.far_behind(self._dirty.values()) if readers.slow else ():
            self._give_up(client)
        for client in readers.knocks(now):
            self._out.append(Send(CLIENT, TextBatch([]), client))

    def next_timer(self) -> float | None:
        """At once until loaded, then when a client needs a look."""
        return 0.0 if self._detokenizer is None else self._readers.next_timer()

    def drain(self, now: float) -> None:
        """Go on until the live sequences have ended; those of clients that are gone end soon, also
        those that linger: nobody may come for them any more."""
        if not self._draining:
            self._readers.hurry(now)
        self._draining = True

    @property
    def done(self) -> bool:
        """True when no sequence lives and all is said to those who are there."""
        away = self._readers.away
        unsaid = any(seq.client not in away for seq in self._dirty.values())
        return not (self._live or unsaid or self._out or self._early)

    def health(self) -> Health:
        """Phase "loading" until the tokenizer is read; `step` counts batches."""
        if self._detokenizer is None:
            return Health("loading", 0, LOADING_BUDGET, {}, "tokenizer files")
        phase = "draining" if self._draining else "stepping" if self._live else "idle"
        return Health(phase, self._step, WORKING_BUDGET,
                      {"detokenizer_sequences": float(len(self._live)),
                       "detokenizer_tokens": float(self._tokens),
                       "duplicates_dropped": float(self._repeated)})

    # --- work ---------------------------------------------------------------------------------

    def _hello(self) -> Send:
        return Send("scheduler", Hello(self._ctx.role, self._ctx.epoch))

    def _fenced(self, epoch: int) -> bool:
        """True for what an older scheduler says after a newer one."""
        self._fence = max(self._fence, epoch)
        return epoch < self._fence

    def _take_open(self, message: Open, detokenizer: TokenDecoder, now: float) -> None:
        """`_open` it, unless its request has been quarantined, or is by that."""
        if (known := self._refusals.of(message)) is not None:
            self._end_request(message.client, message.rid, known)
            return
        self.journal.put(request_name(message))
        try:
            self._open(message, detokenizer, now)
        except BaseException as error:
            self._quarantine(message, error)
        self.journal.clear()

    def _try(self, seq: OutputSequence, work: Callable[..., None], *args: Any) -> None:
        """Work on one sequence of several."""
        self.journal.turn_to(seq.name)
        try:
            work(*args)
        except BaseException as error:
            self._quarantine(seq, error)

    def _quarantine(self, one: OutputSequence | Open, error: BaseException) -> None:
        """Work on a sequence has raised: its request ends, and nothing else."""
        self._end_request(one.client, one.rid, self._refusals.add(one, error))

    def _end_request(self, client: bytes, rid: str, error: Quarantined) -> None:
        """End all its sequences, here and in the scheduler. Its client is told, or will be when it
        asks."""
        self._drop(client, rid)
        self._out.append(Send("scheduler", Cancel(rid, client)))
        if not self._readers.shut(client):
            delta = error_delta(rid, error.code, error.message)
            self._out.append(Send(CLIENT, TextBatch([delta]), client))

    def _drop(self, client: bytes, rid: str) -> None:
        for sid in list(self._clients.get(client, ())):
            if (seq := self._live[sid]).rid == rid:
                self._dirty.pop(sid, None)
                self._close(seq)

    def _open(self, message: Open, detokenizer: TokenDecoder, now: float) -> None:
        """A sequence, new or told once more. Its client gets a delta at once, which may be empty:
        the receipt that its request is in the ledger."""
        if self._fenced(message.epoch) or (not message.again and self._is_over(message)):
            return
        old = self._live.get(message.sid)
        if old is not None and old.key == (message.client, message.rid, message.index):
            if not message.again or old.untold:
                self._catch_up(old, message)
                if message.again:
                    self._dirty[message.sid] = old
                return
            if len(message.emitted) // 4 < old.seen:
                return  # on its way since before what is known; the client will ask again
        if old is not None:
            self._close(old)
            self._taken(old, message.client)
        prompt = memoryview(message.prompt).cast("i")
        stream = detokenizer.stream(prompt, message.text.skip_special_tokens)
        seq = self._live[message.sid] = self._dirty[message.sid] = OutputSequence(message, stream)
        self._clients.setdefault(message.client, set()).add(message.sid)
        self._departed.back(message.sid)
        self._readers.meet(message.client, now)
        self._catch_up(seq, message)

    def _is_over(self, message: Open) -> bool:
        """It has ended here, or its client has been given up: the scheduler is told again."""
        verdict = self._departed.verdict(message)
        if verdict is not None and verdict.news is not None:
            self._out.append(Send("scheduler", verdict.news))
        return verdict is not None

    def _catch_up(self, seq: OutputSequence, message: Open) -> None:
        """Take what the message tells and `seq` has not seen."""
        end, skip, count = message.end, seq.seen, len(message.emitted) // 4
        self._repeated += min(skip, count)
        if message.cached_tokens is not None:
            seq.cached = message.cached_tokens
        if count >= skip:
            seq.drafted, seq.accepted = message.draft_tokens, message.accepted_tokens
        if end is not None:
            seq.note(end)
        for row in message.prompt_logprobs:
            seq.add_prompt_logprobs(row)
        if count > skip:
            self._dirty[seq.sid] = seq
            emitted = memoryview(message.emitted).cast("i").tolist()
            if message.emitted_logprobs:
                seq.add_history(message.emitted_logprobs, emitted, skip)
            self._push(seq, emitted[skip:], None if end is None else end.stop_token)
        if end is not None and self._live.get(seq.sid) is seq:
            self._finish(seq, end)

    def _unknown(self, message: Unknown) -> None:
        """The scheduler knows nothing of a request: what is left of it here is void."""
        self._drop(message.client, message.rid)
        if not self._readers.shut(message.client):  # else it will ask again
            self._out.append(Send(CLIENT, TextBatch([unknown(message)]), message.client))

    def _batch(self, message: TokenBatch, now: float) -> None:
        if self._fenced(message.epoch):
            self._repeated += len(message.tokens) // 4
            return
        self._step += 1
        tokens = memoryview(message.tokens).cast("i").tolist()
        starts = memoryview(message.starts).cast("i").tolist()
        sids = memoryview(message.sids).cast("i").tolist()
        events = {e.sid: e for e in message.events} if message.events else NO_EVENT
        live, dirty = self._live, self._dirty
        if message.drafts:
            count_drafts(live, message, sids, starts)
        self.journal.put(NOBODY)
        for event in message.events:
            if (seq := live.get(event.sid)) is not None:
                self._try(seq, seq.note, event)
        missed, at = False, 0
        for sid, start, count in zip(sids, starts, message.counts, strict=True):
            end = at + count
            seq = live.get(sid)
            if seq is not None and count:
                if start > seq.seen:
                    missed, seq.gap_end = True, start + count
                else:
                    dirty[sid] = seq
                    self._try(seq, self._row, seq, tokens[at:end], seq.seen - start,
                              events.get(sid))
            at = end
        self._tokens += at
        if missed and now >= self._asked + ASK_AGAIN:
            self._asked = now
            self._out.append(self._hello())
        for event in message.events:
            if (seq := live.get(event.sid)) is not None and seq.seen >= seq.gap_end:
                self._try(seq, self._finish, seq, event)
        self.journal.clear()

    def _row(self, seq: OutputSequence, tokens: list[int], skip: int,
             event: SequenceEvent | None) -> None:
        """Tokens of one sequence, the first `skip` of them known already."""
        if event is not None and event.logprobs is not None:
            seq.add_logprobs(event.logprobs, tokens, skip)
        new = tokens
        if skip:
            new = tokens[skip:]
            self._repeated += len(tokens) - len(new)
        if new:
            self._push(seq, new, None if event is None else event.stop_token)

    def _push(self, seq: OutputSequence, tokens: list[int], stop_token: int | None) -> None:
        before = seq.seen
        if seq.take(tokens, stop_token):
            beyond = len(tokens) - (seq.seen - before)
            seq.drop_logprobs(beyond)
            seq.accepted = max(seq.accepted - beyond, 0)
            self._out.append(Send("scheduler", Stop(seq.sid, seq.seen)))
            self._end(seq)

    def _finish(self, seq: OutputSequence, event: SequenceEvent) -> None:
        if event.finish_reason is None and event.error_code is None:
            return
        error = None
        if event.error_code is not None:
            error = Rejected(seq.rid, event.error_code, (event.error or "")[:4096])
        reason = "error" if error else event.finish_reason or "error"
        seq.end(reason, event.stop_token, error)
        self._dirty[seq.sid] = seq
        self._end(seq)

    def _end(self, seq: OutputSequence) -> None:
        """It has got to its end."""
        self._close(seq)
        if seq.error is None and not self.journal.quiet:
            self.journal.finished(seq.name)

    def _give_up(self, client: bytes, away: float = math.inf) -> None:
        """Cancel what a client has here, but what lingers, if it is only away; it is told when it
        comes back. away: seconds."""
        mine = [self._live[sid] for sid in sorted(self._clients.get(client, ()))]
        mine += [s for s in self._dirty.values() if s.client == client and s.sid not in self._live]
        over = [seq for seq in mine if seq.linger <= away]
        live = [seq for seq in over if seq.sid in self._live]
        for rid in dict.fromkeys(seq.rid for seq in live):
            self._out.append(Send("scheduler", Cancel(rid, client)))
        if over:
            self._departed.lose(client, list(dict.fromkeys(seq.rid for seq in over)))
        for seq in live:
            self._close(seq)
        for seq in over:
            self._dirty.pop(seq.sid, None)
        self._readers.left(client, min((s.linger for s in mine if s.linger > away), default=0.0))

    def _taken(self, seq: OutputSequence, client: bytes) -> None:
        """If another client has adopted it, tell who had it, if anybody is there."""
        if client != seq.client and not self._readers.shut(seq.client):
            delta = error_delta(seq.rid, Aborted.code, "another client has taken it up")
            self._out.append(Send(CLIENT, TextBatch([delta]), seq.client))

    def _tell_lost(self, client: bytes) -> None:
        if lost := self._departed.take_lost(client):
            why = "given up: the client did not read its stream"
            deltas = [error_delta(rid, Aborted.code, why) for rid in lost]
            self._out.append(Send(CLIENT, TextBatch(deltas), client))

    def _close(self, seq: OutputSequence) -> None:
        del self._live[seq.sid]
        self._departed.ended(seq)
        mine = self._clients[seq.client]
        mine.discard(seq.sid)
        if not mine:
            del self._clients[seq.client]


def build(ctx: Context) -> DetokenizerCore:
    """The core of the role "detokenizer"."""
    budget = ctx.config.recovery.request_budget
    return DetokenizerCore(ctx, open_journal(ctx.run_dir, ctx.role, budget))
