"""The scheduler's core: which sequences the worker computes, step by step.

Continuous batching. A step decodes every running sequence once and fills the rest of its token
budget with chunks of prompts. Up to two plans are in flight (one without overlap): plan N+1 is made
from result N-1 while the worker runs plan N, so the worker never waits for the scheduler. What is
not known yet is not guessed: lengths are intervals, and the worker decides where a sequence ends.

The core owns its parts, each a file of this folder: here is the loop of plans and results, in
`request_lifecycle` what comes in and what ends. A part that is off (host tier, drafts, pacing,
media) is None. `scheduler_actor` opens the ledger and the journal.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from actorium.actors.core import Context, Core, Health, Send
from actorium.actors.errors import Quarantined
from actorium.actors.health import WAKING
from actorium.actors.ledger.records import (
    ACTIVITY,
    ADAPTERS,
    COUNTS,
    WEIGHTS,
    ActivityRecord,
    WeightsRecord,
    make_record,
)
from actorium.actors.messages import (
    AbortRequest,
    AdapterAnswer,
    AdapterOrder,
    ControlRequest,
    Flush,
    Hello,
    PageAnswer,
    Ready,
    Reply,
    Reset,
    ResumeRequest,
    StepResult,
    Stop,
    Submit,
    TensorAnswer,
    ToScheduler,
    Unloaded,
    WeightsAnswer,
    WeightsOrder,
)
from actorium.actors.runtime.inflight_journal import InflightJournal
from actorium.actors.runtime.roles import TRACER_ROLE, WORKER
from actorium.actors.scheduler.adapters import AdapterTable
from actorium.actors.scheduler.cache.host_tier import HostTier
from actorium.actors.scheduler.media_holds import MEDIA
from actorium.actors.scheduler.outgoing import DETOKENIZER
from actorium.actors.scheduler.planner import Planner
from actorium.actors.scheduler.recovery.recovery_log import PriorRun, restore_requests
from actorium.actors.scheduler.recovery.suspects import SuspectTrials
from actorium.actors.scheduler.request_lifecycle import RequestLifecycle
from actorium.actors.scheduler.request_state import PlanRecord, Rejection, RequestState
from actorium.actors.scheduler.sleep import SleepControl
from actorium.actors.scheduler.step_results import apply_media, apply_result
from actorium.actors.scheduler.weights import WeightsControl
from actorium.actors.scheduler.worker_capacity import WorkerGroup
from actorium.actors.structured.structured_output import Load, no_vocabulary

LOG = logging.getLogger("actorium.scheduler")
STEP_BUDGET_S = 60.0
"""Seconds after which a step without progress counts as hung."""
AUDITED_PAGES = 4096
"""Pages of a pool that an audit in production may look at for each step since the last one: one of
65,536 pages takes a millisecond, which the last token of a lone request waits for."""


class SchedulerCore(Core):
    """The scheduler's logic (see `core.Core`). Messages come in by `on_message`; `on_wake` makes
    plans and returns everything that is to be sent."""

    inbox = ToScheduler
    client_inbox = None
    journal: InflightJournal

    def __init__(self, context: Context, prior: PriorRun | None = None,
                 load: Load = no_vocabulary, journal: InflightJournal | None = None) -> None:
        """prior: the earlier life that it goes on from; load: returns the vocabulary of grammars.
        Without a journal, no other process knows the requests in progress."""
        config = context.config
        self._config, self._memory_config = config.scheduler, config.memory
        self._ranks = config.device.tensor_parallel_size
        self._start_budget = config.runtime.start_timeout
        self._epoch = context.epoch
        self.requests = RequestLifecycle(context, load, journal)
        self.state, self.masks = self.requests.state, self.requests.masks
        self.outgoing, self._guard = self.requests.outgoing, self.requests.guard
        self.journal = self._guard.journal
        self._trials = SuspectTrials()
        self._planner = Planner(self.state, context.epoch, config)
        self._depth = 2 if self._config.overlap else 1
        self._unresolved: deque[PlanRecord] = deque()
        """Plans in flight, the oldest first."""
        self._group = WorkerGroup(self._ranks)
        # A new engine begins awake, whatever the ledger of the one before says.
        activity = prior.history.activity if prior is not None and context.epoch > 1 else None
        self.sleep = SleepControl(self.requests, self._group, context.epoch,
                                  self._config.sleep_after, self._config.sleep_level,
                                  activity or ActivityRecord())
        weights = prior.history.weights if prior is not None and context.epoch > 1 else None
        self.weights = WeightsControl(self.requests, self.sleep, self._ranks, context.epoch,
                                      weights or WeightsRecord())
        self.outgoing.to_worker(Reset(self._epoch))
        if config.adapters.enable_lora:
            self.state.adapters = AdapterTable(
                config.adapters, self._ranks, context.epoch,
                self._config.schedule_policy != "priority",
                prior.history.adapters if prior is not None and context.epoch > 1 else None)
        self._audited = 0
        """The step of the last audit."""
        self._restored = False
        """Requests of an earlier life were restored: there is a worker, or there will be."""
        self._not_durable = False
        """The ledger takes no records, and streams go on without it."""
        self._worker_restarts = 0
        self._missed = 0
        """How often messages to the detokenizer were dropped because it did not read."""
        self._health_detail = ""
        self._totals = {"busy_us": 0, "idle_us": 0, "late_us": 0}
        if prior is not None:
            self.requests.metrics.tally.restore(prior.history.all_counts,
                                                prior.history.counted)
            self._restore(restore_requests(prior, self._config.request_timeout),
                          prior.history.next_sid, prior.now)

    @property
    def next_sid(self) -> int:  # type: ignore[override]
        """The first sequence number that was never given."""
        return self.requests.next_sid

    @next_sid.setter
    def next_sid(self, sid: int) -> None:
        self.requests.next_sid = sid

    # --- the loop: messages in, plans out --------------------------------------------------------

    def on_message(self, message: ToScheduler, now: float) -> None:
        """Handles one message of the inbox."""
        if isinstance(message, StepResult):
            self._on_result(message, now)
        elif isinstance(message, Submit):
            self.requests.on_submit(message, now)
        elif isinstance(message, Stop):
            self.requests.on_stop(message)
        elif isinstance(message, AbortRequest):
            self.requests.on_abort(message)
        elif isinstance(message, Ready):
            if not self.sleep.declines(message) and (
                    worker := self._group.join(message)) is not None:
                self._on_ready(worker, now)
        elif isinstance(message, Unloaded):
            self.sleep.on_unloaded(message)
        elif isinstance(message, ControlRequest):
            self.sleep.on_control(message)
        elif isinstance(message, WeightsOrder):
            self.weights.on_order(message, self.sleep.ordered)
        elif isinstance(message, WeightsAnswer):
            self.weights.on_answer(message)
        elif isinstance(message, TensorAnswer):
            self.weights.on_tensor(message)
        elif isinstance(message, Flush):
            self._on_flush(message)
        elif isinstance(message, PageAnswer):
            if (tier := self.state.tier or self.sleep.tier) is not None:
                tier.answered(message)
        elif isinstance(message, AdapterAnswer | AdapterOrder):
            self.requests.on_adapters(message, self.sleep.ordered)
        elif isinstance(message, ResumeRequest):
            with self._guard.of_key(message.client, message.rid):
                self.outgoing.answer_resume(self.state, message, now)
        elif isinstance(message, Hello):
            self._on_hello(message.role, now, message.sids)

    def on_wake(self, now: float) -> Sequence[Send]:
        """Ends overdue requests, makes as many plans as may be in flight, returns what to send."""
        requests, self.masks.last_forced = self.requests, {}
        requests.end_overdue(now)
        adapters = self.state.adapters
        self.sleep.needed = self.weights.busy or (adapters is not None and adapters.loading)
        self.sleep.step(bool(self._unresolved), now)
        self.weights.step(bool(self._unresolved))
        self.outgoing.report_again(self.state)
        if self._guard.failed:
            requests.end_failed()
        if self._trials.active:
            self._trials.restrict(self.state)
        requests.step_adapters()
        if self.masks and self._unresolved:
            for masks in self.masks.late_masks(self.state, self._unresolved[0], self._epoch):
                self.outgoing.to_worker(masks)
        self._plan(now)
        while self._guard.failed:
            requests.end_failed()
            self._plan(now)  # others may have their places
        for request, rejection in self.masks.pop_stuck():
            requests.fail_request(request, rejection)
        if self.state.tier is not None:
            for order in self.state.tier.orders():
                self.outgoing.to_worker(order)
        self._audit()
        requests.report_ends(now)
        sends = self.outgoing.pop(self.state.table)
        return sends if requests.media is None else [*requests.media.pop(), *sends]

    def _audit(self) -> None:
        """Checks the books. With debug_memory: all of them, at idle and every `audit_every` steps.
        Else, when the engine falls idle after as many steps as its pages take, in a way that
        production can afford: inconsistent pages are put out of use."""
        state, config, steps = self.state, self._memory_config, self.state.step - self._audited
        idle = not (state.table.num_running or self._unresolved)
        if config.debug_memory:
            if idle or steps >= config.audit_every:
                state.audit()
                self._audited = state.step
        elif idle and steps > sum(pool.total for pool in state.kv_cache.pools) // AUDITED_PAGES:
            self._audited = state.step
            if (detail := state.kv_cache.repair()) is not None:
                self._health_detail = detail
                self.requests.recheck()

    def _plan(self, now: float) -> None:
        """Makes as many plans as may be in flight."""
        idle = self.requests.worker is None or self.outgoing.blocked or self.sleep.stopped
        depth = 0 if idle else self._depth
        while len(self._unresolved) < depth:
            step, unresolved = self.state.step + 1, tuple(self._unresolved)
            forced = self.masks.forced(self.state, step, unresolved, self._planner.most_forced) \
                if self._planner.most_forced and self.masks else {}
            made = self._planner.plan(step, unresolved, forced)
            if made is None:
                break
            plan, record = made
            self.state.step += 1
            if self.masks:
                plan = self.masks.add_masks(self.state, plan, record, self._unresolved)
            self._unresolved.append(record)
            self.outgoing.to_worker(plan)
            if plan.admit:
                seated = self.state.table.sequences
                self.requests.metrics.admitted([seated[admit.slot] for admit in plan.admit], now)

    def next_timer(self) -> float | None:
        """Returns the earliest deadline, or at once where more is to be sent."""
        if self.outgoing.has_more:
            return 0.0
        timers = (self.requests.deadlines.next(), self.sleep.next_timer())
        return min((at for at in timers if at is not None), default=None)

    def _on_ready(self, ready: Ready, now: float) -> None:
        """Starts over with a fresh worker: what ran on the one before is recomputed. (A worker that
        is known says `Ready` once more when it is asked; nothing is to be done then.)"""
        state, requests = self.state, self.requests
        if requests.worker is not None and ready.epoch <= requests.worker.epoch:
            return
        self._worker_restarts += requests.worker is not None
        convicted = self._trials.worker_died(state, self._unresolved)
        self._unresolved.clear()
        self.masks.reset()
        while (sequence := state.table.latest()) is not None:
            state.preempt(sequence, "worker")
            requests.metrics.resumed([sequence], WORKER, now)
        state.reset_for_worker(ready)
        if ready.host_pages:
            state.tier = HostTier(state.kv_cache, ready, self._epoch, self._ranks, self.sleep.tier)
        if state.adapters is not None:
            state.adapters.on_worker(ready.adapters)
        self.sleep.on_worker()
        self.weights.on_worker(ready.weights)
        self._planner.reset(ready)
        requests.worker = ready
        if self._planner.pacing is not None:
            LOG.info("target_itl: gaps between tokens are kept to %s", self._planner.pacing.about)
        self.outgoing.to_worker(Reset(self._epoch, ready.epoch))
        if convicted is not None:
            requests.fail_request(convicted, Rejection(
                Quarantined.code, "the worker died each time it ran this request alone"))
        requests.recheck()

    def _on_result(self, result: StepResult, now: float) -> None:
        """Applies a step's result. Results come in the order of the plans; any other is of an
        earlier life of the scheduler or the worker."""
        if (result.epoch != self._epoch or not self._unresolved
                or self._unresolved[0].step != result.step):
            return
        record = self._unresolved.popleft()
        as_run = record.as_run(result.draft_counts)
        if result.busy_us:
            rate = as_run.computed * 1e6 / result.busy_us
            self.requests.best_rate = max(self.requests.best_rate, rate)
        self.requests.metrics.result(as_run, result, self.state, now)
        if self.state.tier is not None:
            self.state.tier.copied(result.step, 0, result.lost)
        for failed, why in apply_media(self.state, record, result):
            self.requests.fail_request(failed, why)
        outcome = apply_result(self.state, record, result)
        self.masks.on_result(self.state, record, result)
        self._planner.on_result(as_run, outcome.verified, result)
        if outcome.tokens:
            self.requests.metrics.tally.add("tokens", outcome.tokens)
        self._totals["busy_us"] += result.busy_us
        self._totals["idle_us"] += result.idle_us
        self._totals["late_us"] += result.late_us
        if outcome.batch is not None:
            self.requests.report(outcome.batch, now)
        if self._trials.active:
            self._trials.decoded(record)

    # --- the cache, the ledger, other actors -----------------------------------------------------

    def _on_flush(self, flush: Flush) -> None:
        freed, kept = self.state.flush_cache()
        self.outgoing.to_detokenizer([Reply(flush.rid, flush.client, msgspec.json.encode(
            {"pages": freed, "kept": kept}))])

    def _restore(self, requests: Iterator[RequestState], next_sid: int, now: float) -> None:
        """Goes on from an earlier life of the scheduler: its unfinished requests wait, with all
        the tokens that they have emitted; the finished ones are retained."""
        self.next_sid, several = next_sid, [*requests]
        self.requests.metrics.open_sequences = sum(len(request.live) for request in several)
        live = self.requests.adopt(several, now)
        self.outgoing.resend_all(self.state, now)
        if live:
            tokens = sum(len(sequence.emitted) for sequence in self.state.sequences.values())
            self._health_detail = (f"resumed {live} unfinished requests from the ledger, with "
                                   f"{tokens} tokens emitted")
        self._restored = bool(live)

    def live_records(self) -> Iterator[list[Any]]:
        """Returns the ledger's records of all that was counted, and of every request that must not
        be forgotten, one request after the other, each as it is when it is asked for."""
        yield [make_record(COUNTS, self.requests.metrics.snapshot(self.state)),
               *(make_record(ACTIVITY, record) for record in self.sleep.records()),
               *(make_record(WEIGHTS, record) for record in self.weights.records())]
        if self.state.adapters is not None:
            yield [make_record(ADAPTERS, self.state.adapters.names.record())]
        yield from self.requests.history.all_records(self.state)

    def on_ledger_full(self, why: str, now: float) -> None:
        """Stops planning while the ledger takes no more records: requests wait, nothing is planned,
        and nothing sent to clients but rejections."""
        self.outgoing.blocked = self._health_detail = why
        self.requests.metrics.tally.held = True

    def on_ledger_lost(self, why: str, now: float) -> None:
        """Goes on without the ledger, which will not come back soon."""
        self.outgoing.blocked, self._not_durable = "", True
        self.requests.metrics.tally.held = False
        self._health_detail = f"not durable: {why}"

    def on_ledger_ok(self, now: float) -> None:
        """Goes on as usual: the ledger takes records again."""
        self.outgoing.blocked, self._not_durable = "", False
        self.requests.metrics.tally.held = False
        self._health_detail = "the ledger takes records again"

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """The detokenizer does not read: messages to it are dropped until it does. (A worker that
        does not read is a fault: it has at most two plans.)"""
        self._missed += role == DETOKENIZER
        return role in (DETOKENIZER, MEDIA, TRACER_ROLE)

    def on_peer_back(self, role: str, now: float) -> None:
        """Reports every request anew to the detokenizer, which reads again."""
        if role != TRACER_ROLE:
            self._on_hello(role, now)

    def _on_hello(self, role: str, now: float, sids: Sequence[int] = ()) -> None:
        """Sends an actor that is new, or has missed something of these sequences, all that it
        needs."""
        if role != MEDIA:
            self.outgoing.resend_all(self.state, now, sids)
        elif self.requests.media is not None:
            self.requests.media.started()

    def drain(self, now: float) -> None:
        """Rejects new requests, finishes the ones that are here (if there is a worker for that)."""
        self.requests.draining = True
        asleep = self.sleep.on_drain()
        waking = self.sleep.phase == WAKING
        if asleep or (self.requests.worker is None and not (self._restored or waking)):
            for request in list(self.state.requests.values()):
                self.requests.fail_request(
                    request, Rejection("unavailable", "the engine is stopping"))

    @property
    def done(self) -> bool:
        busy = self.state.requests or self._unresolved or not self.outgoing.empty
        return self.requests.draining and not busy

    def health(self) -> Health:
        """Reports phase, step and gauges; microseconds are sums since the start."""
        state, phase, requests = self.state, self._phase(), self.requests
        gauges = {"running": state.table.num_running, "waiting": len(state.queue),
                  "waiting_requests": state.queue.requests, "steps": state.step,
                  "worker_restarts": self._worker_restarts, "missed": self._missed,
                  **self.sleep.gauges(), **self.weights.gauges(),
                  "ledger_full": bool(self.outgoing.blocked),
                  "ledger_not_durable": self._not_durable, **self._totals,
                  **self._trials.gauges(state), **requests.history.gauges(),
                  **self.masks.gauges(), **self._planner.gauges(),
                  **(state.adapters.gauges() if state.adapters is not None else {}),
                  **requests.metrics.gauges(state, phase != "stepping", self.ledger)}
        budget = self._start_budget if phase == "starting" else STEP_BUDGET_S
        return Health(phase, state.step, budget, {k: float(v) for k, v in gauges.items()},
                      self._health_detail)

    def _phase(self) -> str:
        if self.requests.draining:
            return "draining"
        if (phase := self.sleep.phase) and not self.outgoing.blocked:
            return phase
        adapters = self.state.adapters
        if self.requests.worker is None or (adapters is not None and adapters.names.starting):
            return "starting"
        waits = adapters is not None and adapters.reading and not self.state.table.num_running
        if self.outgoing.blocked or waits:
            return "idle"
        if self.state.requests or self._unresolved:
            return "stepping"
        return "idle" if self.state.step else "ready"
