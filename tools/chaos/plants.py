"""Actors and clients that are broken on purpose.

Actors that fail in the middle of their work on some requests: by an exception, by hanging, or by
SIGKILL, as from the kernel's OOM killer. The fault is planted where each actor works on one
request; everything around it is the actor's own. A prompt triggers it by one of the tokens in
`POISONS`, which no other prompt has.

And some that the battery must detect: without fencing, a detokenizer accepts batches of a dead
scheduler; without dedup, a client takes repeated deltas for new ones.
"""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from actorium.actors.client.pending import ChoiceState, PendingRequest
from actorium.actors.core import Context, Core
from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.messages import Delta


def _raise() -> None:
    raise ValueError("planted")


def _hang() -> None:
    while True:
        pass


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


EXCEPTION, HANG, KILL = 510, 509, 508
POISONS: dict[int, Callable[[], None]] = {EXCEPTION: _raise, HANG: _hang, KILL: _kill}
BEGUN = 3
"""Tokens that have become text before the detokenizer fails: in the middle of a stream."""


def fail(tokens: Collection[int]) -> None:
    """Fails in the way that a poison among the tokens asks for; without any, does nothing."""
    for token, how in POISONS.items():
        if token in tokens:
            how()


def tokenizer(ctx: Context) -> Core:
    """Builds a tokenizer that fails when it has encoded a request's prompt."""
    from actorium.actors.tokenizer.core import build
    from actorium.actors.tokenizer.prompt_encoder import EncodedPrompt, PromptEncoder

    usual = PromptEncoder._prompt

    def prompt(prompts: PromptEncoder, message: Any, render: Any) -> EncodedPrompt:
        found = usual(prompts, message, render)
        fail(found.ids)
        return found

    PromptEncoder._prompt = prompt  # type: ignore[method-assign, assignment]
    return build(ctx)


def detokenizer(ctx: Context) -> Core:
    """Builds a detokenizer that fails on a sequence that has begun."""
    from actorium.actors.detokenizer.core import build
    from actorium.actors.detokenizer.output_sequence import OutputSequence

    usual = OutputSequence.append_tokens

    def take(seq: OutputSequence, tokens: Any, stop_token: int | None = None) -> bool:
        if seq.seen + len(tokens) > BEGUN:
            fail(array("i", seq._prompt))
        return usual(seq, tokens, stop_token)

    OutputSequence.append_tokens = take  # type: ignore[method-assign, assignment]
    return build(ctx)


def scheduler(ctx: Context) -> Core:
    """Builds a scheduler that fails as it gives a sequence a slot."""
    from actorium.actors.scheduler.scheduler_actor import build
    from actorium.actors.scheduler.scheduler_state import SchedulerState

    usual = SchedulerState.admit

    def admit(state: SchedulerState, sequence: Any) -> Any:
        made = usual(state, sequence)
        fail(sequence.request.prompt.tolist())
        return made

    SchedulerState.admit = admit  # type: ignore[method-assign, assignment]
    return build(ctx)


def gateway(ctx: Context) -> Core:
    """Builds a gateway that fails when it has read a body."""
    from actorium.actors.gateway.actor import build
    from actorium.actors.gateway.http import bodies

    usual = bodies.decode

    def decode(body: bytes, kind: type[Any]) -> Any:
        found = usual(body, kind)
        prompt = getattr(found, "prompt", None)
        if isinstance(prompt, list):
            fail(prompt)
        return found

    bodies.decode = decode
    return build(ctx)


# --- what the battery must notice -----------------------------------------------------------------

UNFENCED = {"detokenizer": "actorium.tools.chaos.plants:build_unfenced"}
"""Roles for `rig`."""


class Unfenced(DetokenizerCore):
    """Accepts every scheduler's messages, however old."""

    def _is_stale(self, epoch: int) -> bool:
        return False


def build_unfenced(context: Context) -> Unfenced:
    return Unfenced(context)


def _apply_all(pending: PendingRequest, choice: ChoiceState, delta: Delta) -> None:
    """Replaces `PendingRequest._apply` by one that removes no duplicates."""
    tokens = array("i", delta.tokens).tolist()
    choice.num_tokens = delta.start + len(tokens)
    choice.num_chars += len(delta.text)
    pending._append(choice, delta, delta.text, tokens, delta.logprobs)


@contextmanager
def no_dedup() -> Iterator[None]:
    """Lets the clients of this process drop no duplicates meanwhile."""
    before = PendingRequest._apply
    PendingRequest._apply = _apply_all  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PendingRequest._apply = before  # type: ignore[method-assign, assignment]
