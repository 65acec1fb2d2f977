"""Opens a device: joins the ranks, loads weights, allocates tables and caches, warms up, and
reports what is there."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from msgspec.structs import replace

from actorium.actors.config.graph_settings import why_no_graphs
from actorium.actors.config.parsed_values import GRAMMAR, chooses_passes, parse_speculative
from actorium.actors.config.tree import Config, DeviceConfig
from actorium.actors.core import Context
from actorium.actors.errors import BadConfig
from actorium.actors.messages import PageGroup, Ready, WeightsSource
from actorium.actors.models.model_dir import resolve
from actorium.actors.runtime.memory_limits import available_memory
from actorium.actors.runtime.roles import rank_of
from actorium.actors.runtime.rundir import GROUP, remove_group
from actorium.actors.runtime.worker_info import WorkerInfo
from actorium.gpu.adapters.adapter_reader import AdapterReader
from actorium.gpu.adapters.adapter_setup import OpenedAdapters, check_adapters, open_adapters
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.graphs.capture import ReportPhase
from actorium.gpu.graphs.decode_graphs import why_eager
from actorium.gpu.models.decoder import LoadedModel
from actorium.gpu.models.registry import load_model
from actorium.gpu.parallel.rank_group import ALONE, LoneRank, RankGroup, RankPlace, StepGate
from actorium.gpu.parallel.torch_group import open_group
from actorium.gpu.passes.pass_choice import keep_winners
from actorium.gpu.passes.pass_manager import keep_all
from actorium.gpu.plan.graph_memory import Graphs
from actorium.gpu.plan.memory_plan import MemoryPlan
from actorium.gpu.plan.weight_bytes import bytes_by_format
from actorium.gpu.step.given_rows import check_prompt_embeds
from actorium.gpu.step.hidden_rows import hidden_sizes
from actorium.gpu.step.routed_experts import routing_of
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import HostArrays
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.gpu.weights.weight_files import files_of
from actorium.gpu.worker.allocation import allocate, max_drafts
from actorium.gpu.worker.disk_threads import DiskThreads
from actorium.gpu.worker.exact_choice import ExactFiles, Settled, exact_files, settle
from actorium.gpu.worker.exactness import require_exact
from actorium.gpu.worker.graph_setup import capture_graphs, capture_programs
from actorium.gpu.worker.measure import (
    Footprint,
    WorkspaceMeter,
    cache_tensors,
    held_bytes,
    measure_key_means,
    profile,
    taken,
)
from actorium.gpu.worker.tiers import KeptTier, check_tiers, open_tiers, tier_capacity
from actorium.gpu.worker.warmup import check_numbers, dummy_run, few_states, warm_up_kernels
from actorium.kernels.backends import triton_fault

LOG = logging.getLogger(__name__)
MALLOPT = {"M_TRIM_THRESHOLD": (-1, 1 << 30), "M_TOP_PAD": (-2, 64 << 20),
           "M_MMAP_THRESHOLD": (-3, 32 << 20)}
"""glibc's mallopt options: (number, bytes). 32 MiB is the largest threshold it takes."""

POSITION_FLOATS = 6
"""Of each of a head's dimensions, for as long as a table of positions is made: its sine and cosine
twice over, and the angles."""
KERNELS = {"torch": "torch", "native": "C, built for this CPU", "triton": "Triton"}
"""Names of the backends of kernels, in the report."""


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
    reader: AdapterReader | None = None
    """None where no adapters are served."""


