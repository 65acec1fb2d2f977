"""Busy and idle time of the device, step by step."""

from __future__ import annotations

from collections import deque
from functools import partial
from time import monotonic_ns, perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from actorium.actors.messages import StepPlan, StepResult
from actorium.gpu.runner import Launched, Runner

if TYPE_CHECKING:
    from actorium.gpu.tracing import StepTrace


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

    def __init__(self, clock: Clock | CudaClock, launched: Launched, start: Any, end: Any,
                 first: bool) -> None:
        """first: since the slots were forgotten."""
        self._clock, self._launched = clock, launched
        self._start, self._end, self._first = start, end, first

    def result(self) -> StepResult:
        """Wait for the step; its result, with its times."""
        if self._first:
            self._clock.forget()
        return self._clock.result(self._launched, self._start, self._end)


class Clock:
    """Host clock: on a CPU a launch runs the step."""

    waits = False

    def __init__(self, trace: StepTrace | None = None) -> None:
        """trace: is told of every step as well."""
        # Of the thread that harvests:
        self._last: Any = None
        self._live = Live()
        self._trace = trace
        # Of the one that launches:
        self._first = True

    def reset(self) -> None:
        """The slots are forgotten; the next step follows no other. For the thread that launches:
        the one that harvests hears of it with that step, when those before are over."""
        self._first = True

    def forget(self) -> None:
        """What `reset` means, for the thread that harvests."""
        self._last, self._live = None, Live()
        if self._trace is not None:
            self._trace.reset()

    def _timed(self, launched: Launched, start: Any, end: Any) -> Timed:
        first, self._first = self._first, False
        return Timed(self, launched, start, end, first)

    def launch(self, runner: Runner, plan: StepPlan) -> Timed:
        """Run the step."""
        start = perf_counter()
        launched = runner.launch(plan)
        end = perf_counter()
        if self._trace is not None:
            self._trace.ran(plan, start, end)
        return self._timed(launched, start, end)

    def result(self, launched: Launched, start: Any, end: Any) -> StepResult:
        """Complete a step, in the order of launching."""
        trace, begun = self._trace, 0 if self._trace is None else monotonic_ns()
        result = launched.result(self._between(start, end), self._gap(start))
        self._last = end
        self._live.take(launched.plan, result, launched.slots)
        if trace is not None:
            trace.harvested(launched.plan, begun)
        return result

    def _gap(self, start: Any) -> int:
        return self._between(self._last, start) if self._live and self._last is not None else 0

    def _between(self, first: Any, second: Any) -> int:
        return max(0, round((second - first) * 1e6))


class CudaClock(Clock):
    """Events on the stream, used over and over."""

    waits = True

    def __init__(self, trace: StepTrace | None = None) -> None:
        super().__init__(trace)
        self._free: deque[Any] = deque()

    def launch(self, runner: Runner, plan: StepPlan) -> Timed:
        """Queue the step."""
        # A step begins when the device's part is queued: what the host prepares before is no
        # work of the device's, and while there is none it idles.
        start, end, trace = self._event(), self._event(), self._trace
        if trace is None:
            launched = runner.launch(plan, start.record)
        else:
            trace.begin()
            launched = runner.launch(plan, partial(trace.queue, plan, start.record))
        end.record()
        if trace is not None:
            trace.launched(plan)
        return self._timed(launched, start, end)

    def result(self, launched: Launched, start: Any, end: Any) -> StepResult:
        end.synchronize()
        before = self._last
        if self._trace is not None:
            now = monotonic_ns()
            gap = 0 if before is None else self._between(before, start)
            self._trace.seen(launched.plan, gap, self._between(start, end), now)
        result = super().result(launched, start, end)
        # Another thread takes them: a deque's ends are safe.
        self._free += [start] if before is None else [start, before]
        return result

    def _event(self) -> Any:
        """One that is over, or a new one."""
        return self._free.popleft() if self._free else torch.cuda.Event(enable_timing=True,
                                                                        blocking=True)

    def _between(self, first: Any, second: Any) -> int:
        return max(0, round(first.elapsed_time(second) * 1e3))


def clock(device: torch.device, trace: StepTrace | None = None) -> Clock:
    """The clock of a device."""
    return CudaClock(trace) if device.type == "cuda" else Clock(trace)
