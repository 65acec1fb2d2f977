"""The scheduler's core: which sequences the worker computes, step by step.

Continuous batching. A step decodes every running sequence once and fills the rest of its token
budget with chunks of prompts. Up to two plans are in flight (one without overlap): plan N+1 is made
from result N-1 while the worker runs plan N, so the worker never waits for the scheduler. What is
not known yet is not guessed: lengths are intervals, and the worker decides where a sequence ends.

The core owns its parts, each a file of this folder. A part that is off (host tier, drafts, pacing,
media) is None. `scheduler_actor` opens the ledger and the journal.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from actorium.actors.core import Context, Core, Health, Send
from actorium.actors.errors import ActoriumError, Quarantined
from actorium.actors.messages import (
    Cancel,
    Flush,
    Hello,
    Open,
    PageAnswer,
    Ready,
    Recall,
    Reply,
    Reset,
    SequenceEvent,
    StepResult,
    Stop,
    Submit,
    TokenBatch,
    ToScheduler,
)
from actorium.actors.params import TextParams
from actorium.actors.runtime.inflight_journal import InflightJournal
from actorium.actors.scheduler.admission_checks import (
    Rejection,
    check_admission,
    check_fits,
    max_sequence_tokens,
)
from actorium.actors.scheduler.cache.host_tier import HostTier
from actorium.actors.scheduler.media_holds import MEDIA, new_media_holds
from actorium.actors.scheduler.outgoing import DETOKENIZER, OutgoingMessages
from actorium.actors.scheduler.plan_record import PlanRecord
from actorium.actors.scheduler.planner import Planner
from actorium.actors.scheduler.recovery.audit import PeriodicAuditor
from actorium.actors.scheduler.recovery.recovery_log import PriorRun, RecoveryLog, restore_requests
from actorium.actors.scheduler.recovery.request_faults import RequestFaults
from actorium.actors.scheduler.recovery.suspects import SuspectTrials
from actorium.actors.scheduler.request_metrics import RequestMetrics
from actorium.actors.scheduler.request_state import (
    RequestState,
    SequenceState,
    new_request_state,
    open_message,
)
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.step_results import apply_media, apply_result, draft_counts
from actorium.actors.scheduler.waiting_queue import Deadlines
from actorium.actors.scheduler.worker_group import WorkerGroup
from actorium.actors.structured.structured_output import (
    Load,
    StructuredOutputManager,
    no_vocabulary,
)

LOG = logging.getLogger("actorium.scheduler")
STEP_BUDGET_S = 60.0
"""Seconds after which a step without progress counts as hung."""


class SchedulerCore(Core):
    """The scheduler's logic (see `core.Core`). Messages come in by `on_message`; `on_wake` makes
    plans and returns everything that is to be sent."""

    inbox = ToScheduler
    front = None
    journal: InflightJournal

    def __init__(self, context: Context, prior: PriorRun | None = None,
                 load: Load = no_vocabulary, journal: InflightJournal | None = None) -> None:
        """prior: the earlier life that it goes on from; load: returns the vocabulary of grammars.
        Without a journal, requests in progress are known to nobody else."""
        config = context.config
        self._config, self._ranks = config.scheduler, config.device.tensor_parallel_size
        self._start_budget = config.runtime.start_timeout
        self._epoch = context.epoch
        self._guard = RequestFaults(journal)
        self.journal = self._guard.journal
        self._history = RecoveryLog(config.recovery, self.journal)
        self._metrics = RequestMetrics(self._config.max_num_seqs + 1)
        self._trials, self._auditor = SuspectTrials(), PeriodicAuditor(config.memory)
        self._media = new_media_holds(context)
        self.masks = StructuredOutputManager(load)
        self.state = SchedulerState(self._config, config.memory, self._guard, self._request_ended)
        self.state.keep_history = self._history.keep_history
        self._planner = Planner(self.state, context.epoch, config)
        self._depth = 2 if self._config.overlap else 1
        self._unresolved: deque[PlanRecord] = deque()
        """Plans in flight, the oldest first."""
        self._deadlines = Deadlines()
        self._worker: Ready | None = None
        self._group = WorkerGroup(self._ranks)
        self.outgoing = OutgoingMessages(self._history, self._epoch)
        self.outgoing.to_worker(Reset(self._epoch))
        self._step = 0
        self.next_sid = 1
        self._draining = False
        self._restored = False
        """Requests of an earlier life were restored: there is a worker, or there will be."""
        self._not_durable = False
        """The ledger takes no records, and streams go on without it."""
        self._worker_restarts = 0
        self._missed = 0
        """How often messages to the detokenizer were dropped because it did not read."""
        self._best_rate = 0.0
        """Most tokens a second that a step has computed."""
        self._health_detail = ""
        self._totals = {"tokens": 0, "prompt_tokens": 0, "busy_us": 0, "idle_us": 0,
                        "late_us": 0}
        if prior is not None:
            self._restore(restore_requests(prior, self._config.request_timeout),
                          prior.history.next_sid, prior.now)

    # --- the loop: messages in, plans out --------------------------------------------------------

    def on_message(self, message: ToScheduler, now: float) -> None:
        """Handles one message of the inbox."""
        if isinstance(message, StepResult):
            self._on_result(message, now)
        elif isinstance(message, Submit):
            self._on_submit(message, now)
        elif isinstance(message, Stop):
            self._on_stop(message)
        elif isinstance(message, Cancel):
            self._on_cancel(message)
        elif isinstance(message, Ready):
            if (worker := self._group.join(message)) is not None:
                self._on_ready(worker)
        elif isinstance(message, Flush):
            self._on_flush(message)
        elif isinstance(message, PageAnswer):
            if self.state.tier is not None:
                self.state.tier.answered(message)
        elif isinstance(message, Recall):
            with self._guard.of_key(message.client, message.rid):
                self.outgoing.answer_resume(self.state, message, now)
        elif isinstance(message, Hello):
            self._on_hello(message.role, now, message.sids)

    def on_wake(self, now: float) -> Sequence[Send]:
        """Ends overdue requests, makes as many plans as may be in flight, returns what to send."""
        for request in self._deadlines.expired(now):
            self._finish_request(request, "deadline")
        self.outgoing.report_again(self.state)
        if self._guard.failed:
            self._end_failed()
        if self._trials.active:
            self._trials.restrict(self.state)
        if self.masks and self._unresolved:
            for masks in self.masks.late_masks(self.state, self._unresolved[0], self._epoch):
                self.outgoing.to_worker(masks)
        self._plan(now)
        while self._guard.failed:
            self._end_failed()
            self._plan(now)  # others may have their places
        for request, rejection in self.masks.pop_stuck():
            self._fail_request(request, rejection)
        if self.state.tier is not None:
            for order in self.state.tier.orders():
                self.outgoing.to_worker(order)
        if events := self.outgoing.events:
            self._metrics.ended(events, now)
            self.outgoing.report_batch(self._event_batch(events))
            self.outgoing.events = []
        self._audit()
        if self.state.finished_requests:
            self._guard.finished(self.state.finished_requests)
            self._history.finished(self.state.finished_requests, now)
        sends = self.outgoing.pop(self.state.table)
        return sends if self._media is None else [*self._media.pop(), *sends]

    def _audit(self) -> None:
        """Checks the books."""
        detail = self._auditor.check(self.state, self._step, bool(self._unresolved))
        if detail is not None:
            self._health_detail = detail
            self._recheck_requests()

    def _plan(self, now: float) -> None:
        """Makes as many plans as may be in flight."""
        depth = 0 if self._worker is None or self.outgoing.blocked else self._depth
        while len(self._unresolved) < depth:
            made = self._planner.plan(self._step + 1, tuple(self._unresolved))
            if made is None:
                break
            plan, record = made
            self._step += 1
            if self.masks:
                plan = self.masks.add_masks(self.state, plan, record, self._unresolved)
            self._unresolved.append(record)
            self.outgoing.to_worker(plan)
            if plan.admit:
                seated = self.state.table.sequences
                self._metrics.admitted([seated[admit.slot] for admit in plan.admit], now)

    def next_timer(self) -> float | None:
        """The earliest deadline, or at once where more is to be sent."""
        return 0.0 if self.outgoing.has_more else self._deadlines.next()

    def _on_ready(self, ready: Ready) -> None:
        """A fresh worker: whatever ran on the one before is recomputed. (A worker that is known
        says `Ready` once more when it is asked; nothing is to be done then.)"""
        if self._worker is not None and ready.epoch <= self._worker.epoch:
            return
        self._worker_restarts += self._worker is not None
        state = self.state
        convicted = self._trials.worker_died(state, self._unresolved)
        self._unresolved.clear()
        self.masks.reset()
        while (sequence := state.table.latest()) is not None:
            state.preempt(sequence, "worker")
            self._metrics.resumed([sequence])
        state.reset_for_worker(ready)
        if ready.host_pages:
            state.tier = HostTier(state.kv_cache, ready, self._epoch, self._ranks)
        self._planner.reset(ready)
        self._worker = ready
        if self._planner.pacing is not None:
            LOG.info("target_itl: gaps between tokens are kept to %s", self._planner.pacing.about)
        self.outgoing.to_worker(Reset(self._epoch, ready.epoch))
        if convicted is not None:
            self._fail_request(convicted, Rejection(
                Quarantined.code, "the worker died each time it ran this request alone"))
        self._recheck_requests()

    def _on_result(self, result: StepResult, now: float) -> None:
        """Applies a step's result. Results come in the order of the plans; any other is of an
        earlier life of the scheduler or the worker."""
        if (result.epoch != self._epoch or not self._unresolved
                or self._unresolved[0].step != result.step):
            return
        record = self._unresolved.popleft()
        if result.busy_us:
            self._best_rate = max(self._best_rate, record.computed * 1e6 / result.busy_us)
        self._metrics.result(record, result, now)
        if self.state.tier is not None:
            self.state.tier.loaded(result.step, result.lost)
        for failed, why in apply_media(self.state, record, result):
            self._fail_request(failed, why)
        outcome = apply_result(self.state, record, result)
        self.masks.on_result(self.state, record, result)
        self._planner.on_result(record, outcome.verified, result)
        self._totals["tokens"] += outcome.tokens
        self._totals["busy_us"] += result.busy_us
        self._totals["idle_us"] += result.idle_us
        self._totals["late_us"] += result.late_us
        if outcome.batch is not None:
            if outcome.batch.events:
                self._metrics.ended(outcome.batch.events, now)
            self.outgoing.report_batch(outcome.batch)
        if self._trials.active:
            self._trials.decoded(record)

    # --- requests come ---------------------------------------------------------------------------

    def _on_submit(self, submit: Submit, now: float) -> None:
        """Queues a request, or rejects it. A request that is sent again is left alone, or, if it
        has ended, reported again."""
        if ((submit.client, submit.rid) in self.state.requests
                or self.outgoing.resend_if_known(self.state, submit, now)):
            return
        refusal = self._guard.refusal_for(submit.client, submit.rid, submit.grammar)
        if refusal is not None:
            self._refuse((submit.client, submit.rid), refusal)
            return
        with self._guard.of_key(submit.client, submit.rid):
            self._accept(submit, now)

    def _accept(self, submit: Submit, now: float) -> None:
        request = new_request_state(submit, self.next_sid)
        rejection = check_admission(request, now, self.state, self._worker, self._best_rate,
                                    self._draining)
        rejection = rejection or self.masks.add_request(request)
        if rejection is not None:
            self._refuse(request.key, rejection)
            return
        self.next_sid += submit.n
        opens = [open_message(choice, self._epoch) for choice in request.choices]
        self.state.add_request(request)
        self._deadlines.add(request, len(self.state.requests))
        self._history.admitted(request)
        if self._media is not None:
            self._media.queued(request)
        self.outgoing.to_detokenizer(opens)
        if self._worker is not None:
            self._cap(request, self._worker)
        self._totals["prompt_tokens"] += len(request.prompt)

    def _refuse(self, key: tuple[bytes, str], why: Rejection | ActoriumError) -> None:
        """Refuses a request that was never queued. It takes one number, whatever its `n`, and its
        client hears of it whatever the ledger does."""
        sid, (client, rid) = self.next_sid, key
        self.next_sid += 1
        text = why.why if isinstance(why, Rejection) else why.message
        event = Rejection(why.code, text).event(sid)
        self._metrics.rejected(why.code)
        self.outgoing.reject([Open(sid, rid, 0, client, b"", TextParams(), epoch=self._epoch),
                              self._event_batch([event])])

    def _cap(self, request: RequestState, worker: Ready) -> None:
        """Lowers max_tokens to what the worker can hold; a sequence that is longer already (from a
        worker with more room) ends at once, with `length`."""
        request.cap(max_sequence_tokens(worker, self.state.kv_cache))
        for sequence in list(request.live.values()):
            if len(request.prompt) + len(sequence.emitted) >= sequence.end:
                self._finish(sequence, SequenceEvent(sid=sequence.sid, finish_reason="length"))

    def _recheck_requests(self) -> None:
        """Fails the requests that fit no longer, and caps the others."""
        if self._worker is not None:
            for request in list(self.state.requests.values()):
                with self._guard.of(request):
                    rejection = check_fits(request, self._worker, self.state.kv_cache)
                    if rejection is None:
                        self._cap(request, self._worker)
                    else:
                        self._fail_request(request, rejection)

    # --- requests end ----------------------------------------------------------------------------

    def _on_cancel(self, cancel: Cancel) -> None:
        request = self.state.requests.get((cancel.client, cancel.rid))
        if request is not None:
            self._finish_request(request, "abort")

    def _on_stop(self, stop: Stop) -> None:
        """A stop string ended the sequence after `stop.tokens` tokens: later ones do not count."""
        sequence = self.state.sequences.get(stop.sid)
        if sequence is not None:
            with self._guard.of(sequence.request):
                self._finish(sequence, SequenceEvent(sid=stop.sid, finish_reason="stop"))

    def _finish_request(self, request: RequestState, reason: str) -> None:
        with self._guard.of(request):
            for sequence in list(request.live.values()):
                self._finish(sequence, SequenceEvent(sid=sequence.sid, finish_reason=reason))

    def _fail_request(self, request: RequestState, rejection: Rejection) -> None:
        LOG.warning("request %s ends: %s", request.submit.rid, rejection.code)
        for sequence in list(request.live.values()):
            self._finish(sequence, rejection.event(sequence.sid))

    def _finish(self, sequence: SequenceState, event: SequenceEvent) -> None:
        self.state.finish(sequence)
        self.masks.remove(sequence.sid)
        if drafts := draft_counts(sequence):
            event = msgspec.structs.replace(event, **drafts)
        sequence.finish = event
        self.outgoing.events.append(event)

    def _request_ended(self, request: RequestState) -> None:
        """All sequences of a request have ended."""
        if self._media is not None:
            self._media.ended(request)
        self._metrics.request_ended(request)

    def _end_failed(self) -> None:
        """Ends the requests on which work has raised."""
        self._guard.end_failed(self.state.requests, self.state.audit, self._quarantine,
                               self._refuse)

    def _quarantine(self, request: RequestState, why: ActoriumError) -> None:
        self._fail_request(request, Rejection(why.code, why.message))

    def _event_batch(self, events: list[SequenceEvent]) -> TokenBatch:
        """A batch of events without tokens."""
        return TokenBatch(step=self._step, sids=b"", starts=b"", counts=b"", tokens=b"",
                          events=events, epoch=self._epoch)

    # --- the cache, the ledger, other actors -----------------------------------------------------

    def _on_flush(self, flush: Flush) -> None:
        freed, kept = self.state.kv_cache.flush()
        if self.state.tier is not None:
            self.state.tier.flush()
        self.outgoing.to_detokenizer([Reply(flush.rid, flush.client, msgspec.json.encode(
            {"pages": freed, "kept": kept}))])

    def _restore(self, requests: Iterator[RequestState], next_sid: int, now: float) -> None:
        """Goes on from an earlier life of the scheduler: its unfinished requests wait, with all
        the tokens that they have emitted; the finished ones are retained."""
        self.next_sid = next_sid
        live = self.adopt(requests, now)
        self.outgoing.resend_all(self.state, now)
        if live:
            tokens = sum(len(sequence.emitted) for sequence in self.state.sequences.values())
            self._health_detail = (f"resumed {live} unfinished requests from the ledger, with "
                                   f"{tokens} tokens emitted")
        self._restored = bool(live)

    def adopt(self, requests: Iterable[RequestState], now: float) -> int:
        """Goes on with requests that have run elsewhere; returns how many live."""
        live = []
        for request in requests:
            if request.live:
                live.append(request)
                self.state.add_request(request)
                self._history.restored(request)
                if self._media is not None:
                    self._media.queued(request)
                self._deadlines.add(request, len(self.state.requests))
            else:
                self._history.finished([request], now)
        self._metrics.resumed([each for request in live for each in request.live.values()])
        for request in live:
            if (refusal := self._guard.refusal_for(*request.key)) is not None:
                self._quarantine(request, refusal)
                continue
            with self._guard.of(request):
                if (rejection := self.masks.add_request(request)) is not None:
                    self._fail_request(request, rejection)
        self._recheck_requests()
        return len(live)

    def live_records(self) -> Iterator[list[Any]]:
        """The ledger's records of every request that must not be forgotten, one request after the
        other, each as it is when it is asked for."""
        return self._history.all_records(self.state)

    def on_ledger_full(self, why: str, now: float) -> None:
        """The ledger takes no more records: requests wait, nothing is planned, and nothing sent to
        clients but rejections."""
        self.outgoing.blocked = self._health_detail = why

    def on_ledger_lost(self, why: str, now: float) -> None:
        """The ledger will not come back soon: streams go on without it."""
        self.outgoing.blocked, self._not_durable = "", True
        self._health_detail = f"not durable: {why}"

    def on_ledger_ok(self, now: float) -> None:
        """The ledger takes records again."""
        self.outgoing.blocked, self._not_durable = "", False
        self._health_detail = "the ledger takes records again"

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """The detokenizer does not read: messages to it are dropped until it does. (A worker that
        does not read is a fault: it has two plans at the most.)"""
        self._missed += role == DETOKENIZER
        return role in (DETOKENIZER, MEDIA)

    def on_peer_back(self, role: str, now: float) -> None:
        """The detokenizer reads again: every request is reported to it anew."""
        self._on_hello(role, now)

    def _on_hello(self, role: str, now: float, sids: Sequence[int] = ()) -> None:
        """An actor is new, or has missed something of these sequences: it is told all it needs."""
        if role != MEDIA:
            self.outgoing.resend_all(self.state, now, sids)
        elif self._media is not None:
            self._media.started()

    def drain(self, now: float) -> None:
        """Rejects new requests, finishes the ones that are here (if there is a worker for that)."""
        self._draining = True
        if self._worker is None and not self._restored:
            for request in list(self.state.requests.values()):
                self._fail_request(request, Rejection("unavailable", "the engine is stopping"))

    @property
    def done(self) -> bool:
        busy = self.state.requests or self._unresolved or not self.outgoing.empty
        return self._draining and not busy

    def health(self) -> Health:
        """Phase, step and gauges; tokens and microseconds are sums since the start."""
        state, phase = self.state, self._phase()
        gauges = {"running": state.table.num_running, "waiting": len(state.queue),
                  "waiting_requests": state.queue.requests, "steps": self._step,
                  "worker_restarts": self._worker_restarts, "missed": self._missed,
                  "ledger_full": bool(self.outgoing.blocked),
                  "ledger_not_durable": self._not_durable, **self._totals,
                  **self._trials.gauges(state), **self._history.gauges(), **self.masks.gauges(),
                  **self._planner.gauges(),
                  **self._metrics.gauges(state, phase != "stepping", self.ledger)}
        budget = self._start_budget if self._worker is None else STEP_BUDGET_S
        return Health(phase, self._step, budget, {k: float(v) for k, v in gauges.items()},
                      self._health_detail)

    def _phase(self) -> str:
        if self._draining:
            return "draining"
        if self._worker is None:
            return "starting"
        if self.outgoing.blocked:
            return "idle"
        if self.state.requests or self._unresolved:
            return "stepping"
        return "idle" if self._step else "ready"
