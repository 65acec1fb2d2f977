"""`actorium plan`: where every byte of a GPU would go, before a single weight is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from actorium.actors.config.attention_names import asked_backends
from actorium.actors.config.graph_settings import why_no_graphs
from actorium.actors.config.retention import retention_bounds
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models import model_dir as models
from actorium.actors.models.gguf_folder import SUFFIX
from actorium.actors.models.model_classes import architecture
from actorium.actors.models.obtain import with_model_path
from actorium.actors.models.pooling_shape import read_pooling
from actorium.actors.runtime.memory_limits import memory_limit
from actorium.gpu.attention.capabilities import CARDS
from actorium.gpu.families.adapted_modules import adapter_bytes
from actorium.gpu.families.architectures import (
    add_plugin_families,
    shape_from_config,
    with_drafter,
)
from actorium.gpu.families.fp8_config import otherwise_quantized, unquantized
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.plan import weight_bytes as weights
from actorium.gpu.plan.graph_memory import (
    BY_TRANSFORMERS,
    NOTHING_DECODED,
    EagerReasons,
    graphs_estimate,
    planned_graphs,
    program_rows,
    program_sizes,
    why_eager,
)
from actorium.gpu.plan.memory_plan import Demand, MemoryPlan, as_served, demand_of, make_plan
from actorium.gpu.plan.non_cache_memory import (
    attention_bytes,
    encoder_cache_bytes,
    encoder_rows,
    encoder_work_bytes,
    host_budget,
    largest_step,
    staging_bytes,
    tables_estimate,
    torch_attends,
    workspace_estimate,
)
from actorium.gpu.plan.sizes import device_budget
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.plan_report import (
    BytesBeside,
    PlanReport,
    check_plot,
    plan_json,
    plan_text,
    plot_plan,
)

PROG = "actorium plan [MODEL_OR_CONFIG_JSON]"
ABOUT = """Where every byte of one GPU goes, or of a worker on a CPU, how many tokens that holds,
and what one more request, one more checkpoint or other dtypes would change. Reads config.json
alone. --memory is the budget of the caches (states, checkpoints, pages), what is left after
weights; --gpu-memory is the whole device, of which --memory-fraction is used, and weights, tables
and workspace are taken off first. Without either it is --kv-cache-bytes, the budget of a worker on
a CPU, or what is left for that under the smallest limit of memory of all control groups that this
command runs in."""
_SIZE = re.compile(r"([0-9.]+)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class PlanOptions(Struct, frozen=True, kw_only=True):
    """What the plan is for, and how it is shown. Sizes: bytes, or 13.61GiB, 80GB, 512MiB."""

    memory: str | None = None
    """Budget of the caches on each GPU."""
    gpu_memory: str | None = None
    """Memory of each GPU, weights and workspace included."""
    weights: str | None = None
    """Bytes of weights on each GPU, where config.json does not tell."""
    json: bool = False
    """Print JSON."""
    plot: str | None = None
    """File (.png, .svg, .pdf) for a picture of the bytes."""


def run(_command: str, argv: list[str]) -> int:
    parsed = parse(PROG, argv, PlanOptions, ABOUT)
    if parsed.options.plot is not None:
        check_plot(parsed.options.plot)
    report = make_report(parsed.config, parsed.options)
    if parsed.options.json:
        print(json.dumps(plan_json(report), indent=2))
    else:
        print(plan_text(report))
    if parsed.options.plot is not None:
        plot_plan(report, parsed.options.plot)
    return 0


def make_report(config: Config, options: PlanOptions) -> PlanReport:
    """The plan for a model as it is configured. Raises `BadModel`, and `BadConfig` where something
    does not fit."""
    wanted, config = config.model.model, with_model_path(config, weights=False)
    where = config_file(config.model.model)
    whole = where.name == "config.json"
    raw = models.read_config(where.parent) if whole else models.read_json(where)
    # Of a checkpoint that is quantised as no worker serves it, the rest can still be planned.
    other = otherwise_quantized(raw) and config.model.quantization != "fp8"
    add_plugin_families(architecture(raw), config.runtime.plugins)
    shape = shape_from_config(unquantized(raw) if other else raw, where, config.model.dtype,
                              config.model.max_model_len, config.model.quantization,
                              config.model.quantization_group, config.model.quantization_head,
                              config.model.language_model_only, config.model.model_impl,
                              read_pooling(where.parent, raw, config.model))
    shape = with_drafter(shape, config)
    part, demand = as_served(shape.split(config.device.tensor_parallel_size), demand_of(config))
    on_cpu = config.device.device == "cpu" or (config.device.device == "auto" and options.memory is
                                               None and options.gpu_memory is None)
    outside = _outside(part, demand, config, _weights(options, part, raw, where), on_cpu)
    budget, source, spare = _budget(config, options, outside, part, demand)
    flag = f"--{source.rpartition('--')[2].split()[0]}"
    try:
        plan, beyond = make_plan(part, demand, budget, flag), []
    except BadConfig:
        if spare is None:
            raise
        plan = make_plan(part, demand, spare, flag)
        beyond = [f"another machine's: here no page would fit, {source}"]
        source = flag
    notes = _notes(plan, config, options, raw.get("quantization_config") is not None) + beyond
    device = config.device
    return PlanReport(wanted or "demo model", plan, outside, source, notes,
                  retention_bounds(config), device.optimization_level, device.passes, on_cpu)


def config_file(model: str) -> Path:
    """The config.json of a directory, of a name in the HF cache, or made of a GGUF file; or the
    file itself."""
    path = Path(model).expanduser()
    if model and path.is_file() and path.suffix != SUFFIX:
        return path
    if model.endswith(".json"):
        raise BadModel(f"model: no such file: {path.absolute()}", "model")
    return models.resolve(model) / "config.json"


def size(text: str, flag: str) -> int:
    """Bytes of `13.61GiB`, `80GB`, `512m` (binary, as of other settings) or a number.

    Raises `BadConfig` that names the flag.
    """
    found = _SIZE.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError(text)
        number, unit, binary, byte = found.groups()
        base = 1000 if byte and not binary else 1024
        count = int(float(number) * base ** _POWERS[unit.lower()])
    except (ValueError, OverflowError):
        raise BadConfig(f"{flag}: must be bytes or a size as 13.61GiB or 80GB, got {text!r}",
                        flag.removeprefix("--")) from None
    if count < 1:
        raise BadConfig(f"{flag}: must be at least 1 byte, got {text!r}", flag.removeprefix("--"))
    return count


# --- bytes beside the caches ---------------------------------------------------------------------

def _weights(options: PlanOptions, part: ModelShape, raw: dict[str, Any],
             where: Path) -> BytesBeside:
    if options.weights is not None:
        return BytesBeside("weights", size(options.weights, "--weights"), "as given by --weights")
    found = models.checkpoint_bytes(where.parent)
    if otherwise_quantized(raw):
        if found is None:
            raise BadConfig("--weights: the checkpoint is quantized and its safetensors index is "
                            f"not in {where.parent}: say what the weights take", "weights")
        return BytesBeside("weights", -(-found // part.tp), "quantized: the checkpoint's, divided")
    own = weights.bytes_by_format(part)
    count = sum(own.values())
    detail = f"{weights.parameters(part) / 1e9:.2f} G parameters in "
    detail += part.dtype if len(own) == 1 else ", ".join(
        f"{name}: {held:,}" for name, held in own.items())
    if found is not None:
        detail += f"; the checkpoint's files hold {found:,} bytes"
    return BytesBeside("weights", count, detail)


def _outside(part: ModelShape, demand: Demand, config: Config,
             own: BytesBeside, on_cpu: bool) -> list[BytesBeside]:
    """What a GPU, or a worker on a CPU, holds beside the caches."""
    step, where = largest_step(demand), "cpu" if on_cpu else "cuda"
    attention = attention_bytes(part, demand, where, torch_attends(config, part, where))
    triton = config.device.kernels != "torch"
    asked = asked_backends(config.device).decode
    attends = ("triton" if triton else "torch") if asked == "auto" else asked
    decode = CARDS[attends].decode
    theirs = (BY_TRANSFORMERS if part.by_transformers else
              NOTHING_DECODED if part.bidirectional else "")
    why = EagerReasons(theirs, theirs) if theirs else why_eager(
        part.experts is not None and not triton, decode is not None and decode.graphs and
        part.index is None)
    graphs = planned_graphs(config, demand.drafts, why)
    off = why.decodes or why_no_graphs(config.device)
    rows = 0 if theirs else program_rows(config, demand.drafts)
    programs = program_sizes(part, demand, rows).bytes if rows else 0
    if on_cpu:
        captured = programs
        detail = (f"programs of decodes of up to {rows} rows" if rows
                  else f"none: {theirs or why_no_graphs(config.device)}")
    else:
        captured = graphs_estimate(part, demand, graphs)
        detail = f"an estimate for {graphs.summary}, on cuda" if any(graphs) else f"none: {off}"
        detail += f"; on a cpu programs of up to {rows} rows take {programs:,}" if rows else ""
    found = [own, BytesBeside("resident tables", tables_estimate(part, demand),
                         f"{demand.max_num_seqs + 1} slots"),
            BytesBeside("workspace", workspace_estimate(part, demand, attention),
                    f"an estimate for a step of {step.tokens:,} tokens, {step.rows:,} rows, "
                    f"{attention:,} of it for attention behind {part.max_model_len:,}: the worker "
                    "measures it (actorium ps)"),
            BytesBeside("graphs", captured, detail)]
    if part.draft is not None:
        found.insert(1, BytesBeside("draft model", weights.weight_bytes(part.draft),
                                    f"weights of {part.draft.architecture}, "
                                    f"{part.draft.layers} layers"))
    if not on_cpu and (staged := staging_bytes(config, part)):
        found.append(BytesBeside("page staging", staged, "pages on their way to and from the host"))
    if demand.earlier_answers:
        found.append(BytesBeside("earlier answers", demand.earlier_answers,
                                 "drafts are made of them (--suffix-global-bytes)"))
    if demand.adapters:
        held = adapter_bytes(part, demand.adapters, demand.adapter_rank)
        found.append(BytesBeside("adapters", held, f"{demand.adapters} of rank "
                                 f"{demand.adapter_rank} at most"))
    if part.vision is None:
        return found
    return [*found, BytesBeside("encoder cache", encoder_cache_bytes(part, demand),
                                f"{encoder_rows(part, demand):,} tokens of images and videos"),
            BytesBeside("encoder workspace", encoder_work_bytes(part, demand),
                        f"an estimate for an image, or a frame of a video, of "
                        f"{demand.encoder_tokens:,} tokens")]


def _budget(config: Config, options: PlanOptions, outside: list[BytesBeside], part: ModelShape,
            demand: Demand) -> tuple[int, str, int | None]:
    """Bytes, where they come from, and what they would be where no limit of memory cut them."""
    if options.memory is not None and options.gpu_memory is not None:
        raise BadConfig("--memory: the caches' budget; cannot be combined with --gpu-memory",
                        "memory")
    if options.memory is not None:
        return size(options.memory, "--memory"), "--memory", None
    if options.gpu_memory is None:
        limit = None if config.device.device == "cuda" else memory_limit()
        found = host_budget(config, part, demand, limit)
        return found.bytes, found.source, config.memory.kv_cache_bytes if found.limited else None
    total, fraction = size(options.gpu_memory, "--gpu-memory"), config.memory.memory_fraction
    taken = sum(line.bytes for line in outside)
    budget = device_budget(fraction, total, taken, 0)
    if budget < 1:
        raise BadConfig(
            f"--gpu-memory: {fraction} of {total:,} bytes are {1 - budget:,} too few: "
            + ", ".join(f"{line.bytes:,} for {line.name}" for line in outside), "gpu_memory")
    return budget, f"{fraction} of --gpu-memory {total:,}", None


def _notes(plan: MemoryPlan, config: Config, options: PlanOptions, quantized: bool) -> list[str]:
    """What the figures do not say by themselves."""
    d, shape = plan.demand, plan.shape
    checks: list[tuple[bool, Callable[[], str]]] = [
        (plan.token_capacity == 0, lambda: f"{d.max_num_seqs} sequences cannot run at once: there "
         f"are {plan.lead.pages - 1} pages"),
        (plan.one_sequence < shape.max_model_len, lambda: "no sequence can reach max_model_len "
         f"({shape.max_model_len:,})"),
        (plan.limited_by != "memory", lambda: f"the pools are limited by {plan.limited_by}, not by "
         "memory"),
        (shape.by_transformers > 0, lambda: "transformers' class runs the model (--model-impl): "
         "the worker learns of it what heads and windows are, which may differ from config.json"),
        (shape.recurrence is not None and not plan.checkpoints, lambda: "without checkpoints no "
         "prefix is reused"),
    ]
    return [note() for wrong, note in checks if wrong]
