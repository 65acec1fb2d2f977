"""`actorium plan`: where every byte of a GPU would go, before a single weight is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from actorium.actors.config.retention import retention_bounds
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models import model_dir as models
from actorium.gpu.families.fp8_shape import otherwise_quantized
from actorium.gpu.plan import checkpoint
from actorium.gpu.plan import weight_bytes as weights
from actorium.gpu.plan.beside import largest_step, tables_estimate, workspace_estimate
from actorium.gpu.plan.graph_memory import graphs_estimate, planned_graphs, why_eager
from actorium.gpu.plan.memory_plan import Demand, MemoryPlan, as_served, demand_of, make_plan
from actorium.gpu.plan.shape import PlanShape, read_plan_shape
from actorium.gpu.plan.sizes import device_budget
from actorium.tools.cli import plan_report
from actorium.tools.cli.flags import Parsed, parse
from actorium.tools.cli.plan_report import BytesBeside, PlanReport

PROG = "actorium plan [MODEL_OR_CONFIG_JSON]"
ABOUT = """Where every byte of one GPU goes, how many tokens that holds, and what one more request,
one more checkpoint or other dtypes would change. Reads config.json alone. --memory is the budget of
the caches (states, checkpoints, pages), what is left after weights; --gpu-memory is the whole
device, of which --memory-fraction is used, and weights, tables and workspace are taken off first.
Without either it is --kv-cache-bytes, the budget of a worker on a CPU."""
_SIZE = re.compile(r"([0-9.]+)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class PlanOptions(Struct, frozen=True, kw_only=True):
    """What the plan is for, and how it is shown. Sizes: bytes, or 13.61GiB, 80GB, 512MiB."""

    memory: str | None = None
    """Budget of the caches on each GPU."""
    gpu_memory: str | None = None
    """Memory of each GPU, weights and workspace included."""
    tensor_parallel_size: int = 1
    """GPUs that share each layer."""
    weights: str | None = None
    """Bytes of weights on each GPU, where config.json does not tell."""
    json: bool = False
    """Print JSON."""
    plot: str | None = None
    """File (.png, .svg, .pdf) for a picture of the bytes."""


class PlannedModel(NamedTuple):
    """What config.json says, and where it lies."""

    shape: PlanShape
    folder: Path
    quantized: bool
    longest: int | None


def run(_command: str, argv: list[str]) -> int:
    """Entry of the command."""
    parsed = parse(PROG, argv, PlanOptions, ABOUT)
    if parsed.options.plot is not None:
        plan_report.check_plot(parsed.options.plot)
    report = _report(parsed)
    if parsed.options.json:
        print(json.dumps(plan_report.as_json(report), indent=2))
    else:
        print(plan_report.text(report))
    if parsed.options.plot is not None:
        plan_report.plot(report, parsed.options.plot)
    return 0


def _report(parsed: Parsed[PlanOptions]) -> PlanReport:
    options, config = parsed.options, parsed.config
    tp = options.tensor_parallel_size
    if not 1 <= tp <= 1024:
        raise BadConfig(f"{parsed.written['tensor_parallel_size']}: must be between 1 and 1024, "
                        f"got {tp}", "tensor_parallel_size")
    where = config_file(config.model.model)
    raw = models.read_json(where)
    shape = read_plan_shape(raw, where, config.model.dtype, config.model.max_model_len,
                            config.model.quantization)
    part, demand = as_served(shape.split(tp), demand_of(config))
    outside = _outside(part, demand, config, _weights(options, part, raw, where))
    budget, source = _budget(parsed, outside)
    plan = make_plan(part, demand, budget, f"--{source.rpartition('--')[2].split()[0]}")
    notes = _notes(plan, config, options, raw.get("quantization_config") is not None)
    return PlanReport(config.model.model or "demo model", plan, outside, source, notes,
                  retention_bounds(config))


def config_file(model: str) -> Path:
    """The config.json of a directory, an id in the HF cache, or the file itself."""
    path = Path(model).expanduser()
    if model and path.is_file():
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

def _weights(options: PlanOptions, part: PlanShape, raw: dict[str, Any],
             where: Path) -> BytesBeside:
    if options.weights is not None:
        return BytesBeside("weights", size(options.weights, "--weights"), "as given by --weights")
    found = checkpoint.total_bytes(where.parent)
    if otherwise_quantized(raw):
        if found is None:
            raise BadConfig("--weights: the checkpoint is quantized and its safetensors index is "
                            f"not in {where.parent}: say what the weights take", "weights")
        return BytesBeside("weights", -(-found // part.tp), "quantized: the checkpoint's, divided")
    count = weights.weight_bytes(part, mtp=part.mtp > 0)
    detail = f"{weights.parameters(part, part.mtp > 0) / 1e9:.2f} G parameters in {part.dtype}"
    if part.fp8 is not None:
        detail += ", projections in fp8"
    if found is not None:
        detail += f"; the checkpoint's files hold {found:,} bytes"
    return BytesBeside("weights", count, detail)


def _outside(part: PlanShape, demand: Demand, config: Config,
             own: BytesBeside) -> list[BytesBeside]:
    """What a GPU holds beside the caches."""
    step = largest_step(demand)
    triton = config.device.kernels != "torch"
    why = why_eager(part.experts is not None and not triton, triton)
    graphs = planned_graphs(config, demand.drafts, why)
    return [own, BytesBeside("resident tables", tables_estimate(part, demand),
                         f"{demand.max_num_seqs + 1} slots"),
            BytesBeside("workspace", workspace_estimate(part, demand),
                    f"an estimate for a step of {step.tokens:,} tokens, {step.rows:,} rows: the "
                    "worker measures it (actorium ps)"),
            BytesBeside("graphs", graphs_estimate(part, demand, graphs),
                    f"an estimate for {graphs.told}, on cuda"
                    if any(graphs) else f"none: {why.decodes or '--enforce-eager'}")]


def _budget(parsed: Parsed[PlanOptions], outside: list[BytesBeside]) -> tuple[int, str]:
    options, config = parsed.options, parsed.config
    if options.memory is not None and options.gpu_memory is not None:
        raise BadConfig("--memory: the caches' budget; cannot be combined with --gpu-memory",
                        "memory")
    if options.memory is not None:
        return size(options.memory, "--memory"), "--memory"
    if options.gpu_memory is None:
        return config.memory.kv_cache_bytes, "--kv-cache-bytes"
    total, fraction = size(options.gpu_memory, "--gpu-memory"), config.memory.memory_fraction
    taken = sum(line.bytes for line in outside)
    budget = device_budget(fraction, total, taken, 0)
    if budget < 1:
        raise BadConfig(
            f"--gpu-memory: {fraction} of {total:,} bytes are {1 - budget:,} too few: "
            + ", ".join(f"{line.bytes:,} for {line.name}" for line in outside), "gpu_memory")
    return budget, f"{fraction} of --gpu-memory {total:,}"


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
        (shape.recurrent is not None and not plan.checkpoints, lambda: "without checkpoints no "
         "prefix is reused"),
    ]
    return [note() for wrong, note in checks if wrong]