def open_device(config: Config, epoch: int, report: ReportPhase, seconds: dict[str, float],
                group: RankGroup = LoneRank(), run_dir: Path | None = None,
                kept: KeptTier | None = None,
                source: WeightsSource = WeightsSource()) -> OpenedDevice:
    """Loads the model, allocates, warms up. `seconds` (by phase) is completed and goes into
    `ready`. group: of the ranks that share the model, each of which calls this on a device of its
    own; run_dir: the engine's, which remembers what its workers chose by measuring; kept: what is
    left on the host of a device that was closed for a sleep; source: of the weights.

    Raises `BadModel` or `BadConfig` with one line, and `GroupTimeout`.
    """
    device = pick_device(config.device, group.place)
    with _timed(seconds, "load"):
        report("loading", "")
        model, weights, files, adapters = _load(config, epoch, device, report, group, run_dir,
                                                 source)
    require_exact(model, config.device.exact)
    with _timed(seconds, "allocate"):
        report("warming", "allocating")
        runner, footprint, plan = allocate(config, model, device, report,
                                           adapters and adapters.layers)
        footprint.measured |= {"weights": weights, **held_bytes(runner)}
        footprint.formats = bytes_by_format(model.shape)
    with _timed(seconds, "warm up"):
        report("warming", "first steps")
        meter = _warm_up(config, runner, footprint, report, group)
    graphs = capture_graphs(config, runner, footprint, report, seconds)
    programs = partial(capture_programs, config, runner, footprint)
    start = perf_counter()
    exact = settle(config, runner, files, lambda: programs(None, report))
    seconds["warm up"] += perf_counter() - start
    if device.type == "cpu" and not any(graphs):
        graphs = programs(meter, report)
    info = summarize(config, model, runner, plan, footprint, graphs, exact, _device_name(device))
    disk = open_tiers(runner, config, info, model.shape, epoch, group.place, kept)
    if runner.staging is not None:
        footprint.measured["page_staging"] = runner.staging.nbytes
    ready = replace(_ready(config, epoch, runner, model.shape, info, seconds, group.place),
                    weights=source)
    LOG.info("exact: %s", info.exact)
    LOG.info("-O%d: passes %s; graphs: %s", info.level, info.passes,
             info.graphs or f"none ({info.no_graphs or 'none were asked for'})")
    return OpenedDevice(runner, ready, footprint, meter, info, disk, adapters and adapters.reader)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Puts into `seconds` how long the phase took."""
    start = perf_counter()
    yield
    seconds[phase] = perf_counter() - start


def _load(config: Config, epoch: int, device: torch.device, report: ReportPhase, group: RankGroup,
          run_dir: Path | None, source: WeightsSource
          ) -> tuple[LoadedModel, int, ExactFiles, OpenedAdapters | None]:
    """The model with its weights, their bytes, what is known of `--exact auto`, and what serves
    adapters; what the config alone rules out is refused before it loads."""
    path = resolve(config.model.model)
    shape = read_shape(path, config).split(group.place.size)
    max_drafts(config, shape)
    check_positions(config, shape, available_memory())
    check_tiers(config, shape)
    check_adapters(config, shape)
    check_prompt_embeds(config, shape)
    if shape.bidirectional and config.memory.kv_cache_dtype != "auto":
        raise BadConfig(f"kv_cache_dtype: {config.memory.kv_cache_dtype}: nothing is kept of "
                        "prompts whose tokens attend to both sides", "memory.kv_cache_dtype")
    if device.type == "cuda" and not (
            config.device.disable_custom_all_reduce or config.device.kernels == "torch"
            or triton_fault(device)):
        group.prepare(shape.hidden, TORCH_DTYPES[shape.dtype])
    measured = chooses_passes(config.device.passes) and config.device.exact_ranks == 1
    most = config.scheduler.max_num_batched_tokens
    if shape.by_transformers:
        import_module("transformers.modeling_utils")  # so that its memory is not the weights'
    files = exact_files(config, shape, epoch, group, run_dir, device.type != "cpu")
    before = taken(device)
    read = None if source == WeightsSource() else files_of(source, path)
    model = load_model(path, files.to_load(config), device,
                       lambda what, done, of: report("loading", f"{what} {done}/{of}"), group,
                       partial(keep_winners, most=most, run_dir=run_dir) if measured else keep_all,
                       read)
    weights = taken(device) - before
    return model, weights, files, open_adapters(path, config, model)


def _device_name(device: torch.device) -> str:
    """"cpu", or "cuda" and the name of the device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return f"{device.type} {name}".strip()


def _ready(config: Config, epoch: int, runner: ModelRunner, shape: ModelShape, info: WorkerInfo,
           seconds: dict[str, float], place: RankPlace) -> Ready:
    """The message to the scheduler."""
    tables, states, pooling = runner.tables, runner.states, shape.pooling
    return Ready(
        epoch=epoch, page_size=tables.page_size,
        groups=[PageGroup(pool.pages, group.window)
                for pool, group in zip(runner.pools, shape.groups, strict=True)],
        slots=tables.slots, max_model_len=shape.max_model_len, vocab_size=shape.vocabulary,
        device=info.device, checkpoints=states.checkpoints if states else 0,
        recurrent=states is not None, load_seconds=seconds, drafts=tables.drafts.max_drafts,
        draft_methods=draft_methods(config, runner), rank=place.rank, inexact=info.inexact,
        pooling=list(pooling.tasks) if pooling else [],
        whole_prompts=pooling is not None and not pooling.causal,
        adapters=runner.adapters.layers.slots if runner.adapters else 0,
        routing=routing_of(shape),
        hidden_states=hidden_sizes(shape),
        **tier_capacity(runner, config))


def draft_methods(config: Config, runner: ModelRunner) -> dict[str, int]:
    """What makes drafts, and how many at most. Raises `BadConfig` where what was asked for cannot
    be had."""
    asked = parse_speculative(config.speculation.speculative)
    if config.speculation.suffix_global_bytes and not isinstance(
            runner.tables.arrays, HostArrays):
        raise BadConfig("suffix_global_bytes: drafts are made of earlier answers on a cpu alone",
                        "speculation.suffix_global_bytes")
    here = {*runner.proposers, GRAMMAR}
    missing = [method for method in asked.methods
               if method not in here and not (asked.auto and method == "mtp")]
    if missing:
        raise BadConfig(f"speculative: nothing makes drafts by {missing[0]} here",
                        "speculation.speculative")
    return {method: most for method, most in asked.methods.items() if method in here}


