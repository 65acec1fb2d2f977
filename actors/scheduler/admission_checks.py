"""What a request may ask for, given what the worker holds."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.messages import Ready, SequenceEvent
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.request_state import RequestState
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.scheduling_policy import misses_deadline


class Rejection(NamedTuple):
    """Why a request is refused."""

    code: str
    """An `errors.CODES` name."""
    why: str

    def event(self, sid: int) -> SequenceEvent:
        """The end of a sequence for this reason."""
        return SequenceEvent(sid=sid, finish_reason="error", error_code=self.code, error=self.why)


def check_fits(request: RequestState, worker: Ready, memory: KVCacheManager) -> Rejection | None:
    """What keeps a prompt from ever running, alone."""
    length, window = len(request.prompt), 1 + worker.drafts
    capacity = memory.capacity(window)
    if length + 1 > worker.max_model_len:
        return Rejection("context_overflow", f"prompt: {length} tokens and one to generate exceed "
                         f"max_model_len={worker.max_model_len}")
    if length > capacity:
        return Rejection("context_overflow", f"prompt: {length} tokens need "
                         f"{memory.pages_for(length + (window > 1))} pages of {memory.page_size}, "
                         f"the pool has {memory.pages_for(capacity)}")
    return None


def max_sequence_tokens(worker: Ready, memory: KVCacheManager) -> int:
    """Tokens that prompt and completion of a sequence may have together.

    Alone in the pool a sequence of length n needs pages for n-1 tokens, for n where drafts are
    made.
    """
    return min(worker.max_model_len, memory.capacity(1 + worker.drafts) + 1)


def check_admission(request: RequestState, now: float, state: SchedulerState, worker: Ready | None,
                    rate: float, closed: str) -> Rejection | None:
    """What there is against a new request. rate: most tokens a second that the engine has shown;
    closed: why nobody is let in; empty = they are."""
    submit, most = request.submit, state.most_waiting
    if not submit.prompt or len(submit.prompt) % 4:
        return Rejection("invalid_request",
                         f"prompt: {len(submit.prompt)} bytes are no tokens (4 bytes each)")
    if closed:
        return Rejection("unavailable", closed)
    full = state.queue.requests >= most + state.table.free
    if full and not state.queue.owes_a_place(submit.tenant, most):
        return Rejection("queue_full", f"{most} requests are waiting already")
    ahead = _ahead(state)
    if misses_deadline(submit.deadline, now, ahead, len(request.prompt), rate):
        return Rejection("deadline", "the deadline cannot be met: at its best the engine computes "
                         f"{rate:,.0f} tokens a second, and {ahead} wait before these "
                         f"{len(request.prompt)}")
    return None if worker is None else check_fits(request, worker, state.memory)


def _ahead(state: SchedulerState) -> int:
    """Tokens that are computed before a new request's, whatever happens."""
    extending = sum(s.total - s.computed for s in state.extending)
    # Only first come, first served lets nobody overtake; else nothing is sure.
    return state.queue.tokens + extending if state.queue.policy == "fcfs" else 0
