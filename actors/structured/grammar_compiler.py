"""Compiles grammars on a thread before their requests reach the scheduler's core.

The tokenizer has compiled each grammar once as a check; compiling it again here takes up to a
second, and all sequences would wait. So a request whose grammar is not compiled yet waits in front
of the core until it is. For the core, and for what records it, the request arrives then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from actorium.actors.core import Core, CoreObserver, Health, Send
from actorium.actors.errors import ActoriumError
from actorium.actors.messages import Cancel, Submit
from actorium.actors.runtime.inflight_journal import InflightJournal
from actorium.actors.runtime.offload import Offload, OffloadJob
from actorium.actors.scheduler.recovery.request_faults import grammar_name
from actorium.actors.structured.structured_output import PreparedGrammar, StructuredOutputManager

Post = Callable[..., None]


class GrammarCompiler(CoreObserver):
    """Wraps the scheduler's core."""

    def __init__(self, core: Core, masking: StructuredOutputManager, most: int) -> None:
        """most: requests that may wait; the core compiles for the next ones itself, and all others
        wait for that."""
        super().__init__(core)
        self._structured_output = masking
        own = core.journal
        self._journal = own if isinstance(own, InflightJournal) else InflightJournal(
            actor="scheduler")
        self._offload = Offload(self._journal)
        self._post: Post | None = None
        self._jobs: dict[str, OffloadJob[PreparedGrammar]] = {}
        """Jobs by grammar."""
        self._waiting: list[Submit] = []
        self._most = most

    def on_start(self, post: Post) -> None:
        """post: wakes the core, from any thread."""
        self._post = post

    def on_message(self, message: Any, now: float) -> None:
        if isinstance(message, Submit) and self._waits(message):
            return
        if isinstance(message, Cancel):
            self._cancel(message)
        self._core.on_message(message, now)

    def _cancel(self, cancel: Cancel) -> None:
        """Grammars that no other request waits for, and that no thread has begun to compile, are
        not compiled."""
        wait = [submit for submit in self._waiting
                if (submit.client, submit.rid) != (cancel.client, cancel.rid)]
        if len(wait) == len(self._waiting):
            return
        self._waiting = wait
        for grammar in self._jobs.keys() - {submit.grammar for submit in wait}:
            if self._jobs[grammar].cancel():
                del self._jobs[grammar]

    def _waits(self, submit: Submit) -> bool:
        grammar, masking, post = submit.grammar, self._structured_output, self._post
        if (not grammar or post is None or masking.knows(grammar)
                or len(self._waiting) >= self._most):
            return False
        if self._journal.convictions and self._journal.convicted(grammar_name(grammar)):
            return False  # the core reports it
        if grammar not in self._jobs:
            self._jobs[grammar] = self._offload.submit(partial(masking.prepare, grammar), post,
                                                 grammar_name(grammar))
        self._waiting.append(submit)
        return True

    def on_wake(self, now: float) -> Sequence[Send]:
        if self._jobs:
            self._take_in(now)
        return self._core.on_wake(now)

    def _take_in(self, now: float) -> None:
        for grammar in [grammar for grammar, job in self._jobs.items() if job.done]:
            job = self._jobs.pop(grammar)
            self._journal.finished(grammar_name(grammar))
            with suppress(ActoriumError):  # there is no vocabulary, as the core will report
                self._structured_output.add_compiled(grammar, job.result())
        waiting, self._waiting = self._waiting, []
        for submit in waiting:
            if submit.grammar in self._jobs:
                self._waiting.append(submit)
            else:
                self._core.on_message(submit, now)

    @property
    def done(self) -> bool:
        return not self._waiting and self._core.done

    def health(self) -> Health:
        """Reports the core's health, counting requests that wait for their grammar among the
        waiting."""
        health = self._core.health()
        if not self._waiting:
            return health
        sequences, gauges = sum(submit.n for submit in self._waiting), dict(health.gauges)
        for name, more in (("waiting", sequences), ("waiting_deferred", sequences),
                           ("waiting_requests", len(self._waiting))):
            gauges[name] = gauges.get(name, 0.0) + more
        return health._replace(gauges=gauges)
