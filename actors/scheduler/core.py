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
from collections.abc import Sequence as SequenceOf

import msgspec

from actorium.actors.core import Context, Health, Send
from actorium.actors.messages import (
    Cancel,
    Flush,
    Ready,
    Reply,
    Reset,
    SequenceEvent,
    StepResult,
    Stop,
    Submit,
    TokenBatch,
    ToScheduler,
)
from actorium.actors.scheduler.books import Books
from actorium.actors.scheduler.metrics import Metrics
from actorium.actors.scheduler.plans import Planner, PlanRecord
from actorium.actors.scheduler.policy import cannot_meet
from actorium.actors.scheduler.queue import Deadlines
from actorium.actors.scheduler.requests import Request, Sequence, open_request, opening
from actorium.actors.scheduler.results import drafts_of, resolve
from actorium.actors.scheduler.slots import SlotTable
from actorium.actors.scheduler.speculation import Drafting, Verified
from actorium.actors.speculation import parse_speculative

WORKER = "worker-0"
DETOKENIZER = "detokenizer"
STEP_BUDGET_S = 60.0
"""Seconds after which a step without progress counts as hung."""


class SchedulerCore:
    """The actor's logic (see `core.Core`)."""

    inbox = ToScheduler
    front = None

    def __init__(self, context: Context) -> None:
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
        self._next_sid = 1
        self._orders: list[Send] = []
        """To the worker: sent before the news, it is the one who must not wait."""
        self._news: list[Send] = []
        self._events: list[SequenceEvent] = []
        self._best_rate = 0.0
        """Most tokens a second that a step has computed."""
        self._audited = 0
        self._notice = ""
        """What people should know, kept in the health's detail."""
        self._sums = {"tokens": 0, "prompt_tokens": 0, "busy_us": 0, "idle_us": 0}

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

    def on_client(self, client: bytes, message: object, now: float) -> None:
        """The scheduler has no front."""

    def on_wake(self, now: float) -> SequenceOf[Send]:
        """End what is overdue, send as many plans as may be on their way, tell the news."""
        for request in self._deadlines.expired(now):
            self._end_request(request, "deadline")
        while self._worker is not None and len(self._unresolved) < self._depth:
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
            self._news.append(Send(DETOKENIZER, TokenBatch(
                step=self._step, sids=b"", starts=b"", counts=b"", tokens=b"",
                events=self._events)))
            self._events = []
        self._audit()
        out = self._orders + self._news
        self._orders, self._news = [], []
        return out

    def next_timer(self) -> float | None:
        """The earliest deadline."""
        return self._deadlines.next()

    def drain(self, now: float) -> None:
        """Refuse what comes from now on, finish what is here (if there is a worker to do it)."""
        self._draining = True
        if self._worker is None:
            for request in list(self.books.requests.values()):
                self._refuse(request, "unavailable", "the engine is stopping")

    @property
    def done(self) -> bool:
        unsaid = self._events or self._news
        return self._draining and not (self.books.requests or self._unresolved or unsaid)

    def health(self) -> Health:
        """Phase, step and gauges; tokens and microseconds are sums since the start."""
        books = self.books
        phase = self._phase()
        gauges = {"running": books.table.running, "waiting": len(books.queue),
                  "waiting_requests": books.queue.requests,
                  "steps": self._step, **memory_gauges(books), **self._sums,
                  **self._planner.drafting.gauges()}
        budget = self._start_budget if self._worker is None else STEP_BUDGET_S
        told = {k: float(v) for k, v in gauges.items()}
        return Health(phase, self._step, budget, told | self._metrics.gauges(phase != "stepping"),
                      self._notice)

    def _phase(self) -> str:
        if self._draining:
            return "draining"
        if self._worker is None:
            return "starting"
        if self.books.requests or self._unresolved:
            return "stepping"
        return "idle" if self._step else "ready"

    # --- requests --------------------------------------------------------------------------------

    def _on_submit(self, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it; one that is already here (a resend) is left alone."""
        if (submit.client, submit.rid) in self.books.requests:
            return
        request = open_request(submit, self._next_sid)
        self._next_sid += submit.n
        self._news.extend(Send(DETOKENIZER, opening(s)) for s in request.live.values())
        limit = self._config.max_num_queued_reqs + self.books.table.free
        full = self.books.queue.requests >= limit
        ahead = self._ahead()
        self.books.enlist(request)
        self._deadlines.add(request, len(self.books.requests))
        if not submit.prompt or len(submit.prompt) % 4:
            self._refuse(request, "invalid_request",
                         f"prompt: {len(submit.prompt)} bytes are no tokens (4 bytes each)")
        elif self._draining:
            self._refuse(request, "unavailable", "the engine is stopping")
        elif full:
            self._refuse(request, "queue_full",
                         f"{self._config.max_num_queued_reqs} requests are waiting already")
        elif cannot_meet(submit.deadline, now, ahead, len(request.prompt), self._best_rate):
            self._refuse(request, "deadline", "the deadline cannot be met: at its best the engine "
                         f"computes {self._best_rate:,.0f} tokens a second, and {ahead} wait "
                         f"before these {len(request.prompt)}")
        elif self._worker is not None:
            self._fit(request, self._worker)
        if request.live:
            self._sums["prompt_tokens"] += len(request.prompt)

    def _ahead(self) -> int:
        """Tokens that are computed before a new request's, whatever happens."""
        books = self.books
        extending = sum(s.total - s.computed for s in books.extending)
        # Only first come, first served lets nobody overtake; else nothing is sure.
        return books.queue.tokens + extending if books.queue.policy == "fcfs" else 0

    def _fit(self, request: Request, worker: Ready) -> None:
        """Refuse a prompt that can never run; cap max_tokens so that the rest can, alone.

        Alone in the pool a sequence of length n needs pages for n-1 tokens, for n where drafts are
        made. Where max_tokens would go past that or past max_model_len, the completion ends
        earlier, with `length`: at once, if it has got so far already (on a worker that had more
        room).
        """
        length, memory = len(request.prompt), self.books.memory
        window = 1 + worker.drafts
        capacity = memory.capacity(window)
        if length + 1 > worker.max_model_len:
            self._refuse(request, "context_overflow",
                         f"prompt: {length} tokens and one to generate exceed "
                         f"max_model_len={worker.max_model_len}")
        elif length > capacity:
            self._refuse(request, "context_overflow",
                         f"prompt: {length} tokens need {memory.pages_for(length + (window > 1))} "
                         f"pages of {memory.page_size}, the pool has "
                         f"{memory.pages_for(capacity)}")
        else:
            request.cap(min(worker.max_model_len, capacity + 1))
            for sequence in list(request.live.values()):
                if length + len(sequence.emitted) >= sequence.end:
                    self._end(sequence, SequenceEvent(sid=sequence.sid, finish_reason="length"))

    def _fit_all(self) -> None:
        if self._worker is not None:
            for request in list(self.books.requests.values()):
                self._fit(request, self._worker)

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

    def _refuse(self, request: Request, code: str, why: str) -> None:
        for sequence in list(request.live.values()):
            self._end(sequence, SequenceEvent(sid=sequence.sid, finish_reason="error",
                                              error_code=code, error=why))

    def _end_request(self, request: Request, reason: str) -> None:
        for sequence in list(request.live.values()):
            self._end(sequence, SequenceEvent(sid=sequence.sid, finish_reason=reason))

    def _end(self, sequence: Sequence, event: SequenceEvent) -> None:
        self.books.end(sequence)
        if drafts := drafts_of(sequence):
            event = msgspec.structs.replace(event, **drafts)
        self._events.append(event)

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
        """A worker is there, empty. Whatever ran on one before it will be recomputed.

        There are no more slots than a step may decode: so every running sequence decodes in every
        step, and while one still extends at least a token of the budget is left for it.
        """
        books = self.books
        self._unresolved.clear()
        while (sequence := books.table.latest()) is not None:
            books.preempt(sequence, "worker")
        window = 1 + ready.drafts
        slots = min(self._config.max_num_seqs, ready.slots - 1,
                    max(self._config.max_num_batched_tokens // window, 1))
        windows = tuple(group.window for group in ready.groups)
        books.furnish(SlotTable(slots + 1, ready.page_size, window, windows),
                      ready.groups, ready.page_size, ready.recurrent, ready.checkpoints)
        self._planner.start_over(Drafting(ready.drafts, self._fixed))
        self._worker = ready
        self._orders.append(Send(WORKER, Reset(epoch=self._epoch)))
        self._fit_all()

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
            self._news.append(Send(DETOKENIZER, credited.batch))

    def _learn(self, record: PlanRecord, result: StepResult, verified: Verified | None) -> None:
        """What a step tells of drafts: how many were right, and what making them cost."""
        drafting = self._planner.drafting
        if verified is not None:
            drafting.verified(verified)
        if record.window == 1 + record.drafts and not record.extends:
            drafting.timed(record.decodes, record.drafts, result.busy_us)


def memory_gauges(books: Books) -> dict[str, float]:
    """Pages by state (all groups together), what the cache saved, and preemptions by cause."""
    pools, tree = books.memory.pools, books.memory.tree
    causes = {f"preemptions_{cause}": books.preemptions[cause]
              for cause in ("memory", "priority", "forced", "worker")}
    return {"free_pages": sum(p.free for p in pools), "used_pages": sum(p.used for p in pools),
            "held_pages": sum(p.held for p in pools), "cached_pages": sum(p.cached for p in pools),
            "quarantined_pages": sum(p.quarantined for p in pools),
            "cache_hit_tokens": books.hits, "cache_lookup_tokens": books.looked_up,
            "checkpoints": books.memory.checkpoints.held,
            "checkpoints_saved": books.memory.checkpoints.saved,
            "checkpoints_evicted": books.memory.checkpoints.evicted,
            "evicted_pages": 0 if tree is None else tree.stats.evictions,
            "preemptions": books.preemptions.total(), **causes}


def build(context: Context) -> SchedulerCore:
    """The scheduler of an engine; its worker tells it, by `Ready`, what there is to share out."""
    return SchedulerCore(context)
