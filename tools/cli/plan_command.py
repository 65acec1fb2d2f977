"""`actorium plan`: where every byte of a GPU would go, before a single weight is read; as text,
JSON or a picture.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from actorium.actors.config.attention_names import asked_backends
from actorium.actors.config.graph_settings import why_no_graphs
from actorium.actors.config.retention import RetentionBound, retention_bounds
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models import model_dir as models
from actorium.actors.models.gguf_folder import SUFFIX
from actorium.actors.models.obtain import with_model_path
from actorium.actors.runtime.memory_limits import memory_limit
from actorium.gpu.attention.capabilities import CARDS
from actorium.gpu.families.architectures import shape_from_config
from actorium.gpu.families.fp8_config import otherwise_quantized, unquantized
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.plan import weight_bytes as weights
from actorium.gpu.plan.attention_memory import attention_bytes, torch_attends
from actorium.gpu.plan.checkpoint_reuse import choices
from actorium.gpu.plan.encoder_memory import (
    encoder_cache_bytes,
    encoder_rows,
    encoder_work_bytes,
)
from actorium.gpu.plan.graph_memory import (
    graphs_estimate,
    planned_graphs,
    program_rows,
    program_sizes,
    why_eager,
)
from actorium.gpu.plan.host_budget import host_budget
from actorium.gpu.plan.memory_plan import (
    Change,
    Demand,
    MemoryPlan,
    as_served,
    changes,
    demand_of,
    kv_dtype,
    make_plan,
)
from actorium.gpu.plan.non_cache_memory import largest_step, tables_estimate, workspace_estimate
from actorium.gpu.plan.sizes import device_budget
from actorium.gpu.plan.tier_memory import staging_bytes
from actorium.tools.cli.command_line import parse

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
    """Entry of the command."""
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
    where = config_file(with_model_path(config, weights=False).model.model)
    raw = models.read_json(where)
    # Of a checkpoint that is quantised as no worker serves it, the rest can still be planned.
    other = otherwise_quantized(raw) and config.model.quantization != "fp8"
    shape = shape_from_config(unquantized(raw) if other else raw, where, config.model.dtype,
                              config.model.max_model_len, config.model.quantization,
                              config.model.quantization_group, config.model.quantization_head,
                              config.model.language_model_only)
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
    return PlanReport(config.model.model or "demo model", plan, outside, source, notes,
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
    found = weights.checkpoint_bytes(where.parent)
    if otherwise_quantized(raw):
        if found is None:
            raise BadConfig("--weights: the checkpoint is quantized and its safetensors index is "
                            f"not in {where.parent}: say what the weights take", "weights")
        return BytesBeside("weights", -(-found // part.tp), "quantized: the checkpoint's, divided")
    count = weights.weight_bytes(part)
    own = weights.bytes_by_format(part)
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
    why = why_eager(part.experts is not None and not triton, decode is not None and decode.graphs)
    graphs = planned_graphs(config, demand.drafts, why)
    off = why.decodes or why_no_graphs(config.device)
    rows = program_rows(config, demand.drafts)
    programs = program_sizes(part, demand, rows).bytes if rows else 0
    if on_cpu:
        captured = programs
        detail = (f"programs of decodes of up to {rows} rows" if rows
                  else f"none: {why_no_graphs(config.device)}")
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
    if not on_cpu and (staged := staging_bytes(config, part)):
        found.append(BytesBeside("page staging", staged, "pages on their way to and from the host"))
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
        (shape.recurrence is not None and not plan.checkpoints, lambda: "without checkpoints no "
         "prefix is reused"),
    ]
    return [note() for wrong, note in checks if wrong]


# --- the report -----------------------------------------------------------------------------------

PLOT_KINDS = (".png", ".svg", ".pdf")


class BytesBeside(NamedTuple):
    """Bytes that are not the caches'."""

    name: str
    bytes: int
    detail: str


class PlanReport(NamedTuple):
    """A plan and what belongs beside it."""

    model: str
    plan: MemoryPlan
    outside: Sequence[BytesBeside]
    source: str
    """Where the budget comes from."""
    notes: Sequence[str]
    kept: Sequence[RetentionBound]
    """By actors on the host, of requests that are over."""
    level: int = 2
    """Of optimisation."""
    passes: str = "all"
    """The setting."""
    on_cpu: bool = False
    """It is a worker's on a CPU."""

    @property
    def place(self) -> str:
        """What the bytes are of."""
        return "one worker on a CPU" if self.on_cpu else "one GPU"


