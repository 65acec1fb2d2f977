"""Measures the device's ceilings in the same run as the figures compared with them; then, kernel by
kernel, whether the result is right, the bandwidth or arithmetic achieved, and the public kernels
available, each timed as ours is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actorium.gpu.attention.attention_backend import TorchAttention, TritonAttention
from actorium.kernels.backends import select_ops

from .case import BF16, Case, Named, Setting, Timer, compared, error
from .child import Bench
from .record import readings

SMALL_LAUNCHES = 200
SOME = 16
"""Rows of a product that are compared."""


class Ceilings(NamedTuple):
    copy_gbs: float
    """The fastest of several ways to move bytes, read and written."""
    bf16_tflops: float = 0.0
    fp8_tflops: float = 0.0


def run(bench: Bench) -> None:
    """Rows `copy`, `bf16 products`, `fp8 products`, `small launches`."""
    timer = Timer(bench.machine)
    with bench.row("copy") as go:
        if go:
            found = copies(bench, timer)
            bench.record.add("copy", gbs=max(found.values()), **{
                f"gbs_{how}": each for how, each in found.items()})
    side = bench.size(8192, 64)
    for name, product in (("bf16 products", _bf16), ("fp8 products", _fp8)):
        with bench.row(name) as go:
            if go:
                run, some = product(bench, side)
                if bench.compared(name, error(run()[:len(some)], some), 0.01):
                    us = timer.us(run)
                    bench.record.add(name, tflops=2 * side**3 / us / 1e6, side=side,
                                     **readings())
    with bench.row("small launches") as go:
        if go:
            _launches(bench, timer)


def copies(bench: Bench, timer: Timer) -> dict[str, float]:
    """Measures GB/s of four ways to move bytes, read and written. A copy in a graph may be far from
    the fastest (2,773 of 4,353 GB/s on an H200), and a decode step mostly reads, so the largest is
    the ceiling."""
    size = bench.size(int(min(4.0, bench.free_gib / 4) * 2**30), 1 << 20)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    whole, other, total = source.view(torch.int32), target.view(torch.int32), \
        torch.empty((), dtype=torch.int32, device=bench.device)
    return {
        "graph": 2 * size / timer.us(lambda: target.copy_(source)) / 1e3,
        "host": 2 * size / timer.launched_us(lambda: target.copy_(source)) / 1e3,
        "kernel": 2 * size / timer.us(lambda: torch.bitwise_not(whole, out=other)) / 1e3,
        "read": size / timer.us(lambda: torch.amax(whole, dim=0, out=total)) / 1e3}


def copy_gbs(bench: Bench, timer: Timer) -> float:
    """The fastest of `copies`."""
    return max(copies(bench, timer).values())


Product = tuple[Callable[[], Tensor], Tensor]
"""(the whole, what some of its first rows must be)"""


def _bf16(bench: Bench, side: int) -> Product:
    a, b = (torch.randn(side, side, device=bench.device).to(torch.bfloat16) for _ in range(2))
    return lambda: a @ b, a[:SOME].float() @ b.float()


def _fp8(bench: Bench, side: int) -> Product:
    """An FP8 product with a scale per row and column; sums are rounded to bf16."""
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
    """Returns the ceilings measured in this call. Copy bandwidth is measured if it is missing and
    kept for later groups, so that all figures of a call use the same one."""
    rows = {row["name"]: row for row in bench.record.group("ceilings")["rows"]}
    copied = rows.get("copy", {}).get("gbs") or next(
        (own["facts"]["copy_gbs"] for own in bench.record.read()["groups"].values()
         if "copy_gbs" in own["facts"]), 0.0)
    if not copied:
        copied = copy_gbs(bench, Timer(bench.machine))
        bench.record.facts(copy_gbs=copied)
    return Ceilings(copied, *(rows.get(name, {}).get("tflops", 0.0)
                              for name in ("bf16 products", "fp8 products")))


def table(bench: Bench, cases: str) -> None:
    """Every row of a group. cases: "module.function", which names them."""
    module, _, function = cases.rpartition(".")
    make: Callable[[Setting], Named] = getattr(
        importlib.import_module(f".{module}", __package__), function)
    limits, timer = of_this_run(bench), Timer(bench.machine)
    ops = select_ops(BF16, bench.device, 128, False, "triton" if bench.toy else "auto")
    attention = TritonAttention if ops.name == "triton" else TorchAttention
    bench.record.facts(kernels=ops.name)
    with torch.inference_mode():
        for name, case in make(Setting(bench.device, bench.toy, ops, attention)):
            measure(bench, timer, name, case, limits)


def measure(bench: Bench, timer: Timer, name: str, make: Callable[[], Case], limits: Ceilings
            ) -> None:
    """One row, then its peers, which are added to it: one that fails costs itself alone."""
    with bench.row(name) as go:
        if not go:
            return
        case = make()
        if not bench.compared(name, *compared(case, bench.toy, bench.spoils(name))):
            return
        us = timer.us(case.run)
        bench.record.add(name, us=us, **achieved(case, us, limits))
    if "us" not in bench.record.row(name):
        return
    peers: dict[str, float] = {}
    for peer, make_peer in case.peers.items():
        with bench.trying(f"{name}: {peer}"):
            peers[peer] = timer.us(make_peer())
            best = min(peers, key=lambda each: peers[each])
            bench.record.add(name, peers=peers, peer=best, peer_us=peers[best],
                             ratio=peers[best] / us)
    bench.judge(name)


def achieved(case: Case, us: float, limits: Ceilings) -> dict[str, Any]:
    """Bandwidth or arithmetic, and its share of the ceiling, where that was measured."""
    if case.bytes:
        gbs = case.bytes / us / 1e3
        return {"gbs": gbs, "share": gbs / limits.copy_gbs}
    tflops = case.flops / us / 1e6
    most = limits.fp8_tflops if case.fp8 else limits.bf16_tflops
    return {"tflops": tflops, **({"share": tflops / most} if most else {})}
