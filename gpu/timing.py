"""Busy and idle time of the device, step by step."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch

from actorium.actors.messages import StepPlan, StepResult
from actorium.gpu.runner import Launched, Runner


class Live:
    """Slots whose sequence goes on, as results tell: while there is one, a gap is idle time."""

    def __init__(self) -> None:
        self._slots: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._slots)

    def take(self, plan: StepPlan, result: StepResult, slots: Any) -> None:
        """Follow one step; slots: i32[rows], of its sampled rows."""
        if plan.release:
            self._slots.difference_update(np.frombuffer(plan.release, np.int32).tolist())
        if plan.admit:
            self._slots.update(a.slot for a in plan.admit)
        if any(result.finish):
            end = np.frombuffer(result.finish, np.uint8) > 0
            self._slots.difference_update(slots[end].tolist())


class Timed:
    """A step under way, with its times to come."""

    def __init__(self, clock: Clock | CudaClock, launched: Launched, start: Any, end: Any) -> None:
        self._clock, self._launched = clock, launched
        self._start, self._end = start, end

    def result(self) -> StepResult:
        """Wait for the step; its result, with its times."""
        return self._clock.result(self._launched, self._start, self._end)


class Clock:
    """Host clock: on a CPU a launch runs the step."""

    waits = False

    def __init__(self) -> None:
        self._last: Any = None
        self._live = Live()

    def reset(self) -> None:
        """The slots are forgotten; the next step follows no other."""
        self._last, self._live = None, Live()

    def launch(self, runner: Runner, plan: StepPlan) -> Timed:
        """Run the step."""
        start = perf_counter()
        launched = runner.launch(plan)
        return Timed(self, launched, start, perf_counter())

    def result(self, launched: Launched, start: Any, end: Any) -> StepResult:
        """Complete a step, in the order of launching."""
        result = launched.result(self._between(start, end), self._gap(start))
        self._last = end
        self._live.take(launched.plan, result, launched.slots)
        return result

    def _gap(self, start: Any) -> int:
        return self._between(self._last, start) if self._live and self._last is not None else 0

    def _between(self, first: Any, second: Any) -> int:
        return max(0, round((second - first) * 1e6))


class CudaClock(Clock):
    """Events on the stream."""

    waits = True

    def launch(self, runner: Runner, plan: StepPlan) -> Timed:
        """Queue the step."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True, blocking=True)
        start.record()
        launched = runner.launch(plan)
        end.record()
        return Timed(self, launched, start, end)

    def result(self, launched: Launched, start: Any, end: Any) -> StepResult:
        end.synchronize()
        return super().result(launched, start, end)

    def _between(self, first: Any, second: Any) -> int:
        return max(0, round(first.elapsed_time(second) * 1e3))


def clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else Clock()
