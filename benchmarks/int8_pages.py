"""C's attention over pages in int8 beside pages in bf16, on this CPU.

    python benchmarks/int8_pages.py [--threads 2] [--contexts 512,2048,8192] [--batches 1,32] \
        [--builds this,avx2] [--out FILE]

Each case is one run in which both kinds of pages take turns, so that what else the machine does
falls on both. Layers are so many that no cache keeps one until its next turn, as in a model, and
pages are dealt out at random. One thread is measured by its own time, which counts on a machine
that does other things besides; more threads by the clock. `ratio` is the median of bf16's times
over the median of int8's; errors are relative to fp64 over the same pages (int8: over what their
codes and scales say).
Extends are chunks of 512 tokens behind so many.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actorium.gpu.attention.attention_backend import NativeAttention
from actorium.kernels.cpu.native_library import THIS_PROCESSOR, library
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.reference.paged_attention import torch_decode

BUILDS = {"this": THIS_PROCESSOR, "avx2": ("-march=haswell",)}
PAGE = 16
CHUNK = 512
COLD_BYTES = 96 << 20
"""Of the layers' pages in int8, together."""
MOST_LAYERS = 30
FEW_LAYERS = 4
"""Of prompts, whose time is not memory's."""


class Heads(NamedTuple):
    """Of a model."""

    heads: int
    kv_heads: int
    dim: int


SHAPES = {"Qwen3-0.6B": Heads(16, 8, 128), "SmolLM2-135M": Heads(9, 3, 64)}


class Chunk(NamedTuple):
    """See `paged_attention.ExtendChunk`."""

    start: int
    count: int
    pages: Tensor


class Layers:
    """The same keys and values in both kinds of pages, in every layer."""

    def __init__(self, lib: ctypes.CDLL, threads: int, heads: Heads, batch: int, context: int,
                 most: int = MOST_LAYERS) -> None:
        each = -(-context // PAGE)
        tokens = batch * each * PAGE
        size = tokens * 2 * heads.kv_heads * heads.dim
        self.count = max(1, min(most, COLD_BYTES // size))
        self.tables = torch.randperm(batch * each).to(torch.int32).view(batch, each)
        self.wide = torch.empty((self.count, tokens, 2 * heads.kv_heads, heads.dim),
                                dtype=torch.bfloat16)
        self.codes = torch.empty(self.wide.shape, dtype=torch.int8)
        self.scales = torch.empty(self.wide.shape[:-1], dtype=torch.bfloat16)
        ops, index = NativeOps(lib, threads), torch.arange(tokens)
        still = torch.zeros(tokens, 2, 1, heads.dim, dtype=torch.bfloat16)
        still[:, 0] = 1  # rotates nothing
        kv = torch.randn(self.wide.shape[1:]).to(torch.bfloat16)
        self.wide.copy_(kv)
        ops.rotate_write(kv, 0, None, 0.0, still, self.codes[0], index, self.scales[0])
        self.codes.copy_(self.codes[0].clone())
        self.scales.copy_(self.scales[0].clone())

    def calls(self, attend: Callable[..., Tensor], q: Tensor) -> dict[str, Callable[[int], Tensor]]:
        """Attention of a layer over each kind of pages."""
        out = torch.empty(q.shape, dtype=q.dtype)
        return {"bf16": lambda i: attend(q, self.wide[i], out),
                "int8": lambda i: attend(q, self.codes[i], out, self.scales[i])}


def by_turns(calls: dict[str, Callable[[int], Tensor]], layers: int, seconds: float,
             threads: int) -> dict[str, float]:
    """Median seconds of a layer, of rounds over all layers, which take turns for so long."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    clock = time.thread_time if threads == 1 else time.perf_counter
    end = time.perf_counter() + seconds
    while len(times["bf16"]) < 5 or time.perf_counter() < end:
        for name, call in calls.items():
            start = clock()
            for layer in range(layers):
                call(layer)
            times[name].append((clock() - start) / layers)
    return {name: statistics.median(found) for name, found in times.items()}


def error(got: Tensor, q: Tensor, pages: Tensor, tables: Tensor, context: int,
          scale: float) -> float:
    """|got - want| / |want|, want in fp64."""
    lens = torch.full((len(tables),), context, dtype=torch.int32)
    want = torch_decode(tables, lens, context, 1, PAGE, 0, scale)(q.double(), pages)
    return float((got.double() - want).norm() / want.norm())


def decode_case(lib: ctypes.CDLL, threads: int, heads: Heads, batch: int, context: int,
                seconds: float) -> dict[str, Any]:
    """A decode step's attention of one layer."""
    layers, scale = Layers(lib, threads, heads, batch, context), heads.dim**-0.5
    q = torch.randn(batch, heads.heads, heads.dim).to(torch.bfloat16)
    lens = torch.full((batch,), context, dtype=torch.int32)
    attend = NativeAttention(lib, threads).decode(layers.tables, lens, context, 1, PAGE, 0, scale)
    calls = layers.calls(attend, q)
    few = slice(0, 2)
    errors = {name: error(call(0)[few].clone(), q[few], pages, layers.tables[few], context, scale)
              for (name, call), pages in zip(calls.items(), (
                  layers.wide[0], layers.codes[0].double() * layers.scales[0].double()[..., None]),
                  strict=True)}
    return told(by_turns(calls, layers.count, seconds, threads)) | {
        f"error_{name}": float(f"{value:.2e}") for name, value in errors.items()}


def extend_case(lib: ctypes.CDLL, threads: int, heads: Heads, context: int,
                seconds: float) -> dict[str, Any]:
    """Attention of one layer, of a chunk behind so many tokens."""
    layers = Layers(lib, threads, heads, 1, context + CHUNK, FEW_LAYERS)
    q = torch.randn(CHUNK, heads.heads, heads.dim).to(torch.bfloat16)
    rows = [Chunk(context, CHUNK, layers.tables[0])]
    attend = NativeAttention(lib, threads).extend(rows, PAGE, 0, heads.dim**-0.5)
    return told(by_turns(layers.calls(attend, q), layers.count, seconds, threads))


def told(times: dict[str, float]) -> dict[str, Any]:
    """A case's figures."""
    return {**{f"{name}_us": round(1e6 * own, 1) for name, own in times.items()},
            "ratio": round(times["bf16"] / times["int8"], 2)}


def processor() -> str:
    """Its name, and what it has of what the kernels use."""
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines()
                 if ":" in line)
    named = {key.strip(): value.strip() for key, value in facts.items()}
    flags = named.get("flags", "").split()
    has = [flag for flag in ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8")
           if flag in flags]
    return f"{named.get('model name', '?')}: {' '.join(has)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--contexts", default="512,2048,8192")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--builds", default="this")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    found: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        found.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)

    for build in given.builds.split(","):
        lib = library(None, BUILDS[build])
        if lib is None:
            raise SystemExit("the C kernels cannot be built here")
        for model, heads in SHAPES.items():
            for context in map(int, given.contexts.split(",")):
                case = {"build": build, "model": model, "context": context}
                for batch in map(int, given.batches.split(",")):
                    tell({"part": "decode", **case, "batch": batch, **decode_case(
                        lib, given.threads, heads, batch, context, given.seconds)})
                tell({"part": "extend", **case, **extend_case(
                    lib, given.threads, heads, context, given.seconds)})
    if given.out:
        given.out.write_text(json.dumps({"processor": processor(), "threads": given.threads,
                                         "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
