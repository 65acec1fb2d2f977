"""Allocates tables, pages and states as the memory plan has them. On CUDA the plan's budget is what
the largest step and the graphs, which are run first, leave."""

from __future__ import annotations

import logging

import torch

from actorium.actors.config.parsed_values import parse_acceptance
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.plugins.entry_points import usable
from actorium.actors.plugins.logits_processors import load_processors
from actorium.actors.runtime.memory_limits import memory_limit
from actorium.gpu.adapters.adapted_layers import AdaptedLayers
from actorium.gpu.adapters.adapter_slots import AdapterSlots
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.graphs.capture import ReportPhase
from actorium.gpu.models.decoder import LoadedModel
from actorium.gpu.plan.memory_plan import Demand, MemoryPlan, as_served, demand_of, make_plan
from actorium.gpu.plan.non_cache_memory import (
    StepSize,
    attention_bytes,
    encoder_work_bytes,
    host_budget,
    planned_bytes,
    staging_bytes,
    torch_attends,
)
from actorium.gpu.plan.sizes import device_budget, page_table_width
from actorium.gpu.step.draft_model import DraftModelProposer, make_draft_model_pool
from actorium.gpu.step.eagle import eagle_pool, eagle_proposers
from actorium.gpu.step.logits_processing import LogitsProcessing
from actorium.gpu.step.pools import make_draft_pool, make_pools
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.speculation import Proposer, make_proposers
from actorium.gpu.step.staging import HostArrays, device_arrays
from actorium.gpu.step.states import StatePool
from actorium.gpu.step.tables import SlotTables
from actorium.gpu.step.text_proposer import text_proposers
from actorium.gpu.vision.media_steps import make_images
from actorium.gpu.weights.dtypes import TORCH_DTYPES, kv_dtype
from actorium.gpu.worker.graph_setup import trial_graph_bytes, wanted_graphs
from actorium.gpu.worker.measure import Footprint, longest_cases
from actorium.gpu.worker.warmup import compile_ahead, dummy_run, run_case

LOG = logging.getLogger(__name__)


def allocate(config: Config, model: LoadedModel, device: torch.device, report: ReportPhase,
             adapted: AdaptedLayers | None = None) -> tuple[ModelRunner, Footprint, MemoryPlan]:
    """A runner with what the memory plan gives it, what the plan and CUDA say of its bytes, and the
    plan. adapted: the layers with adapters, where any are served."""
    shape, runner = model.shape, first_runner(config, model, device)
    if adapted is not None:
        runner.adapters = AdapterSlots(adapted, runner.tables.slots, runner.arrays,
                                       runner.tables.drafts.max_drafts + 1)
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
    runner.proposers = _proposers(config, model, pages[-1], tables)
    attention = attention_bytes(*as_served(shape, demand), device.type,
                                torch_attends(config, shape, device.type))
    planned = planned_bytes(plan, attention, graphs) | (
        {"page_staging": staged} if staged else {})
    footprint = Footprint(planned, {"workspace": workspace}, step)
    return runner, footprint, plan


def first_runner(config: Config, model: LoadedModel, device: torch.device) -> ModelRunner:
    """A runner with one page of each pool, for steps that nobody asked for."""
    shape, slots = model.shape, config.scheduler.max_num_seqs + 1
    size, dtype = config.memory.page_size, kv_dtype(config.memory.kv_cache_dtype, model.dtype)
    arrays = device_arrays(device, model.ops.apply_plan, config.device.kernels == "triton")
    tables = SlotTables(arrays, slots, page_table_width(shape.max_model_len, size), size,
                        shape.vocabulary, shape.max_model_len, len(shape.groups),
                        max_drafts(config, shape), model.ops.sampling)
    tables.images = make_images(model.vision, shape, demand_of(config), model.group)
    if demand_of(config).history:
        tables.keep_history()
    sinks = make_pools(shape, [1] * len(shape.groups), size, dtype, device)
    runner = ModelRunner(model, sinks, tables, make_states(config, shape, slots, 0, device),
                         force=parse_acceptance(config.speculation.force_acceptance))
    runner.proposers = _proposers(config, model, 1, tables)
    runner.processing = LogitsProcessing(usable(load_processors(config.runtime.plugins)), tables)
    return runner


def _proposers(config: Config, model: LoadedModel, pages: int, tables: SlotTables
               ) -> dict[str, Proposer]:
    """What makes drafts for the model, by method, with so many pages each."""
    size, asked, shape = config.memory.page_size, config.memory.kv_cache_dtype, model.shape
    proposers = make_proposers(model.drafter, shape, make_draft_pool(
        shape, pages, size, kv_dtype(asked, model.dtype), model.device), tables)
    proposers |= eagle_proposers(
        model, eagle_pool(model, pages, size, kv_dtype(asked, model.dtype)), tables)
    if config.device.kernels != "torch" or isinstance(tables.arrays, HostArrays):
        proposers |= text_proposers(config.speculation, tables)  # a device's kernels are Triton's
    if (draft := model.draft_model) is not None:
        pool = make_draft_model_pool(draft.shape, pages, size, kv_dtype(asked, draft.dtype),
                                     draft.device)
        full = [group.window for group in shape.groups].index(0)
        proposers["draft"] = DraftModelProposer(draft, pool, tables, full)
    return proposers


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


def _tune(runner: ModelRunner, model: LoadedModel, report: ReportPhase) -> None:
    """Measures products that have several ways, as a step of one row asks for them. What that takes
    for good must be there before the memory that is left is shared out."""
    report("warming", "products")
    if model.ops.name == "triton":
        dummy_run(runner, 1)
    model.ops.tune(runner.arrays.device)


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
    cases = [] if runner.model.shape.bidirectional else longest_cases(runner.tables, tokens)
    dummy_run(runner, tokens)
    for case in cases[:1]:
        run_case(runner, case)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step = dummy_run(runner, tokens)
    for case in cases:
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
