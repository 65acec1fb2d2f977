"""Mixtures of experts in C: the bits that each expert alone gives, whatever rows there are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from actorium.gpu.graphs.capture import Arena, KernelCapturer
from actorium.kernels.cpu.experts_native import NativeExperts, combine_rows
from actorium.kernels.cpu.grouped_native import GroupedMemory
from actorium.kernels.cpu.native_library import library
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.grouped_rows import RowFormat, pack_rows, quantise_grouped
from actorium.kernels.reference.activation import clamped_swiglu
from actorium.kernels.reference.experts import EachExpert

NUMBER, HIDDEN, INNER = 7, 128, 96


class Gated(NamedTuple):
    gate_up: Any
    down: Any

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))


class Ungated(NamedTuple):
    up: Any
    down: Any
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    whole = library()
    if whole is None:
        pytest.skip("no C compiler, or torch with another OpenMP")
    return whole


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul_(0.2).bfloat16()


def made(ops: NativeOps, kind: str, hidden: int) -> list[Any]:
    """One of a kind each, of drawn weights."""
    form = RowFormat(4, 32, True)

    def weight(rows: int, columns: int, seed: int) -> Tensor:
        own = rand(rows, columns, seed=seed)
        return pack_rows(quantise_grouped(own.float(), form)) if "codes" in kind else own

    own: list[Any] = []
    for e in range(NUMBER):
        bias = (rand(2 * INNER, seed=40 + e), rand(hidden, seed=50 + e)) if "bias" in kind \
            else (None, None)
        up, down = weight(2 * INNER, hidden, e), ops.linear(weight(hidden, INNER, 20 + e), bias[1])
        if "clamped" in kind:
            own.append(Gated(ops.clamped_gated(ops.linear(up, bias[0]), 1.7, 0.5), down))
        elif "ungated" in kind:
            own.append(Ungated(ops.linear(up[:INNER], None), down, ops.activation("relu2")))
        else:
            own.append(Gated(ops.gated(up, bias[0], "gelu" if "gelu" in kind else "silu"), down))
    return own


@pytest.mark.parametrize("rows", [1, 2, 9, 150])
@pytest.mark.parametrize("kind", ["silu", "gelu", "clamped bias", "ungated", "silu, odd",
                                  "silu codes", "clamped bias codes", "gelu codes"])
def test_experts_have_the_bits_of_each(lib: ctypes.CDLL, kind: str, rows: int) -> None:
    ops, hidden = NativeOps(lib, 2, exact=True), 120 if "odd" in kind else HIDDEN
    if ops.scratch is None and "codes" not in kind:
        pytest.skip("weights are not laid out in tiles on this processor")
    ops.grouped_memory = GroupedMemory(6000 if rows == 150 else 1 << 20)
    own = made(ops, kind, hidden)
    joined = ops.ungated_experts(own) if "ungated" in kind else ops.experts_of(own)
    assert isinstance(joined, NativeExperts) and not joined.waits
    each = EachExpert(own, partial(combine_rows, lib, 2))

    def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.randn(rows, NUMBER - 1, generator=torch.Generator().manual_seed(seed))
        weights, chosen = scores.softmax(-1).topk(3, -1)  # the last expert has no row
        return rand(rows, hidden, seed=seed), weights.bfloat16(), chosen

    given = drawn(30)
    assert torch.equal(joined(*given), each(*given))
    if rows > 64:
        return
    program, out = KernelCapturer(lib, 2, Arena(1 << 20), Arena(1 << 20)).capture(
        lambda: joined(*given))
    for seed in (31, 32):
        for to, new in zip(given, drawn(seed), strict=True):
            to.copy_(new)
        for _ in range(100):  # threads that wait must not take what a step has left for a task
            program.replay()
        assert torch.equal(out, each(*given))


def test_no_rows(lib: ctypes.CDLL) -> None:
    ops = NativeOps(lib, 2)
    joined = ops.experts_of(made(ops, "silu codes", HIDDEN))
    none = torch.empty((0, 3))
    assert joined(rand(0, HIDDEN, seed=1), none.bfloat16(), none.long()).shape == (0, HIDDEN)


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_gates_and_their_sums(lib: ctypes.CDLL, rows: int) -> None:
    ops, x, out = NativeOps(lib, 2), rand(rows, 100, seed=1), rand(rows, 100, seed=2)
    gate, both = rand(rows, 9, seed=3)[:, 8:], rand(rows, 200, seed=4) * 20
    by = gate.double().sigmoid()
    near = partial(torch.testing.assert_close, rtol=2 ** -8, atol=1e-4)
    near(ops.sigmoid_scale(x, gate).double(), x.double() * by)
    near(ops.gate_add(out, x, gate).double(), out.double() + x.double() * by)
    clamped = ops.clamped_gated(lambda x: x, 1.702, 7.0)  # type: ignore[arg-type]
    near(clamped(both).double(), clamped_swiglu(both.double(), 1.702, 7.0))  # type: ignore
