"""The scheduler's requests from their arrival to their end: who is admitted to the queue, refused,
ended by an event, and taken over from an earlier life."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from actorium.actors.config.retention import RETAINED_REQUESTS
from actorium.actors.core import Context
from actorium.actors.errors import ActoriumError, BadModel, UnknownAdapter
from actorium.actors.messages import (
    AbortRequest,
    AdapterAnswer,
    AdapterOrder,
    Open,
    Ready,
    SequenceEvent,
    Stop,
    Submit,
    TokenBatch,
    Unknown,
)
from actorium.actors.params import TextParams
from actorium.actors.runtime.inflight_journal import InflightJournal
from actorium.actors.runtime.roles import SCHEDULER
from actorium.actors.scheduler.answer_owners import AnswerOwners
from actorium.actors.scheduler.media_holds import new_media_holds
from actorium.actors.scheduler.outgoing import OutgoingMessages
from actorium.actors.scheduler.queue_policies import Deadlines
from actorium.actors.scheduler.recovery.recovery_log import RecoveryLog
from actorium.actors.scheduler.recovery.request_faults import RequestFaults
from actorium.actors.scheduler.request_metrics import RequestMetrics
from actorium.actors.scheduler.request_state import (
    Rejection,
    RequestState,
    SequenceState,
    new_request_state,
    open_message,
    received,
)
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.step_results import draft_counts
from actorium.actors.scheduler.worker_capacity import check_request, max_sequence_tokens
from actorium.actors.structured.structured_output import Load, StructuredOutputManager

LOG = logging.getLogger("actorium.scheduler")
NO_ADAPTERS = Rejection("invalid_request", "adapter: this engine serves no LoRA adapters: start it "
                        "with --enable-lora")


MAX_HELD_EMBEDS = 1 << 30
"""Bytes of the prompts given as embeddings of all unfinished requests."""


class RequestLifecycle:
    """Begins and ends requests, and keeps the parts that must know of both."""

    def __init__(self, context: Context, load: Load, journal: InflightJournal | None) -> None:
        """load, journal: as of `SchedulerCore`."""
        config = context.config
        self._epoch = context.epoch
        self.guard = RequestFaults(journal)
        self.metrics = RequestMetrics(config.scheduler.max_num_seqs + 1)
        self.history = RecoveryLog(config.recovery, self.guard.journal, self.metrics.marks_of)
        self.media = new_media_holds(context)
        self.masks = StructuredOutputManager(load)
        self.state = SchedulerState(config.scheduler, config.memory, self.guard, self._ended)
        self.state.keep_history = self.history.keep_history
        if config.speculation.suffix_global_bytes:
            self.state.answer_owners = AnswerOwners(self._epoch)
        self.deadlines = Deadlines()
        self._ended_traced: list[RequestState] = []
        """Requests with spans that have ended in this wake."""
        self.outgoing = OutgoingMessages(self.history, self._epoch)
        self.worker: Ready | None = None
        self.next_sid = 1
        self.draining = False
        self.best_rate = 0.0
        """Most tokens a second that a step has computed."""

    # --- requests come ---------------------------------------------------------------------------

    def on_submit(self, submit: Submit, now: float) -> None:
        """Queues a request, or refuses it. A request that is sent again is left alone, or, if it
        has ended, reported again."""
        key = submit.client, submit.rid
        if key in self.state.requests or self.outgoing.resend_if_known(self.state, submit, now):
            return
        refusal = self.guard.refusal_for(*key, submit.grammar)
        if refusal is not None:
            self.refuse(key, refusal)
            return
        with self.guard.of_key(*key):
            self._accept(submit, now)

    def _accept(self, submit: Submit, now: float) -> None:
        submit = received(submit, now)
        if submit.adapter is not None and self.state.adapters is not None:
            submit = msgspec.structs.replace(
                submit, adapter=self.state.adapters.names.bound(submit.adapter))
        request = new_request_state(submit, self.next_sid)
        rejection = self._check(request, now) or self.masks.add_request(request)
        if rejection is not None:
            self.refuse(request.key, rejection)
            return
        self.next_sid += submit.n
        self.metrics.started(submit.n, len(request.prompt))
        opens = [open_message(choice, self._epoch) for choice in request.choices]
        self._add(request)
        self.history.admitted(request)
        self.outgoing.to_detokenizer(opens)
        if self.worker is not None:
            self._cap(request, self.worker)

    def _check(self, request: RequestState, now: float) -> Rejection | None:
        """Returns why a new request is refused; None if it is accepted."""
        submit, state, most = request.submit, self.state, self.state.max_waiting
        if not submit.prompt or len(submit.prompt) % 4:
            return Rejection("invalid_request",
                             f"prompt: {len(submit.prompt)} bytes are no tokens (4 bytes each)")
        if submit.adapter is not None and not submit.adapter.digest:
            return NO_ADAPTERS if state.adapters is None else Rejection(
                UnknownAdapter.code, f"model: {submit.adapter.name!r} is not served here")
        if self.draining:
            return Rejection("unavailable", "the engine is stopping")
        if submit.embeds is not None and len(submit.embeds.data) + sum(
                [len(own.submit.embeds.data) for own in state.requests.values()
                 if own.submit.embeds is not None]) > MAX_HELD_EMBEDS:
            return Rejection("queue_full", "prompt_embeds: with those of unfinished requests more "
                             f"than {MAX_HELD_EMBEDS:,} bytes")
        full = state.queue.requests >= most + state.table.num_free
        if full and not state.queue.has_fair_share_left(submit.tenant, most):
            return Rejection("queue_full", f"{most} requests are waiting already")
        # Only first come, first served lets none overtake; else no token is sure to come before.
        ahead = 0 if state.queue.policy != "fcfs" else state.queue.tokens + sum(
            s.total - s.computed for s in state.prefilling)
        if misses_deadline(submit.deadline, now, ahead, len(request.prompt), self.best_rate):
            return Rejection("deadline", "the deadline cannot be met: at its best the engine "
                             f"computes {self.best_rate:,.0f} tokens a second, and {ahead} wait "
                             f"before these {len(request.prompt)}")
        if self.worker is None:
            return None
        return check_request(request, self.worker, state.kv_cache, state.whole_prompts)

    def _add(self, request: RequestState) -> None:
        self.state.add_request(request)
        self.deadlines.add(request, len(self.state.requests))
        if self.media is not None:
            self.media.queued(request.submit)

    def refuse(self, key: tuple[bytes, str], why: Rejection | ActoriumError) -> None:
        """Refuses a request that was never queued. It takes one number, whatever its `n`, and its
        client is answered whatever the ledger does."""
        sid, (client, rid) = self.next_sid, key
        self.next_sid += 1
        self.metrics.rejected(why.code)
        self.outgoing.reject([Open(sid, rid, 0, client, b"", TextParams(), epoch=self._epoch),
                              self._event_batch([_rejection(why).event(sid)])])

    def _cap(self, request: RequestState, worker: Ready) -> None:
        """Lowers max_tokens to what the worker can hold; a sequence that is longer already (from a
        worker with more room) ends at once, with `length`."""
        request.cap(max_sequence_tokens(worker, self.state.kv_cache,
                                        bool(request.params.hidden_states)))
        for sequence in list(request.live.values()):
            if len(request.prompt) + len(sequence.emitted) >= sequence.end:
                self._finish(sequence, SequenceEvent(sid=sequence.sid, finish_reason="length"))

    def recheck(self) -> None:
        """Fails the requests that this worker cannot run, and caps the others."""
        if self.worker is not None:
            for request in list(self.state.requests.values()):
                with self.guard.of(request):
                    rejection = check_request(request, self.worker, self.state.kv_cache,
                                              self.state.whole_prompts)
                    if rejection is None:
                        self._cap(request, self.worker)
                    else:
                        self.fail_request(request, rejection)

    def adopt(self, requests: Iterable[RequestState], now: float) -> int:
        """Goes on with requests that have run elsewhere, or in an earlier life, with all the tokens
        that they have emitted; those that have ended are retained. Returns how many live."""
        live, lost = list[RequestState](), list[Unknown]()
        for request in requests:
            if request.live:
                live.append(request)
                self._add(request)
                self.history.restored(request)
            else:
                if request.lost_vector:
                    lost.append(Unknown(request.submit.rid, request.submit.client))
                self.history.finished([request], now)
        # The clients of the latest may still wait, and ask again at once.
        self.outgoing.to_detokenizer(lost[-RETAINED_REQUESTS:])
        self.metrics.resumed([each for request in live for each in request.live.values()],
                             SCHEDULER, now)
        for request in live:
            if (refusal := self.guard.refusal_for(*request.key)) is not None:
                self.fail_request(request, refusal)
                continue
            if request.submit.adapter is not None and self.state.adapters is None:
                self.fail_request(request, NO_ADAPTERS)
                continue
            with self.guard.of(request):
                if (rejection := self.masks.add_request(request)) is not None:
                    self.fail_request(request, rejection)
        self.recheck()
        return len(live)

    # --- requests end ----------------------------------------------------------------------------

    def on_abort(self, abort: AbortRequest) -> None:
        """Ends a request that its client has given up; unknown ones are ignored."""
        self.abort((abort.client, abort.rid))

    def abort(self, key: tuple[bytes, str]) -> None:
        """Ends a request; unknown ones are ignored."""
        request = self.state.requests.get(key)
        if request is not None:
            self._finish_request(request, "abort")

    def on_stop(self, stop: Stop) -> None:
        """Ends a sequence in which a stop string matched after `stop.tokens` tokens: later ones do
        not count."""
        sequence = self.state.sequences.get(stop.sid)
        if sequence is not None:
            with self.guard.of(sequence.request):
                self._finish(sequence, SequenceEvent(sid=stop.sid, finish_reason="stop"))

    def end_overdue(self, now: float) -> None:
        """Ends the requests whose deadline has passed."""
        for request in self.deadlines.expired(now):
            self._finish_request(request, "deadline")

    def _finish_request(self, request: RequestState, reason: str) -> None:
        with self.guard.of(request):
            for sequence in list(request.live.values()):
                self._finish(sequence, SequenceEvent(sid=sequence.sid, finish_reason=reason))

    def fail_request(self, request: RequestState, why: Rejection | ActoriumError) -> None:
        """Ends a queued request with an error."""
        LOG.warning("request %s ends: %s", request.submit.rid, why.code)
        for sequence in list(request.live.values()):
            self._finish(sequence, _rejection(why).event(sequence.sid))

    def _finish(self, sequence: SequenceState, event: SequenceEvent) -> None:
        self.state.finish(sequence)
        self.masks.remove(sequence.sid)
        if drafts := draft_counts(sequence):
            event = msgspec.structs.replace(event, **drafts)
        sequence.finish = event
        self.outgoing.events.append(event)

    def _ended(self, request: RequestState) -> None:
        """Takes a request off the counts: all its sequences have ended."""
        if self.media is not None:
            self.media.ended(request.submit)
        if request.submit.embeds is not None:  # retained without them: nobody computes it again
            request.submit = msgspec.structs.replace(request.submit, embeds=None)
        self.metrics.request_ended(request)
        if request.submit.trace is not None:
            self._ended_traced.append(request)

    def end_failed(self) -> None:
        """Ends the requests on which work has raised."""
        self.guard.end_failed(self.state.requests, self.state.audit, self.fail_request, self.refuse)

    # --- adapters --------------------------------------------------------------------------------

    def on_adapters(self, message: AdapterAnswer | AdapterOrder, asleep: bool) -> None:
        """Handles what is about adapters. Requests with one that the worker cannot serve end."""
        if (adapters := self.state.adapters) is None:
            return  # the tokenizer has refused the order
        if isinstance(message, AdapterOrder):
            adapters.on_order(message, asleep)
        elif why := adapters.on_answer(message):
            digest, error = why
            for request in list(self.state.requests.values()):
                adapter = request.submit.adapter
                if adapter is not None and adapter.digest == digest:
                    self.fail_request(request, Rejection(
                        BadModel.code, f"adapter: {adapter.name!r}: {error}"))

    def step_adapters(self) -> None:
        """Has the worker read adapters and forget them, before the plans that need it."""
        if (adapters := self.state.adapters) is None:
            return
        adapters.step(self.state.admissible_adapters)
        for order in adapters.pop_orders(not self.state.slots_to_release):
            self.outgoing.to_worker(order)
        record, replies = adapters.pop_replies()
        if record is not None:
            self.history.adapters(record)
        self.outgoing.to_detokenizer(replies)

    # --- reports ---------------------------------------------------------------------------------

    def report(self, batch: TokenBatch, now: float) -> None:
        """Has a step's batch reported."""
        if batch.events:
            self.metrics.ended(batch.events, now)
        self.outgoing.report_batch(batch)

    def report_ends(self, now: float) -> None:
        """Has the ends reported that no step has caused, remembers the requests that are over, and
        has the counts of this wake written down."""
        if events := self.outgoing.events:
            self.report(self._event_batch(events), now)
            self.outgoing.events = []
        if self.state.finished_requests:
            self.guard.finished(self.state.finished_requests)
            self.history.finished(self.state.finished_requests, now)
        if self._ended_traced:
            self.outgoing.trace(self._ended_traced, now)
            self._ended_traced.clear()
        if not self.outgoing.blocked:
            self.history.counted(self.metrics.commit(self.state, now))

    def _event_batch(self, events: list[SequenceEvent]) -> TokenBatch:
        """Returns a batch of events without tokens."""
        return TokenBatch(step=self.state.step, sids=b"", starts=b"", counts=b"", tokens=b"",
                          events=events, epoch=self._epoch)


def _rejection(why: Rejection | ActoriumError) -> Rejection:
    return why if isinstance(why, Rejection) else Rejection(why.code, why.message)


def misses_deadline(deadline: float | None, now: float, tokens_ahead: int, own_tokens: int,
                    tokens_per_second: float | None) -> bool:
    """Returns whether a deadline passes before the work is done even by an optimistic estimate.

    `tokens_ahead` are to be computed before it begins, `own_tokens` until it ends; the rate is the
    best that the engine has shown, None (or 0) = not known: then only the past cannot be met.
    Times in seconds of one clock; a deadline of None can always be met.
    """
    if deadline is None:
        return False
    if now >= deadline:
        return True
    if not tokens_per_second:
        return False
    return now + (tokens_ahead + own_tokens) / tokens_per_second > deadline
