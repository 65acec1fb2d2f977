"""When steps were launched, ran and were fetched: records for `actorium trace` (see
`actors/runtime/step_events.py`). The times of a device's own events are laid on the host's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from actorium.actors.messages import StepPlan
from actorium.actors.runtime.step_events import (
    DEVICE,
    HARVEST,
    LATE,
    LAUNCH,
    StepEventFile,
    decodes,
)

MAX_IN_FLIGHT = 16
"""More steps than are ever in flight."""


class DeviceTimeline:
    """Places a device's steps on the host's clock; the device's events measure spans alone.

    Each step follows the one before. No step begins before it was queued, nor ends after its end
    was observed: within these bounds steps are shifted where the two clocks drift apart, and where
    the step before is not known.
    """

    def __init__(self) -> None:
        self._end: int | None = None

    def reset(self) -> None:
        """The next step follows no other."""
        self._end = None

    def place(self, gap: int, busy: int, queued: int, seen: int) -> tuple[int, int]:
        """When a step began and ended; nanoseconds. gap: since the one before."""
        begin = queued if self._end is None else max(queued, self._end + gap)
        begin = max(queued, min(begin, seen - busy))
        self._end = begin + busy
        return begin, self._end


class StepTrace:
    """Records the times that a `StepTimer` measures. One thread launches; another may harvest."""

    def __init__(self, events: StepEventFile) -> None:
        self._events, self._line = events, DeviceTimeline()
        self._begun = 0
        self._queued: dict[tuple[int, int], int] = {}

    def reset(self) -> None:
        """Starts anew: the next step follows no other. For the thread that harvests."""
        self._line.reset()

    def begin(self) -> None:
        """A launch begins."""
        self._begun = monotonic_ns()

    def queue(self, plan: StepPlan, record: Callable[[], None]) -> None:
        """The device's part begins, of which `record` marks the start."""
        self._queued[plan.epoch, plan.step] = monotonic_ns()
        for key in tuple(self._queued)[:-MAX_IN_FLIGHT]:  # a step that was abandoned is never seen
            self._queued.pop(key, None)  # the other thread may just have seen it
        record()

    def launched(self, plan: StepPlan) -> None:
        """A launch is over."""
        self._events.add(LAUNCH, plan.epoch, plan.step, self._begun, monotonic_ns(), decodes(plan))

    def ran(self, plan: StepPlan, begin: float, end: float) -> None:
        """The host itself has run a step between these seconds."""
        span, rows = (round(begin * 1e9), round(end * 1e9)), decodes(plan)
        self._events.add(LAUNCH, plan.epoch, plan.step, *span, rows)
        self._events.add(DEVICE, plan.epoch, plan.step, *span, rows)

    def seen(self, plan: StepPlan, gap_us: int, busy_us: int, now: int, late_us: int = 0) -> None:
        """The end of a step on the device was seen. gap_us: since the step before it; late_us: see
        `timing`."""
        queued = self._queued.pop((plan.epoch, plan.step), now - busy_us * 1000)
        span = self._line.place(gap_us * 1000, busy_us * 1000, queued, now)
        self._events.add(DEVICE, plan.epoch, plan.step, *span, decodes(plan))
        if late_us:
            self._events.add(LATE, plan.epoch, plan.step, span[0], span[0] + late_us * 1000,
                             decodes(plan))

    def harvested(self, plan: StepPlan, begin: int) -> None:
        """Its result is there."""
        self._events.add(HARVEST, plan.epoch, plan.step, begin, monotonic_ns())
