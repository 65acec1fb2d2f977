"""Opens the device: loads weights, allocates tables and caches, warms up."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch

from actorium.actors.config.parsed_values import chooses_passes, parse_acceptance
from actorium.actors.config.tree import Config, DeviceConfig
from actorium.actors.errors import BadConfig
from actorium.actors.messages import PageGroup, Ready
from actorium.actors.models.model_dir import resolve
from actorium.actors.runtime.memory_limits import available_memory, memory_limit
from actorium.actors.runtime.worker_info import WorkerInfo
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.registry import Model, load_model
from actorium.gpu.parallel.rank_types import ALONE, LoneRank, RankGroup, RankPlace
from actorium.gpu.passes.pass_choice import keep_winners
from actorium.gpu.passes.pass_manager import keep_all
from actorium.gpu.plan.attention_memory import attention_bytes, torch_attends
from actorium.gpu.plan.encoder_memory import encoder_work_bytes
from actorium.gpu.plan.host_budget import host_budget
from actorium.gpu.plan.memory_plan import Demand, MemoryPlan, as_served, demand_of, make_plan
from actorium.gpu.plan.non_cache_memory import StepSize, planned_bytes
from actorium.gpu.plan.sizes import device_budget, page_table_width
from actorium.gpu.plan.tier_memory import staging_bytes
from actorium.gpu.plan.weight_bytes import bytes_by_format
from actorium.gpu.step.pools import make_draft_pool, make_pools
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.speculation import make_proposer
from actorium.gpu.step.staging import device_arrays
from actorium.gpu.step.states import StatePool
from actorium.gpu.step.tables import SlotTables
from actorium.gpu.vision.media_steps import make_images
from actorium.gpu.weights.dtypes import TORCH_DTYPES, kv_dtype
from actorium.gpu.worker.compile_ahead import compile_ahead
from actorium.gpu.worker.disk_threads import DiskThreads
from actorium.gpu.worker.exactness import require_exact
from actorium.gpu.worker.graph_setup import (
    ReportPhase,
    capture_graphs,
    capture_programs,
    trial_graph_bytes,
    wanted_graphs,
)
from actorium.gpu.worker.key_means import measure_key_means
from actorium.gpu.worker.measure import (
    Footprint,
    WorkspaceMeter,
    cache_tensors,
    held_bytes,
    longest_cases,
    profile,
    taken,
)
from actorium.gpu.worker.summary import summarize
from actorium.gpu.worker.tiers import check_tiers, open_tiers, tier_capacity
from actorium.gpu.worker.warmup import check_numbers, dummy_run, run_case, warm_up_kernels
from actorium.kernels.backends import triton_fault

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


class OpenedDevice(NamedTuple):
    """A device with a model on it."""

    runner: ModelRunner
    ready: Ready
    footprint: Footprint
    meter: WorkspaceMeter | None
    """Of a CPU: it goes on with the steps of requests."""
    info: WorkerInfo
    disk: DiskThreads | None = None
    """Not begun."""


def open_device(config: Config, epoch: int, report: ReportPhase, seconds: dict[str, float],
                group: RankGroup = LoneRank()) -> OpenedDevice:
    """Load the model, allocate, warm up. `seconds` (by phase) is completed and goes into `ready`.
    group: of the ranks that share the model, each of which calls this on a device of its own.

    Raises `BadModel` or `BadConfig` with one line, and `GroupTimeout`.
    """
    device = pick_device(config.device, group.place)
    start = perf_counter()
    report("loading", "")
    before = taken(device)
    path = resolve(config.model.model)
    # Says what cannot be before it loads.
    shape = read_shape(path, config).split(group.place.size)
    max_drafts(config, shape)
    check_positions(config, shape, available_memory())
    check_tiers(config, shape)
    if device.type == "cuda" and not (
            config.device.disable_custom_all_reduce or config.device.kernels == "torch"
            or triton_fault(device)):
        group.prepare(shape.hidden, TORCH_DTYPES[shape.dtype])
    most = config.scheduler.max_num_batched_tokens
    model = load_model(path, config, device,
                       lambda what, done, of: report("loading", f"{what} {done}/{of}"), group,
                       partial(keep_winners, most=most) if chooses_passes(config.device.passes)
                       and config.device.exact_ranks == 1 else keep_all)
    seconds["load"] = perf_counter() - start
    require_exact(model, config.device.exact)
    weights = taken(device) - before
    start = perf_counter()
    report("warming", "allocating")
    runner, footprint, plan = _allocate(config, model, device, report)
    footprint.measured |= {"weights": weights, **held_bytes(runner)}
    footprint.formats = bytes_by_format(model.shape)
    seconds["allocate"] = perf_counter() - start
    start = perf_counter()
    report("warming", "first steps")
    meter = _warm_up(config, runner, footprint, report, group)
    seconds["warm up"] = perf_counter() - start
    graphs = capture_graphs(config, runner, footprint, report, seconds)
    if device.type == "cpu" and not any(graphs):
        graphs = capture_programs(config, runner, footprint, meter, report)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    where = f"{device.type} {name}".strip()
    info = summarize(config, model, runner, plan, footprint, graphs, where)
    disk = open_tiers(runner, config, info, model.shape, epoch, group.place)
    if runner.staging is not None:
        footprint.measured["page_staging"] = runner.staging.nbytes
    ready = Ready(
        epoch=epoch, page_size=runner.tables.page_size,
        groups=[PageGroup(pool.pages, group.window)
                for pool, group in zip(runner.pools, model.shape.groups, strict=True)],
        slots=runner.tables.slots, max_model_len=model.shape.max_model_len,
        vocab_size=model.shape.vocabulary, device=where,
        checkpoints=runner.states.checkpoints if runner.states else 0,
        recurrent=runner.states is not None, load_seconds=seconds,
        drafts=runner.tables.drafts.max_drafts, rank=group.place.rank,
        **tier_capacity(runner, config))
    LOG.info("exact: %s", f"no: {info.inexact}" if info.inexact else "yes")
    LOG.info("-O%d: passes %s; graphs: %s", info.level, info.passes,
             info.graphs or f"none ({info.no_graphs or 'none were asked for'})")
    return OpenedDevice(runner, ready, footprint, meter, info, disk)


def pick_device(config: DeviceConfig, place: RankPlace = ALONE) -> torch.device:
    """The device of a rank, with torch's threads set. Raises `BadConfig` if it is not there."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise BadConfig("device: cuda was asked for, but torch finds no CUDA device",
                        "device.device")
    if config.device == "cpu" or not available:
        threads = config.threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, threads // place.size))
        keep_freed_memory()
        return torch.device("cpu")
    if (devices := torch.cuda.device_count()) < place.size:
        raise BadConfig(f"tensor_parallel_size: each rank needs a CUDA device, and there "
                        f"{'is' if devices == 1 else 'are'} {devices}, got {place.size}",
                        "device.tensor_parallel_size")
    torch.cuda.set_device(place.rank)
    return torch.device("cuda", place.rank)


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
             report: ReportPhase, group: RankGroup) -> WorkspaceMeter | None:
    """The first steps: on CUDA of every form; on a CPU ever larger ones, of which the temporaries
    are measured."""
    most = config.scheduler.max_num_batched_tokens
    check_numbers(runner, resolve(config.model.model), most)
    measure_key_means(runner, most)
    if runner.arrays.device.type != "cpu":
        warm_up_kernels(runner, most, report)
        return None
    dummy_run(runner, min(2, most))
    meter = WorkspaceMeter(footprint, cache_tensors(runner))
    rows = runner.tables.slots
    if runner.states is not None:
        rows = max(1, STATE_BYTES * (rows + runner.states.checkpoints) // runner.states.bytes)
    profile(meter, most, lambda tokens: dummy_run(runner, tokens, rows), group.agreed)
    return meter


def _tune(runner: ModelRunner, model: Model, report: ReportPhase) -> None:
    """Measures products that have several ways, as a step of one row asks for them. What that takes
    for good must be there before the memory that is left is shared out."""
    report("warming", "products")
    if model.ops.name == "triton":
        dummy_run(runner, 1)
    model.ops.tune(runner.arrays.device)


def first_runner(config: Config, model: Model, device: torch.device) -> ModelRunner:
    """A runner with one page of each pool, for steps that nobody asked for."""
    shape, slots = model.shape, config.scheduler.max_num_seqs + 1
    size, dtype = config.memory.page_size, kv_dtype(config.memory.kv_cache_dtype, model.dtype)
    arrays = device_arrays(device, model.ops.apply_plan, config.device.kernels == "triton")
    tables = SlotTables(arrays, slots, page_table_width(shape.max_model_len, size), size,
                        shape.vocabulary, shape.max_model_len, len(shape.groups),
                        max_drafts(config, shape), model.ops.sampling)
    tables.images = make_images(model.vision, shape, demand_of(config), model.group)
    sinks = make_pools(shape, [1] * len(shape.groups), size, dtype, device)
    runner = ModelRunner(model, sinks, tables, make_states(config, shape, slots, 0, device),
                         force=parse_acceptance(config.speculation.force_acceptance))
    runner.proposer = make_proposer(model.drafter, shape, make_draft_pool(
        shape, 1, size, dtype, device), tables)
    return runner


def _allocate(config: Config, model: Model, device: torch.device, report: ReportPhase
              ) -> tuple[ModelRunner, Footprint, MemoryPlan]:
    """A runner with what the memory plan gives it, what the plan and CUDA say of its bytes, and the
    plan."""
    shape, runner = model.shape, first_runner(config, model, device)
    size, dtype = config.memory.page_size, kv_dtype(config.memory.kv_cache_dtype, model.dtype)
    slots, tables = runner.tables.slots, runner.tables
    if device.type == "cuda":
        compile_ahead(runner, config.scheduler.max_num_batched_tokens, report)
    if config.device.optimization_level:
        _tune(runner, model, report)
    workspace, staged, step = 0, 0, StepSize(0, 0)
    graphs, demand = wanted_graphs(config, runner), demand_of(config)
    if device.type == "cuda":
        workspace, step = _cuda_workspace(config, runner, device)
        staged = staging_bytes(config, shape)
        beside = trial_graph_bytes(runner, graphs) + encoder_work_bytes(shape, demand) + staged
        budget = _cuda_budget(config, runner, device, workspace + beside)
        budget = int(model.group.agreed(budget))  # all ranks have the same pages
        plan = make_plan(shape, demand, budget, "memory_fraction")
    else:
        plan = _host_plan(config, shape, demand)
    if plan.checkpoints:
        runner.states = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
        runner.states = make_states(config, shape, slots, plan.checkpoints, device)
    pages = [pool.pages for pool in plan.pools]
    runner.pools = make_pools(shape, pages[:len(shape.groups)], size, dtype, device)
    runner.proposer = make_proposer(model.drafter, shape, make_draft_pool(
        shape, pages[-1], size, dtype, device), tables)
    attention = attention_bytes(*as_served(shape, demand), device.type,
                                torch_attends(config, shape, device.type))
    planned = planned_bytes(plan, attention, graphs) | (
        {"page_staging": staged} if staged else {})
    footprint = Footprint(planned, {"workspace": workspace}, step)
    return runner, footprint, plan


def _host_plan(config: Config, shape: ModelShape, demand: Demand) -> MemoryPlan:
    """Raises `BadConfig` where no page is left."""
    budget = host_budget(config, *as_served(shape, demand), memory_limit())
    if not budget.limited:
        return make_plan(shape, demand, budget.bytes, "kv_cache_bytes")
    LOG.warning("the caches get %s bytes: %s", f"{max(budget.bytes, 0):,}", budget.source)
    try:
        return make_plan(shape, demand, budget.bytes, "kv_cache_bytes")
    except BadConfig as error:
        raise BadConfig(f"{error.message}; it is {budget.source}", error.param) from None


def _cuda_workspace(config: Config, runner: ModelRunner,
                    device: torch.device) -> tuple[int, StepSize]:
    """Bytes of the largest step's temporaries, and its size: it is run, over the sink page, as many
    prompts and as `longest_cases`."""
    tokens = config.scheduler.max_num_batched_tokens
    single, *others = longest_cases(runner.tables, tokens)
    dummy_run(runner, tokens)
    run_case(runner, single)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step = dummy_run(runner, tokens)
    for case in (single, *others):
        run_case(runner, case)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, step


def _cuda_budget(config: Config, runner: ModelRunner, device: torch.device, workspace: int) -> int:
    """Bytes for states and pages, beside the largest step's temporaries. The live states are there
    already."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    held = runner.states.bytes if runner.states else 0
    return device_budget(config.memory.memory_fraction, total, total - free - held, workspace)
