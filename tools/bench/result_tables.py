"""Results as text: the tables that vLLM's and SGLang's benchmarks print, and several runs side by
side, as a table or a picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WIDTH = 50
HEADINGS = {"ttft": ("TTFT", "Time to First Token"),
            "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
            "itl": ("ITL", "Inter-token Latency (per event, vLLM's)"),
            "itl_per_token": ("ITL", "Inter-token Latency (per token)"),
            "e2el": ("E2EL", "End-to-end Latency")}
"""Metric -> (its short name, its heading). The two latencies between tokens differ where several
tokens come at once: in the first a burst is one gap, in the second each token has its share."""
SERVING = (
    ("Backend", "backend", "{}"),
    ("Successful requests", "completed", "{}"), ("Failed requests", "failed", "{}"),
    ("Maximum request concurrency", "max_concurrency", "{}"),
    ("Request rate configured (RPS)", "request_rate", "{}"),
    ("Benchmark duration (s)", "duration", "{:.2f}"),
    ("Total input tokens", "total_input_tokens", "{}"),
    ("Total input tokens found cached", "total_cached_tokens", "{}"),
    ("Total generated tokens", "total_output_tokens", "{}"),
    ("Total generated tokens (retokenized)", "total_output_tokens_retokenized", "{}"),
    ("Request throughput (req/s)", "request_throughput", "{:.2f}"),
    ("Request goodput (req/s)", "request_goodput", "{:.2f}"),
    ("Input token throughput (tok/s)", "input_throughput", "{:.2f}"),
    ("Output token throughput (tok/s)", "output_throughput", "{:.2f}"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s", "{:.2f}"),
    ("Peak concurrent requests", "max_concurrent_requests", "{}"),
    ("Total token throughput (tok/s)", "total_token_throughput", "{:.2f}"),
    ("Concurrency", "concurrency", "{:.2f}"))
"""(row, key, format) of a serving run."""
OFFLINE = (
    ("Backend", "backend", "{}"), ("Successful requests", "successful_requests", "{}"),
    ("Failed requests", "failed_requests", "{}"),
    ("Benchmark duration (s)", "total_latency", "{:.2f}"),
    ("Total input tokens", "total_input_tokens", "{}"),
    ("Total generated tokens", "total_output_tokens", "{}"),
    ("Last generation throughput (tok/s)", "last_gen_throughput", "{:.2f}"),
    ("Request throughput (req/s)", "request_throughput", "{:.2f}"),
    ("Input token throughput (tok/s)", "input_throughput", "{:.2f}"),
    ("Output token throughput (tok/s)", "output_throughput", "{:.2f}"),
    ("Total token throughput (tok/s)", "total_throughput", "{:.2f}"))
"""The same of an offline run."""
SPECULATION = (
    ("Acceptance rate (%)", "spec_decode_acceptance_rate", "{:.2f}"),
    ("Acceptance length", "spec_decode_acceptance_length", "{:.2f}"),
    ("Drafts", "spec_decode_num_drafts", "{}"),
    ("Draft tokens", "spec_decode_draft_tokens", "{}"),
    ("Accepted tokens", "spec_decode_accepted_tokens", "{}"))


def serving_table(result: Mapping[str, Any], metrics: Sequence[str],
                  percentiles: Sequence[str]) -> str:
    """metrics: of `HEADINGS`; percentiles: as p99."""
    lines = [heading(" Serving Benchmark Result ", "="), *_rows(SERVING, result)]
    for metric in metrics:
        short, title = HEADINGS[metric]
        lines.append(heading(title, "-"))
        lines += [row(f"{what[0].upper()}{what[1:]} {short} (ms)",
                      f"{result[f'{what}_{metric}_ms']:.2f}")
                  for what in ("mean", "median", *percentiles) if f"{what}_{metric}_ms" in result]
    speculation = _rows(SPECULATION, result)
    if speculation:
        lines += [heading("Speculative Decoding", "-"), *speculation]
        shares = result.get("spec_decode_per_position_acceptance_rates") or ()
        if shares:
            lines.append("Per-position acceptance (%):")
        lines += [row(f"  Position {i}", f"{100 * share:.2f}") for i, share in enumerate(shares)]
    return "\n".join([*lines, "=" * WIDTH])


def offline_table(result: Mapping[str, Any]) -> str:
    """SGLang's table of its offline throughput benchmark."""
    return "\n".join([heading(" Offline Throughput Benchmark Result ", "="),
                      *_rows(OFFLINE, result), "=" * WIDTH])


def _rows(rows: Sequence[tuple[str, str, str]], result: Mapping[str, Any]) -> list[str]:
    return [row(name, form.format(result[key])) for name, key, form in rows
            if result.get(key) is not None]


def heading(text: str, mark: str) -> str:
    """A line of marks around a text."""
    return text.center(WIDTH, mark)


def row(name: str, value: str) -> str:
    """`name:` and its value, which begins where theirs does."""
    return f"{name + ':':<40} {value:<10}".rstrip()


# --- several runs ---------------------------------------------------------------------------------

