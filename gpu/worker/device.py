"""Opens the device: loads weights, allocates tables and caches, warms up, captures graphs."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import torch

from actorium.actors.config.speculative import parse_acceptance
from actorium.actors.config.tree import Config, DeviceConfig
from actorium.actors.errors import BadConfig
from actorium.actors.messages import PageGroup, Ready
from actorium.actors.models.model_dir import resolve
from actorium.actors.runtime.worker_info import WorkerInfo
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.graphs.capture import Capturer, CudaCapturer
from actorium.gpu.graphs.decode_graphs import DecodeGraphRunner, why_eager
from actorium.gpu.graphs.piecewise_graphs import PiecewiseGraphRunner
from actorium.gpu.models.registry import Model, load_model
from actorium.gpu.plan.graph_memory import GRAPH_BYTES, Graphs, planned_graphs
from actorium.gpu.plan.memory_plan import MemoryPlan, as_served, demand_of, make_plan
from actorium.gpu.plan.non_cache_memory import StepSize, planned_bytes
from actorium.gpu.plan.sizes import device_budget, page_table_width
from actorium.gpu.step.pools import make_draft_pool, make_pools
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.speculation import make_proposer
from actorium.gpu.step.staging import device_arrays
from actorium.gpu.step.states import StatePool
from actorium.gpu.step.tables import SlotTables
from actorium.gpu.weights.dtypes import TORCH_DTYPES, check_kv_dtype, kv_dtype
from actorium.gpu.worker.measure import (
    Footprint,
    WorkspaceMeter,
    cache_tensors,
    held_bytes,
    profile,
    taken,
)
from actorium.gpu.worker.summary import summarize
from actorium.gpu.worker.warmup import (
    WarmupCase,
    check_numbers,
    dummy_run,
    run_case,
    warm_up_kernels,
)

LOG = logging.getLogger(__name__)
MALLOPT = {"M_TRIM_THRESHOLD": (-1, 1 << 30), "M_TOP_PAD": (-2, 64 << 20),
           "M_MMAP_THRESHOLD": (-3, 32 << 20)}
"""glibc's mallopt options: (number, bytes). 32 MiB is the largest threshold it takes."""

POSITION_FLOATS = 6
"""Of each of a head's dimensions, for as long as a table of positions is made: its sine and cosine
twice over, and the angles."""
STATE_BYTES = 64 << 20
"""Most of the state pool that the steps before the first request may touch on a CPU, where memory
is taken when it is first written."""

DRIVER_BYTES = 8 * GRAPH_BYTES
"""Most that the driver is believed to keep of one graph."""
ReportPhase = Callable[[str, str], None]
"""Reports a phase: (phase, detail)."""


class OpenedDevice(NamedTuple):
    """A device with a model on it."""

    runner: ModelRunner
    ready: Ready
    footprint: Footprint
    meter: WorkspaceMeter | None
    """Of a CPU: it goes on with the steps of requests."""
    info: WorkerInfo


