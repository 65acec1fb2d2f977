"""The scheduler: decides, step by step, which sequences the worker computes.

Continuous batching; a policy names who is admitted next. A step decodes every running sequence once
and fills the rest of its token budget with chunks of prompts. Two plans may be on their way
(one without overlap): plan N+1 is made from result N-1 while the worker runs plan N, so the worker
never waits for the scheduler. What is not known yet is not guessed: lengths are intervals, and the
end of a sequence is the worker's to decide.

Where things live: `state` (who is where), `slots` (numpy columns of the running), `memory` (all
page pools and the prefix tree), `pages` (one pool), `radix`, `eviction`, `nodes` (the tree),
`checkpoints` (of recurrent states), `queue` (the waiting), `policy` (every choice, as a pure
function), `speculation` (how many drafts), `plans` (making a plan), `results` (reading its result),
`structured_output` (which tokens are allowed), `metrics` (what is observed of requests), `limits`
(whom to refuse), `outgoing` (what is sent, in which order), `recovery` (what the ledger and others
are told, and going on from it), `suspects` and `trials` (who kills the worker).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from time import monotonic

import msgspec

from actorium.actors.config.speculative import parse_speculative
from actorium.actors.core import Context, Core, Health, Send
from actorium.actors.errors import Quarantined
from actorium.actors.ledger.committer import open_ledger
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.segments import LedgerRecord
from actorium.actors.messages import (
    Cancel,
    Flush,
    Hello,
    Open,
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
from actorium.actors.runtime.inflight_journal import InflightJournal, open_journal
from actorium.actors.scheduler.admission_checks import (
    Rejection,
    check_admission,
    check_fits,
    max_sequence_tokens,
)
from actorium.actors.scheduler.draft_policy import DraftPolicy
from actorium.actors.scheduler.outgoing import DETOKENIZER, OutgoingMessages
from actorium.actors.scheduler.planner import Planner, PlanRecord
from actorium.actors.scheduler.recovery.audit import Auditor
from actorium.actors.scheduler.recovery.recovery_log import PriorRun, RecoveryLog, restore_requests
from actorium.actors.scheduler.recovery.request_faults import RequestFaults
from actorium.actors.scheduler.recovery.trials import Trials
from actorium.actors.scheduler.request_metrics import RequestMetrics, memory_gauges
from actorium.actors.scheduler.request_state import (
    RequestState,
    SequenceState,
    new_request_state,
    open_message,
)
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.step_results import apply_result, draft_counts
from actorium.actors.scheduler.waiting_queue import Deadlines
from actorium.actors.structured.structured_output import (
    Load,
    StructuredOutputManager,
    no_vocabulary,
    vocabulary,
)

LOG = logging.getLogger("actorium.scheduler")
QUARANTINE = Rejection(Quarantined.code, "the worker died each time it ran this request alone")
STEP_BUDGET_S = 60.0
"""Seconds after which a step without progress counts as hung."""


class SchedulerCore(Core):
    """The actor's logic (see `core.Core`)."""

    inbox = ToScheduler
    front = None

    def __init__(self, context: Context, past: PriorRun | None = None,
                 load: Load = no_vocabulary, journal: InflightJournal | None = None) -> None:
        self._config = context.config.scheduler
        self._start_budget = context.config.runtime.start_timeout
        self._epoch = context.epoch
        self.state = SchedulerState(self._config, context.config.memory)
        self.state.faults = self._faults = RequestFaults(journal)
        self.journal = self._faults.journal
        self._auditor = Auditor(self.state, context.config.memory)
        self._planner = Planner(self.state, context.epoch, self._config.max_num_batched_tokens,
                                self._config.force_preempt_every)
        self._fixed = parse_speculative(context.config.speculation.speculative).fixed
        self._depth = 2 if self._config.overlap else 1
        self._unresolved: deque[PlanRecord] = deque()
        self._deadlines = Deadlines()
        self._worker: Ready | None = None
        self._metrics = RequestMetrics(self._config.max_num_seqs + 1)
        self._draining = False
        self._step = 0
        self.next_sid = 1
        self.ledger: Ledger | None = None  # for the shell
        self._not_durable = False
        """It takes nothing, and streams go on without."""
        self._recovery_log = RecoveryLog(context.config.recovery, context.epoch)
        self.state.keep_history = self._recovery_log.keep_history
        self._recovery_log.journal = self.journal
        self.state.on_finished = self._metrics.over
        self._outgoing = OutgoingMessages(self._recovery_log)
        self._outgoing.order(Reset(self._epoch))
        self._trials = Trials(self.state)
        self.structured_output = StructuredOutputManager(load)
        self._restarts = 0  # of the worker
        self._missed = 0  # how often the detokenizer was told nothing, as it did not read
        self._best_rate = 0.0  # most tokens a second that a step has computed
        self._health_detail = ""
        """What people should know, kept in the health's detail."""
        self._totals = {"tokens": 0, "prompt_tokens": 0, "busy_us": 0, "idle_us": 0,
                        "late_us": 0}
        self._revived = past is not None and self._revive(past)

    # --- the shell's side ------------------------------------------------------------------------

    def on_message(self, message: ToScheduler, now: float) -> None:
        """Take one message of the inbox."""
        if isinstance(message, StepResult):
            self._on_result(message, now)
        elif isinstance(message, Submit):
            self._on_submit(message, now)
        elif isinstance(message, Stop):
            self._on_stop(message)
        elif isinstance(message, Cancel):
            self._on_cancel(message)
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Flush):
            self._on_flush(message)
        elif isinstance(message, Recall):
            with self._faults.about(message.client, message.rid):
                self._outgoing.answer_recall(self.state, message, now)
        elif isinstance(message, Hello):
            self._outgoing.resend_all(self.state, now)

    def on_client(self, client: bytes, message: object, now: float) -> None:
        """No front."""

    def on_wake(self, now: float) -> Sequence[Send]:
        """End what is overdue, send as many plans as may be on their way, tell the news."""
        for request in self._deadlines.expired(now):
            self._end_request(request, "deadline")
        if self._faults.found:
            self._settle()
        if self._trials.on:
            self._trials.hold()
        if self.structured_output and self._unresolved:
            for masks in self.structured_output.follow(self.state, self._unresolved[0],
                                                       self._epoch):
                self._outgoing.order(masks)
        self._plan(now)
        while self._faults.found:
            self._settle()
            self._plan(now)  # others may have their places
        for request, objection in self.structured_output.pop_stuck():
            self._fail_request(request, objection)
        if events := self._outgoing.events:
            self._metrics.ended(events, now)
            self._outgoing.report_batch(self._batch(events))
            self._outgoing.events = []
        notice = self._auditor.look(self._step, bool(self._unresolved))
        if notice is not None:
            self._health_detail = notice
            self._recheck_requests()
        if self.state.finished_requests:
            self._faults.over(self.state.finished_requests)
            self._recovery_log.over(self.state.finished_requests, now)
        return self._outgoing.take(self.state.table)

    def _plan(self, now: float) -> None:
        """As many plans as may be on their way."""
        depth = 0 if self._worker is None or self._outgoing.full else self._depth
        while len(self._unresolved) < depth:
            made = self._planner.plan(self._step + 1, tuple(self._unresolved))
            if made is None:
                break
            plan, record = made
            self._step += 1
            if self.structured_output:
                plan = self.structured_output.plan(self.state, plan, record, self._unresolved)
            self._unresolved.append(record)
            self._outgoing.order(plan)
            if plan.admit:
                seated = self.state.table.sequences
                self._metrics.admitted([seated[admit.slot] for admit in plan.admit], now)

    def _settle(self) -> None:
        """End the requests on which work has failed."""
        self._faults.settle(self.state.requests, self.state.audit, self._quarantine,
                            self._reject_unopened)

    def _quarantine(self, request: RequestState, why: Quarantined) -> None:
        self._fail_request(request, Rejection(why.code, why.message))

    def _reject_unopened(self, key: tuple[bytes, str], why: Quarantined) -> None:
        """Refuse what is not in the books, and cannot be opened as others are."""
        sid, (client, rid) = self.next_sid, key
        self.next_sid += 1
        event = Rejection(why.code, why.message).event(sid)
        self._metrics.rejected[why.code] += 1
        self._outgoing.refuse([Open(sid, rid, 0, client, b"", TextParams(), epoch=self._epoch),
                               self._batch([event])])

    def next_timer(self) -> float | None:
        """The earliest deadline, or at once where more is to be told."""
        return 0.0 if self._outgoing.urgent else self._deadlines.next()

    def drain(self, now: float) -> None:
        """Refuse what comes from now on, finish what is here (if there is a worker to do it)."""
        self._draining = True
        if self._worker is None and not self._revived:
            for request in list(self.state.requests.values()):
                self._fail_request(request, Rejection("unavailable", "the engine is stopping"))

    @property
    def done(self) -> bool:
        busy = self.state.requests or self._unresolved or not self._outgoing.empty
        return self._draining and not busy

    def health(self) -> Health:
        """Phase, step and gauges; tokens and microseconds are sums since the start."""
        state = self.state
        phase = self._phase()
        gauges = {"running": state.table.num_running, "waiting": len(state.queue),
                  "waiting_requests": state.queue.requests,
                  "steps": self._step, **self._trials.gauges(), "worker_restarts": self._restarts,
                  "retained": len(self._recovery_log.retained),
                  "retained_bytes": self._recovery_log.retained.bytes, "missed": self._missed,
                  "ledger_full": bool(self._outgoing.full),
                  "ledger_not_durable": self._not_durable, "masks": self.structured_output.made,
                  "computed_prompt_tokens": self._metrics.computed_prompt_tokens,
                  **memory_gauges(state), **self._totals,
                  **self._planner.drafting.gauges()}
        budget = self._start_budget if self._worker is None else STEP_BUDGET_S
        told = {k: float(v) for k, v in gauges.items()}
        observed = self._metrics.gauges(phase != "stepping", self.ledger)
        return Health(phase, self._step, budget, told | observed, self._health_detail)

    def _phase(self) -> str:
        if self._draining:
            return "draining"
        if self._worker is None:
            return "starting"
        if self._outgoing.full:
            return "idle"
        if self.state.requests or self._unresolved:
            return "stepping"
        return "idle" if self._step else "ready"

    # --- what is remembered ----------------------------------------------------------------------

    def _revive(self, past: PriorRun) -> bool:
        """Go on from what the ledger says: its requests wait, with all that they have emitted.
        True if there are any: then there is a worker, or there will be."""
        self.next_sid = past.history.next_sid
        for request in restore_requests(past, self._config.request_timeout):
            if request.live:
                self.state.add_request(request)
                self._deadlines.add(request, len(self.state.requests))
            else:
                self._recovery_log.over([request], past.now)
        live = self.state.requests.values()
        self._outgoing.resend_all(self.state, past.now)
        for request in list(live):
            if (why := self._faults.refusal_for(*request.key)) is not None:
                self._quarantine(request, why)
                continue
            with self._faults.of(request):
                if (objection := self.structured_output.add_request(request)) is not None:
                    self._fail_request(request, objection)
        if live:
            tokens = self._metrics.resumed(self.state.sequences.values())
            self._health_detail = (f"resumed {len(live)} unfinished requests from the ledger, with "
                                   f"{tokens} tokens emitted")
        return bool(live)

    def live_records(self) -> Iterator[list[LedgerRecord]]:
        """Records that say all that must not be forgotten, of one request after the other: as it is
        when it is asked for, wherever it is by then. Those that come meanwhile have records of
        their own."""
        for request in [*self._recovery_log.retained, *self.state.requests.values()]:
            yield self._recovery_log.entry(request, self.state.table)

    def on_ledger_full(self, why: str, now: float) -> None:
        """The ledger takes no more: plan nothing, tell nothing but refusals."""
        self._outgoing.full = self._health_detail = why

    def on_ledger_lost(self, why: str, now: float) -> None:
        """Nor will it soon: go on without."""
        self._outgoing.full, self._not_durable = "", True
        self._health_detail = f"not durable: {why}"

    def on_ledger_ok(self, now: float) -> None:
        """It does again."""
        self._outgoing.full, self._not_durable = "", False
        self._health_detail = "the ledger takes records again"

    def on_missed(self, role: str, now: float) -> bool:
        """The detokenizer does not read: what it is told is dropped until it does. (A worker that
        does not is a fault: it has two plans at the most.)"""
        self._missed += role == DETOKENIZER
        return role == DETOKENIZER

    def on_hears(self, role: str, now: float) -> None:
        """It reads again: it is told all."""
        self._outgoing.resend_all(self.state, now)

    # --- requests --------------------------------------------------------------------------------

    def _on_submit(self, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it. One that is already here (a resend) is left alone; if it
        is over, it is told again."""
        if ((submit.client, submit.rid) in self.state.requests
                or self._outgoing.knows(self.state, submit, now)):
            return
        why = self._faults.refusal_for(submit.client, submit.rid, submit.grammar)
        if why is not None:
            self._reject_unopened((submit.client, submit.rid), why)
            return
        with self._faults.about(submit.client, submit.rid):
            self._accept(submit, now)

    def _accept(self, submit: Submit, now: float) -> None:
        request = new_request_state(submit, self.next_sid)
        self.next_sid += submit.n
        closed = "the engine is stopping" if self._draining else self._outgoing.full
        objection = check_admission(request, now, self.state, self._worker, self._best_rate, closed)
        objection = objection or self.structured_output.add_request(request)
        if objection is not None:
            self._reject(request, objection, now)
            return
        openings = [open_message(choice, self._epoch) for choice in request.choices]
        self.state.add_request(request)
        self._deadlines.add(request, len(self.state.requests))
        self._recovery_log.admitted(request)
        self._outgoing.tell(openings)
        if self._worker is not None:
            self._cap(request, self._worker)
        self._totals["prompt_tokens"] += len(request.prompt)

    def _reject(self, request: RequestState, objection: Rejection, now: float) -> None:
        """Refuse a request that never was on the ring: told at once, whatever the ledger does."""
        events = [objection.event(choice.sid) for choice in request.choices]
        self._metrics.ended(events, now)
        self._metrics.rejected[objection.code] += 1
        self._outgoing.refuse(open_message(choice, self._epoch) for choice in request.choices)
        self._outgoing.refuse([self._batch(events)])

    def _cap(self, request: RequestState, worker: Ready) -> None:
        """Where max_tokens would go past what can be held, the completion ends earlier, with
        `length`: at once, if it has got so far already (on a worker that had more room)."""
        request.cap(max_sequence_tokens(worker, self.state.kv_cache))
        for sequence in list(request.live.values()):
            if len(request.prompt) + len(sequence.emitted) >= sequence.end:
                self._end(sequence, SequenceEvent(sid=sequence.sid, finish_reason="length"))

    def _recheck_requests(self) -> None:
        if self._worker is not None:
            for request in list(self.state.requests.values()):
                with self._faults.of(request):
                    objection = check_fits(request, self._worker, self.state.kv_cache)
                    if objection is None:
                        self._cap(request, self._worker)
                    else:
                        self._fail_request(request, objection)

    def _on_cancel(self, cancel: Cancel) -> None:
        request = self.state.requests.get((cancel.client, cancel.rid))
        if request is not None:
            self._end_request(request, "abort")

    def _on_stop(self, stop: Stop) -> None:
        """A stop string ended the sequence after `stop.tokens` tokens: later ones do not count."""
        sequence = self.state.sequences.get(stop.sid)
        if sequence is not None:
            with self._faults.of(sequence.request):
                self._end(sequence, SequenceEvent(sid=stop.sid, finish_reason="stop"))

    def _on_flush(self, flush: Flush) -> None:
        freed, kept = self.state.kv_cache.flush()
        self._outgoing.tell([Reply(flush.rid, flush.client,
                                   msgspec.json.encode({"pages": freed, "kept": kept}))])

    def _fail_request(self, request: RequestState, objection: Rejection) -> None:
        LOG.warning("request %s ends: %s", request.submit.rid, objection.code)
        for sequence in list(request.live.values()):
            self._end(sequence, objection.event(sequence.sid))

    def _end_request(self, request: RequestState, reason: str) -> None:
        with self._faults.of(request):
            for sequence in list(request.live.values()):
                self._end(sequence, SequenceEvent(sid=sequence.sid, finish_reason=reason))

    def _end(self, sequence: SequenceState, event: SequenceEvent) -> None:
        self.state.finish(sequence)
        self.structured_output.forget(sequence.sid)
        if drafts := draft_counts(sequence):
            event = msgspec.structs.replace(event, **drafts)
        sequence.finish = event
        self._outgoing.events.append(event)

    def _batch(self, events: list[SequenceEvent]) -> TokenBatch:
        return TokenBatch(step=self._step, sids=b"", starts=b"", counts=b"", tokens=b"",
                          events=events, epoch=self._epoch)

    # --- the worker ------------------------------------------------------------------------------

    def _on_ready(self, ready: Ready) -> None:
        """A worker is there, empty. Whatever ran on one before it will be recomputed. (One that was
        taken up already says so once more when it is asked.)"""
        if self._worker is not None and ready.epoch <= self._worker.epoch:
            return
        self._restarts += self._worker is not None
        state = self.state
        convicted = self._trials.accuse(self._unresolved)
        self._unresolved.clear()
        self.structured_output.start_over()
        while (sequence := state.table.latest()) is not None:
            state.preempt(sequence, "worker")
            self._metrics.resumed([sequence])
        state.reset_for_worker(ready)
        self._planner.start_over(DraftPolicy(ready.drafts, self._fixed))
        self._worker = ready
        self._outgoing.order(Reset(self._epoch, ready.epoch))
        if convicted is not None:
            self._fail_request(convicted, QUARANTINE)
        self._recheck_requests()

    def _on_result(self, result: StepResult, now: float) -> None:
        """Results come in the order of the plans; any other is of another life."""
        if (result.epoch != self._epoch or not self._unresolved
                or self._unresolved[0].step != result.step):
            return
        record = self._unresolved.popleft()
        if result.busy_us:
            self._best_rate = max(self._best_rate, record.computed * 1e6 / result.busy_us)
        self._metrics.result(record, result, now)
        credited = apply_result(self.state, record, result)
        self.structured_output.learn(self.state, record, result)
        if self._planner.drafting.most:
            self._planner.learn(record, credited.verified, result.busy_us)
        self._totals["tokens"] += credited.tokens
        self._totals["busy_us"] += result.busy_us
        self._totals["idle_us"] += result.idle_us
        self._totals["late_us"] += result.late_us
        if credited.batch is not None:
            if credited.batch.events:
                self._metrics.ended(credited.batch.events, now)
            self._outgoing.report_batch(credited.batch)
        if self._trials.on:
            self._trials.decoded(record)


def build(context: Context) -> SchedulerCore:
    """The scheduler of an engine; its worker tells it, by `Ready`, what there is to share out.

    With a ledger it goes on from there. Raises `BadConfig` and `EngineUnavailable` if that cannot
    be."""
    ledger, load = open_ledger(context), vocabulary(context)
    journal = open_journal(context.run_dir, context.role, context.config.recovery.request_budget)
    if ledger is None:
        return SchedulerCore(context, None, load, journal)
    past = PriorRun(ledger.history, ledger.same_boot, monotonic())
    core = SchedulerCore(context, past, load, journal)
    core.ledger = ledger
    return core
