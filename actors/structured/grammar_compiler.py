"""Compiles grammars on a thread before their requests reach the scheduler's core.

The tokenizer has compiled each grammar once as a check; compiling it again here takes up to a
second, and all sequences would wait. So a request whose grammar is not compiled yet waits in front
of the core until it is. For the core, and for what records it, the request arrives then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from actorium.actors.core import Health
from actorium.actors.errors import ActoriumError
from actorium.actors.messages import AbortRequest, Submit
from actorium.actors.runtime.inflight_journal import InflightJournal
from actorium.actors.runtime.offload import Offload, OffloadJob
from actorium.actors.scheduler.recovery.request_faults import grammar_name
from actorium.actors.structured.structured_output import StructuredOutputManager

Post = Callable[..., None]


class GrammarCompiler:
    """Requests that wait for their grammars, and the threads that compile them."""

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
        """Returns whether a request waits for its grammar from now on."""
        grammar, masking, post = submit.grammar, self._structured_output, self._post
        if (not grammar or post is None or masking.knows(grammar)
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
