"""What a simulated cluster comes to: figures, a table of several, a page, a picture."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorium.tools.evaluation.report_pages import page, table
from actorium.tools.output import load_pyplot, save_plot

PERCENTILES = (50, 90, 99)
ROWS = (
    ("requests", "requests", "{:,}"), ("failed", "of them failed", "{:,}"),
    ("seconds", "seconds, simulated", "{:,.1f}"),
    ("ttft_p50_ms", "TTFT p50, ms", "{:,.1f}"), ("ttft_p90_ms", "TTFT p90, ms", "{:,.1f}"),
    ("ttft_p99_ms", "TTFT p99, ms", "{:,.1f}"),
    ("tpot_p50_ms", "TPOT p50, ms", "{:,.2f}"), ("tpot_p90_ms", "TPOT p90, ms", "{:,.2f}"),
    ("tpot_p99_ms", "TPOT p99, ms", "{:,.2f}"),
    ("requests_per_s", "requests/s", "{:,.2f}"), ("output_per_s", "output tokens/s", "{:,.1f}"),
    ("hit_ratio", "prompt tokens cached", "{:.1%}"),
    ("computed_prompt_tokens", "prompt tokens computed", "{:,}"),
    ("busy", "workers busy", "{:.1%}"), ("preemptions", "preemptions", "{:,}"),
    ("migrated_requests", "requests migrated", "{:,}"),
    ("migrated_tokens", "tokens taken along", "{:,}"),
    ("mean_replicas", "replicas, in the mean", "{:,.2f}"),
    ("most_replicas", "replicas, at the most", "{:,}"),
    ("replicas_more", "times that more came", "{:,}"),
    ("replicas_fewer", "times that one left", "{:,}"),
    ("cost_per_million_output", "cost, million output tokens", "{:,.3f}"),
    ("cost_per_million_tokens", "cost, million tokens", "{:,.3f}"),
)
"""(key of the figures, heading, format)"""
Arrays = Mapping[str, NDArray[Any]]
Clusters = Sequence[tuple[int, str, Mapping[str, Any]]]
"""(replicas, routing, figures) of each."""


def joined(parts: Sequence[Arrays]) -> dict[str, NDArray[Any]]:
    """The columns of all cells, one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def simulation_figures(columns: Arrays, counts: Mapping[str, int], replicas: int,
                       cost_per_hour: float | None) -> dict[str, Any]:
    """The figures of one cluster.

    columns: as `RequestColumns` has them; cost_per_hour: of a replica. A request with one token has
    no TPOT.
    """
    good = ~columns["failed"]
    prompt, tokens = int(columns["prompt"][good].sum()), int(columns["tokens"][good].sum())
    first, end = columns["first"], columns["end"]
    seconds = float(np.nanmax(end) - np.nanmin(columns["arrival"]))
    mean = float(replicas)
    if "replica_seconds" in counts:
        mean = counts["replica_seconds"] / counts["simulated_seconds"]
    figures: dict[str, Any] = {
        "requests": int(np.isfinite(columns["arrival"]).sum()), "failed": int((~good).sum()),
        "seconds": seconds}
    several = good & (columns["tokens"] > 1)
    times = {"ttft": (first - columns["arrival"])[good],
             "tpot": (end - first)[several] / (columns["tokens"][several] - 1)}
    for name, values in times.items():
        if len(values):
            figures[f"{name}_mean_ms"] = 1e3 * float(values.mean())
            figures |= {f"{name}_p{p}_ms": 1e3 * float(np.percentile(values, p))
                      for p in PERCENTILES}
    figures |= {
        "prompt_tokens": prompt, "output_tokens": tokens,
        "requests_per_s": int(good.sum()) / seconds, "output_per_s": tokens / seconds,
        "hit_ratio": int(columns["cached"][good].sum()) / max(prompt, 1),
        "busy": counts["busy_us"] / 1e6 / (seconds * mean), **counts}
    if "replica_seconds" in counts:
        figures |= {"mean_replicas": mean, "replicas_more": sum(
            counts[f"autoscaled_by_{why}"] for why in ("queue", "ttft", "min")),
            "replicas_fewer": sum(counts[f"autoscaled_by_{why}"] for why in ("room", "max"))}
    if cost_per_hour is not None:
        cost = cost_per_hour * mean * seconds / 3600
        figures["cost_per_million_output"] = 1e6 * cost / max(tokens, 1)
        figures["cost_per_million_tokens"] = 1e6 * cost / max(tokens + prompt, 1)
    return figures


def comparison(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Rows of text, the first of headings: one column a policy."""
    rows = [["", *results]]
    for key, heading, form in ROWS:
        if any(key in figures for figures in results.values()):
            rows.append([heading, *(form.format(figures[key]) if key in figures else "-"
                                    for figures in results.values())])
    return rows


def comparison_html(title: str, notes: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a page without scripts that stands alone."""
    return page(title, [*(f"<p>{html.escape(note)}</p>" for note in notes),
                        table(rows[0], rows[1:])])


def comparison_plot(path: Path, title: str, columns: Mapping[str, Arrays],
                    clusters: Clusters) -> None:
    """How many of the requests had their first token, and each of their tokens, by when; with
    several numbers of replicas also what these come to."""
    pyplot = load_pyplot()
    from matplotlib import ticker

    grown = len({replicas for replicas, _, _ in clusters}) > 1
    figure, panels = pyplot.subplots(1, 4 if grown else 2, figsize=(17 if grown else 9, 3.6))
    axes = panels[:2]
    for name, mine in columns.items():
        good = ~mine["failed"] & (mine["tokens"] > 1)
        ttft = (mine["first"] - mine["arrival"])[good]
        tpot = ((mine["end"] - mine["first"])[good] / (mine["tokens"][good] - 1))
        for axis, values in zip(axes, (ttft, tpot), strict=True):
            shares = np.linspace(0, 100, 400)
            axis.plot(1e3 * np.percentile(values, shares), shares, label=name)
    for axis, what in zip(axes, ("time to first token", "time per output token"), strict=True):
        axis.set_xlabel(f"{what}, ms")
        axis.grid(alpha=0.3)
        axis.set_ylabel("% of requests")
    axes[0].set_xscale("log")
    axes[0].xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes[0].xaxis.set_major_formatter("{x:g}")
    axes[0].xaxis.set_minor_formatter(ticker.NullFormatter())
    axes[0].legend(fontsize=8)
    if grown:
        _plot_over_replicas(panels[2:], clusters)
    figure.suptitle(title, fontsize=10)
    save_plot(figure, path)


def _plot_over_replicas(panels: Sequence[Any], clusters: Clusters) -> None:
    """Waiting against cost, or against how busy workers are where nothing is said of costs."""
    cost = "cost_per_million_output"
    costly = all(cost in figures for _, _, figures in clusters)
    shown = (("ttft_p99_ms", "TTFT p99, ms"),
             (cost, "cost of a million output tokens") if costly else ("busy", "workers busy"))
    for panel, (key, label) in zip(panels, shown, strict=True):
        for routing in dict.fromkeys(routing for _, routing, _ in clusters):
            points = [(replicas, figures.get(key, np.nan)) for replicas, name, figures in clusters
                      if name == routing]
            panel.plot(*zip(*points, strict=True), "o-", label=routing)
        panel.set(xlabel="replicas", ylabel=label, ylim=(0, None))
        panel.set_xticks(sorted({replicas for replicas, _, _ in clusters}))
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
