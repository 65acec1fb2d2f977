"""What adapters add to rows of a product: in C and in Triton against the reference, and each row's
bits alone and among others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers_builds import EACH_BUILD, built
from torch import Tensor

from actorium.kernels.adapter_rows import AdapterRows, AdapterStack, sorted_rows
from actorium.kernels.backends import triton_fault
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.reference.torch_ops import TorchOps

CPU = torch.device("cpu")
SLOTS = [2, -1, 0, 0, 1, 2, -1, 3, 1, *[0] * 37]
"""Of each row; one run is longer than a block."""
SIZES = [(1, 5, [7]), (16, 64, [96]), (7, 100, [40, 9, 33]), (64, 576, [576, 192, 192])]
"""(rank, K, columns of modules)"""


@pytest.fixture(params=EACH_BUILD)
def native(request: pytest.FixtureRequest) -> TorchOps:
    return NativeOps(built(request.param), 2)


@pytest.fixture
def triton() -> TorchOps:
    if fault := triton_fault(CPU):
        pytest.skip(fault)
    from actorium.kernels.triton.triton_ops import TritonOps
    return TritonOps()


def drawn(rank: int, ins: int, widths: list[int], dtype: torch.dtype) -> AdapterStack:
    """Slot 1 has half the rank, slot 2 lacks the last module, slot 3 holds nothing."""
    generator = torch.Generator().manual_seed(rank)
    stack = AdapterStack(4, rank, ins, widths, dtype, CPU)
    for slot in range(3):
        own = max(1, rank // 2) if slot == 1 else rank
        for module, width in enumerate(widths):
            if slot < 2 or module + 1 < len(widths):
                stack.fill(slot, module, torch.randn((own, ins), generator=generator) / ins**0.5,
                           torch.randn((own, width), generator=generator), 0.5 + slot)
    return stack


def rows_of(slots: list[int]) -> AdapterRows:
    rows, blocks = sorted_rows(np.array(slots, np.int32))
    return AdapterRows(torch.from_numpy(rows), torch.from_numpy(blocks))


def inputs(ins: int, outs: int, dtype: torch.dtype, wide: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((len(SLOTS), ins + 3), generator=generator).to(dtype)[:, :ins]
    y = torch.randn((len(SLOTS), outs), generator=generator)
    return x, y if wide else y.to(dtype)


def check(ops: TorchOps, size: tuple[int, int, list[int]], dtype: torch.dtype, wide: bool,
          alone: Sequence[int]) -> None:
    """alone: rows that are computed by themselves as well."""
    rank, ins, widths = size
    stack, (x, y) = drawn(rank, ins, widths, dtype), inputs(ins, sum(widths), dtype, wide)
    want = TorchOps().adapt(x, y.clone(), rows_of(SLOTS), stack)
    found = ops.adapt(x, y.clone(), rows_of(SLOTS), stack)
    assert (found[[1, 6]] == y[[1, 6]]).all() and (found[7] == y[7]).all()
    assert not (found[2] == y[2]).all()
    torch.testing.assert_close(found, want, rtol=2**-7 if y.dtype is torch.bfloat16 else 1e-4,
                               atol=1e-4)
    exact = rows_of(SLOTS)
    fixed = AdapterRows(torch.cat((exact.rows, exact.rows)),
                        torch.cat((exact.blocks, torch.zeros((3, 3), dtype=torch.int32))))
    assert torch.equal(ops.adapt(x, y.clone(), fixed, stack), found), "tables of fixed size"
    for row in alone:
        own = rows_of(SLOTS[row:row + 1])
        assert torch.equal(ops.adapt(x[row:row + 1], y[row:row + 1].clone(), own, stack)[0],
                           found[row]), row


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_in_c(native: TorchOps, size: tuple[int, int, list[int]], wide: bool) -> None:
    check(native, size, torch.bfloat16, wide, [i for i, slot in enumerate(SLOTS) if slot >= 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES[:3])
def test_in_triton(triton: TorchOps, size: tuple[int, int, list[int]], dtype: torch.dtype) -> None:
    check(triton, size, dtype, False, [0, 4, 45])


def test_rows_are_sorted_by_adapter_and_cut_into_blocks() -> None:
    rows, blocks = sorted_rows(np.array(SLOTS, np.int32))
    assert rows[:3].tolist() == [2, 3, 9] and rows[-4:].tolist() == [8, 0, 5, 7]
    assert blocks.tolist() == [[0, 0, 16], [0, 16, 16], [0, 32, 7], [1, 39, 2], [2, 41, 2],
                               [3, 43, 1]]
