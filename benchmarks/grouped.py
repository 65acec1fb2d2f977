"""Products with weights in 4 to 8 bits on this CPU, beside bf16 ones and memory's rate.

Each shape and number of rows is one run, in which all contenders take turns, so that what else the
machine does falls on all of them; weights are so many copies, used in turn, that no cache keeps
them between products. Times are the best of all turns and the median; ratios of both to those of
bf16 in the same run are given, and, of few rows, the share of the rate (by medians) at which as
many threads read as many bytes of memory and only add them up. One thread is measured by its own
time, which counts on a machine that does other things besides; more threads by the clock.

    python benchmarks/grouped.py [--threads 2] [--shapes 1024x3072,...] [--rows 1,...] [--out FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actorium.kernels.backends import select_ops
from actorium.kernels.cpu.grouped_native import NativeGrouped
from actorium.kernels.cpu.native_library import library
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.grouped_rows import Grouped, RowFormat, pack_rows
from actorium.kernels.linear import TileLinear, huge

SHAPES = "576x1536,1024x3072,4096x4096,151936x1024"
"""Outputs x columns."""
ROWS = "1,4,32,256,2048"
FORMATS = {
    "int4 in 32": RowFormat(4, 32, False, 8), "int4 in 32, mins": RowFormat(4, 32, True),
    "int4 in 128": RowFormat(4, 128, False, 8), "int5 in 32, mins": RowFormat(5, 32, True),
    "int6 in 16": RowFormat(6, 16, False, 32), "int8 in 32": RowFormat(8, 32, False, 128),
    "int8 in rows": RowFormat(8, 0, False, 128)}
COPIES_BYTES = 192 << 20
"""Of a weight's copies together."""
FEW = 8
"""Up to so many rows a product is compared with reading."""
MOST = 2e12
"""Operations of a product beyond which it is not measured."""
READER = """
#include <stdint.h>
uint64_t read_all(const uint64_t *at, int64_t count, int threads) {
    uint64_t sum = 0;
#pragma omp parallel for reduction(+ : sum) schedule(static) num_threads(threads)
    for (int64_t i = 0; i < count; i++) sum += at[i];
    return sum;
}
"""


def reader(folder: Path) -> Callable[[Tensor, int], None]:
    """Reads memory and adds it up, by so many threads."""
    (folder / "reader.c").write_text(READER)
    path = folder / "reader.so"
    subprocess.run(["cc", "-O3", "-march=native", "-mprefer-vector-width=512", "-funroll-loops",
                    "-fopenmp", "-shared", "-fPIC", "-o", str(path), str(folder / "reader.c")],
                   check=True)
    call = ctypes.CDLL(str(path)).read_all
    call.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    call.restype = ctypes.c_uint64
    return lambda memory, threads: call(memory.data_ptr(), memory.numel() // 8, threads)


def rows_of(outs: int, ins: int, form: RowFormat) -> Tensor:
    """Rows of any numbers."""
    count = ins // form.group if form.group else 1
    return pack_rows(Grouped(
        torch.randint(0, 1 << form.bits, (outs, ins), dtype=torch.uint8),
        torch.rand(outs, count) * 0.01, torch.randn(outs, count) * 0.01 if form.mins else None,
        form))


def copies(size: int) -> int:
    """Of so many bytes."""
    return max(1, min(64, COPIES_BYTES // size))


def by_turns(calls: dict[str, list[Callable[[], Any]]], seconds: float,
             clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each call of each contender, which take turns for so long, thrice at least."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end, turn = time.perf_counter() + seconds, 0
    while turn < 3 or time.perf_counter() < end:
        for name, each in calls.items():
            call = each[turn % len(each)]
            start = clock()
            call()
            times[name].append(clock() - start)
        turn += 1
    return times


def measured(outs: int, ins: int, rows: list[int], ops: NativeOps,
             read: Callable[[Tensor, int], None], seconds: float) -> list[dict[str, Any]]:
    """The figures of a shape."""
    results, held, products = [], {}, {}
    for name, form in FORMATS.items():
        packed = rows_of(outs, ins, form)
        one = ops.linear(packed)
        assert isinstance(one, NativeGrouped)
        held[name] = one.held.numel()
        products[name] = [one, *(ops.linear(packed) for _ in range(copies(held[name]) - 1))]
    weight = torch.randn(outs, ins).to(torch.bfloat16)
    plain = ops.linear(weight)
    held["bf16"] = plain.blocks.numel() if isinstance(plain, TileLinear) else 2 * weight.numel()
    products["bf16"] = [plain, *(ops.linear(weight) for _ in range(copies(held["bf16"]) - 1))]
    memory = huge(max(COPIES_BYTES, 2 * outs * ins))
    memory.fill_(1)
    for count in rows:
        if 2.0 * outs * ins * count > MOST:
            continue
        x = torch.randn(count, ins).to(torch.bfloat16)
        calls: dict[str, list[Callable[[], Any]]] = {
            name: [partial(p, x) for p in each] for name, each in products.items()}
        if count <= FEW:
            for i, (name, size) in enumerate(held.items()):
                size = size // 64 * 64
                parts = [memory[at:at + size] for at in range(0, len(memory) - size + 1, size)]
                first = i * len(parts) // len(held)  # not what another has just read
                calls[f"read {name}"] = [partial(read, p, ops.threads)
                                         for p in parts[first:] + parts[:first]]
        clock = time.thread_time if ops.threads == 1 else time.perf_counter
        times = by_turns(calls, seconds * len(calls), clock)
        base = times["bf16"]
        for name in products:
            best, median = min(times[name]), statistics.median(times[name])
            row = {"shape": f"{outs}x{ins}", "rows": count, "format": name,
                   "best_us": round(best * 1e6, 1), "median_us": round(median * 1e6, 1),
                   "gb_s": round(held[name] / best / 1e9, 2),
                   "gops": round(2 * outs * ins * count / best / 1e9),
                   "over_bf16": round(min(base) / best, 2),
                   "over_bf16_median": round(statistics.median(base) / median, 2)}
            if count <= FEW:
                row["of_reading"] = round(statistics.median(times[f"read {name}"]) / median, 2)
            results.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each contender")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    ops = select_ops(torch.bfloat16, torch.device("cpu"), 64, native=True)
    if not isinstance(ops, NativeOps) or library() is None:
        raise SystemExit("no C kernels here")
    rows = [int(count) for count in given.rows.split(",")]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        read = reader(Path(folder))
        for shape in given.shapes.split(","):
            outs, ins = map(int, shape.split("x"))
            results += measured(outs, ins, rows, ops, read, given.seconds)
    if given.out:
        given.out.write_text(json.dumps(
            {"threads": given.threads, "processor": processor(), "products": results},
            indent=1) + "\n")


def processor() -> str:
    """The model's name as the kernel has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
