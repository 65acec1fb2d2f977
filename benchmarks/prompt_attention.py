"""Attention of prompts on this CPU: queries and keys in 8 bits (`sage`) beside bf16 (`native`).

Both read the same prompt over the same pages, in bf16 or in INT8, which lie scattered, in turns, so
that what else the machine does falls on both. Times are the best of all turns and the median; one
thread is measured by its own time, more threads by the clock. `apart` is how far the two results
are from one another, |sage - native| / |native|, on random numbers.

    python benchmarks/prompt_attention.py [--threads 1] [--lengths 512,2048,8192] \
        [--pages bf16,int8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actorium.gpu.attention.attention_backend import NativeAttention
from actorium.gpu.attention.capabilities import EXTEND
from actorium.gpu.attention.sage_attention import SageAttention
from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference.kv import quantise_rows

SHAPES = {"SmolLM2-135M": (9, 3, 64), "16/8 heads of 128": (16, 8, 128)}
"""Heads, key heads, numbers of a head."""
PAGE = 16
SECONDS = 6.0
"""Of each length, about; at least `LEAST` turns."""
LEAST = 3


@dataclass
class Prompt:
    """A chunk, as a step names it."""

    start: int
    count: int
    pages: Tensor


def measured(name: str, start: int, count: int, threads: int, kind: str) -> dict[str, Any]:
    """Of one prompt, or of the end of one of which `start` tokens are in the pages, of this kind.
    """
    heads, kv_heads, dim = SHAPES[name]
    pages = -(-(start + count) // PAGE)
    layer = torch.randn((pages + 1) * PAGE, 2 * kv_heads, dim).to(torch.bfloat16)
    scales: Tensor | None = None
    if kind == "int8":
        layer, scales = quantise_rows(layer)
    q = torch.randn(count, heads, dim).to(torch.bfloat16)
    rows = [Prompt(start, count, (torch.randperm(pages) + 1).to(torch.int32))]
    lib = library()
    assert lib is not None
    sage = SageAttention("cpu")
    sage.threads = threads
    contenders = {own.name: own.extend(rows, PAGE, 0, dim**-0.5)
                  for own in (NativeAttention(lib, threads), sage)}
    out = {own: attend(q, layer, None, scales).float() for own, attend in contenders.items()}
    clock, times = time.thread_time if threads == 1 else time.perf_counter, {
        own: list[float]() for own in contenders}
    begin = time.perf_counter()
    while len(times["sage"]) < LEAST or time.perf_counter() - begin < SECONDS:
        for own, attend in contenders.items():
            at = clock()
            attend(q, layer, None, scales)
            times[own].append(clock() - at)
    best = {own: min(seconds) for own, seconds in times.items()}
    median = {own: statistics.median(seconds) for own, seconds in times.items()}
    return {
        "shape": name, "pages": kind, "before": start, "tokens": count, "turns": len(times["sage"]),
        **{f"{own}_best_ms": round(1e3 * seconds, 2) for own, seconds in best.items()},
        "faster_best": round(best["native"] / best["sage"], 2),
        "faster_median": round(median["native"] / median["sage"], 2),
        "apart": round(float((out["sage"] - out["native"]).norm() / out["native"].norm()), 4)}


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--pages", default="bf16,int8")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if why := SageAttention.missing(EXTEND, torch.device("cpu")):
        parser.error(f"sage: {why}")
    torch.set_num_threads(given.threads)
    lengths = [int(word) for word in given.lengths.split(",")]
    cases = [(0, length) for length in lengths] + [(lengths[-1] - lengths[0], lengths[0])]
    rows = []
    for name, kind in product(SHAPES, given.pages.split(",")):
        for start, count in cases:
            rows.append(measured(name, start, count, given.threads, kind))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    words = Path("/proc/cpuinfo").read_text()
    found = {"processor": next(line.split(": ")[1] for line in words.splitlines()
                               if line.startswith("model name")),
             "amx": "amx_bf16" in words, "avx512_bf16": "avx512_bf16" in words,
             "threads": given.threads, "prompts": rows}
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
