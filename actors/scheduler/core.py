"""The scheduler: decides, step by step, which sequences the worker computes.

Continuous batching; a policy names who is admitted next. A step decodes every running sequence once
and fills the rest of its token budget with chunks of prompts. Two plans may be on their way
(one without overlap): plan N+1 is made from result N-1 while the worker runs plan N, so the worker
never waits for the scheduler. What is not known yet is not guessed: lengths are intervals, and the
end of a sequence is the worker's to decide.

Where things live: `books` (who is where), `slots` (numpy columns of the running), `memory` (all
page pools and the prefix tree), `pages` (one pool), `radix`, `eviction`, `nodes` (the tree),
`checkpoints` (of recurrent states), `queue` (the waiting), `policy` (every choice, as a pure
function), `speculation` (how many drafts), `plans` (making a plan), `results` (reading its result),
`metrics` (what is observed of requests).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from time import monotonic

import msgspec

from actorium.actors.core import Context, Health, Send
from actorium.actors.errors import Quarantined
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.segments import Record
from actorium.actors.messages import (
    Cancel,
    Flush,
    Hello,
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
    Unknown,
)
from actorium.actors.runtime.commit import open_ledger
from actorium.actors.scheduler.books import Books
from actorium.actors.scheduler.limits import Objection, longest, misfit
from actorium.actors.scheduler.metrics import Metrics, memory_gauges
from actorium.actors.scheduler.plans import Planner, PlanRecord
from actorium.actors.scheduler.policy import cannot_meet
from actorium.actors.scheduler.queue import Deadlines
from actorium.actors.scheduler.recovery import Chronicle, Past, revive
from actorium.actors.scheduler.requests import Request, Sequence, open_request, opening
from actorium.actors.scheduler.results import drafts_of, resolve
from actorium.actors.scheduler.slots import SlotTable
from actorium.actors.scheduler.speculation import Drafting, Verified
from actorium.actors.scheduler.suspects import Suspects
from actorium.actors.speculation import parse_speculative

WORKER = "worker-0"
DETOKENIZER = "detokenizer"
QUARANTINE = Objection(Quarantined.code, "the worker died each time it ran this request alone")
STEP_BUDGET_S = 60.0
"""Seconds after which a step without progress counts as hung."""


class SchedulerCore:
    """The actor's logic (see `core.Core`)."""

    inbox = ToScheduler
    front = None

    def __init__(self, context: Context, past: Past | None = None) -> None:
        self._config = context.config.scheduler
        self._memory = context.config.memory
        self._start_budget = context.config.runtime.start_timeout
        self._epoch = context.epoch
        self.books = Books(self._config, self._memory)
        self._planner = Planner(self.books, context.epoch, self._config.max_num_batched_tokens,
                                self._config.force_preempt_every)
        self._fixed = parse_speculative(context.config.speculation.speculative).fixed
        self._depth = 2 if self._config.overlap else 1
        self._unresolved: deque[PlanRecord] = deque()
        self._deadlines = Deadlines()
        self._worker: Ready | None = None
        self._metrics = Metrics(self._config.max_num_seqs + 1)
        self._draining = False
        self._step = 0
        self.next_sid = 1
        """Of the next sequence."""
        self.ledger: Ledger | None = None
        """For the shell."""
        self._chronicle = Chronicle(context.config.recovery, context.epoch)
        self.books.remembers = self._chronicle.remembers
        self._orders: list[Send] = [Send(WORKER, Reset(self._epoch))]
        """To the worker: sent before the news, it is the one who must not wait."""
        self._news: list[Send] = []
        self._events: list[SequenceEvent] = []
        self._refusals: list[Send] = []
        """What is told although the ledger is full."""
        self._full = ""
        """Why the ledger takes no more; empty = it does."""
        self._suspects = Suspects()
        self._restarts = 0
        """Workers that came after the first one of this life."""
        self._best_rate = 0.0
        """Most tokens a second that a step has computed."""
        self._audited = 0
        self._notice = ""
        """What people should know, kept in the health's detail."""
        self._sums = {"tokens": 0, "prompt_tokens": 0, "busy_us": 0, "idle_us": 0}
        if past is not None:
            self._revive(past)

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
            self._on_recall(message, now)
        elif isinstance(message, Hello):
            self._on_hello(message, now)

    def on_client(self, client: bytes, message: object, now: float) -> None:
        """The scheduler has no front."""

    def on_wake(self, now: float) -> SequenceOf[Send]:
        """End what is overdue, send as many plans as may be on their way, tell the news."""
        for request in self._deadlines.expired(now):
            self._end_request(request, "deadline")
        self._judge()
        while (self._worker is not None and len(self._unresolved) < self._depth
               and not self._full):
            made = self._planner.plan(self._step + 1, tuple(self._unresolved))
            if made is None:
                break
            plan, record = made
            self._step += 1
            self._unresolved.append(record)
            self._orders.append(Send(WORKER, plan))
            if plan.admit:
                seated = self.books.table.sequences
                self._metrics.admitted([seated[admit.slot] for admit in plan.admit], now)
        if self._events:
            self._metrics.ended(self._events, now)
            self._tell(self._batch(self._events))
            self._events = []
        self._audit()
        self._chronicle.over(self.books.over, now)
        return self._out()

    def _out(self) -> list[Send]:
        """What may go out now: orders, refusals, records, and what was committed with them."""
        out = self._orders + self._refusals
        self._orders, self._refusals = [], []
        if not self._full:
            opens = self._chronicle.tell_some(self.books.table)
            out += self._chronicle.take() + self._news
            out += [Send(DETOKENIZER, message) for message in opens]
            self._news = []
        return out

    def next_timer(self) -> float | None:
        """The earliest deadline, or at once where more is to be told."""
        return 0.0 if self._chronicle.telling and not self._full else self._deadlines.next()

    def drain(self, now: float) -> None:
        """Refuse what comes from now on, finish what is here (if there is a worker to do it)."""
        self._draining = True
        if self._worker is None:
            for request in list(self.books.requests.values()):
                self._refuse(request, Objection("unavailable", "the engine is stopping"))

    @property
    def done(self) -> bool:
        unsaid = self._events or self._news or self._chronicle.telling
        return self._draining and not (self.books.requests or self._unresolved or unsaid)

    def health(self) -> Health:
        """Phase, step and gauges; tokens and microseconds are sums since the start."""
        books = self.books
        phase = self._phase()
        gauges = {"running": books.table.running, "waiting": len(books.queue),
                  "waiting_requests": books.queue.requests,
                  "steps": self._step, "suspects": self._suspects.circle,
                  "quarantined": self._suspects.convictions, "worker_restarts": self._restarts,
                  "retained": len(self._chronicle.retained), "ledger_full": bool(self._full),
                  **memory_gauges(books), **self._sums,
                  **self._planner.drafting.gauges()}
        budget = self._start_budget if self._worker is None else STEP_BUDGET_S
        told = {k: float(v) for k, v in gauges.items()}
        observed = self._metrics.gauges(phase != "stepping", self.ledger)
        return Health(phase, self._step, budget, told | observed, self._notice)

    def _phase(self) -> str:
        if self._draining:
            return "draining"
        if self._worker is None:
            return "starting"
        if self._full:
            return "idle"
        if self.books.requests or self._unresolved:
            return "stepping"
        return "idle" if self._step else "ready"

    # --- what is remembered ----------------------------------------------------------------------

    def _revive(self, past: Past) -> None:
        """Go on from what the ledger says: its requests wait, with all that they have emitted."""
        self.next_sid = past.history.next_sid
        for request in revive(past, self._config.request_timeout):
            if request.live:
                self.books.enlist(request)
                self._deadlines.add(request, len(self.books.requests))
            else:
                self._chronicle.over([request], past.now)
        live = self.books.requests.values()
        self._news.extend(Send(DETOKENIZER, message)
                          for message in self._chronicle.tell_all(live, self.books.table))
        if live:
            tokens = self._metrics.resumed(self.books.sequences.values())
            self._notice = (f"resumed {len(live)} unfinished requests from the ledger, with "
                            f"{tokens} tokens emitted")

    def alive(self) -> Iterator[Record]:
        """Records that say all that must not be forgotten."""
        return self._chronicle.alive(self.books.requests.values(), self.books.table)

    def on_ledger_full(self, why: str, now: float) -> None:
        """The ledger takes no more: plan nothing, tell nothing but refusals."""
        self._full = self._notice = why

    def on_ledger_ok(self, now: float) -> None:
        """It does again."""
        self._full, self._notice = "", "the ledger takes records again"

    def _on_hello(self, hello: Hello, now: float) -> None:
        """A new detokenizer, or one that has missed something."""
        self._chronicle.over(self.books.over, now)
        live = self.books.requests.values()
        self._news.extend(Send(DETOKENIZER, message)
                          for message in self._chronicle.tell_all(live, self.books.table))

    def _on_recall(self, recall: Recall, now: float) -> None:
        self._chronicle.over(self.books.over, now)
        key = recall.client, recall.rid
        request = self.books.requests.get(key) or self._chronicle.retained.get(key)
        if request is None:
            self._news.append(Send(DETOKENIZER, Unknown(recall.rid, recall.client)))
        else:
            self._tell_again(request)

    def _tell_again(self, request: Request) -> None:
        opens = self._chronicle.openings(request, self.books.table, again=True)
        self._news.extend(Send(DETOKENIZER, message) for message in opens)

    # --- requests --------------------------------------------------------------------------------

    def _on_submit(self, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it. One that is already here (a resend) is left alone; if it
        is over, it is told again."""
        key = submit.client, submit.rid
        if key in self.books.requests:
            return
        self._chronicle.over(self.books.over, now)
        known = self._chronicle.retained.get(key)
        if known is not None:
            self._tell_again(known)
            return
        request = open_request(submit, self.next_sid)
        self.next_sid += submit.n
        objection = self._objection(request, now)
        if objection is not None:
            self._turn_away(request, objection, now)
            return
        self._chronicle.admitted(request)
        self._news.extend(Send(DETOKENIZER, opening(s, self._epoch)) for s in request.choices)
        self.books.enlist(request)
        self._deadlines.add(request, len(self.books.requests))
        if self._worker is not None:
            self._cap(request, self._worker)
        self._sums["prompt_tokens"] += len(request.prompt)

    def _objection(self, request: Request, now: float) -> Objection | None:
        """What there is against a new request."""
        submit, books, most = request.submit, self.books, self._config.max_num_queued_reqs
        if not submit.prompt or len(submit.prompt) % 4:
            return Objection("invalid_request", f"prompt: {len(submit.prompt)} bytes are no tokens "
                             "(4 bytes each)")
        if self._draining:
            return Objection("unavailable", "the engine is stopping")
        if self._full:
            return Objection("unavailable", self._full)
        if books.queue.requests >= most + books.table.free:
            return Objection("queue_full", f"{most} requests are waiting already")
        ahead = self._ahead()
        if cannot_meet(submit.deadline, now, ahead, len(request.prompt), self._best_rate):
            return Objection("deadline", "the deadline cannot be met: at its best the engine "
                             f"computes {self._best_rate:,.0f} tokens a second, and {ahead} wait "
                             f"before these {len(request.prompt)}")
        return None if self._worker is None else misfit(request, self._worker, books.memory)

    def _turn_away(self, request: Request, objection: Objection, now: float) -> None:
        """Refuse a request that never was on the ring: told at once, whatever the ledger does."""
        events = [_error(choice.sid, objection) for choice in request.choices]
        self._metrics.ended(events, now)
        told = self._refusals if self._full else self._news
        told.extend(Send(DETOKENIZER, opening(s, self._epoch)) for s in request.choices)
        told.append(Send(DETOKENIZER, self._batch(events)))

    def _ahead(self) -> int:
        """Tokens that are computed before a new request's, whatever happens."""
        books = self.books
        extending = sum(s.total - s.computed for s in books.extending)
        # Only first come, first served lets nobody overtake; else nothing is sure.
        return books.queue.tokens + extending if books.queue.policy == "fcfs" else 0

    def _cap(self, request: Request, worker: Ready) -> None:
        """Where max_tokens would go past what can be held, the completion ends earlier, with
        `length`: at once, if it has got so far already (on a worker that had more room)."""
        request.cap(longest(worker, self.books.memory))
        for sequence in list(request.live.values()):
            if len(request.prompt) + len(sequence.emitted) >= sequence.end:
                self._end(sequence, SequenceEvent(sid=sequence.sid, finish_reason="length"))

    def _fit_all(self) -> None:
        if self._worker is not None:
            for request in list(self.books.requests.values()):
                objection = misfit(request, self._worker, self.books.memory)
                if objection is None:
                    self._cap(request, self._worker)
                else:
                    self._refuse(request, objection)

    def _on_cancel(self, cancel: Cancel) -> None:
        request = self.books.requests.get((cancel.client, cancel.rid))
        if request is not None:
            self._end_request(request, "abort")

    def _on_stop(self, stop: Stop) -> None:
        """A stop string ended the sequence after `stop.tokens` tokens: later ones do not count."""
        sequence = self.books.sequences.get(stop.sid)
        if sequence is not None:
            self._end(sequence, SequenceEvent(sid=stop.sid, finish_reason="stop"))

    def _on_flush(self, flush: Flush) -> None:
        freed, kept = self.books.memory.flush()
        self._news.append(Send(DETOKENIZER, Reply(
            flush.rid, flush.client, msgspec.json.encode({"pages": freed, "kept": kept}))))

    def _refuse(self, request: Request, objection: Objection) -> None:
        for sequence in list(request.live.values()):
            self._end(sequence, _error(sequence.sid, objection))

    def _end_request(self, request: Request, reason: str) -> None:
        for sequence in list(request.live.values()):
            self._end(sequence, SequenceEvent(sid=sequence.sid, finish_reason=reason))

    def _end(self, sequence: Sequence, event: SequenceEvent) -> None:
        self.books.end(sequence)
        if drafts := drafts_of(sequence):
            event = msgspec.structs.replace(event, **drafts)
        sequence.finish = event
        self._events.append(event)

    def _batch(self, events: list[SequenceEvent]) -> TokenBatch:
        return TokenBatch(step=self._step, sids=b"", starts=b"", counts=b"", tokens=b"",
                          events=events, epoch=self._epoch)

    def _tell(self, batch: TokenBatch) -> None:
        self._chronicle.told(batch)
        self._news.append(Send(DETOKENIZER, batch))

    # --- the books -------------------------------------------------------------------------------

    def _audit(self) -> None:
        """With debug_memory: all the books, at idle and every so many steps. Else, each time the
        engine falls idle, what can be afforded: pages in doubt are put out of use, and it is said.
        """
        idle = not (self.books.table.running or self._unresolved)
        if self._memory.debug_memory:
            if idle or self._step >= self._audited + self._memory.audit_every:
                self.books.audit()
                self._audited = self._step
        elif idle and self._audited != self._step:
            self._audited = self._step
            notice = self.books.memory.settle()
            if notice is not None:
                self._notice = notice
                self._fit_all()

    # --- the worker ------------------------------------------------------------------------------

    def _on_ready(self, ready: Ready) -> None:
        """A worker is there, empty. Whatever ran on one before it will be recomputed. (One that was
        taken up already says so once more when it is asked.)

        There are no more slots than a step may decode: so every running sequence decodes in every
        step, and while one still extends at least a token of the budget is left for it.
        """
        if self._worker is not None and ready.epoch <= self._worker.epoch:
            return
        self._restarts += self._worker is not None
        books = self.books
        convicted = self._accuse()
        self._unresolved.clear()
        while (sequence := books.table.latest()) is not None:
            books.preempt(sequence, "worker")
            self._metrics.resumed([sequence])
        window = 1 + ready.drafts
        slots = min(self._config.max_num_seqs, ready.slots - 1,
                    max(self._config.max_num_batched_tokens // window, 1))
        windows = tuple(group.window for group in ready.groups)
        books.furnish(SlotTable(slots + 1, ready.page_size, window, windows),
                      ready.groups, ready.page_size, ready.recurrent, ready.checkpoints)
        self._planner.start_over(Drafting(ready.drafts, self._fixed))
        self._worker = ready
        self._orders.append(Send(WORKER, Reset(self._epoch, ready.epoch)))
        if convicted is not None:
            self._refuse(convicted, QUARANTINE)
        self._fit_all()

    def _accuse(self) -> Request | None:
        """The worker has died: who was in its unanswered plans is a suspect. Returns the request
        that is to be ended for it, if any."""
        sequences = self.books.sequences
        planned = {sid for record in self._unresolved
                   for sid in (*record.sids.tolist(), *record.extends.values())}
        guilty = self._suspects.died(planned & sequences.keys(), sequences.keys())
        return None if guilty is None else sequences[guilty].request

    def _judge(self) -> None:
        """While somebody is under suspicion, nobody else runs."""
        if not (self._suspects.circle or self.books.trial):
            return
        self._suspects.settle(self.books.sequences.keys())
        trial = self.books.trial = self._suspects.trial
        if trial is not None:
            for sequence in list(self.books.table.sequences):
                if sequence is not None and sequence.sid not in trial:
                    self.books.preempt(sequence, "worker")

    def _on_result(self, result: StepResult, now: float) -> None:
        """Results come in the order of the plans; any other is of another life."""
        if (result.epoch != self._epoch or not self._unresolved
                or self._unresolved[0].step != result.step):
            return
        record = self._unresolved.popleft()
        if result.busy_us:
            self._best_rate = max(self._best_rate, record.computed * 1e6 / result.busy_us)
        self._metrics.result(record, result, now)
        credited = resolve(self.books, record, result)
        if self._planner.drafting.most:
            self._learn(record, result, credited.verified)
        self._sums["tokens"] += credited.tokens
        self._sums["busy_us"] += result.busy_us
        self._sums["idle_us"] += result.idle_us
        if credited.batch is not None:
            if credited.batch.events:
                self._metrics.ended(credited.batch.events, now)
            self._tell(credited.batch)
        if self._suspects.circle:
            self._suspects.decoded(record.sids[record.firsts:].tolist())

    def _learn(self, record: PlanRecord, result: StepResult, verified: Verified | None) -> None:
        """What a step tells of drafts: how many were right, and what making them cost."""
        drafting = self._planner.drafting
        if verified is not None:
            drafting.verified(verified)
        if record.window == 1 + record.drafts and not record.extends:
            drafting.timed(record.decodes, record.drafts, result.busy_us)


def build(context: Context) -> SchedulerCore:
    """The scheduler of an engine; its worker tells it, by `Ready`, what there is to share out.

    With a ledger it goes on from there. Raises `BadConfig` and `EngineUnavailable` if that cannot
    be."""
    ledger = open_ledger(context)
    if ledger is None:
        return SchedulerCore(context)
    core = SchedulerCore(context, Past(ledger.history, ledger.same_boot, monotonic()))
    core.ledger = ledger
    return core


def _error(sid: int, objection: Objection) -> SequenceEvent:
    return SequenceEvent(sid=sid, finish_reason="error", error_code=objection.code,
                         error=objection.why)
