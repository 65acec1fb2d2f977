"""Kernel by kernel: whether its result is right, then achieved bandwidth or arithmetic beside the
ceilings of the same run, and the public kernels that can be had here, each timed as ours is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from actorium.gpu.attention.attention_backend import TorchAttention, TritonAttention
from actorium.kernels.backends import select_ops

from .case import BF16, Case, Named, Setting
from .ceilings import Ceilings, of_this_run
from .child import Bench
from .timer import Timer
from .truth import compared


def run(bench: Bench, cases: str) -> None:
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
