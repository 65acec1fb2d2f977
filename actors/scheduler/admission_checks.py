"""Why a request is rejected when it comes: what the worker cannot hold, a full queue, a deadline
that cannot be met."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.messages import Ready, SequenceEvent
from actorium.actors.scheduler.cache.kv_cache_manager import KVCacheManager
from actorium.actors.scheduler.request_state import RequestState
from actorium.actors.scheduler.scheduler_state import SchedulerState


class Rejection(NamedTuple):
    """Why a request is refused."""

    code: str
    """An `errors.CODES` name."""
    why: str

    def event(self, sid: int) -> SequenceEvent:
        """The end of a sequence for this reason."""
        return SequenceEvent(sid=sid, finish_reason="error", error_code=self.code, error=self.why)


def check_fits(request: RequestState, worker: Ready, kv_cache: KVCacheManager) -> Rejection | None:
    """Why a prompt cannot run even alone; None if it can."""
    length, window = len(request.prompt), 1 + worker.drafts
    capacity = kv_cache.capacity(window)
    if length + 1 > worker.max_model_len:
        return Rejection("context_overflow", f"prompt: {length} tokens and one to generate exceed "
                         f"max_model_len={worker.max_model_len}")
    if length > capacity:
        return Rejection("context_overflow", f"prompt: {length} tokens need "
                         f"{kv_cache.pages_for(length + (window > 1))} pages of "
                         f"{kv_cache.page_size}, "
                         f"the pool has {kv_cache.pages_for(capacity)}")
    return None


def max_sequence_tokens(worker: Ready, kv_cache: KVCacheManager) -> int:
    """Tokens that prompt and completion of a sequence may have together.

    Alone in the pool a sequence of length n needs pages for n-1 tokens, for n where drafts are
    made.
    """
    return min(worker.max_model_len, kv_cache.capacity(1 + worker.drafts) + 1)


def check_admission(request: RequestState, now: float, state: SchedulerState, worker: Ready | None,
                    rate: float, draining: bool) -> Rejection | None:
    """Why a new request is rejected; None if it is accepted. rate: most tokens a second that the
    engine has computed; draining: all are rejected."""
    submit, most = request.submit, state.max_waiting
    if not submit.prompt or len(submit.prompt) % 4:
        return Rejection("invalid_request",
                         f"prompt: {len(submit.prompt)} bytes are no tokens (4 bytes each)")
    if draining:
        return Rejection("unavailable", "the engine is stopping")
    full = state.queue.requests >= most + state.table.num_free
    if full and not state.queue.has_fair_share_left(submit.tenant, most):
        return Rejection("queue_full", f"{most} requests are waiting already")
    ahead = _ahead(state)
    if misses_deadline(submit.deadline, now, ahead, len(request.prompt), rate):
        return Rejection("deadline", "the deadline cannot be met: at its best the engine computes "
                         f"{rate:,.0f} tokens a second, and {ahead} wait before these "
                         f"{len(request.prompt)}")
    return None if worker is None else check_fits(request, worker, state.kv_cache)


def _ahead(state: SchedulerState) -> int:
    """Tokens that are computed before a new request's, whatever happens."""
    extending = sum(s.total - s.computed for s in state.prefilling)
    # Only first come, first served lets nobody overtake; else nothing is sure.
    return state.queue.tokens + extending if state.queue.policy == "fcfs" else 0


def misses_deadline(deadline: float | None, now: float, tokens_ahead: int, own_tokens: int,
                    tokens_per_second: float | None) -> bool:
    """True if a deadline passes before the work is done even by an optimistic estimate.

    `tokens_ahead` are to be computed before it begins, `own_tokens` until it ends; the rate is the
    best that the engine has shown, None (or 0) = not known: then only the past cannot be met.
    Times in seconds of one clock; a deadline of None can always be met.
    """
    if deadline is None:
        return False
    if now >= deadline:
        return True
    if not tokens_per_second:
        return False
    return now + (tokens_ahead + own_tokens) / tokens_per_second > deadline