def open_device(config: Config, epoch: int, report: ReportPhase,
                seconds: dict[str, float]) -> OpenedDevice:
    """Load the model, allocate, warm up. `seconds` (by phase) is completed and goes into `ready`.

    Raises `BadModel` or `BadConfig` with one line.
    """
    device = pick_device(config.device)
    start = perf_counter()
    report("loading", "")
    before = taken(device)
    path = resolve(config.model.model)
    shape = read_shape(path, config)  # says what cannot be before it loads
    max_drafts(config, shape)
    check_kv_dtype(config.memory.kv_cache_dtype, device, config.device.kernels)
    check_positions(config, shape, physical_bytes())
    model = load_model(path, config, device,
                       lambda what, done, of: report("loading", f"{what} {done}/{of}"))
    seconds["load"] = perf_counter() - start
    weights = taken(device) - before
    start = perf_counter()
    report("warming", "allocating")
    runner, footprint, plan = _allocate(config, model, device)
    footprint.measured |= {"weights": weights, **held_bytes(runner)}
    seconds["allocate"] = perf_counter() - start
    start = perf_counter()
    report("warming", "products")
    model.ops.tune(device)
    report("warming", "first steps")
    meter = _warm_up(config, runner, footprint, report)
    seconds["warm up"] = perf_counter() - start
    graphs = _capture(config, runner, footprint, report, seconds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    ready = Ready(
        epoch=epoch, page_size=runner.tables.page_size,
        groups=[PageGroup(pool.pages, group.window)
                for pool, group in zip(runner.pools, model.shape.groups, strict=True)],
        slots=runner.tables.slots, max_model_len=model.shape.max_model_len,
        vocab_size=model.shape.vocab_size, device=f"{device.type} {name}".strip(),
        checkpoints=runner.states.checkpoints if runner.states else 0,
        recurrent=runner.states is not None, load_seconds=seconds,
        drafts=runner.tables.drafts.max_drafts)
    info = summarize(config, model, runner, plan, footprint, graphs, ready.device)
    return OpenedDevice(runner, ready, footprint, meter, info)


def pick_device(config: DeviceConfig) -> torch.device:
    """The device, with torch's threads set. Raises `BadConfig` if it is not there."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise BadConfig("device: cuda was asked for, but torch finds no CUDA device",
                        "device.device")
    if config.device == "cpu" or not available:
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        keep_freed_memory()
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def keep_freed_memory() -> None:
    """Let glibc keep what a layer frees for the next one.

    By default blocks of megabytes go back to the system at once, and every page of them is cleared
    and mapped anew for each layer: a quarter of the time of a step of 2,048 tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in MALLOPT.values():
            mallopt(option, value)


def check_positions(config: Config, shape: ModelShape, memory: int) -> None:
    """Raise `BadConfig` where the tables of positions and pages alone, which grow with the longest
    sequence, would take more than half of so many bytes."""
    angles = POSITION_FLOATS * 4 * shape.head_dim * len(shape.ropes)
    pages = 4 * (config.scheduler.max_num_seqs + 1) * len(shape.groups)
    taken = shape.max_model_len * (angles + pages // config.memory.page_size)
    if taken > memory // 2:
        raise BadConfig(f"max_model_len: tables of {shape.max_model_len:,} positions take "
                        f"{taken:,} bytes, and this machine has {memory:,}: ask for less",
                        "model.max_model_len")


def physical_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def max_drafts(config: Config, shape: ModelShape) -> int:
    """Drafts that a sequence can have in a step. Raises `BadConfig` where they are asked for and
    the model has no layer to make them."""
    return as_served(shape, demand_of(config))[1].drafts


def make_states(config: Config, shape: ModelShape, slots: int, checkpoints: int,
                device: torch.device) -> StatePool | None:
    """The state pool of a model with recurrent layers."""
    if shape.state is None:
        return None
    return StatePool(shape.state, len(shape.recurrent), slots, checkpoints,
                     TORCH_DTYPES[config.memory.state_dtype], TORCH_DTYPES[shape.dtype], device,
                     max_drafts(config, shape))


def _warm_up(config: Config, runner: ModelRunner, footprint: Footprint,
             report: ReportPhase) -> WorkspaceMeter | None:
    """The first steps: on CUDA of every form; on a CPU ever larger ones, of which the temporaries
    are measured."""
    most = config.scheduler.max_num_batched_tokens
    check_numbers(runner, resolve(config.model.model), most)
    if runner.arrays.device.type != "cpu":
        warm_up_kernels(runner, most, report)
        return None
    dummy_run(runner, min(2, most))
    meter = WorkspaceMeter(footprint, cache_tensors(runner))
    rows = runner.tables.slots
    if runner.states is not None:
        rows = max(1, STATE_BYTES * (rows + runner.states.checkpoints) // runner.states.bytes)
    profile(meter, most, lambda tokens: dummy_run(runner, tokens, rows))
    return meter


def _allocate(config: Config, model: Model, device: torch.device
              ) -> tuple[ModelRunner, Footprint, MemoryPlan]:
    """A runner with what the memory plan gives it, what the plan and CUDA say of its bytes, and the
    plan."""
    shape = model.shape
    size, dtype = config.memory.page_size, kv_dtype(config.memory.kv_cache_dtype, model.dtype)
    slots = config.scheduler.max_num_seqs + 1
    arrays = device_arrays(device, model.ops.apply_plan, config.device.kernels == "triton")
    tables = SlotTables(arrays, slots, page_table_width(shape.max_model_len, size), size,
                        shape.vocab_size, shape.max_model_len, len(shape.groups),
                        max_drafts(config, shape), model.ops.sampling)
    sinks = make_pools(shape, [1] * len(shape.groups), size, dtype, device)
    runner = ModelRunner(model, sinks, tables, make_states(config, shape, slots, 0, device),
                         force=parse_acceptance(config.speculation.force_acceptance))
    runner.proposer = make_proposer(model.drafter, shape, make_draft_pool(
        shape, 1, size, dtype, device), tables)
    workspace, step = 0, StepSize(0, 0)
    graphs, demand = _graphs(config, runner), demand_of(config)
    if device.type == "cuda":
        workspace, step = _cuda_workspace(config, runner, device)
        budget = _cuda_budget(config, runner, device, workspace + _graph_bytes(runner, graphs))
        plan = make_plan(shape, demand, budget, "memory_fraction")
    else:
        plan = make_plan(shape, demand, config.memory.kv_cache_bytes, "kv_cache_bytes")
    if plan.checkpoints:
        runner.states = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
        runner.states = make_states(config, shape, slots, plan.checkpoints, device)
    pages = [pool.pages for pool in plan.pools]
    runner.pools = make_pools(shape, pages[:len(shape.groups)], size, dtype, device)
    runner.proposer = make_proposer(model.drafter, shape, make_draft_pool(
        shape, pages[-1], size, dtype, device), tables)
    footprint = Footprint(planned_bytes(plan, graphs), {"workspace": workspace}, step)
    return runner, footprint, plan


def _cuda_workspace(config: Config, runner: ModelRunner,
                    device: torch.device) -> tuple[int, StepSize]:
    """Bytes of the largest step's temporaries, and its size: it is run, over the sink page, as many
    prompts and as a single one."""
    tokens = config.scheduler.max_num_batched_tokens
    single = WarmupCase([(0, max(1, min(tokens, runner.tables.max_len - 1)))])
    dummy_run(runner, tokens)
    run_case(runner, single)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step = dummy_run(runner, tokens)
    run_case(runner, single)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, step


def _cuda_budget(config: Config, runner: ModelRunner, device: torch.device, workspace: int) -> int:
    """Bytes for states and pages, beside the largest step's temporaries. The live states are there
    already."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    held = runner.states.bytes if runner.states else 0
    return device_budget(config.memory.memory_fraction, total, total - free - held, workspace)


# --- graphs --------------------------------------------------------------------------------------

def _graphs(config: Config, runner: ModelRunner) -> Graphs:
    """Those to capture."""
    why = why_eager(runner.model, runner.arrays.device)
    if runner.arrays.device.type == "cuda":
        for what, reason in (("steps of decodes", why.decodes), ("segments", why.segments)):
            if reason:
                LOG.info("no graphs of %s: %s", what, reason)
    return planned_graphs(config, runner.tables.drafts.max_drafts, why)


def _to_capture(runner: ModelRunner, graphs: Graphs, capturer: Capturer
                ) -> tuple[DecodeGraphRunner | None, PiecewiseGraphRunner | None]:
    """These graphs, of one memory. Decodes come first: the logits of the largest take most."""
    model = runner.model
    assert isinstance(model, Model)
    return (DecodeGraphRunner(runner, capturer, graphs.decodes, runner.force)
            if graphs.decodes else None,
            PiecewiseGraphRunner(model, runner.pools, capturer, graphs.tokens)
            if graphs.tokens else None)


def _graph_bytes(runner: ModelRunner, graphs: Graphs) -> int:
    """Bytes that graphs will take: of each kind the largest one is captured, over the sink page,
    and the next one, as which all others count; they are given up again."""
    if not any(graphs):
        return 0
    device, total = runner.arrays.device, 0
    kinds = []
    seen = [_memory(device)]
    for kind in _to_capture(runner, graphs, CudaCapturer(device)):
        if kind is None:
            continue
        kinds.append(kind)  # those before keep their memory
        for most in (1, 2):
            kind.capture(_no_report, most)
            seen.append(_memory(device))
        first, next_one = (graph_bytes_between(*pair, 1) for pair in pairwise(seen[-3:]))
        total += first + (len(kind.shapes) - 1) * next_one
    return total


def _no_report(phase: str, detail: str) -> None:
    pass


def _capture(config: Config, runner: ModelRunner, footprint: Footprint, report: ReportPhase,
             seconds: dict[str, float]) -> Graphs:
    """Capture the runner's graphs, now that its pages are there."""
    graphs = _graphs(config, runner)
    if not any(graphs):
        return graphs
    device, start = runner.arrays.device, perf_counter()
    before = _memory(device)
    decodes, segments = _to_capture(runner, graphs, CudaCapturer(device))
    for kind in (decodes, segments):
        if kind is not None:
            kind.capture(report)
    captured = len(graphs.decodes) + len(graphs.tokens)
    footprint.measured["graphs"] = graph_bytes_between(before, _memory(device), captured)
    runner.graphs, runner.segments = decodes, segments
    seconds["graphs"] = perf_counter() - start
    if device.type == "cuda":
        start = perf_counter()
        warm_up_kernels(runner, max(graphs.tokens, default=1), report)  # as these serve them
        seconds["warm up"] += perf_counter() - start
    return graphs


class DeviceMemory(NamedTuple):
    """Of a device; bytes."""

    free: int
    """Of all of it, whoever took the rest."""
    reserved: int
    """By torch in this process, pools of graphs included."""


def _memory(device: torch.device) -> DeviceMemory:
    free = _free_bytes(device)
    return DeviceMemory(free, torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)


def graph_bytes_between(before: DeviceMemory, after: DeviceMemory, captured: int) -> int:
    """Bytes that so many graphs took between two readings: torch's share, which is this process's
    own, and the driver's. The driver tells what is free on the whole device alone, and other
    processes allocate as well; so of that no more is believed than graphs can take."""
    pools = max(0, after.reserved - before.reserved)
    driver = before.free - after.free - pools
    return pools + min(max(0, driver), DRIVER_BYTES * captured)


def _free_bytes(device: torch.device) -> int:
    """Of the whole device, when torch has given back what it keeps for later."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
