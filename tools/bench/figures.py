"""The figures of a serving run, under the names that vLLM's result files give them. Pure.

Two things are counted as people would expect where vLLM counts events: the peak of throughput is in
tokens, and beside `itl` (from one event to the next, as vLLM has it, where a burst of tokens is one
gap) there is `itl_per_token`, with the wait for a burst shared out among its tokens.

`counters` and `acceptance` report what speculative decoding did during a run, from counters read
before and after it: the scheduler's gauges of an engine that is reached as a client, and over HTTP
the `/metrics` of vLLM (and of this engine), which counts by position, or of SGLang, which does not.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from actorium.tools.bench.load_driver import RequestResult

METRICS = ("ttft", "tpot", "itl", "itl_per_token", "e2el")
"""Times reported as mean, median, deviation and percentiles."""
GOALS = ("ttft", "tpot", "e2el")
"""Metrics that --goodput may bound."""
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
    now = peak = 0
    for _, step in marks:
        now += step
        peak = max(peak, now)
    return peak


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


# --- speculative decoding -------------------------------------------------------------------------

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')
_ACCEPTED = "spec_decode_num_accepted_tokens_pos_"
_VLLM = {f"vllm:spec_decode_num_{name}_total": f"spec_decode_num_{name}"
         for name in ("drafts", "draft_tokens", "accepted_tokens")}
_SGLANG = ("sglang:spec_verify_calls_total", "sglang:generation_tokens_total",
           "sglang:spec_accept_rate", "sglang:spec_accept_length")


def counters(text: str) -> dict[str, float]:
    """The counters of Prometheus' text, by the names of this engine's gauges; of SGLang's by their
    own. Those of several engines behind one port are added up."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            position = _POSITION.search(labels or "")
            key = f"{_ACCEPTED}{position[1]}" if position else ""
        else:
            key = _VLLM.get(name, name if name in _SGLANG else "")
        if key:
            totals[key] = totals.get(key, 0.0) + _number(value)
    return totals


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def acceptance(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Returns acceptance under vLLM's names (the rate in percent, positions as shares); {} if
    nothing was drafted or the server reports no counters."""

    def more(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    drafts = more("spec_decode_num_drafts")
    tokens, accepted = (more(f"spec_decode_num_{name}") for name in ("draft_tokens",
                                                                     "accepted_tokens"))
    if drafts <= 0:
        return _of_sglang(more, after)
    places = sorted(int(name.removeprefix(_ACCEPTED)) for name in after
                    if name.startswith(_ACCEPTED))
    return {
        "spec_decode_acceptance_rate": 100 * accepted / max(tokens, 1.0),
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts), "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            more(f"{_ACCEPTED}{place}") / drafts for place in places]}


def _of_sglang(more: Any, after: Mapping[str, float]) -> dict[str, Any]:
    """Tokens for each time that drafts were verified; the rate is the server's own latest one."""
    calls = more("sglang:spec_verify_calls_total")
    if calls > 0:
        found = {"spec_decode_acceptance_length": more("sglang:generation_tokens_total") / calls,
                 "spec_decode_num_drafts": int(calls)}
    elif after.get("sglang:spec_accept_length"):
        found = {"spec_decode_acceptance_length": after["sglang:spec_accept_length"]}
    else:
        return {}
    if after.get("sglang:spec_accept_rate"):
        found["spec_decode_acceptance_rate"] = 100 * after["sglang:spec_accept_rate"]
    return found
