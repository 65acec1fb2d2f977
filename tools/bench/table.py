"""Figures as the text that vLLM's and SGLang's benchmarks print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
