"""How long the device idled, twice: as torch.profiler has it (CUPTI's interval of every kernel and
copy), and as the engine's own clock tells of the same steps (`actorium.gpu.worker.timing`).

The clock sees what the host caused: `idle_us` between steps, for certain, and within them at most
`late_us`. The profiler sees every gap, those between kernels that lay queued one behind the other
as well, which are no longer than SHORT_US. So where the clock is right,

    least <= the profiler's share of longer gaps <= most

but for NEAR of the time. Not yet compared on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

SHORT_US = 10.0
"""Of a gap between kernels that the host had queued long before: launch latency on the device,
and what a captured graph needs between two nodes."""
NEAR = 0.01
"""Share of the time by which the two may differ: one has its edges at events, the other one at
kernels, and copies of results on the side stream count as work here."""
Span = tuple[float, float]


class Result(Protocol):
    """See `StepResult`."""

    @property
    def busy_us(self) -> int: ...

    @property
    def idle_us(self) -> int: ...

    @property
    def late_us(self) -> int: ...


class Covered(NamedTuple):
    """Intervals on one line; microseconds."""

    wall: float
    """From the first begin to the last end."""
    busy: float
    """In which at least one lasts."""
    short: float
    """Gaps of up to SHORT_US, all of them."""
    long: float
    """The longer ones."""


def covered(spans: Iterable[Span]) -> Covered:
    """Of intervals (from, to) in any order. Raises `ValueError` where there are none."""
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("the profiler saw nothing run on the device")
    start, end = ordered[0]
    short = long = 0.0
    for begin, until in ordered[1:]:
        gap = max(0.0, begin - end)
        if gap <= SHORT_US:
            short += gap
        else:
            long += gap
        end = max(end, until)
    wall = end - start
    return Covered(wall, wall - short - long, short, long)


def compared(spans: Iterable[Span], results: Sequence[Result]) -> dict[str, Any]:
    """The two, of the same steps; results: in their order. The gap before the first step is before
    all that the profiler saw, and left out.

    profiler_idle: share of the wall time in which nothing ran; profiler_idle_long: in gaps longer
    than SHORT_US; least, most: the clock's shares; wall_ratio: the clock's time over the
    profiler's; idle_ratio: most over profiler_idle_long; agrees: see above. Raises `ValueError`
    where one of them has seen nothing.
    """
    seen = covered(spans)
    busy = sum(result.busy_us for result in results)
    idle = sum(result.idle_us for result in results[1:])
    late = sum(result.late_us for result in results)
    whole = busy + idle
    if not seen.wall or not whole:
        raise ValueError("no time went by")
    longer, least, most = seen.long / seen.wall, idle / whole, (idle + late) / whole
    return {"steps": len(results), "wall_us": seen.wall, "clock_us": float(whole),
            "wall_ratio": whole / seen.wall, "profiler_busy_us": seen.busy,
            "profiler_idle": 1 - seen.busy / seen.wall, "profiler_idle_long": longer,
            "least": least, "most": most,
            "idle_ratio": most / longer if longer else float("inf") if most else 1.0,
            "agrees": least - NEAR <= longer <= most + NEAR}


def profiled(run: Callable[[], Sequence[Result]], toy: bool = False) -> dict[str, Any]:
    """`compared`, of steps that `run` runs to their ends and whose results it returns. The
    profiler makes launches slower; both see the same. toy: without a device, operations of torch
    that call no others stand for kernels."""
    if toy:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            results = run()
        return compared(((own.time_range.start, own.time_range.end) for own in seen.events()
                         if own.name.startswith("aten::") and not own.cpu_children), results)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        results = run()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return compared(((own.time_range.start, own.time_range.end) for own in seen.events()
                     if own.device_type == device
                     and not getattr(own, "is_user_annotation", False)), results)
