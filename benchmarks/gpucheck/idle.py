"""How long the device idled, twice: as torch.profiler has it (CUPTI's interval of every kernel and
copy), and as the engine's own clock tells of the same steps (`actorium.gpu.worker.timing`).

The clock sees what the host caused: `idle_us` between steps, for certain, and within them at most
`late_us`. The profiler sees every gap, those between kernels that lay queued one behind the other
as well, which are no longer than SHORT_US. So where the clock is right,

    least <= the profiler's share of longer gaps <= most

but for NEAR of the time. Not yet compared on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from actorium.actors.messages import StepResult

SHORT_US = 10.0
"""Of a gap between kernels that the host had queued long before: launch latency on the device,
and what a captured graph needs between two nodes."""
NEAR = 0.01
"""Share of the time by which the two may differ: one has its edges at events, the other one at
kernels, and copies of results on the side stream count as work here."""
Span = tuple[float, float]


class Covered(NamedTuple):
    """Intervals on one line; microseconds."""

    wall: float
    """From the first begin to the last end."""
    busy: float
    """In which at least one lasts."""
    long: float
    """Gaps of more than SHORT_US, all of them."""


def covered(spans: Iterable[Span]) -> Covered:
    """Of intervals (from, to) in any order. Raises `ValueError` where there are none."""
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("the profiler saw nothing run on the device")
    start, end = ordered[0]
    gaps = []
    for begin, until in ordered[1:]:
        gaps.append(max(0.0, begin - end))
        end = max(end, until)
    wall = end - start
    return Covered(wall, wall - sum(gaps), sum(gap for gap in gaps if gap > SHORT_US))


def compared(spans: Iterable[Span], results: Sequence[StepResult]) -> dict[str, Any]:
    """The two, of the same steps; results: in their order. The gap before the first step is before
    all that the profiler saw, and left out.

    long_gaps: share of the wall time in gaps longer than SHORT_US; clock_least, clock_most: the
    clock's shares; clock_off: by how much the profiler's lies outside of these, no more than NEAR
    where the clock is right. Raises `ValueError` where one of them has seen nothing.
    """
    seen = covered(spans)
    busy = sum(result.busy_us for result in results)
    idle = sum(result.idle_us for result in results[1:])
    late = sum(result.late_us for result in results)
    whole = busy + idle
    if not seen.wall or not whole:
        raise ValueError("no time went by")
    longer, least, most = seen.long / seen.wall, idle / whole, (idle + late) / whole
    return {"long_gaps": longer, "clock_least": least, "clock_most": most,
            "clock_off": max(0.0, least - longer, longer - most)}
