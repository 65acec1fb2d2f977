"""A memory plan as text, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.config.retention import RetentionBound
from actorium.actors.errors import BadConfig
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.plan.checkpoint_reuse import choices
from actorium.gpu.plan.memory_plan import Change, MemoryPlan, changes, kv_dtype
from actorium.tools.output import aligned

PLOT_KINDS = (".png", ".svg", ".pdf")


class BytesBeside(NamedTuple):
    """Bytes that are not the caches'."""

    name: str
    bytes: int
    detail: str


class PlanReport(NamedTuple):
    model: str
    plan: MemoryPlan
    outside: Sequence[BytesBeside]
    source: str
    """Where the budget comes from."""
    notes: Sequence[str]
    kept: Sequence[RetentionBound]
    """Kept by actors on the host for requests that have ended."""
    level: int = 2
    """Level of optimisation."""
    passes: str = "all"
    """The setting."""
    on_cpu: bool = False
    """It is a worker's on a CPU."""

    @property
    def worker_kind(self) -> str:
        return "one worker on a CPU" if self.on_cpu else "one GPU"


# --- text ----------------------------------------------------------------------------------------

def plan_text(report: PlanReport) -> str:
    plan, d = report.plan, report.plan.demand
    head = (f"{report.model}: {plan.shape.architecture}, {plan.shape.layers} layers, "
            f"tp {plan.shape.tp}, {d.max_num_seqs} requests, pages of {d.page_size} tokens, "
            + (f"{d.drafts} drafts a step{_drafters(plan.shape)}" if d.drafts else "no speculation")
            + f", -O{report.level} (passes {report.passes})")
    parts = [head, "", *_byte_table(report), "", *_tokens(plan), "", *_changes(plan),
             *_reuse(plan), "", *_kept(report.kept)]
    parts += [f"note: {note}" for note in report.notes]
    return "\n".join(parts)


def _drafters(shape: ModelShape) -> str:
    """What makes drafts and takes memory."""
    names = ["mtp"] * (shape.mtp_layers > 0) + ["draft model"] * (shape.draft is not None)
    return f" ({', '.join(names)})" if names else ""


def _byte_table(report: PlanReport) -> list[str]:
    rows = [(f"bytes of {report.worker_kind}", "bytes", "GiB", "share", "")]
    rows += [(line.name, f"{line.bytes:,}", _gib(line.bytes), "", line.detail)
             for line in report.outside]
    budget = report.plan.budget
    rows.append(("caches", f"{budget:,}", _gib(budget), "100.0 %", f"the budget: {report.source}"))
    for line in report.plan.lines:
        each = f"{line.number:,} x {line.each:,}" if line.name != "unused" else ""
        rows.append((f"  {line.name}", f"{line.bytes:,}", _gib(line.bytes),
                     f"{100 * line.bytes / budget:.1f} %",
                     "; ".join(word for word in (each, line.detail) if word)))
    return aligned(rows, {1, 2, 3})


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
    figure.suptitle(f"{report.model}: {report.worker_kind} of {plan.shape.tp}")
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise BadConfig(f"--plot: cannot write {file}: {error.strerror}", "plot") from None
