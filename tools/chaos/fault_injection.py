"""Actors and clients that are broken on purpose, and the null worker that takes a fixed time per
step.

The worker: steps take `STEP` seconds, so that an actor can die in the middle of a stream. Results
wait here until their step is over, as they do on a device: a scheduler that dies leaves some for
the next. Some prompts kill it.

Actors that fail in the middle of their work on some requests: by an exception, by hanging, or by
SIGKILL, as from the kernel's OOM killer. The fault is injected where each actor works on one
request; everything around it is the actor's own. A prompt triggers it by one of the tokens in
`POISONS`, which no other prompt has.

And some that the battery must detect: without fencing, a detokenizer accepts batches of a dead
scheduler; without dedup, a client takes repeated deltas for new ones.
"""

from __future__ import annotations

import os
import signal
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from actorium.actors.client.pending import ChoiceState, PendingRequest
from actorium.actors.core import Context, Core, Health, Send
from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.messages import Delta, Reset, StepPlan, StepResult, ToWorker
from actorium.tools.null.null_memory import ints_of
from actorium.tools.null.null_worker import NullWorker

STEP = 0.05
SHORT_STEP = 0.01
POISON = 511
"""A prompt with this token kills the worker in each step that computes it."""


class PacedWorker(Core):
    """A null worker that holds the result of each step back for as long as the step takes."""

    inbox = ToWorker

    def __init__(self, worker: NullWorker, seconds: Callable[[StepResult], float],
                 deadly: bool = True) -> None:
        """seconds: of the step of a result; deadly: whether a prompt with `POISON` kills it."""
        self._worker, self._seconds, self._deadly = worker, seconds, deadly
        self._out: list[Send] = []
        self._due: deque[tuple[float, Send]] = deque()
        self._free_at = 0.0
        """When the last step that was begun is over."""
        self._poisoned: set[int] = set()
        """Slots of poisoned prompts."""

    def on_message(self, message: ToWorker, now: float) -> None:
        """Computes a plan at once, but holds its result back for the step's time."""
        worker = self._worker
        self._out += worker.on_wake(now)
        if isinstance(message, Reset):
            self._poisoned.clear()
        if not isinstance(message, StepPlan):
            worker.on_message(message, now)
            return
        if self._deadly and worker._acknowledged and message.epoch == worker._epoch:
            self._kill_on_poison(message)
        worker.on_message(message, now)
        for send in worker.on_wake(now):
            self._free_at = max(self._free_at, now) + self._seconds(send.message)
            self._due.append((self._free_at, send))

    def _kill_on_poison(self, plan: StepPlan) -> None:
        self._poisoned.difference_update(ints_of(plan.release).tolist())
        for admit in plan.admit:
            if POISON in ints_of(admit.tokens)[:admit.prompt_len]:
                self._poisoned.add(admit.slot)
        extends = ints_of(plan.extend).reshape(-1, 2)[:, 0].tolist()
        if self._poisoned.intersection(chain(extends, ints_of(plan.decode).tolist())):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_wake(self, now: float) -> Sequence[Send]:
        out, self._out = [*self._out, *self._worker.on_wake(now)], []
        while self._due and self._due[0][0] <= now:
            out.append(self._due.popleft()[1])
        return out

    def next_timer(self) -> float | None:
        return self._due[0][0] if self._due else None

    @property
    def done(self) -> bool:
        return not self._due

    def health(self) -> Health:
        health = self._worker.health()
        return health._replace(phase="stepping") if self._due else health


def build(context: Context) -> PacedWorker:
    """Steps of `STEP` seconds."""
    return PacedWorker(NullWorker(context), lambda result: STEP)


def build_short(context: Context) -> PacedWorker:
    """Steps of `SHORT_STEP` seconds."""
    return PacedWorker(NullWorker(context), lambda result: SHORT_STEP)


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

UNFENCED = {"detokenizer": "actorium.tools.chaos.fault_injection:build_unfenced"}
"""Roles for `rig`."""


def build_unfenced(context: Context) -> DetokenizerCore:
    """Builds a detokenizer that accepts every scheduler's messages, however old."""
    DetokenizerCore._is_stale = _is_never_stale  # type: ignore[method-assign, assignment]
    return DetokenizerCore(context)


def _is_never_stale(core: DetokenizerCore, epoch: int) -> bool:
    """Replaces `DetokenizerCore._is_stale` by one that fences nothing."""
    return False


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
