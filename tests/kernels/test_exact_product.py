"""Products of `--exact on`: a row's bits are the same alone and in any batch, and its launch
follows from the weight alone.

The interpreter's products are numpy's, over tiles of the shape that a device is given; what the
compiler makes of them is in test_exact_compiles.py.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers_attention import INTERPRETED
from torch import Tensor

from actorium.kernels.backends import select_ops
from actorium.kernels.grouped_rows import RowFormat, pack_rows, quantise_grouped
from actorium.kernels.linear import Linear
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.scaled_linear import pack, quantise
from actorium.kernels.triton import exact_product as module
from actorium.kernels.triton.exact_ops import ExactTritonOps
from actorium.kernels.triton.exact_product import ExactLinear, fits_exactly, tile
from actorium.kernels.triton.grouped_mm import TritonGrouped
from actorium.kernels.triton.int8_mm import TritonInt8
from actorium.kernels.triton.scaled_mm import TritonScaledLinear

pytestmark = INTERPRETED
BF16 = torch.bfloat16
CPU = torch.device("cpu")
ROWS = (2, 17, 100)
SOME = (0, 1, 16, 63, 99)
"""Rows that are computed alone, too."""
OPS = ExactTritonOps()


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(kind: str, outs: int, ins: int) -> Tensor:
    """One weight, in a format that products take."""
    own = drawn(outs, ins, seed=1) * 0.1
    if kind in FORMATS:
        return pack_rows(quantise_grouped(own, FORMATS[kind]))
    if kind == "fp8":
        return pack(*quantise(own, ins))
    return own.half() if kind == "fp16" else own


FORMATS = {"int8": RowFormat(8, 0, False, 128), "int4": RowFormat(4, 32, True)}
KINDS = {"bf16": ExactLinear, "fp16": ExactLinear, "fp8": TritonScaledLinear, "int8": TritonInt8,
         "int4": TritonGrouped}


def linear_of(kind: str, outs: int, ins: int, biased: bool = False) -> tuple[Linear, torch.dtype]:
    dtype = torch.float16 if kind == "fp16" else BF16
    bias = drawn(outs, seed=3, dtype=dtype) if biased else None
    with patch("actorium.kernels.triton.exact_ops.has_products", lambda device: True):
        linear = OPS.linear(weight_of(kind, outs, ins), bias)
    assert type(linear) is KINDS[kind] and getattr(linear, "tiled_for", 64) == 64
    return linear, dtype


@pytest.mark.parametrize(("kind", "outs", "ins"), [
    *(pytest.param(kind, 80, 128, marks=[pytest.mark.slow] * (kind == "fp16")) for kind in KINDS),
    ("bf16", 33, 100),
    pytest.param("bf16", 130, 264, marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_in_any_batch(kind: str, outs: int, ins: int) -> None:
    linear, dtype = linear_of(kind, outs, ins)
    x, residual = drawn(max(ROWS), ins, dtype=dtype), drawn(max(ROWS), outs, seed=2, dtype=dtype)
    alone = {i: linear(x[i:i + 1])[0] for i in SOME}
    added = {i: linear.add(x[i:i + 1], residual[i:i + 1].clone())[0] for i in SOME}
    for rows in ROWS:
        many, sums = linear(x[:rows]), linear.add(x[:rows], residual[:rows].clone())
        last = linear(x[-rows:].contiguous())
        for i in SOME:
            assert i >= rows or torch.equal(many[i], alone[i]), (rows, i)
            assert i >= rows or torch.equal(sums[i], added[i]), (rows, i)
            assert i < 100 - rows or torch.equal(last[i - 100 + rows], alone[i]), (rows, i)
    if kind == "bf16":  # where prompts take larger tiles
        with patch.object(module, "MANY", 50):
            assert torch.equal(linear(x), many)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 96, 128), (70, 33, 100), (3, 64, 300)])
def test_products_are_those_of_the_reference(rows: int, outs: int, ins: int,
                                             dtype: torch.dtype) -> None:
    x, w, bias = (drawn(*size, seed=i, dtype=dtype)
                  for i, size in enumerate(((rows, ins), (outs, ins), (outs,))))
    linear, want = OPS.linear(w, bias), x.float() @ w.float().t() + bias.float()
    spare = drawn(rows, 2 * ins, dtype=dtype)
    spare[:, ins:] = x
    for given in (x, spare[:, ins:]):
        close(linear(given), want)
    residual = drawn(rows, outs, seed=4, dtype=dtype)
    close(linear.add(x, residual.clone()), want + residual.float())
    close(linear.add(x, residual.float()), want + residual.float())
    assert len(linear(x[:0])) == 0


def close(got: Tensor, want: Tensor) -> None:
    """As near as rounding of the result allows."""
    error = (got.float() - want).abs().max()
    assert float(error) <= 0.01 * float(want.abs().max()), float(error)


class Launches:
    """Writes down how kernels are launched, and launches nothing."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def __call__(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        self.found.append({name: value for name, value in options.items()
                           if name.isupper() or name.startswith("num_")
                           or name in ("maxnreg", "enable_fp_fusion")})


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_has_one_configuration_for_any_rows(kind: str) -> None:
    """But for groups of warps, of which two have twice the rows."""
    linear, dtype = linear_of(kind, 80, 128)
    seen = Launches()
    with patch("triton.runtime.interpreter.InterpretedFunction.run", seen):
        for rows in (*ROWS, 255, 256, 3000):
            linear(torch.zeros(rows, 128, dtype=dtype))
    product = [own for own in seen.found if "ROWS" in own or "OUTS" in own]
    assert len(product) == len(ROWS) + 3
    if kind in ("bf16", "fp16"):
        for own in product:
            assert own.pop("ROWS") == 16 * own.pop("num_warps")
            assert own["COLUMNS"] == 64 and own.pop("num_stages") > 1
            assert own["enable_fp_fusion"] is False
    assert all(own == product[0] for own in product), product


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("outs", [1, 128, 6144, 28672])
def test_tiles_have_one_instruction(capability: int, outs: int) -> None:
    """Columns of a tile are those of an instruction on sm_90; 16 rows are a warp's."""
    tiles = [tile(rows, outs, capability) for rows in (1, 64, 255, 256, 9999)]
    assert len({own.outs for own in tiles}) == 1
    assert all(own.rows == 16 * own.warps and own.rows % 64 == 0 for own in tiles)
    if capability >= 100:
        assert len(set(tiles)) == 1  # its instruction is as high as a program's tile


def test_the_exact_backend_is_chosen_and_says_what_it_has_not() -> None:
    ops = select_ops(BF16, CPU, 64, False, "triton", exact=True)
    assert isinstance(ops, ExactTritonOps) and ops.inexact == set()
    assert not isinstance(select_ops(BF16, CPU, 64, False, "triton"), ExactTritonOps)
    assert not fits_exactly(torch.zeros(4, 4)) and not fits_exactly(drawn(8, 8)[:, 1:])
    with patch("actorium.kernels.triton.triton_ops.can_pack", lambda weight: False):
        assert not isinstance(ops.linear(torch.zeros(4, 4)), ExactLinear)
    assert ops.inexact == {"products of weights in float32 by torch"}


def test_gates_are_a_launch_of_their_own() -> None:
    x, gated = drawn(5, 128), OPS.gated(weight_of("int4", 160, 128), None, "silu")
    halves = TorchOps().silu_mul(gated.halves(x))
    assert torch.equal(gated(x), OPS.silu_mul(gated.halves(x)))
    close(gated(x), halves.float())
