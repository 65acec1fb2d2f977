"""Kernel by kernel: whether its result is right, then achieved bandwidth or arithmetic beside the
ceilings of the same run, and the public kernels that can be had here, each timed as ours is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from actorium.gpu.attention.attention_backend import TorchAttention, TritonAttention
from actorium.kernels.backends import select_ops

from . import aims
from .case import BF16, Case, Named, Run, Setting
from .ceilings import Ceilings, of_this_run
from .child import Bench
from .record import RIGHT, SLOW, WRONG
from .timer import EVENTS, GRAPH, Timer
from .truth import compared

NOISE = 0.95
"""Of our time: a peer that takes less is faster."""


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
        found = compared(case, bench.toy, bench.spoils(name))
        bench.record.add(name, verdict=RIGHT if found.right else WRONG, error=found.error,
                         tolerance=found.tolerance)
        if not found.right:
            bench.record.skip(name, f"an error of {found.error:.3g}, {found.tolerance:.3g} is "
                              "allowed", WRONG)
            return
        us = timer.us(case.run)
        bench.record.add(name, us=us, timed=GRAPH, **achieved(case, us, limits))
    if "us" not in _row(bench, name):
        return
    peers: dict[str, float] = {}
    for peer, make_peer in case.peers.items():
        with bench.trying(f"{name}: {peer}"):
            peers[peer] = timer.us(make_peer())
            best = min(peers, key=lambda each: peers[each])
            bench.record.add(name, peers=peers, peer=best, peer_us=peers[best],
                             ratio=peers[best] / us)
    _waiting(bench, timer, name, case.run, case.waiting)
    if why := too_slow(bench.group.name, _row(bench, name)):
        bench.record.add(name, verdict=SLOW, why=why)


def _row(bench: Bench, name: str) -> Mapping[str, Any]:
    return next((row for row in bench.record.group()["rows"] if row["name"] == name), {})


def too_slow(group: str, row: Mapping[str, Any]) -> str:
    """Why a row is: an aim that it misses, or a peer that is faster by more than what differs from
    run to run. Empty: it is not."""
    if row.get("ratio", 1.0) < NOISE:
        return f"{row['peer']} takes {row['ratio']:.0%} of its time"
    return "; ".join(aims.missed(group, row))


def _waiting(bench: Bench, timer: Timer, name: str, ours: Run,
             waiting: Mapping[str, Callable[[], Run]]) -> None:
    for peer, make in waiting.items():
        with bench.trying(f"{name}: {peer}"):
            launched, spent = timer.launched_us(ours), timer.launched_us(make())
            bench.record.add(name, launched_us=launched, waiting_peer=peer, waiting_peer_us=spent,
                             waiting_ratio=spent / launched, waiting_timed=EVENTS)


def achieved(case: Case, us: float, limits: Ceilings) -> dict[str, Any]:
    """Bandwidth or arithmetic, and its share of the ceiling, where that was measured."""
    if case.bytes:
        gbs = case.bytes / us / 1e3
        return {"gbs": gbs, "share": gbs / limits.copy_gbs}
    tflops = case.flops / us / 1e6
    most = limits.fp8_tflops if case.fp8 else limits.bf16_tflops
    return {"tflops": tflops, **({"share": tflops / most} if most else {})}
