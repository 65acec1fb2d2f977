"""What a clock with events tells of steps whose times are made up: the device's in microseconds,
the host's in seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actorium.actors.messages import Admit, StepPlan, StepResult
from actorium.actors.params import ResolvedParams
from actorium.gpu.worker.timing import CudaStepTimer

PARAMS = ResolvedParams(max_tokens=8)


class Device(CudaStepTimer):
    """A stream, and a host that takes so long to queue a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.host, self.free, self.made = 1.0, 0.0, 0
        """The host's time; when the device is done with all that was queued; events."""
        monkeypatch.setattr("actorium.gpu.worker.timing.perf_counter", lambda: self.host)

    def _event(self) -> Any:
        if self._free:
            return self._free.popleft()
        self.made += 1
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", max(self.free, self.host * 1e6))
        event.query = lambda: event.at <= self.host * 1e6
        return event

    def _between(self, first: Any, second: Any) -> int:
        return max(0, round(second.at - first.at))

    def step(self, number: int, at: float, queueing: float, work: float) -> Any:
        """Launched at this time (us); queueing: us until the last of its work is queued; work: us
        of the device, which begins when the first is queued and ends when all is done."""
        self.host = at / 1e6

        def launch(plan: StepPlan, begin: Any) -> Any:
            begin()
            start = max(self.free, at)
            self.host = (at + queueing) / 1e6
            self.free = max(start + work, at + queueing)
            return SimpleNamespace(plan=plan, slots=np.zeros(0, np.int32), result=done)

        def done(busy: int, idle: int, late: int) -> StepResult:
            return StepResult(1, number, b"", b"", b"", [], [], busy, idle, b"", late)

        plan = StepPlan(1, number, admit=[Admit(1, bytes(4), 1, 0, b"", PARAMS, 1)])
        return self.launch(SimpleNamespace(launch=launch), plan)  # type: ignore[arg-type]


def figures(result: StepResult) -> tuple[int, int, int]:
    return result.busy_us, result.idle_us, result.late_us


def test_a_fully_queued_step_has_no_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps under way: while the device works at the first one, the second one is queued."""
    device = Device(monkeypatch)
    steps = [device.step(1, 1000, 100, 900), device.step(2, 1150, 300, 900),
             device.step(3, 1950, 100, 900)]
    assert [figures(step.result()) for step in steps] == [(900, 0, 100), (900, 0, 0), (900, 0, 0)]


def test_a_late_host_is_measured_between_and_within_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has done all, and waits: before the step, and while it is queued. Of the latter
    the events cannot tell what was idle: it is told as the most."""
    device = Device(monkeypatch)
    device.step(1, 1000, 100, 900).result()
    assert figures(device.step(2, 2400, 150, 900).result()) == (900, 500, 150)
    assert figures(device.step(3, 3300, 8000, 900).result()) == (8000, 0, 8000), "by operations"


def test_late_is_never_more_than_the_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host comes back late from having queued a step that the device has long run."""
    device = Device(monkeypatch)
    event = device._event()
    inner = device.step(1, 1000, 100, 40)
    assert figures(inner.result()) == (100, 0, 100)
    launched = SimpleNamespace(plan=StepPlan(1, 2), slots=np.zeros(0, np.int32), result=lambda *t:
                               StepResult(1, 2, b"", b"", b"", [], [], t[0], t[1], b"", t[2]))
    end = SimpleNamespace(at=event.at + 30, synchronize=lambda: None)
    assert figures(device.result(launched, event, end, 700)) == (30, 0,
                                                                 30)  # type: ignore[arg-type]


def test_events_are_used_again_after_a_reset_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    for number in range(20):
        if number % 3 == 0:
            device.reset()
        found = device.step(number, 1000 * (1 + number), 100, 500).result()
        assert figures(found) == (500, 0 if number % 3 == 0 else 500, 100)
    assert device.made <= 4
