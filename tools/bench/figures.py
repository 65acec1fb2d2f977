"""The figures of a serving run, under the names that vLLM's result files give them. Pure.

Two things are counted as people would expect where vLLM counts events: the peak of throughput is in
tokens, and beside `itl` (from one event to the next, as vLLM has it, where a burst of tokens is one
gap) there is `itl_per_token`, with the wait for a burst shared out among its tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from actorium.tools.bench.run import RequestResult

METRICS = ("ttft", "tpot", "itl", "itl_per_token", "e2el")
"""Times of which the mean, the median, the deviation and percentiles are told."""
GOALS = ("ttft", "tpot", "e2el")
"""Those that --goodput may bound."""
BUCKET = 1.0
"""Seconds over which the peak of throughput is counted."""


def percentile(ranked: Sequence[float], p: float) -> float:
    """The p-th percentile (0..100) of sorted values, between two of them in proportion (numpy's
    default, which vLLM and SGLang use)."""
    place = (len(ranked) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def percentile_name(p: float) -> str:
    """As in p99 and p99.9."""
    return f"p{int(p) if p == int(p) else p}"


def spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean_, median_, std_ and pN_ of `name` in ms, of values in seconds; {} of none."""
    if not values:
        return {}
    ranked = sorted(1e3 * value for value in values)
    found = {"mean": statistics.fmean(ranked), "median": statistics.median(ranked),
             "std": statistics.pstdev(ranked)}
    found |= {percentile_name(p): percentile(ranked, p) for p in percentiles}
    return {f"{what}_{name}_ms": value for what, value in found.items()}


def values_of(found: Sequence[RequestResult]) -> dict[str, list[float]]:
    """Seconds of each of `METRICS`."""
    return {
        "ttft": [r.ttft for r in found],
        "tpot": [r.tpot for r in found if r.tokens > 1],
        "itl": [gap for r in found for gap in r.itl],
        "itl_per_token": [gap for r in found for gap in r.itl_per_token],
        "e2el": [r.latency for r in found],
    }


def goodput(found: Sequence[RequestResult], goals: Mapping[str, float], seconds: float) -> float:
    """Requests a second that met every goal (ms). One token has no TPOT: it counts as 0."""
    met = [all(1e3 * {"ttft": r.ttft, "tpot": r.tpot, "e2el": r.latency}[name] <= bound
               for name, bound in goals.items()) for r in found]
    return sum(met) / seconds


def peak_throughput(found: Sequence[RequestResult], seconds: float) -> float:
    """Most tokens that came in one second, of the seconds since the first request was sent; of a
    run that was over sooner, the mean."""
    if seconds < BUCKET:
        return sum(r.tokens for r in found) / seconds
    buckets: dict[int, int] = {}
    start = min((r.sent for r in found), default=0.0)
    for result in found:
        for time, count in zip(result.times, result.counts, strict=True):
            place = int((time - start) / BUCKET)
            buckets[place] = buckets.get(place, 0) + count
    return max(buckets.values(), default=0) / BUCKET


def peak_concurrency(found: Sequence[RequestResult]) -> int:
    """Most requests under way at once; one that ends when another begins is not beside it."""
    marks = sorted([(r.sent, 1) for r in found] + [(r.times[-1], -1) for r in found])
    now = most = 0
    for _, step in marks:
        now += step
        most = max(most, now)
    return most


def figures(found: Sequence[RequestResult], seconds: float, percentiles: Sequence[float] = (99.0,),
            goals: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The figures of the requests that ended well; `failed` counts the others."""
    good = [r for r in found if r.ok]
    inputs, outputs = sum(r.prompt_tokens for r in good), sum(r.tokens for r in good)
    cached = sum(r.cached_tokens for r in good)
    out: dict[str, Any] = {
        "duration": seconds, "completed": len(good), "failed": len(found) - len(good),
        "total_input_tokens": inputs, "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": goodput(good, goals, seconds) if goals else None,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": peak_throughput(good, seconds),
        "max_concurrent_requests": peak_concurrency(good),
        "concurrency": sum(r.latency for r in good) / seconds,
    }
    if cached:
        out["total_cached_tokens"] = cached
    for name, values in values_of(good).items():
        out |= spread(name, values, percentiles)
    return out


def details(found: Sequence[RequestResult]) -> dict[str, list[Any]]:
    """One value a request, in their order: what vLLM's --save-detailed adds."""
    return {
        "input_lens": [r.prompt_tokens for r in found],
        "output_lens": [r.tokens if r.ok else 0 for r in found],
        "start_times": [r.sent for r in found],
        "ttfts": [r.ttft if r.ok else 0.0 for r in found],
        "itls": [r.itl for r in found],
        "tokens_per_event": [r.counts for r in found],
        "latencies": [r.latency if r.ok else 0.0 for r in found],
        "generated_texts": [r.text for r in found],
        "errors": [r.error or "" for r in found],
    }
