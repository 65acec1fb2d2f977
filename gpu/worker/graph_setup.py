"""Graphs of an opened device: which are wanted, what they will take, and their capture."""

from __future__ import annotations

import logging
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import torch

from actorium.actors.config.tree import Config
from actorium.gpu.graphs.capture import Capturer, CudaCapturer, ReportPhase, WhyNot
from actorium.gpu.graphs.decode_graphs import DecodeGraphRunner, why_eager
from actorium.gpu.graphs.decode_programs import DecodePrograms
from actorium.gpu.graphs.piecewise_graphs import PiecewiseGraphRunner
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.plan.graph_memory import (
    GRAPH_BYTES,
    Graphs,
    GraphShape,
    planned_graphs,
    program_rows,
    program_shapes,
    program_sizes,
    sizes_beyond_a_step,
)
from actorium.gpu.plan.memory_plan import as_served, demand_of
from actorium.gpu.plan.weight_bytes import workspace_bytes
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.measure import Footprint, WorkspaceMeter
from actorium.gpu.worker.warmup import warm_up_kernels
from actorium.kernels.cpu.native_ops import NativeOps

LOG = logging.getLogger(__name__)
DRIVER_BYTES = 8 * GRAPH_BYTES
"""Most that the driver is believed to keep of one graph."""
CAPTURE_SECONDS = 60.0
"""Most that segments may take: the smallest are left out, whose steps the next ones serve."""


def wanted_graphs(config: Config, runner: ModelRunner) -> Graphs:
    """The graphs to capture. Logs why there are none of a kind."""
    why = why_eager(runner.model, runner.arrays.device)
    if runner.arrays.device.type == "cuda":
        for what, reason in (("steps of decodes", why.decodes), ("segments", why.segments)):
            if reason:
                LOG.info("no graphs of %s: %s", what, reason)
    return planned_graphs(config, runner.tables.drafts.max_drafts, why)


def graph_runners(runner: ModelRunner, graphs: Graphs, capturer: Capturer
                  ) -> tuple[DecodeGraphRunner | None, PiecewiseGraphRunner | None]:
    """These graphs, of one memory. Decodes come first: the logits of the largest take most."""
    model = runner.model
    assert isinstance(model, Decoder)
    return (runner.decode_graphs(capturer, graphs.decodes) if graphs.decodes else None,
            PiecewiseGraphRunner(model, runner.pools, capturer, graphs.tokens)
            if graphs.tokens else None)


def trial_graph_bytes(runner: ModelRunner, graphs: Graphs) -> int:
    """Bytes that graphs will take: of each kind the largest one is captured, over the sink page,
    and the next one, as which all others count; they are given up again."""
    if not any(graphs):
        return 0
    device, total = runner.arrays.device, 0
    kinds = []
    seen = [read_memory(device)]
    for kind in graph_runners(runner, graphs, CudaCapturer(device)):
        if kind is None:
            continue
        kinds.append(kind)  # those before keep their memory
        for most in (1, 2):
            kind.capture(lambda *_: None, most)
            seen.append(read_memory(device))
        first, next_one = (graph_bytes_between(*pair, 1) for pair in pairwise(seen[-3:]))
        total += first + (len(kind.shapes) - 1) * next_one
    return total


def capture_graphs(config: Config, runner: ModelRunner, footprint: Footprint, report: ReportPhase,
                   seconds: dict[str, float]) -> Graphs:
    """Captures the runner's graphs, now that its pages are there; adds to `footprint` and `seconds`
    what that took."""
    graphs, device = wanted_graphs(config, runner), runner.arrays.device
    if not why_eager(runner.model, device).segments:
        _tell_left_out(dict.fromkeys(
            sizes_beyond_a_step(config),
            f"--max-num-batched-tokens is {config.scheduler.max_num_batched_tokens}"))
    if not any(graphs):
        return graphs
    start = perf_counter()
    before = read_memory(device)
    decodes, segments = graph_runners(runner, graphs, CudaCapturer(device))
    if decodes is not None:
        decodes.capture(report)
    if segments is not None:
        bounds = segment_bounds(runner, footprint.measured.get("workspace", 0))
        _tell_left_out(segments.capture(report, why_not=bounds))
        graphs = graphs._replace(tokens=segments.shapes)
    captured = len(graphs.decodes) + len(graphs.tokens)
    footprint.measured["graphs"] = graph_bytes_between(before, read_memory(device), captured)
    runner.graphs, runner.segments = decodes, segments if graphs.tokens else None
    seconds["graphs"] = footprint.capture_seconds = perf_counter() - start
    LOG.info("graphs: %s, captured in %.2f s, %.1f MiB (planned %.1f)", graphs.summary,
             footprint.capture_seconds, footprint.measured["graphs"] / 2**20,
             footprint.planned.get("graphs", 0) / 2**20)
    if device.type == "cuda":
        start = perf_counter()
        warm_up_kernels(runner, max(graphs.tokens, default=1), report)  # as these serve them
        seconds["warm up"] += perf_counter() - start
    return graphs


