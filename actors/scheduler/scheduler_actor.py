"""The scheduler actor: the core with its ledger and journal, and what a process has around it.

Every message and every wake goes through the same steps, in this order: a replica's link to its
router turns orders into messages; a request whose grammar is not compiled waits, and so does an
order whose adapter is not read; the flight recorder writes down what the core is about to get; the
core. What comes out goes back through the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from actorium.actors.cluster.replica_link import ORDERS, ReplicaLink
from actorium.actors.config.cluster_settings import replica_of
from actorium.actors.core import Context, CoreObserver, Health, Send
from actorium.actors.errors import ActoriumError
from actorium.actors.ledger.committer import open_ledger
from actorium.actors.messages import AbortRequest, AdapterOrder, Ready, Submit
from actorium.actors.recorder.recorder import open_recorder
from actorium.actors.runtime.inflight_journal import InflightJournal, open_journal
from actorium.actors.runtime.offload import Offload, OffloadJob
from actorium.actors.scheduler.adapter_file_reader import AdapterFileReader
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.recovery.recovery_log import PriorRun
from actorium.actors.scheduler.recovery.request_faults import grammar_name
from actorium.actors.structured.structured_output import (
    StructuredOutputManager,
    needs_vocabulary,
    vocabulary,
)

Post = Callable[..., None]


def build(context: Context) -> SchedulerActor:
    """Returns the actor of the role "scheduler". Raises what `build_core` raises."""
    return SchedulerActor(build_core(context), context)


def build_core(context: Context) -> SchedulerCore:
    """Returns the core with its ledger and journal. With a ledger it goes on from there. Raises
    `BadConfig` and `EngineUnavailable` where that cannot be."""
    ledger, load = open_ledger(context), vocabulary(context)
    journal = open_journal(context.run_dir, context.role, context.config.recovery.request_budget)
    prior = None
    if ledger is not None:
        prior = PriorRun(ledger.history, ledger.same_boot, monotonic())
    core = SchedulerCore(context, prior, load, journal)
    core.ledger = ledger
    return core


class SchedulerActor(CoreObserver):
    """A scheduler's core, and the steps around it; see the module."""

    def __init__(self, core: SchedulerCore, context: Context) -> None:
        super().__init__(core)
        config = context.config
        self.recorder = open_recorder(core, context)
        self.compiler = GrammarCompiler(core.masks, core.journal,
                                        config.scheduler.max_num_queued_reqs)
        self.reader = AdapterFileReader(config.adapters, core.state.adapters)
        replica = replica_of(config.cluster)
        self.link = None if replica is None else ReplicaLink(core, replica, context)
        if self.link is not None:
            self.inbox = self.link.inbox
        self.publisher = None
        if config.kv_events.kv_events_endpoint:
            from actorium.actors.scheduler.kv_event_publisher import KVEventPublisher

            self.publisher = KVEventPublisher(
                config.kv_events, core.state, context.epoch,
                0 if replica is None else replica.index)

    # --- messages ---

    def on_message(self, message: Any, now: float) -> None:
        if self.link is not None and isinstance(message, ORDERS):
            message = self.link.on_order(message, now)
            if message is None:
                return
        if isinstance(message, Submit) and self.compiler.takes(message):
            return
        if isinstance(message, AdapterOrder) and self.reader.takes(message):
            return
        if isinstance(message, AbortRequest):
            self.compiler.cancel(message)
        self._deliver(message, now)
        if self.link is not None and isinstance(message, Ready):
            self.link.report_at = now

    def _deliver(self, message: Any, now: float) -> None:
        """Gives a message to the core."""
        if self.link is not None:
            self.link.number(message)
        if self.recorder is None:
            self._core.on_message(message, now)
            return
        self.recorder.on_message(message, now)
        with self.recorder.until_failure():
            self._core.on_message(message, now)

    # --- a wake ---

    def on_wake(self, now: float) -> Sequence[Send]:
        for message in (*self.compiler.pop_ready(), *self.reader.pop_ready()):
            self._deliver(message, now)
        if self.recorder is None:
            sends = self._core.on_wake(now)
        else:
            with self.recorder.until_failure():
                sends = self._core.on_wake(now)
            self.recorder.on_wake(now, sends)
        if self.publisher is not None:
            self.publisher.publish()
        return sends if self.link is None else self.link.on_wake(sends, now, self.health)

    def next_timer(self) -> float | None:
        if self.recorder is not None:
            self.recorder.write()
        due = self._core.next_timer()
        if self.link is None:
            return due
        return self.link.report_at if due is None else min(due, self.link.report_at)

    # --- everything else ---

    def on_start(self, post: Post) -> None:
        self.compiler.on_start(post)
        self.reader.on_start(post)
        if self.publisher is not None:
            self.publisher.on_start(post)

    def drain(self, now: float) -> None:
        self._call("drain", now)

    def on_ledger_full(self, why: str, now: float) -> None:
        self._call("on_ledger_full", now, why)

    def on_ledger_lost(self, why: str, now: float) -> None:
        self._call("on_ledger_lost", now, why)

    def on_ledger_ok(self, now: float) -> None:
        self._call("on_ledger_ok", now)

    def _call(self, name: str, now: float, *args: str) -> None:
        if self.recorder is not None:
            self.recorder.on_call(name, now, *args)
        getattr(self._core, name)(*args, now)

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """Drops messages to a router that does not read: it, or its successor, asks for everything
        later."""
        return (self.link is not None and role == self.link.router) \
            or self._core.on_peer_stuck(role, now)

    def on_peer_back(self, role: str, now: float) -> None:
        if self.link is not None and role == self.link.router:
            self._deliver(self.link.on_router_back(), now)
        else:
            self._core.on_peer_back(role, now)

    @property
    def done(self) -> bool:
        return not self.compiler.waiting and self._core.done

    def health(self) -> Health:
        return self.compiler.counted(self._core.health())


