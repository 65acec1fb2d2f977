"""Result files under vLLM's names, whichever benchmark wrote them; the tables that vLLM's and
SGLang's benchmarks print; several runs side by side, as a table or a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.errors import BadConfig
from actorium.tools.output import aligned, load_pyplot, save_plot

DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "tokens_per_event",
           "latencies", "generated_texts", "errors")
"""One value a request: in a file only where asked for."""
_SGLANG = {"total_throughput": "total_token_throughput",
           "accept_length": "spec_decode_acceptance_length",
           **{f"{what}_e2e_latency_ms": f"{what}_e2el_ms"
              for what in ("mean", "median", "std", "p90", "p95", "p99")}}
"""SGLang's name -> vLLM's."""
_OFFLINE = {"successful_requests": "completed", "failed_requests": "failed",
            "total_latency": "duration", "total_throughput": "total_token_throughput"}
"""The same for its offline benchmark."""


def default_name(result: Mapping[str, Any]) -> str:
    """The file name that vLLM would make up: label or backend, rate, concurrency, model, date."""
    model = str(result["model_id"]).rstrip("/").rpartition("/")[2] or "model"
    concurrency = result.get("max_concurrency")
    limit = f"-concurrency{concurrency}" if concurrency else ""
    rate = f"{result['request_rate']}qps"
    if "ramp_up_strategy" in result:
        rate = (f"ramp-up-{result['ramp_up_strategy']}-{result['ramp_up_start_rps']}qps-"
                f"{result['ramp_up_end_rps']}qps")
    return (f"{result.get('label') or result['backend']}-{rate}{limit}-{model}-"
            f"{result['date']}.json")


def without_details(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in DETAILS}


def write_result(path: Path, result: Mapping[str, Any], append: bool) -> None:
    """One object on one line; `append`: after those that the file holds. Raises `BadConfig`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    except OSError as error:
        raise BadConfig(f"--result-filename: {path}: {error.strerror}",
                        "result_filename") from None


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results in a file, under vLLM's names: one JSON object, or several one after the other,
    as vLLM appends them and SGLang writes them. Raises `BadConfig`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise BadConfig(f"{path}: {reason}", "file") from None
    decoder, found, place = json.JSONDecoder(), [], 0
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise BadConfig(f"{path}: no JSON: {error}", "file") from None
        named = translated(value) if isinstance(value, dict) else {}
        if "output_throughput" not in named:
            raise BadConfig(f"{path}: no result of a benchmark: output_throughput is missing",
                            "file")
        found.append(named)
    if not found:
        raise BadConfig(f"{path}: holds no result", "file")
    return found


def translated(result: Mapping[str, Any]) -> dict[str, Any]:
    names = _OFFLINE if "total_latency" in result and "duration" not in result else _SGLANG
    return {names.get(name, name): value for name, value in result.items() if value is not None}


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
    return "\n".join(aligned(lines, range(1, len(runs) + 1)))


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
    figure, axes = load_pyplot().subplots(2, 3, figsize=(max(11.0, 2.2 * len(runs) + 6), 6.6))
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
    save_plot(figure, path)
