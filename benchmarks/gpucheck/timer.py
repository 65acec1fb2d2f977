"""Microseconds of a kernel."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from .machine import Cuda

FLUSH = 128 << 20
"""Bytes written before each timed run, more than twice an H200's L2, so that no run finds there
what the one before has left. It also keeps the device busy while the run is being launched."""
TIMED_S = 0.03
"""Of one kernel, over all its runs."""


class Timer:
    """The median of runs with cold caches."""

    def __init__(self, machine: Cuda) -> None:
        self._machine = machine
        self._flush = torch.empty(1 << 10 if machine.toy else FLUSH, dtype=torch.uint8,
                                  device=machine.device)

    def us(self, *runs: Callable[[], Any]) -> float:
        """Of these runs, one behind the other, each replayed from a graph of its own, so that
        launching is not in it: they must not wait for the device. Raises `CaptureFailed`."""
        graphs = [self._machine.captured(run) for run in runs]
        return self._median_us(lambda: [replay() for replay in graphs])

    def launched_us(self, run: Callable[[], Any]) -> float:
        """Of one run as the host launches it, waiting and all."""
        return self._median_us(run)

    def _median_us(self, run: Callable[[], Any]) -> float:
        rounds = self._machine.rounds
        first = self._device_us(run, rounds.first)
        if self._machine.toy:
            return first
        times = round(TIMED_S * 1e6 / max(first, 1.0))
        return self._device_us(run, max(rounds.least, min(rounds.most, times)))

    def _device_us(self, run: Callable[[], Any], times: int) -> float:
        event = self._machine.event
        marks = [(event(), event()) for _ in range(times)]
        for start, end in marks:
            self._flush.zero_()
            start.record()
            run()
            end.record()
        self._machine.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in marks) * 1e3