def join_ranks(ctx: Context) -> tuple[RankGroup, StepGate]:
    """The group of this worker's ranks, all of which call this, and the gate before its steps; of
    a rank alone where it shares the model with nobody. Both wait as long as the engine may take to
    start, until `timeout_s` is set.

    Raises `BadConfig` where there is no device for the rank, and `GroupTimeout`.
    """
    size, patience = ctx.config.device.tensor_parallel_size, ctx.config.runtime.start_timeout
    place = RankPlace(rank_of(ctx.role), size)
    device = pick_device(ctx.config.device, place)
    path = ctx.run_dir / f"{GROUP}{ctx.epoch}"
    if size > 1:
        path.mkdir(mode=0o700, exist_ok=True)
        if place.rank == 0:  # the ranks of older groups are gone
            for old in ctx.run_dir.glob(f"{GROUP}*"):
                if old != path:
                    remove_group(old)
    gate = StepGate(place, path, patience)
    return open_group(place, path, patience, device, patience), gate


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


def free_memory(device: torch.device) -> None:
    """Give the system back the memory of what nothing refers to any more."""
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    else:
        taken(device)  # which trims glibc's heap


def check_positions(config: Config, shape: ModelShape, memory: int) -> None:
    """Raise `BadConfig` where the tables of positions and pages alone, which grow with the longest
    sequence, would take more than half of so many bytes."""
    angles = POSITION_FLOATS * 4 * shape.rope_columns * bool(shape.ropes)
    pages = 4 * (config.scheduler.max_num_seqs + 1) * len(shape.groups)
    taken = shape.max_model_len * (angles + pages // config.memory.page_size)
    if taken > memory // 2:
        raise BadConfig(f"max_model_len: tables of {shape.max_model_len:,} positions take "
                        f"{taken:,} bytes, and this machine has {memory:,}: ask for less",
                        "model.max_model_len")


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
    rows = few_states(runner)
    profile(meter, most, lambda tokens: dummy_run(runner, tokens, rows), group.agreed)
    return meter


# --- the start report ----------------------------------------------------------------------------

def summarize(config: Config, model: LoadedModel, runner: ModelRunner, plan: MemoryPlan,
              footprint: Footprint, graphs: Graphs, exact: Settled, device: str) -> WorkerInfo:
    """What was loaded and allocated, for the engine's start report. device: its name; graphs: those
    that were captured."""
    measured = footprint.measured
    own = {"kv_dtype": config.memory.kv_cache_dtype, "dtype": model.shape.dtype}
    return WorkerInfo(
        device=device, dtype=own["dtype"], weights_bytes=measured.get("weights", 0),
        weight_formats=bytes_by_format(model.shape),
        kv_dtype=own["dtype"] if own["kv_dtype"] == "auto" else own["kv_dtype"],
        kv_bytes=measured.get("pages", 0), kv_tokens=plan.page_tokens,
        max_model_len=plan.shape.max_model_len, full_length=plan.full_length,
        max_num_seqs=plan.demand.max_num_seqs, state_bytes=measured.get("states", 0),
        checkpoints=plan.checkpoints, level=config.device.optimization_level,
        passes=config.device.passes, graphs=describe_graphs(graphs),
        capture_seconds=footprint.capture_seconds or 0.0,
        no_graphs=_why_none(config, runner, graphs), kernels=_kernels(model),
        attention=str(model.attention), exact=exact.text, inexact=exact.inexact,
        drafts=runner.tables.drafts.max_drafts)


def describe_graphs(graphs: Graphs) -> str:
    """Sizes of the graphs of decodes and of steps with prompts; "" without any."""
    rows = sorted({shape.rows for shape in graphs.decodes})
    parts = [f"decodes of {_span(rows)} requests"] * bool(rows)
    parts += [f"steps with prompts of {_span(sorted(graphs.tokens))} tokens"] * bool(graphs.tokens)
    if graphs.programs:
        asked = sorted({shape.rows for shape in graphs.programs})
        parts.append(f"decodes of {_span(asked)} requests, programs in C")
    elif graphs.rows:
        parts.append(f"decodes of up to {graphs.rows} rows, captured as they come")
    return ", ".join(parts)


def _span(sizes: Sequence[int]) -> str:
    if len(sizes) <= 4:
        return ", ".join(map(str, sizes))
    return f"{sizes[0]} to {sizes[-1]} ({len(sizes)} sizes)"


def _why_none(config: Config, runner: ModelRunner, graphs: Graphs) -> str:
    if why := why_no_graphs(config.device):
        return why
    if runner.arrays.device.type != "cuda":
        return runner.model.no_graphs or (
            f"decode steps are no program: {graphs.prevented}" if graphs.prevented else "")
    return why_eager(runner.model, runner.arrays.device).decodes


def _kernels(model: LoadedModel) -> str:
    name = str(getattr(model.ops, "name", "torch"))
    return f"{model.layers_by} (slower than classes of ours)" if model.layers_by else KERNELS.get(
        name, name)
