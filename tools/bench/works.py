"""The three pieces of work that are measured, and their figures. Nothing heavy is imported."""

from __future__ import annotations

import random
import statistics
from typing import Any

from msgspec import Struct


class Workload(Struct, frozen=True):
    """`requests` prompts of `prompt` random tokens, all at once, each completed by `output`."""

    name: str
    requests: int
    prompt: int
    output: int
    figure: str
    """The figure that it is judged by: output_tok_s or input_tok_s."""


WORKS = (
    Workload("W1", 1, 128, 128, "output_tok_s"),
    Workload("W2", 32, 128, 64, "output_tok_s"),
    Workload("W3", 1, 2048, 1, "input_tok_s"),
)


class WorkloadRun(Struct):
    """One run of a work."""

    seconds: float
    tokens: list[list[int]]


class WorkloadRuns(Struct):
    """What one engine did of one work: seconds of each run, and the tokens of the first one."""

    work: str
    seconds: list[float]
    tokens: list[list[int]]


def prompts(work: Workload, vocab: int, run: int) -> list[list[int]]:
    """The prompts of a run: fresh ones each time, the same for every engine."""
    rng = random.Random(f"{work.name}-{run}")
    return [[rng.randrange(vocab) for _ in range(work.prompt)] for _ in range(work.requests)]


def figures(work: Workload, seconds: list[float]) -> dict[str, float]:
    """Medians over the runs: latency in seconds, requests and tokens a second."""
    latency = statistics.median(seconds)
    inputs, outputs = work.requests * work.prompt, work.requests * work.output
    return {
        "latency_s": latency,
        "latency_min_s": min(seconds),
        "latency_max_s": max(seconds),
        "requests_s": work.requests / latency,
        "input_tok_s": inputs / latency,
        "output_tok_s": outputs / latency,
        "total_tok_s": (inputs + outputs) / latency,
        "ms_per_token": 1000 * latency / work.output,
    }


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of the positions before the first difference, over all requests."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(a)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return same / max(total, 1)


def row(engine: str, work: Workload, measured: WorkloadRuns) -> dict[str, Any]:
    """One line of the report."""
    return {"engine": engine, "work": work.name, "requests": work.requests,
            "prompt_tokens": work.prompt, "output_tokens": work.output,
            "runs": len(measured.seconds), **figures(work, measured.seconds),
            "seconds": measured.seconds}


def neighbour_ratio(ours: list[float], theirs: list[float]) -> float:
    """How many times as long theirs took: the median over runs next to each other, where the two
    took turns (ours first), so that a machine that changes its speed does so to both."""
    after = [b / a for a, b in zip(ours, theirs, strict=True)]
    before = [b / a for a, b in zip(ours[1:], theirs, strict=False)]
    return statistics.median(after + before)
