"""Engines and clients that are broken on purpose: the battery must notice.

Without fencing, a detokenizer listens to what a dead scheduler says. Without dedup, a client takes
what it is told once more for new.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from actorium.actors.client.pending import ChoiceState, PendingRequest
from actorium.actors.core import Context
from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.messages import Delta

UNFENCED = {"detokenizer": "actorium.tools.chaos.teeth:build_unfenced"}
"""Roles for `rig`."""


class Unfenced(DetokenizerCore):
    """Believes every scheduler, however old."""

    def _fenced(self, epoch: int) -> bool:
        return False


def build_unfenced(context: Context) -> Unfenced:
    return Unfenced(context)


def _apply_all(pending: PendingRequest, choice: ChoiceState, delta: Delta) -> None:
    """`PendingRequest._apply` that cuts nothing off."""
    tokens = array("i", delta.tokens).tolist()
    choice.num_tokens = delta.start + len(tokens)
    choice.num_chars += len(delta.text)
    pending._append(choice, delta, delta.text, tokens, delta.logprobs)


@contextmanager
def no_dedup() -> Iterator[None]:
    """Meanwhile the clients of this process drop nothing that they know already."""
    before = PendingRequest._apply
    PendingRequest._apply = _apply_all  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PendingRequest._apply = before  # type: ignore[method-assign, assignment]
