"""The detokenizer actor's core: tokens in, text out, stop strings found on the way.

All that happened to one client's sequences since the last wake goes out as one `TextBatch`. What a
client cannot be sent now, because it reads slowly or is not connected, is merged until it can.

Nothing here outlives the actor. A new incarnation sends `Hello` to the scheduler, which reports
every sequence anew (`Open` with what was emitted): it starts over, its first delta has `start` 0
and the whole text, and the client drops what it has. Tokens are numbered: those seen before are
dropped; if some were missed, `Hello` again. What an older scheduler says after a newer one is
dropped, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from actorium.actors.core import CLIENT, Context, Core, Health, Send
from actorium.actors.detokenizer.client_connections import ClientConnections
from actorium.actors.detokenizer.ended_sequences import (
    EndedSequences,
    QuarantinedRequests,
    error_delta,
    unknown,
)
from actorium.actors.detokenizer.incremental import TokenDecoder, load
from actorium.actors.detokenizer.output_sequence import OutputSequence, count_drafts, request_name
from actorium.actors.errors import Aborted, ActoriumError
from actorium.actors.messages import (
    AbortRequest,
    Answer,
    Attach,
    Attached,
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
from actorium.actors.runtime.roles import TRACER_ROLE

LOADING_BUDGET = 120.0
WORKING_BUDGET = 30.0
ASK_AGAIN = 10.0
"""Seconds until the scheduler is asked once more for what was missed of a sequence: it answers, or
is replaced by one that reports everything."""
NO_EVENT: dict[int, SequenceEvent] = {}


class DetokenizerCore(Core):
    """See the module."""

    inbox: Any = ToDetokenizer
    client_inbox: Any = ToDetokenizerFront
    journal: InflightJournal

    def __init__(self, ctx: Context, journal: InflightJournal | None = None) -> None:
        self._ctx = ctx
        self.journal = journal or InflightJournal(actor="detokenizer")
        self._quarantined = QuarantinedRequests(self.journal)
        self._detokenizer: TokenDecoder | None = None
        self._announced = False
        self._early_messages: list[Any] = []
        self._sequences: dict[int, OutputSequence] = {}
        self._clients: dict[bytes, set[int]] = {}
        self._connections = ClientConnections()
        self._ended_sequences = EndedSequences()
        self._scheduler_epoch = 0
        """Highest epoch of a scheduler so far."""
        self._unsent: dict[int, OutputSequence] = {}
        self._ended_traced: list[OutputSequence] = []
        """Sequences with spans that have ended in this wake."""
        self._out: list[Send] = []
        self._tokens = self._repeated = 0
        self._step = 0
        self._draining = False

    # --- Core ---------------------------------------------------------------------------------

    def on_message(self, message: Any, now: float) -> None:
        """Takes an Open, a TokenBatch, an Unknown, or a Reply to pass on (the shell drops it if its
        client has left). What needs the tokenizer waits until it is loaded."""
        if isinstance(message, Reply):
            self._out.append(Send(CLIENT, Answer(message.rid, message.json), message.client))
        elif self._detokenizer is None:
            self._early_messages.append(message)
        elif isinstance(message, TokenBatch):
            self._on_batch(message, now)
        elif isinstance(message, Open):
            self._on_open(message, self._detokenizer, now)
        else:
            self._on_unknown(message)

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        """Answers an Attach with this incarnation's epoch, and with errors for the requests that
        were given up because the client had left or did not read."""
        if isinstance(message, Attach):
            self._connections.connected(client)
            self._out.append(Send(CLIENT, Attached(self._ctx.epoch), client))
            self._report_lost(client)

    def on_client_lost(self, client: bytes, now: float) -> None:
        """Gives the client's requests up unless it comes back soon: it cannot be reached."""
        if client in self._clients or any(s.client == client for s in self._unsent.values()):
            self._connections.disconnected(client, now)
        else:
            self._connections.forget(client)

    def on_client_slow(self, client: bytes, slow: bool, now: float) -> None:
        """Takes note that the client does not read what is sent, or has read it all."""
        if slow:
            self._connections.slow.add(client)
        else:
            self._connections.slow.discard(client)
            self._report_lost(client)

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """The scheduler does not read: what it is sent is dropped until it does."""
        return role in ("scheduler", TRACER_ROLE)

    def on_peer_back(self, role: str, now: float) -> None:
        """Asks the scheduler, which reads again, for a report of all sequences: it shows what the
        scheduler has missed."""
        if role != TRACER_ROLE:
            self._out.append(self._hello())

    def on_wake(self, now: float) -> Sequence[Send]:
        """Returns a TextBatch for each client with new deltas. The second wake loads the model:
        raises `BadModel`."""
        if not self._announced:  # let a heartbeat say "loading" before it blocks
            self._announced = True
            return [self._hello()]
        if self._detokenizer is None:
            self._detokenizer = load(self._ctx.config.model)
            for message in self._early_messages:
                self.on_message(message, now)
            self._early_messages = []
        connections = self._connections
        for client in connections.idle_clients(self._clients, now):
            self._out.append(Send(CLIENT, TextBatch([]), client))
        if not connections.all_open:
            self._check_clients(connections, now)
        news = self._deltas(connections) if self._unsent else []
        out, self._out = self._out, []
        if self._ended_traced:
            news += [Send(TRACER_ROLE, seq.traced(now)) for seq in self._ended_traced]
            self._ended_traced.clear()
        return out + news

    def _deltas(self, connections: ClientConnections) -> list[Send]:
        """Returns a TextBatch for each client to which deltas can be sent now."""
        by_client: dict[bytes, list[Delta]] = {}
        waiting: dict[int, OutputSequence] = {}
        all_open = connections.all_open
        large: list[Send] = []
        broken: list[tuple[OutputSequence, BaseException]] = []
        self.journal.put(NOBODY)
        for sid, seq in self._unsent.items():
            if all_open or not connections.shut(seq.client):
                self.journal.turn_to(seq.name)
                try:
                    delta = seq.delta()
                    if delta.routed_experts is None:
                        by_client.setdefault(seq.client, []).append(delta)
                    else:  # several of them may be too much for a message
                        large.append(Send(CLIENT, TextBatch([delta]), seq.client))
                except BaseException as error:
                    broken.append((seq, error))
            else:
                waiting[sid] = seq
        self.journal.clear()
        self._unsent = waiting
        for seq, raised in broken:
            self._quarantine(seq, raised)
        connections.sent_to([*by_client, *(send.client for send in large)])
        return [*large, *(Send(CLIENT, TextBatch(news), client)
                          for client, news in by_client.items())]

    def _check_clients(self, connections: ClientConnections, now: float) -> None:
        """Gives up clients that are away for too long or far behind, and probes the others."""
        for client in connections.overdue(now):
            self._give_up_client(client, math.inf if self._draining
                                 else now - connections.away[client].since)
        for client in connections.too_far_behind(self._unsent.values()) if connections.slow else ():
            self._give_up_client(client)
        for client in connections.due_probes(now):
            self._out.append(Send(CLIENT, TextBatch([]), client))

    def next_timer(self) -> float | None:
        """Returns 0 until the model is loaded, then when a client must be looked at."""
        return 0.0 if self._detokenizer is None else self._connections.next_timer()

    def drain(self, now: float) -> None:
        """Goes on until the live sequences have ended; those of clients that have left end soon,
        also those that can be resumed: nobody may come for them any more."""
        if not self._draining:
            self._connections.shorten_patience(now)
        self._draining = True

    @property
    def done(self) -> bool:
        """True when no sequence lives and everything was sent to the clients that are there."""
        away = self._connections.away
        unsaid = any(seq.client not in away for seq in self._unsent.values())
        return not (self._sequences or unsaid or self._out or self._early_messages)

    def health(self) -> Health:
        """Reports phase "loading" until the tokenizer is read; `step` counts batches."""
        if self._detokenizer is None:
            return Health("loading", 0, LOADING_BUDGET, {}, "tokenizer files")
        phase = "draining" if self._draining else "stepping" if self._sequences else "idle"
        return Health(phase, self._step, WORKING_BUDGET,
                      {"detokenizer_sequences": float(len(self._sequences)),
                       "detokenizer_tokens": float(self._tokens),
                       "duplicates_dropped": float(self._repeated)})

    # --- work ---------------------------------------------------------------------------------

    def _hello(self, sids: list[int] | None = None) -> Send:
        return Send("scheduler", Hello(self._ctx.role, self._ctx.epoch, sids or []))

    def _is_stale(self, epoch: int) -> bool:
        """Returns whether it is a message of an older scheduler that comes after one of a newer."""
        self._scheduler_epoch = max(self._scheduler_epoch, epoch)
        return epoch < self._scheduler_epoch

    def _on_open(self, message: Open, detokenizer: TokenDecoder, now: float) -> None:
        """Opens a sequence, unless its request has been quarantined, or is by that."""
        if (known := self._quarantined.of(message)) is not None:
            self._end_request(message.client, message.rid, known)
            return
        self.journal.put(request_name(message))
        try:
            self._open(message, detokenizer, now)
        except BaseException as error:
            self._quarantine(message, error)
        self.journal.clear()

    def _guarded(self, seq: OutputSequence, work: Callable[..., None], *args: Any) -> None:
        """Does work on one sequence of several."""
        self.journal.turn_to(seq.name)
        try:
            work(*args)
        except BaseException as error:
            self._quarantine(seq, error)

    def _quarantine(self, one: OutputSequence | Open, error: BaseException) -> None:
        """Ends the request of a sequence, work on which has raised."""
        self._end_request(one.client, one.rid, self._quarantined.add(one, error))

    def _end_request(self, client: bytes, rid: str, error: ActoriumError) -> None:
        """Ends all sequences of a request, here and in the scheduler. Its client gets the error
        now, or when it asks."""
        self._drop(client, rid)
        self._out.append(Send("scheduler", AbortRequest(rid, client)))
        self._send_error(client, error_delta(rid, error.code, error.message))

    def _send_error(self, client: bytes, delta: Delta) -> None:
        """Sends a client the end of a request, if it can be sent to: else it will ask again."""
        if not self._connections.shut(client):
            self._out.append(Send(CLIENT, TextBatch([delta]), client))

    def _drop(self, client: bytes, rid: str) -> None:
        for sid in list(self._clients.get(client, ())):
            if (seq := self._sequences[sid]).rid == rid:
                self._unsent.pop(sid, None)
                self._close(seq)

    def _open(self, message: Open, detokenizer: TokenDecoder, now: float) -> None:
        """Opens a sequence that is new or reported once more. Its client gets a delta at once,
        which may be empty: the receipt that its request is in the ledger."""
        if self._is_stale(message.epoch):
            return
        if not message.again and (
                replies := self._ended_sequences.reply_if_over(message)) is not None:
            self._out += [Send("scheduler", reply) for reply in replies]
            return
        old = self._sequences.get(message.sid)
        if old is not None and old.key == (message.client, message.rid, message.index):
            if not message.again or old.nothing_sent:
                self._apply_open(old, message)
                if message.again:
                    self._unsent[message.sid] = old
                return
            if len(message.emitted) // 4 < old.seen:
                return  # on its way since before what is known; the client will ask again
        if old is not None:
            self._close(old)
            if message.client != old.client:
                self._send_error(old.client, error_delta(old.rid, Aborted.code,
                                                         "another client has taken it up"))
        prompt = memoryview(message.prompt).cast("i")
        stream = detokenizer.stream(prompt, message.text.skip_special_tokens)
        seq = self._sequences[message.sid] = self._unsent[message.sid] = OutputSequence(
            message, stream, now)
        self._clients.setdefault(message.client, set()).add(message.sid)
        self._ended_sequences.back(message.sid)
        self._connections.add(message.client, now)
        self._apply_open(seq, message)

    def _apply_open(self, seq: OutputSequence, message: Open) -> None:
        """Applies what the message reports and `seq` has not seen."""
        end, skip, count = message.end, seq.seen, len(message.emitted) // 4
        seq.asked_at = -math.inf
        self._repeated += min(skip, count)
        if message.cached_tokens is not None:
            seq.cached = message.cached_tokens
        if len(message.weights) > len(seq.runs):
            seq.runs = list(message.weights)
        if count >= skip:
            seq.drafted, seq.accepted = message.draft_tokens, message.accepted_tokens
        if end is not None:
            seq.apply_event(end)
        for row in message.prompt_logprobs:
            seq.add_prompt_logprobs(row)
        seq.add_experts(message.experts)
        if count > skip:
            self._unsent[seq.sid] = seq
            emitted = memoryview(message.emitted).cast("i").tolist()
            if message.emitted_logprobs:
                seq.add_logprobs(message.emitted_logprobs, emitted, skip)
            self._add_tokens(seq, emitted[skip:], None if end is None else end.stop_token)
        if end is not None and self._sequences.get(seq.sid) is seq:
            self._finish(seq, end)

    def _on_unknown(self, message: Unknown) -> None:
        """Drops a request that the scheduler does not know."""
        self._drop(message.client, message.rid)
        self._send_error(message.client, unknown(message))

    def _on_batch(self, message: TokenBatch, now: float) -> None:
        if self._is_stale(message.epoch):
            self._repeated += len(message.tokens) // 4
            return
        self._step += 1
        tokens = memoryview(message.tokens).cast("i").tolist()
        starts = memoryview(message.starts).cast("i").tolist()
        sids = memoryview(message.sids).cast("q").tolist()
        events = {e.sid: e for e in message.events} if message.events else NO_EVENT
        live, dirty = self._sequences, self._unsent
        if message.drafts:
            count_drafts(live, message, sids, starts)
        self.journal.put(NOBODY)
        for event in message.events:
            if (seq := live.get(event.sid)) is not None:
                if event.cached_tokens is not None:
                    seq.first_at = now
                self._guarded(seq, seq.apply_event, event)
        missed, at = list[int](), 0
        for sid, start, count in zip(sids, starts, message.counts, strict=True):
            end = at + count
            seq = live.get(sid)
            if seq is not None and count:
                if start > seq.seen:
                    seq.gap_end = start + count
                    if now >= seq.asked_at + ASK_AGAIN:
                        seq.asked_at = now
                        missed.append(sid)
                else:
                    dirty[sid] = seq
                    self._guarded(seq, self._add_row, seq, tokens[at:end], seq.seen - start,
                                  events.get(sid))
            at = end
        self._tokens += at
        if missed:
            self._out.append(self._hello(missed))
        for event in message.events:
            if (seq := live.get(event.sid)) is not None and seq.seen >= seq.gap_end:
                self._guarded(seq, self._finish, seq, event)
        self.journal.clear()

    def _add_row(self, seq: OutputSequence, tokens: list[int], skip: int,
                 event: SequenceEvent | None) -> None:
        """Adds tokens of one sequence, the first `skip` of them known already."""
        if event is not None and event.logprobs is not None:
            seq.add_logprobs([event.logprobs], tokens, skip)
        new = tokens
        if skip:
            new = tokens[skip:]
            self._repeated += len(tokens) - len(new)
        if new:
            self._add_tokens(seq, new, None if event is None else event.stop_token)

    def _add_tokens(self, seq: OutputSequence, tokens: list[int], stop_token: int | None) -> None:
        before = seq.seen
        if seq.append_tokens(tokens, stop_token):
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
        seq.finish(reason, event.stop_token, error)
        self._unsent[seq.sid] = seq
        self._end(seq)

    def _end(self, seq: OutputSequence) -> None:
        """Closes a sequence that has come to its regular end."""
        self._close(seq)
        if seq.trace is not None:
            self._ended_traced.append(seq)
        if seq.error is None and not self.journal.quiet:
            self.journal.finished(seq.name)

    def _give_up_client(self, client: bytes, away: float = math.inf) -> None:
        """Aborts the requests of a client, but those that can be resumed, if it is only away; it
        gets the errors when it comes back. away: seconds."""
        mine = [self._sequences[sid] for sid in sorted(self._clients.get(client, ()))]
        mine += [s for s in self._unsent.values() if s.client == client
                 and s.sid not in self._sequences]
        over = [seq for seq in mine if seq.resume_seconds <= away]
        live = [seq for seq in over if seq.sid in self._sequences]
        for rid in dict.fromkeys(seq.rid for seq in live):
            self._out.append(Send("scheduler", AbortRequest(rid, client)))
        if over:
            self._ended_sequences.give_up_requests(client,
                                                   list(dict.fromkeys(seq.rid for seq in over)))
        for seq in live:
            self._close(seq)
        for seq in over:
            self._unsent.pop(seq.sid, None)
        self._connections.left(client, min(
            (s.resume_seconds for s in mine if s.resume_seconds > away), default=0.0))

    def _report_lost(self, client: bytes) -> None:
        if lost := self._ended_sequences.pop_lost(client):
            why = "given up: the client did not read its stream"
            deltas = [error_delta(rid, Aborted.code, why) for rid in lost]
            self._out.append(Send(CLIENT, TextBatch(deltas), client))

    def _close(self, seq: OutputSequence) -> None:
        del self._sequences[seq.sid]
        self._ended_sequences.ended(seq)
        mine = self._clients[seq.client]
        mine.discard(seq.sid)
        if not mine:
            del self._clients[seq.client]


def build(ctx: Context) -> DetokenizerCore:
    """Returns the core of the role "detokenizer"."""
    budget = ctx.config.recovery.request_budget
    return DetokenizerCore(ctx, open_journal(ctx.run_dir, ctx.role, budget))