def recapture_graphs(config: Config, runner: ModelRunner) -> None:
    """Captures the same graphs of a model that has taken another's place, whose kernels are warm.
    Their memory is given up before."""
    sizes = runner.segments.shapes if isinstance(runner.segments, PiecewiseGraphRunner) else []
    graphs = wanted_graphs(config, runner)._replace(tokens=sizes)
    if not any(graphs):
        return
    runner.graphs = runner.segments = None
    decodes, segments = graph_runners(runner, graphs, CudaCapturer(runner.arrays.device))
    if decodes is not None:
        decodes.capture(lambda *_: None)
    if segments is not None:
        segments.capture(lambda *_: None)
    runner.graphs, runner.segments = decodes, segments


def segment_bounds(runner: ModelRunner, workspace: int) -> WhyNot:
    """Says of a size of segments why it is not to be captured from now on, of all ranks alike:
    beside the temporaries of the largest step, which are so many bytes, there is no memory left
    for what the first takes and others add, or `CAPTURE_SECONDS` are over."""
    model, device, start = runner.model, runner.arrays.device, perf_counter()
    assert isinstance(model, Decoder)

    def why_not(size: int, first: bool) -> str:
        need = GRAPH_BYTES + (workspace_bytes(model.shape, size, 0) if first else 0)
        if model.group.agreed(CAPTURE_SECONDS - (perf_counter() - start)) < 0:
            return f"{CAPTURE_SECONDS:g} seconds are over"
        left = int(model.group.agreed(read_memory(device).free - workspace))
        return f"only {max(left, 0):,} bytes are left" if left < need else ""

    return why_not


def _tell_left_out(left: dict[int, str]) -> None:
    for why in dict.fromkeys(left.values()):
        sizes = ", ".join(str(size) for size, own in left.items() if own == why)
        LOG.warning("no segments for steps of %s tokens: %s", sizes, why)


def capture_programs(config: Config, runner: ModelRunner, footprint: Footprint,
                     meter: WorkspaceMeter | None, report: ReportPhase) -> Graphs:
    """On a CPU: captures the sizes that were asked for, the largest first; else a step of one row,
    and lets the others be captured when they come. Says what prevents it, if anything does."""
    model = runner.model
    if not isinstance(model, Decoder):
        return Graphs([], [])
    demand = as_served(model.shape, demand_of(config))[1]
    rows = program_rows(config, demand.drafts)
    if not rows:
        return Graphs([], [])
    why = "the kernels are not C's" if not isinstance(model.ops, NativeOps) else (
        "experts are grouped by the host" if model.waits else "")
    if not why and not model.attention.decode.graphs:
        why = f"{model.attention.decode.name} attends"
    if model.shape.index is not None:
        why = "an indexer chooses tokens"
    why = model.no_graphs or why
    if not model.group.replays:
        why = "the ranks' sums are not C's"
    if not why:
        sizes, asked = program_sizes(model.shape, demand, rows), program_shapes(
            config, demand.drafts)
        programs = DecodePrograms(model, runner.pools, runner.states, sizes, asked,
                                  runner.adapters.layers if runner.adapters else None)
        start, todo = perf_counter(), asked or [GraphShape(1, 1)]
        for number, shape in enumerate(todo):
            report("warming", f"programs {number}/{len(todo)}")
            if not programs.captures(shape):
                break
        if not programs.fault:
            footprint.capture_seconds = perf_counter() - start
            LOG.info("programs: %d captured in %.2f s, %.1f MiB for steps of up to %d rows",
                     programs.count, footprint.capture_seconds, sizes.bytes / 2**20, sizes.rows)
            footprint.planned["graphs"] = sizes.bytes
            footprint.measured["graphs"] = sum(own.nbytes for own in programs.memory)
            if meter is not None:
                meter.leave_out(programs.memory)
            runner.segments = programs
            return Graphs([], [], sizes.rows, asked)
        why = programs.fault
    return Graphs([], [], prevented=why)


class DeviceMemory(NamedTuple):
    """Of a device; bytes."""

    free: int
    """Of all of it, whoever took the rest."""
    reserved: int
    """By torch in this process, pools of graphs included."""


def read_memory(device: torch.device) -> DeviceMemory:
    """What is left now."""
    free = free_bytes(device)
    return DeviceMemory(free, torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)


def graph_bytes_between(before: DeviceMemory, after: DeviceMemory, captured: int) -> int:
    """Bytes that so many graphs took between two readings: torch's share, which is this process's
    own, and the driver's. The driver reports what is free on the whole device alone, and other
    processes allocate as well; so of that no more is believed than graphs can take."""
    pools = max(0, after.reserved - before.reserved)
    driver = before.free - after.free - pools
    return pools + min(max(0, driver), DRIVER_BYTES * captured)


def free_bytes(device: torch.device) -> int:
    """Of the whole device; torch gives back what it keeps for later."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