class GrammarCompiler:
    """Requests that wait for their grammars, and the threads that compile them.

    The tokenizer has compiled each grammar once as a check; compiling it again takes up to a
    second, and all sequences would wait. So a request whose grammar is not compiled yet waits in
    front of the core until it is. For the core, and for what records it, the request arrives then.
    """

    def __init__(self, masking: StructuredOutputManager, journal: InflightJournal, most: int
                 ) -> None:
        """most: requests that may wait; the core compiles for the next ones itself, and all others
        wait for that."""
        self.waiting: list[Submit] = []
        self._structured_output, self._journal = masking, journal
        self._offload = Offload(journal)
        self._post: Post | None = None
        self._jobs: dict[str, OffloadJob[Any]] = {}
        """Jobs by grammar."""
        self._most = most

    def on_start(self, post: Post) -> None:
        """post: wakes the core, from any thread."""
        self._post = post

    def cancel(self, abort: AbortRequest) -> None:
        """Drops a request that waits. Grammars that no other request waits for, and that no thread
        has begun to compile, are not compiled."""
        wait = [submit for submit in self.waiting
                if (submit.client, submit.rid) != (abort.client, abort.rid)]
        if len(wait) == len(self.waiting):
            return
        self.waiting = wait
        for grammar in self._jobs.keys() - {submit.grammar for submit in wait}:
            if self._jobs[grammar].cancel():
                del self._jobs[grammar]

    def takes(self, submit: Submit) -> bool:
        """Returns whether a request waits from now on: for its grammar, or for the vocabulary."""
        grammar, masking, post = submit.grammar, self._structured_output, self._post
        if (not needs_vocabulary(submit) or post is None or masking.knows(grammar)
                or len(self.waiting) >= self._most):
            return False
        if self._journal.convictions and self._journal.convicted(grammar_name(grammar)):
            return False  # the core reports it
        if grammar not in self._jobs:
            self._jobs[grammar] = self._offload.submit(partial(masking.prepare, grammar), post,
                                                 grammar_name(grammar))
        self.waiting.append(submit)
        return True

    def pop_ready(self) -> list[Submit]:
        """Returns the requests that have waited long enough: their grammars are compiled, or cannot
        be."""
        if not self._jobs:
            return []
        for grammar in [grammar for grammar, job in self._jobs.items() if job.done]:
            job = self._jobs.pop(grammar)
            self._journal.finished(grammar_name(grammar))
            with suppress(ActoriumError):  # there is no vocabulary, as the core will report
                self._structured_output.add_compiled(grammar, *job.result())
        ready = [submit for submit in self.waiting if submit.grammar not in self._jobs]
        self.waiting = [submit for submit in self.waiting if submit.grammar in self._jobs]
        return ready

    def counted(self, health: Health) -> Health:
        """Returns the core's health, with the requests that wait for their grammar among the
        waiting."""
        if not self.waiting:
            return health
        sequences, gauges = sum(submit.n for submit in self.waiting), dict(health.gauges)
        for name, more in (("waiting", sequences), ("waiting_deferred", sequences),
                           ("waiting_requests", len(self.waiting))):
            gauges[name] = gauges.get(name, 0.0) + more
        return health._replace(gauges=gauges)
