"""The figures of an offline run as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actorium.tools.bench.works import neighbour_ratio

COLUMNS = (
    ("work", "work", "{}"),
    ("engine", "engine", "{}"),
    ("requests", "requests", "{}"),
    ("prompt_tokens", "in", "{}"),
    ("output_tokens", "out", "{}"),
    ("latency_s", "latency s", "{:.3f}"),
    ("ms_per_token", "ms/token", "{:.2f}"),
    ("requests_s", "req/s", "{:.2f}"),
    ("input_tok_s", "input tok/s", "{:,.1f}"),
    ("output_tok_s", "output tok/s", "{:,.1f}"),
    ("total_tok_s", "total tok/s", "{:,.1f}"),
    ("ratio", "x peer", "{:.2f}"),
)
"""(key of a row, heading, format)"""


def add_ratios(rows: list[dict[str, Any]], peer: str) -> None:
    """Give each row of ours, under `ratio`, how many times as fast as the peer it was."""
    theirs = {row["work"]: row for row in rows if row["engine"] == peer}
    for row in rows:
        if row["engine"] != peer and row["work"] in theirs:
            row["ratio"] = neighbour_ratio(row["seconds"], theirs[row["work"]]["seconds"])


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned text, one line a work and engine."""
    columns = [c for c in COLUMNS if any(c[0] in row for row in rows)]
    lines = [[heading for _, heading, _ in columns]]
    lines += [[form.format(row[key]) if key in row else "" for key, _, form in columns]
              for row in sorted(rows, key=lambda row: row["work"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) if i > 1 else cell.ljust(width)
                               for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
                     .rstrip() for line in lines)


def write_json(path: str, result: dict[str, Any]) -> None:
    """The whole result."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")


def plot(path: str, title: str, rows: list[dict[str, Any]], judged: dict[str, str]) -> None:
    """One panel a work: the figure that it is judged by, per engine, with the runs' spread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = sorted({row["work"] for row in rows})
    figure, axes = pyplot.subplots(1, len(works), figsize=(3.2 * len(works), 3.4), squeeze=False)
    for axis, work in zip(axes[0], works, strict=True):
        mine = [row for row in rows if row["work"] == work]
        key = judged[work]
        values = [row[key] for row in mine]
        scale = [row[key] * row["latency_s"] for row in mine]
        spread = [[v - s / row["latency_max_s"] for v, s, row in zip(values, scale, mine,
                                                                     strict=True)],
                  [s / row["latency_min_s"] - v for v, s, row in zip(values, scale, mine,
                                                                     strict=True)]]
        bars = axis.bar([row["engine"] for row in mine], values, yerr=spread, capsize=4,
                        color=["#3b6ea5" if row["engine"] == "actorium" else "#b0b0b0"
                               for row in mine])
        axis.bar_label(bars, fmt="{:,.0f}", padding=3)
        axis.set_title(f"{work}: {key.replace('_tok_s', '')} tokens/s", fontsize=10)
        axis.margins(y=0.2)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
