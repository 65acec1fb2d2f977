"""Steps of the Llama shape under torch's profiler: what the device did, kernel by kernel, beside
how long the step took; and what it costs to capture with a warm cache of kernels.

How long the device idled, twice: as torch.profiler has it (CUPTI's interval of every kernel and
copy), and by the engine's own clock of the same steps (`actorium.gpu.worker.timing`). The
clock sees what the host caused: `idle_us` between steps, for certain, and within them at most
`late_us`. The profiler sees every gap, those between kernels that lay queued one behind the other
as well, which are no longer than SHORT_US. So where the clock is right,

    least <= the profiler's share of longer gaps <= most

but for NEAR of the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from actorium.actors.config.graph_settings import TOKEN_LADDER
from actorium.actors.messages import StepResult
from actorium.gpu.plan.graph_memory import Graphs, graphs_estimate
from actorium.gpu.plan.memory_plan import Demand
from actorium.gpu.worker import graph_setup
from actorium.gpu.worker.device import OpenedDevice

from . import models, shapes
from .child import Bench
from .decode import record_opening
from .machine import Profile
from .plan import LADDER, ROOT

SHORT_US = 10.0
"""The longest gap between kernels queued long before: launch latency on the device, and what a
captured graph needs between two nodes."""
NEAR = 0.01
"""Share of the time by which the two may differ: one has its edges at events, the other one at
kernels, and copies of results on the side stream count as work here."""
Span = tuple[float, float]


class Covered(NamedTuple):
    """Intervals on one line; microseconds."""

    wall: float
    """From the first start to the last end."""
    busy: float
    """Time covered by at least one."""
    long: float
    """Gaps of more than SHORT_US, all of them."""


def covered(spans: Iterable[Span]) -> Covered:
    """Measures intervals (from, to) in any order. Raises `ValueError` if there are none."""
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


TOP = 30
PROFILED = 4
"""Steps."""
COUNTED = ROOT / "benchmarks/results/launches.json"


def run(bench: Bench) -> None:
    """A row for each batch; the row of capture holds what this process, the second one to open this
    model, took."""
    wanted = [own for own in shapes.PROFILED if bench.wants(f"replay {own.name}")]
    most = max([16, *(own.batch for own in wanted)])
    bench.machine.profiled(lambda: torch.ones(8, device=bench.device) + 1)  # before any graph
    with models.opened(bench, shapes.LLAMA, bench.size(most, 8)) as (device, seconds):
        record_opening(bench, device, seconds)
        for own in shapes.PROFILED:
            name = f"replay {own.name}"
            with bench.row(name) as go:
                if not go:
                    continue
                batch, context = own.small() if bench.toy else own
                warm, steps = bench.size(models.WARM, 1), bench.size(PROFILED, 2)
                driver = models.Driver(device.runner, batch, context, 2 * warm + 3 * steps, 0,
                                       models.budget(bench.toy))
                try:
                    driver.steps(warm)
                    plain = driver.steps(steps)
                    seen = bench.machine.profiled(partial(driver.steps, steps))
                finally:
                    driver.close()
                clock = compared(((a, b) for _, a, b in seen.kernels), driver.results)
                bench.record.add(name, batch=batch, context=context, **{
                    key: plain[key] for key in ("step_us", "device_us", "idle_ratio")},
                    **digest(seen, steps), **clock, **counted(own.batch))
                if not bench.toy:  # whose operations are no kernels
                    bench.compared(name, clock["clock_off"], NEAR)
        if LADDER in bench.group.rows:
            with bench.row(LADDER.name) as go:
                if go:
                    bench.record.add(LADDER.name, **ladder(bench, device))


def ladder(bench: Bench, device: OpenedDevice) -> dict[str, Any]:
    """Segments of every size that `--graph-token-counts all` makes up to 8,192 tokens, captured
    from the largest on: seconds, and bytes beside those that the plan counts."""
    runner, shape = device.runner, device.runner.model.shape
    sizes = [size for size in TOKEN_LADDER if size <= (16 if bench.toy else 8192)][::-1]
    graphs = Graphs([], sizes)
    with bench.machine.opening():
        before = graph_setup.read_memory(bench.device)
        _, segments = graph_setup.graph_runners(runner, graphs,
                                                graph_setup.CudaCapturer(bench.device))
        assert segments is not None
        start = perf_counter()
        segments.capture(lambda phase, detail: None)
        after = graph_setup.read_memory(bench.device)  # waits for the device
        seconds = perf_counter() - start
    taken = graph_setup.graph_bytes_between(before, after, len(sizes))
    planned = graphs_estimate(shape, Demand(runner.tables.slots - 1), graphs)
    return {"seconds": seconds, "graphs": len(sizes), "largest": sizes[0],
            "graph_mib": taken / 2**20, "planned_mib": planned / 2**20}


def digest(seen: Profile, steps: int) -> dict[str, Any]:
    """Summarises so many steps. wall_us: a step, from the first kernel's begin to the last one's
    end; kernels_us: the sum of its kernels; covered_us: the time in which any ran, which is less
    where they overlap; idle_share: of the wall time, that in which none ran; launches: kernels a
    step; calls: of the host, a step; top: the kernels that take most of it.

    Raises `ValueError` where nothing was seen."""
    line = covered((begin, end) for _, begin, end in seen.kernels)
    total = sum(end - begin for _, begin, end in seen.kernels)
    by_name: dict[str, list[float]] = {}
    for name, begin, end in seen.kernels:
        by_name.setdefault(name, []).append(end - begin)
    top = sorted(by_name.items(), key=lambda own: -sum(own[1]))[:TOP]
    return {"wall_us": line.wall / steps, "kernels_us": total / steps,
            "covered_us": line.busy / steps,
            "idle_share": 1 - line.busy / line.wall if line.wall else 0.0,
            "launches": len(seen.kernels) / steps,
            "calls": {name: count / steps for name, count in seen.launches.items()},
            "top": [{"kernel": name[:120], "launches": len(each) / steps, "us": sum(each) / steps,
                     "share": sum(each) / total if total else 0.0} for name, each in top]}


def counted(batch: int) -> dict[str, Any]:
    """Kernels of such a step as `launches.py` counts them without a device, where it has."""
    if not COUNTED.exists():
        return {}
    steps = json.loads(COUNTED.read_text())["now"]
    own = steps.get(f"Llama-3.1-8B, {batch} greedy")
    return {} if own is None else {"counted": own["launches"]}
