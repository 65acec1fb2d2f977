"""What the device can do at best, in the run whose figures are held against it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import facts
from .child import Bench
from .timer import Timer
from .truth import error

SMALL_LAUNCHES = 200
SOME = 16
"""Rows of a product that are compared."""


class Ceilings(NamedTuple):
    """Of one device."""

    copy_gbs: float
    """A copy; bytes read and written."""
    bf16_tflops: float = 0.0
    fp8_tflops: float = 0.0


def run(bench: Bench) -> None:
    """Rows `copy`, `bf16 products`, `fp8 products`, `small launches`."""
    timer = Timer(bench.machine)
    with bench.row("copy") as go:
        if go:
            bench.record.add("copy", gbs=copy_gbs(bench, timer))
    side = bench.size(8192, 64)
    for name, product in (("bf16 products", _bf16), ("fp8 products", _fp8)):
        with bench.row(name) as go:
            if go:
                run, some = product(bench, side)
                if bench.compared(name, error(run()[:len(some)], some), 0.01):
                    us = timer.us(run)
                    bench.record.add(name, tflops=2 * side**3 / us / 1e6, side=side,
                                     **facts.readings())
    with bench.row("small launches") as go:
        if go:
            _launches(bench, timer)


def copy_gbs(bench: Bench, timer: Timer) -> float:
    """Bytes read and written."""
    size = bench.size(int(min(4.0, bench.free_gib / 4) * 2**30), 1 << 20)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / timer.us(lambda: target.copy_(source)) / 1e3


Product = tuple[Callable[[], Tensor], Tensor]
"""(the whole, what some of its first rows must be)"""


def _bf16(bench: Bench, side: int) -> Product:
    """Of random numbers."""
    a, b = (torch.randn(side, side, device=bench.device).to(torch.bfloat16) for _ in range(2))
    return lambda: a @ b, a[:SOME].float() @ b.float()


def _fp8(bench: Bench, side: int) -> Product:
    """A scale for each row and each column, sums rounded to bf16."""
    a, b = (torch.randn(side, side, device=bench.device).to(torch.float8_e4m3fn) for _ in range(2))
    # On a CPU torch 2.11, which GPU machines have, takes one scale for all.
    ones = torch.ones(bench.size(side, 1), 1, device=bench.device)
    return (lambda: torch._scaled_mm(a, b.t(), ones, ones.t(), out_dtype=torch.bfloat16),
            a[:SOME].float() @ b.t().float())


def _launches(bench: Bench, timer: Timer) -> None:
    """Microseconds of a kernel that does nothing much, in a graph and launched by the host; and
    what it takes longer where half of them are in a graph of their own."""
    x, number = torch.zeros(1024, device=bench.device), bench.size(SMALL_LAUNCHES, 4)

    def some(count: int) -> None:
        for _ in range(count):
            x.add_(1.0)

    many, half = partial(some, number), partial(some, number // 2)
    whole = timer.us(many)
    bench.record.add("small launches", us_in_a_graph=whole / number,
                     us_by_the_host=timer.launched_us(many) / number,
                     us_of_a_second_graph=timer.us(half, half) - whole)


def of_this_run(bench: Bench) -> Ceilings:
    """Those that this call has measured. A copy's is measured here if none is there, and kept for
    the groups behind this one: figures of one call are held against one copy."""
    rows = {row["name"]: row for row in bench.record.group("ceilings")["rows"]}
    copied = rows.get("copy", {}).get("gbs") or next(
        (own["facts"]["copy_gbs"] for own in bench.record.read()["groups"].values()
         if "copy_gbs" in own["facts"]), 0.0)
    if not copied:
        copied = copy_gbs(bench, Timer(bench.machine))
        bench.record.facts(copy_gbs=copied)
    return Ceilings(copied, *(rows.get(name, {}).get("tflops", 0.0)
                              for name in ("bf16 products", "fp8 products")))
