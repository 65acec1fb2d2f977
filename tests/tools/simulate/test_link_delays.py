"""What messages take is read from the scheduler's histograms and the client's clock."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.errors import EngineUnavailable
from actorium.tools.simulate import calibration
from actorium.tools.simulate.calibration import DelayProbe, sums_of

PAGE = """# HELP vllm:time_to_first_token_seconds From arrival to the first token.
vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 3
vllm:time_to_first_token_seconds_sum{model_name="m"} 0.25
vllm:time_to_first_token_seconds_count{model_name="m"} 3
vllm:request_queue_time_seconds_sum 0.5
vllm:request_queue_time_seconds_count 4
"""


def test_sums_and_counts_are_read_from_prometheus_text() -> None:
    assert sums_of(PAGE) == {"first_token": (0.25, 3), "queued": (0.5, 4)}
    assert sums_of("") == {"first_token": (0, 0), "queued": (0, 0)}


class ToldProbe(DelayProbe):
    """Its counters are these, one reading after the other, the last one for good."""

    def __init__(self, readings: list[dict[str, tuple[float, int]]]) -> None:
        client: Any = None
        super().__init__(client, Path("/nowhere"), 100)
        self._readings = readings

    async def _sums(self) -> dict[str, tuple[float, int]]:
        await asyncio.sleep(0)
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]

    async def load(self) -> None:
        self._took += [0.3, 0.5]


def reading(count: int, queued: float, first: float) -> dict[str, tuple[float, int]]:
    return {"queued": (queued, count), "first_token": (first, count)}


def test_means_are_of_the_load_alone_once_the_counters_tell_of_all() -> None:
    probe = ToldProbe([reading(7, 1.0, 2.0), reading(8, 1.1, 2.1), reading(9, 1.2, 2.6)])
    found = asyncio.run(probe.during(probe.load()))
    assert found == pytest.approx({"client": 0.4, "queued": 0.1, "first_token": 0.3})


def test_counters_that_never_tell_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "PATIENCE", 0.01)
    probe = ToldProbe([reading(7, 1.0, 2.0)])
    with pytest.raises(EngineUnavailable, match="do not tell"):
        asyncio.run(probe.during(probe.load()))