PANELS = (
    ("Output tokens/s", ("output_throughput", "max_output_tokens_per_s"), ("mean", "peak")),
    ("Requests/s", ("request_throughput",), ("mean",)),
    *((f"{title}, ms", tuple(f"{what}_{name}_ms" for what in ("mean", "median", "p99")),
       ("mean", "median", "p99"))
      for title, name in (("Time to first token", "ttft"), ("Time per output token", "tpot"),
                          ("Gap between events", "itl"), ("End to end", "e2el"))))
"""(title, keys, their names) of the picture."""
_COMPARED = (
    ("completed", "successful requests", "{:.0f}"), ("failed", "failed requests", "{:.0f}"),
    ("max_concurrency", "max concurrency", "{:.0f}"), ("request_rate", "request rate", "{:.2f}"),
    ("duration", "duration s", "{:.2f}"), ("total_input_tokens", "input tokens", "{:.0f}"),
    ("total_output_tokens", "generated tokens", "{:.0f}"),
    ("request_throughput", "requests/s", "{:.2f}"),
    ("request_goodput", "goodput requests/s", "{:.2f}"),
    ("output_throughput", "output tokens/s", "{:.1f}"),
    ("total_token_throughput", "total tokens/s", "{:.1f}"),
    ("max_output_tokens_per_s", "peak output tokens/s", "{:.1f}"),
    ("max_concurrent_requests", "peak concurrency", "{:.0f}"))
_TIMES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL per event"),
          ("itl_per_token", "ITL per token"), ("e2el", "E2EL"))
_COMPARED_DRAFTS = (("spec_decode_acceptance_rate", "acceptance %", "{:.2f}"),
                ("spec_decode_acceptance_length", "acceptance length", "{:.2f}"))


class NamedRun(NamedTuple):
    """A result under the name of its column."""

    name: str
    result: Mapping[str, Any]


def named_runs(found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[NamedRun]:
    """found: (file, result). A run is named by its label, else by its file; with a number where
    several would have the same name."""
    names = [str(result.get("label") or result.get("tag") or Path(file).stem)
             for file, result in found]
    seen: dict[str, int] = {}
    runs = []
    for name, (_, result) in zip(names, found, strict=True):
        seen[name] = seen.get(name, 0) + 1
        runs.append(NamedRun(f"{name} #{seen[name]}" if names.count(name) > 1 else name, result))
    return runs


def compared(runs: Sequence[NamedRun]) -> str:
    """One line a figure, one column a run; in parentheses how many times that of the first run."""
    rows = [(title, key, form) for key, title, form in _COMPARED]
    rows += [(f"{what} {title} ms", f"{what}_{key}_ms", "{:.2f}") for key, title in _TIMES
             for what in ("mean", "median", *_percentiles(runs, key))]
    rows += [(title, key, form) for key, title, form in _COMPARED_DRAFTS]
    lines = [["", *(run.name for run in runs)]]
    lines += [[title, *_compared_cells(key, form, runs)] for title, key, form in rows
              if any(key in run.result for run in runs)]
    for place in range(max((len(_positions(run)) for run in runs), default=0)):
        shares = [_positions(run)[place:place + 1] for run in runs]
        lines.append([f"acceptance % at {place}",
                      *(f"{100 * share[0]:.2f}" if share else "-" for share in shares)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(runs) + 1)]
    return "\n".join("  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width)
                               in enumerate(zip(line, widths, strict=True))).rstrip()
                     for line in lines)


def _percentiles(runs: Sequence[NamedRun], key: str) -> list[str]:
    """Returns the percentiles of a time that any run has, in their order."""
    found = {name.partition("_")[0] for run in runs for name in run.result
             if name.startswith("p") and name.endswith(f"_{key}_ms")
             and name.removesuffix(f"_{key}_ms")[1:].replace(".", "", 1).isdigit()}
    return sorted(found, key=lambda name: float(name[1:]))


def _positions(run: NamedRun) -> Sequence[float]:
    found = run.result.get("spec_decode_per_position_acceptance_rates")
    return found if isinstance(found, list) else ()


def _compared_cells(key: str, form: str, runs: Sequence[NamedRun]) -> list[str]:
    base = runs[0].result.get(key)
    cells = []
    for number, run in enumerate(runs):
        value = run.result.get(key)
        if not isinstance(value, int | float):
            cells.append("-" if value is None else str(value))
            continue
        text = form.format(value)
        if number and isinstance(base, int | float) and base:
            text += f" ({value / base:.2f}x)"
        cells.append(text)
    return cells


def picture(path: str, runs: Sequence[NamedRun]) -> None:
    """One panel a figure, with a group of bars for each run. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(max(11.0, 2.2 * len(runs) + 6), 6.6))
    for axis, (title, keys, names) in zip(axes.flat, PANELS, strict=True):
        width = 0.8 / len(keys)
        for place, (key, name) in enumerate(zip(keys, names, strict=True)):
            values = [run.result.get(key) for run in runs]
            heights = [value if isinstance(value, int | float) else 0.0 for value in values]
            spots = [i + (place - (len(keys) - 1) / 2) * width for i in range(len(runs))]
            axis.bar(spots, heights, width, label=name)
        axis.set_xticks(range(len(runs)), [run.name for run in runs], fontsize=8,
                        rotation=20 if len(runs) > 3 else 0)
        axis.set_title(title, fontsize=10)
        if len(keys) > 1:
            axis.legend(fontsize=7)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
