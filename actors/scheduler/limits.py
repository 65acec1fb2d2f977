"""What a request may ask for, given what the worker holds."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.messages import Ready, SequenceEvent
from actorium.actors.scheduler.books import Books
from actorium.actors.scheduler.cache.kv_cache_manager import Memory
from actorium.actors.scheduler.request_state import Request
from actorium.actors.scheduler.scheduling_policy import cannot_meet


class Objection(NamedTuple):
    """Why a request is refused."""

    code: str
    """An `errors.CODES` name."""
    why: str

    def event(self, sid: int) -> SequenceEvent:
        """The end of a sequence for this reason."""
        return SequenceEvent(sid=sid, finish_reason="error", error_code=self.code, error=self.why)


def misfit(request: Request, worker: Ready, memory: Memory) -> Objection | None:
    """What keeps a prompt from ever running, alone."""
    length, window = len(request.prompt), 1 + worker.drafts
    capacity = memory.capacity(window)
    if length + 1 > worker.max_model_len:
        return Objection("context_overflow", f"prompt: {length} tokens and one to generate exceed "
                         f"max_model_len={worker.max_model_len}")
    if length > capacity:
        return Objection("context_overflow", f"prompt: {length} tokens need "
                         f"{memory.pages_for(length + (window > 1))} pages of {memory.page_size}, "
                         f"the pool has {memory.pages_for(capacity)}")
    return None


def longest(worker: Ready, memory: Memory) -> int:
    """Tokens that prompt and completion of a sequence may have together.

    Alone in the pool a sequence of length n needs pages for n-1 tokens, for n where drafts are
    made.
    """
    return min(worker.max_model_len, memory.capacity(1 + worker.drafts) + 1)


def objection_to(request: Request, now: float, books: Books, worker: Ready | None, rate: float,
                 closed: str) -> Objection | None:
    """What there is against a new request. rate: most tokens a second that the engine has shown;
    closed: why nobody is let in; empty = they are."""
    submit, most = request.submit, books.most_waiting
    if not submit.prompt or len(submit.prompt) % 4:
        return Objection("invalid_request",
                         f"prompt: {len(submit.prompt)} bytes are no tokens (4 bytes each)")
    if closed:
        return Objection("unavailable", closed)
    full = books.queue.requests >= most + books.table.free
    if full and not books.queue.owes_a_place(submit.tenant, most):
        return Objection("queue_full", f"{most} requests are waiting already")
    ahead = _ahead(books)
    if cannot_meet(submit.deadline, now, ahead, len(request.prompt), rate):
        return Objection("deadline", "the deadline cannot be met: at its best the engine computes "
                         f"{rate:,.0f} tokens a second, and {ahead} wait before these "
                         f"{len(request.prompt)}")
    return None if worker is None else misfit(request, worker, books.memory)


def _ahead(books: Books) -> int:
    """Tokens that are computed before a new request's, whatever happens."""
    extending = sum(s.total - s.computed for s in books.extending)
    # Only first come, first served lets nobody overtake; else nothing is sure.
    return books.queue.tokens + extending if books.queue.policy == "fcfs" else 0
