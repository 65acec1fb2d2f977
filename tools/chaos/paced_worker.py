"""A null worker that takes a fixed time per step, and that some prompts kill.

Steps take `STEP` seconds, so that an actor can die in the middle of a stream. Results wait here
until their step is over, as they do on a device: a scheduler that dies leaves some for the next.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Sequence
from itertools import chain

from actorium.actors.core import Context, Health, Send
from actorium.actors.messages import Admit, Reset, StepPlan, ToWorker
from actorium.tools.null.null_memory import ints_of
from actorium.tools.null.null_worker import NullWorker

STEP = 0.05
SHORT_STEP = 0.01
POISON = 511
"""A prompt with this token kills the worker in each step that computes it."""
BUDGET = 60.0


class PacedWorker(NullWorker):
    """A null worker with a pace; see the module."""

    def __init__(self, context: Context, step: float = STEP) -> None:
        """step: seconds that each step takes."""
        super().__init__(context)
        self._seconds = step
        self._due: deque[tuple[float, Send]] = deque()
        self._free_at = 0.0
        """When the last step that was begun is over."""
        self._poisoned: set[int] = set()
        """Slots of poisoned prompts."""

    def on_message(self, message: ToWorker, now: float) -> None:
        """Computes a plan at once, but holds its result back for the step's time."""
        if isinstance(message, StepPlan):
            if self._acknowledged and message.epoch == self._epoch:
                self._kill_on_poison(message)
        elif isinstance(message, Reset):
            self._poisoned.clear()
        before = len(self._out)
        super().on_message(message, now)
        for send in self._out[before:] if isinstance(message, StepPlan) else ():
            self._free_at = max(self._free_at, now) + self._seconds
            self._due.append((self._free_at, send))
        if isinstance(message, StepPlan):
            del self._out[before:]

    def _kill_on_poison(self, plan: StepPlan) -> None:
        self._poisoned.difference_update(ints_of(plan.release).tolist())
        for admit in plan.admit:
            if _is_poison(admit):
                self._poisoned.add(admit.slot)
        extends = ints_of(plan.extend).reshape(-1, 2)[:, 0].tolist()
        if self._poisoned.intersection(chain(extends, ints_of(plan.decode).tolist())):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_wake(self, now: float) -> Sequence[Send]:
        out = [*super().on_wake(now)]
        while self._due and self._due[0][0] <= now:
            out.append(self._due.popleft()[1])
        return out

    def next_timer(self) -> float | None:
        return self._due[0][0] if self._due else None

    @property
    def done(self) -> bool:
        return not self._due

    def health(self) -> Health:
        return Health("stepping" if self._due else "idle" if self._steps else "ready",
                      self._steps, BUDGET)


def _is_poison(admit: Admit) -> bool:
    return POISON in ints_of(admit.tokens)[:admit.prompt_len]


def build(context: Context) -> PacedWorker:
    """Steps of `STEP` seconds."""
    return PacedWorker(context)


def build_short(context: Context) -> PacedWorker:
    """Steps of `SHORT_STEP` seconds."""
    return PacedWorker(context, SHORT_STEP)
