"""What a worker has loaded and allocated, for the report at the start of an engine."""

from __future__ import annotations

from collections.abc import Sequence

from actorium.actors.config.graph_settings import why_no_graphs
from actorium.actors.config.tree import Config
from actorium.actors.runtime.worker_info import WorkerInfo
from actorium.gpu.graphs.decode_graphs import why_eager
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.plan.graph_memory import Graphs
from actorium.gpu.plan.memory_plan import MemoryPlan
from actorium.gpu.plan.weight_bytes import bytes_by_format
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.exactness import departures
from actorium.gpu.worker.measure import Footprint

KERNELS = {"torch": "torch", "native": "C, built for this CPU", "triton": "Triton"}


def summarize(config: Config, model: Decoder, runner: ModelRunner, plan: MemoryPlan,
              footprint: Footprint, graphs: Graphs, device: str) -> WorkerInfo:
    """device: its name. graphs: those that were captured."""
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
        no_graphs=_why_none(config, runner), kernels=_kernels(model.ops),
        attention=str(model.attention), inexact="; ".join(departures(model, config.device.exact)),
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


def _why_none(config: Config, runner: ModelRunner) -> str:
    if why := why_no_graphs(config.device):
        return why
    if runner.arrays.device.type != "cuda":
        return "" if runner.segments else "not all of this model's kernels are C's"
    return why_eager(runner.model, runner.arrays.device).decodes


def _kernels(ops: object) -> str:
    name = str(getattr(ops, "name", "torch"))
    return KERNELS.get(name, name)
