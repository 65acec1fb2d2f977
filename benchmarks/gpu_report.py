"""One page of Markdown and the plots of what `gpu.py` has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, str, str]
"""(key, heading, format)"""
KERNELS: Sequence[Column] = (
    ("kernel", "kernel", "{}"), ("shape", "shape", "{}"), ("us", "us", "{:.1f}"),
    ("gbs", "GB/s", "{:,.0f}"), ("tflops", "TFLOP/s", "{:.1f}"), ("share", "of ceiling", "{:.0%}"),
    ("peer", "best other", "{}"), ("peer_us", "its us", "{:.1f}"), ("ratio", "x", "{:.2f}"),
    ("launched_us", "us without a graph", "{:.1f}"), ("waiting_peer", "other that waits", "{}"),
    ("waiting_peer_us", "its us", "{:.1f}"))
DECODE: Sequence[Column] = (
    ("batch", "batch", "{}"), ("context", "context", "{}"), ("how", "how", "{}"),
    ("step_us", "step us", "{:,.0f}"), ("tokens_s", "tokens/s", "{:,.0f}"),
    ("floor_us", "floor us", "{:,.0f}"), ("share", "of floor", "{:.0%}"),
    ("idle_ratio", "idle", "{:.2%}"), ("peer_s", "transformers", "{:,.0f}"),
    ("ratio", "x", "{:.2f}"))
MIXED: Sequence[Column] = (
    ("tokens", "tokens", "{}"), ("batch", "of decodes", "{}"), ("context", "context", "{}"),
    ("how", "how", "{}"), ("step_us", "step us", "{:,.0f}"), ("device_us", "device us", "{:,.0f}"),
    ("idle_ratio", "idle", "{:.2%}"), ("ratio", "x eager", "{:.2f}"))
RING: Sequence[Column] = (
    ("batch", "batch", "{}"), ("context", "context", "{}"), ("overlap", "overlap", "{}"),
    ("step_us", "step us", "{:,.0f}"), ("device_us", "device us", "{:,.0f}"),
    ("tokens_s", "tokens/s", "{:,.0f}"), ("idle_ratio", "idle", "{:.2%}"),
    ("cause", "mostly", "{}"))
SPECULATION: Sequence[Column] = (
    ("batch", "batch", "{}"), ("drafts", "drafts", "{}"), ("step_us", "step us", "{:,.0f}"),
    ("tokens_a_step", "tokens a step", "{:.2f}"), ("tokens_s", "tokens/s", "{:,.0f}"),
    ("share", "of floor", "{:.0%}"), ("ratio", "x no drafts", "{:.2f}"))


def table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """Markdown; columns that no row has are left out."""
    shown = [c for c in columns if any(c[0] in row for row in rows)]
    lines = ["| " + " | ".join(heading for _, heading, _ in shown) + " |",
             "|" + "---|" * len(shown)]
    lines += ["| " + " | ".join(form.format(row[key]) if row.get(key) is not None else ""
                                for key, _, form in shown) + " |" for row in rows]
    return lines


def page(found: Mapping[str, Any], toy: bool) -> str:
    """The page. found: the parts by name."""
    facts = found.get("ceilings", {}).get("facts", {})
    lines = ["# GPU figures" + (" (toy sizes on a CPU: they say nothing)" if toy else ""), "",
             f"{facts.get('device', 'no device')}, torch {facts.get('torch', '?')}; ceilings of "
             f"this run: copy {facts.get('copy_gbs', 0):,.0f} GB/s, bf16 products "
             f"{facts.get('matmul_tflops', 0):,.0f} TFLOP/s."]
    lines += _section("Kernels", KERNELS, with_ratios(_rows(found, "kernels")))
    peers = {(r["batch"], r["context"]): r["tokens_s"] for r in _rows(found, "transformers")}
    decode = [{**row, "peer_s": peer, "ratio": row["tokens_s"] / peer}
              if (peer := peers.get((row["batch"], row["context"]))) else row
              for row in _rows(found, "decode") if "tokens" not in row]
    lines += _section("Decode, Llama-3.1-8B shape, launch path and device alone", DECODE, decode)
    lines += _section("Steps of a piece of a prompt and decodes, Llama-3.1-8B shape", MIXED,
                      _beside_eager(_rows(found, "decode")))
    lines += _opening(found.get("decode", {}).get("facts", {}))
    ring = [{**row, "cause": max(row["causes"], key=row["causes"].get)} if row.get("causes")
            else row for row in (*_rows(found, "ring"), *_rows(found, "ring-no-overlap"))]
    lines += _section("Decode, the whole engine", RING, ring)
    lines += _section("Two drafts a step, forced acceptance, Qwen3.5-like 9B shape", SPECULATION,
                      _rows(found, "speculation"))
    skipped = [f"- {name}: {what}" for name, part in found.items() for what in part["skipped"]]
    if skipped:
        lines += ["", "## Left out, or failed", "", *skipped]
    return "\n".join(lines) + "\n"


def _rows(found: Mapping[str, Any], name: str) -> list[Row]:
    rows: list[Row] = found.get(name, {}).get("rows", [])
    return rows


def _section(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    return ["", f"## {title}", "", *table(columns, rows)] if rows else []


def _opening(facts: Mapping[str, Any]) -> list[str]:
    if not facts:
        return []
    seconds = ", ".join(f"{name} {spent:.1f}" for name, spent in facts["seconds"].items())
    bytes_ = ", ".join(f"{name} {facts['bytes'][name] / 2**30:.2f} ({planned / 2**30:.2f})"
                       for name, planned in facts["planned"].items() if name in facts["bytes"])
    return ["", f"{facts['graphs']} graphs. Seconds: {seconds}. GiB (planned): {bytes_}."]


def _beside_eager(rows: Sequence[Row]) -> list[Row]:
    """Mixed steps: how many times as fast as operation by operation."""
    mixed = [row for row in rows if "tokens" in row]
    eager = {row["tokens"]: row["step_us"] for row in mixed if row["how"] == "eager"}
    return [{**row, "ratio": eager[row["tokens"]] / row["step_us"]}
            if row["how"] != "eager" and row["tokens"] in eager else row for row in mixed]


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """How many times as fast as the best other kernel."""
    return [{**row, "ratio": row["peer_us"] / row["us"]} if "peer_us" in row else row
            for row in rows]


def plots(found: Mapping[str, Any], out: Path) -> None:
    """gpu-kernels.png and gpu-decode.png, of what there is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if rows := _rows(found, "kernels"):
        figure, axis = pyplot.subplots(figsize=(9, 1.5 + 0.25 * len(rows)))
        names = [f"{row['kernel']} {row['shape']}" for row in rows]
        axis.barh(names, [row["share"] for row in rows], color="#3b6ea5", label="actorium")
        others = [(name, row["share"] * row["us"] / row["peer_us"])
                  for name, row in zip(names, rows, strict=True) if "peer_us" in row]
        axis.plot([share for _, share in others], [name for name, _ in others], "d",
                  color="#e08a3c", label="best other")
        axis.invert_yaxis()
        axis.set_xlabel("share of the ceiling (copy bandwidth, or bf16 products)")
        axis.tick_params(labelsize=7)
        axis.legend()
        _save(figure, out / "gpu-kernels.png")
    if rows := [*_rows(found, "decode"), *_rows(found, "ring")]:
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
        steps = [row for row in _rows(found, "decode") if "share" in row]
        _lines(left, steps, "share", "share of the byte floor", "how")
        both = [*_rows(found, "ring"), *_rows(found, "ring-no-overlap")]
        _lines(right, both, "idle_ratio", "device idle ratio, whole engine", "overlap")
        _save(figure, out / "gpu-decode.png")


def _lines(axis: Any, rows: Sequence[Row], key: str, title: str, by: str) -> None:
    """A line for each context and `by`, over the batch."""
    for kind in sorted({(row["context"], row[by]) for row in rows}):
        mine = [row for row in rows if (row["context"], row[by]) == kind]
        axis.plot([row["batch"] for row in mine], [row[key] for row in mine], "o-",
                  label=f"{kind[0]} tokens, {by} {kind[1]}")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("sequences")
    axis.set_title(title, fontsize=10)
    axis.set_ylim(bottom=0)
    if rows:
        axis.legend(fontsize=7)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
