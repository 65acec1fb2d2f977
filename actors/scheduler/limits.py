"""What a request may ask for, given what the worker holds."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.messages import Ready
from actorium.actors.scheduler.memory import Memory
from actorium.actors.scheduler.requests import Request


class Objection(NamedTuple):
    """Why a request is refused."""

    code: str
    """An `errors.CODES` name."""
    why: str


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