# --- text ----------------------------------------------------------------------------------------

def plan_text(report: PlanReport) -> str:
    """The whole report."""
    plan, d = report.plan, report.plan.demand
    head = (f"{report.model}: {plan.shape.architecture}, {plan.shape.layers} layers, "
            f"tp {plan.shape.tp}, {d.max_num_seqs} requests, pages of {d.page_size} tokens, "
            + (f"{d.drafts} drafts a step (mtp)" if d.drafts else "no speculation")
            + f", -O{report.level} (passes {report.passes})")
    parts = [head, "", *_byte_table(report), "", *_tokens(plan), "", *_changes(plan),
             *_reuse(plan), "", *_kept(report.kept)]
    parts += [f"note: {note}" for note in report.notes]
    return "\n".join(parts)


def _byte_table(report: PlanReport) -> list[str]:
    rows = [(f"bytes of {report.place}", "bytes", "GiB", "share", "")]
    rows += [(line.name, f"{line.bytes:,}", _gib(line.bytes), "", line.detail)
             for line in report.outside]
    budget = report.plan.budget
    rows.append(("caches", f"{budget:,}", _gib(budget), "100.0 %", f"the budget: {report.source}"))
    for line in report.plan.lines:
        each = f"{line.number:,} x {line.each:,}" if line.name != "unused" else ""
        rows.append((f"  {line.name}", f"{line.bytes:,}", _gib(line.bytes),
                     f"{100 * line.bytes / budget:.1f} %",
                     "; ".join(word for word in (each, line.detail) if word)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [f"{row[0]:<{widths[0]}}  " + "  ".join(
        f"{row[i]:>{widths[i]}}" for i in (1, 2, 3)) + (f"  {row[4]}" if row[4] else "")
        for row in rows]


def _gib(count: int) -> str:
    return f"{count / 2**30:.3f}"


def _tokens(plan: MemoryPlan) -> list[str]:
    n = plan.demand.max_num_seqs
    rows = [
        (plan.token_capacity, f"tokens guaranteed to {n} requests at once, in whatever lengths"),
        (plan.one_sequence, "tokens for one request alone"),
        (plan.page_tokens, "tokens when every page is full"),
        (plan.arithmetic_limit, "tokens if padding sinks and whole pages took nothing"),
        (plan.token_bytes, "bytes a token"),
    ]
    return [f"{number:>12,}  {what}" for number, what in rows]


def _changes(plan: MemoryPlan) -> list[str]:
    lines = ["a change, and the tokens guaranteed then:"]
    for change in changes(plan):
        lines.append(f"{_capacity(change):>12}  {change.name}" + (
            f" ({change.token_capacity - plan.token_capacity:+,})"
            if change.token_capacity is not None else ""))
    return lines


def _reuse(plan: MemoryPlan) -> list[str]:
    """What checkpoints cost and save; nothing for a model without recurrent layers."""
    rows = [(choice.token_capacity, *choice.reuse) for choice in choices(plan)]
    if not rows:
        return []
    lines = ["", "checkpoints: tokens guaranteed, and prompt tokens computed in recorded workloads "
             "(benchmarks/run.py checkpoints)",
             f"{'':>12}  {'checkpoints':>11}  {'chat':>7}  {'agents':>7}  {'few-shot':>8}"]
    for tokens, number, chat, agents, few_shot in rows:
        here = "  as planned" if number == plan.checkpoints else ""
        lines.append(f"{tokens:>12,}  {number:>11}  {chat:>7.0%}  {agents:>7.0%}  {few_shot:>8.0%}"
                     + here)
    return lines


def _kept(rows: Sequence[RetentionBound]) -> list[str]:
    """What each actor keeps on the host."""
    lines = ["kept of requests that are over, at the most, in the host's memory:"]
    lines += [f"{row.bytes:>14,}  {row.role}: {row.what}"
              + (f" (--{row.setting})" if row.setting else "") for row in rows]
    return [*lines, f"{sum(row.bytes for row in rows):>14,}  in all"]


def _capacity(change: Change) -> str:
    return "does not fit" if change.token_capacity is None else f"{change.token_capacity:,}"


# --- JSON ----------------------------------------------------------------------------------------

def plan_json(report: PlanReport) -> dict[str, Any]:
    """The report's figures; `bytes` sums up to `budget`."""
    plan, d = report.plan, report.plan.demand
    return {
        "model": report.model, "architecture": plan.shape.architecture, "tp": plan.shape.tp,
        "max_num_seqs": d.max_num_seqs, "page_size": d.page_size, "drafts": d.drafts,
        "max_model_len": plan.shape.max_model_len, "weights_dtype": plan.shape.dtype,
        "kv_dtype": kv_dtype(plan.shape, d),
        "optimization_level": report.level, "passes": report.passes,
        "state_dtype": d.state_dtype, "checkpoints": plan.checkpoints,
        "token_capacity": plan.token_capacity, "one_sequence": plan.one_sequence,
        "page_tokens": plan.page_tokens, "arithmetic_limit": plan.arithmetic_limit,
        "bytes_per_token": plan.token_bytes, "limited_by": plan.limited_by,
        "budget": plan.budget, "budget_source": report.source, "used": plan.used,
        "bytes": [line._asdict() for line in plan.lines],
        "outside": [line._asdict() for line in report.outside],
        "pools": [{**pool._asdict(), "bytes": pool.bytes} for pool in plan.pools],
        "states": {"rows": plan.state_rows, **plan.state._asdict()},
        "changes": [{**change._asdict(), "delta": None if change.token_capacity is None
                     else change.token_capacity - plan.token_capacity}
                    for change in changes(plan)],
        "reuse": [{"token_capacity": choice.token_capacity, **choice.reuse._asdict()}
                  for choice in choices(plan)],
        "notes": list(report.notes),
        "kept": [row._asdict() for row in report.kept],
    }


# --- picture -------------------------------------------------------------------------------------

def check_plot(file: str) -> None:
    """Raise `BadConfig` before any work if no picture can be written to `file`."""
    path = Path(file)
    if path.suffix.lower() not in PLOT_KINDS:
        raise BadConfig(f"--plot: must end in {', '.join(PLOT_KINDS)}, got {file!r}", "plot")
    if not path.absolute().parent.is_dir():
        raise BadConfig(f"--plot: no such directory: {path.absolute().parent}", "plot")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise BadConfig("--plot: needs matplotlib; from a checkout: pip install -e '.[bench]'",
                        "plot") from None


def plot_plan(report: PlanReport, file: str) -> None:
    """A bar of the caches' bytes, and one of the tokens each change would guarantee."""
    from matplotlib.figure import Figure

    plan = report.plan
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    lines = [line for line in reversed(plan.lines) if line.bytes]
    bars = left.barh([line.name for line in lines], [line.bytes / 2**30 for line in lines],
                     color="#4c78a8")
    left.bar_label(bars, [f"{line.bytes / 2**30:.2f}  ({100 * line.bytes / plan.budget:.1f} %)"
                          for line in lines], padding=3)
    left.set_xlabel(f"GiB of {plan.budget / 2**30:.2f}")
    left.set_xlim(0, 1.35 * max(line.bytes for line in lines) / 2**30)
    made = [("as planned", plan.token_capacity), *((c.name, c.token_capacity or 0)
                                                   for c in changes(plan))][::-1]
    bars = right.barh([name for name, _ in made], [count for _, count in made],
                      color=["#54a24b" if name == "as planned" else "#bab0ac" for name, _ in made])
    right.bar_label(bars, [f"{count:,}" for _, count in made], padding=3)
    right.set_xlabel(f"tokens guaranteed to {plan.demand.max_num_seqs} requests at once")
    right.set_xlim(0, max(1.0, 1.35 * max(count for _, count in made)))
    right.locator_params(axis="x", nbins=4)
    figure.suptitle(f"{report.model}: {report.place} of {plan.shape.tp}")
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise BadConfig(f"--plot: cannot write {file}: {error.strerror}", "plot") from None
