"""Products with weights in 4 to 8 bits in Triton, in its interpreter."""

from __future__ import annotations

import pytest
import torch
from helpers_pairs import pairs
from torch import Tensor

from actorium.gpu.families.weight_formats import WeightFormat
from actorium.kernels.grouped_rows import (
    Grouped,
    RowFormat,
    dequantise_grouped,
    grouped_mm,
    pack_rows,
    quantise_grouped,
    quantise_input,
    unpack_rows,
)
from actorium.kernels.reference.activation import gelu_mul, silu_mul

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
BF16 = torch.bfloat16
FORMS = [RowFormat(4, 32, False, 8), RowFormat(4, 128, True), RowFormat(4, 16, False, 7),
         RowFormat(4, 0, False, 8), RowFormat(5, 32, True), RowFormat(5, 64, False, 16),
         RowFormat(6, 16, False, 32), RowFormat(6, 32, True), RowFormat(8, 32, False, 128),
         RowFormat(8, 16, False, 128), RowFormat(8, 64, True)]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(outs: int, width: int, form: RowFormat, seed: int = 1) -> Tensor:
    """Rows, with every code somewhere."""
    own = quantise_grouped(drawn(outs, width, seed=seed, dtype=torch.float32), form)
    codes = torch.randint(0, 2**form.bits, own.codes.shape, dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(seed))
    return pack_rows(Grouped(codes, own.scales, own.mins, form))


# The interpreter cuts numbers to bf16 where a device rounds them: what is exact is tried in f32.
def close(got: Tensor, want: Tensor, within: float = 0.015) -> None:
    error = (got.float() - want.float()).abs().max()
    assert float(error) <= within * float(want.float().abs().max()), float(error)


@pytest.mark.parametrize(("form", "width"), pairs([(form,) for form in FORMS], [128, 384]))
def test_held_to_the_byte_and_widened_again(form: RowFormat, width: int) -> None:
    from actorium.kernels.triton.grouped_mm import GroupedWeight, can_serve, reference, widened

    rows = weight(40, width, form)
    assert can_serve(rows)
    own = GroupedWeight(rows)
    counted = WeightFormat(form.bits, form.group, form.mins)
    assert own.nbytes == counted.held_bytes(40, width)
    want = reference(rows, torch.float32)
    close(widened(own, torch.float32, count=40), want, 1e-6)
    close(widened(own, torch.float32, first=16, count=9), want[16:25], 1e-6)
    ids = torch.tensor([39, 0, 17, 17])
    close(widened(own, BF16, ids), want[ids], 2**-7)


@pytest.mark.parametrize(("form", "width"), pairs(
    [FORMS[0], FORMS[4], FORMS[6], FORMS[8], FORMS[3]], [32, 96, 160, 192, 576]))
def test_columns_beyond_whole_blocks(form: RowFormat, width: int) -> None:
    from actorium.kernels.triton.grouped_mm import TritonGrouped, reference

    rows, x = weight(24, width, form), drawn(3, width, dtype=torch.float32)
    linear = TritonGrouped(rows)
    assert linear.own.nbytes == WeightFormat(*form[:3]).held_bytes(24, width)
    want = reference(rows, torch.float32)
    close(linear.wide(x), x @ want.t(), 1e-5)
    close(linear.rows(torch.arange(24), torch.float32), want, 1e-6)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_with_bias_sum_and_gate(form: RowFormat) -> None:
    """With whole blocks of columns, and some that are none."""
    from actorium.kernels.triton.grouped_mm import TritonGrouped, grouped_linear, reference

    width = 128 if form.group == 128 else 192
    rows, x = weight(40, width, form), drawn(5, width, dtype=torch.float32)
    bias = drawn(40, seed=2, dtype=torch.float32)
    linear = TritonGrouped(rows, bias)
    want = x @ reference(rows, torch.float32).t() + bias
    close(linear(x), want, 1e-4)
    residual = drawn(5, 40, seed=3, dtype=torch.float32)
    close(linear.add(x, residual.clone()), want + residual, 1e-4)
    close(linear.add(x, residual.t().contiguous().t()), want + residual, 1e-4)
    for gate, apart in (("silu", silu_mul), ("gelu", gelu_mul)):
        close(grouped_linear(x, linear.own, bias, gate), apart(want), 1e-4)


@pytest.mark.parametrize("count", [0, 1, 17, 70])
def test_rows_of_every_tile(count: int) -> None:
    from actorium.kernels.triton.grouped_mm import TritonGrouped, reference

    rows, x = weight(40, 160, RowFormat(4, 32, True)), drawn(count, 160)
    got = TritonGrouped(rows)(x)
    assert got.shape == (count, 40)
    if count:
        assert got.dtype is BF16
        close(got, x.float() @ reference(rows, BF16).float().t())


def test_many_rows_take_the_weight_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from actorium.kernels.triton import grouped_mm

    monkeypatch.setattr(grouped_mm, "MANY", 8)
    monkeypatch.setattr(grouped_mm, "WIDENED_BYTES", 32 * 64 * 2)
    rows, x, bias = weight(72, 64, FORMS[0]), drawn(9, 64), drawn(72, seed=2)
    linear = grouped_mm.TritonGrouped(rows, bias)
    want = x.float() @ grouped_mm.reference(rows, BF16).float().t() + bias.float()
    close(linear(x), want)
    close(linear.wide(x), want)
    residual = drawn(9, 72, seed=3)
    close(linear.add(x, residual), want + residual.float())


def test_scales_beyond_f16_and_laying_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from actorium.kernels.triton import grouped_mm

    monkeypatch.setattr(grouped_mm, "PACKED_AT_ONCE", 64 * 17)
    form = RowFormat(4, 32, True)
    for scale in (1e-12, 1e9):
        wide = drawn(50, 64, dtype=torch.float32) * scale
        rows = pack_rows(quantise_grouped(wide, form))
        own = grouped_mm.GroupedWeight(rows)
        assert bool(own.scales.isfinite().all())
        close(grouped_mm.widened(own, torch.float32, count=50), wide, 0.06)


def test_fp16_and_fp32_inputs() -> None:
    from actorium.kernels.triton.grouped_mm import TritonGrouped, reference

    rows = weight(16, 64, FORMS[0])
    for dtype in (torch.float16, torch.float32):
        x = drawn(2, 64, dtype=dtype)
        y = TritonGrouped(rows)(x)
        assert y.dtype is dtype
        close(y, x.float() @ reference(rows, dtype).float().t())


# --- 8 bits by 8 bits -----------------------------------------------------------------------------

ROWS8 = [RowFormat(8, 0, False, 128), RowFormat(8, 0, False, 120), RowFormat(8, 0, True)]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_inputs_are_quantised_as_the_reference_does(dtype: torch.dtype) -> None:
    from actorium.kernels.triton.int8_mm import quantise_int8

    x = drawn(5, 200, dtype=dtype)
    x[3] = 0
    got, scales, sums = quantise_int8(x)
    want, want_scales = quantise_input(x, 200)
    assert torch.equal(got, want) and torch.equal(scales[:, None], want_scales)
    assert sums.tolist() == want.sum(1, dtype=torch.int64).tolist()
    apart = x.repeat(1, 2)[:, :200]
    assert torch.equal(quantise_int8(apart)[0], want)


@pytest.mark.parametrize(("form", "count", "width"), pairs(
    ROWS8, [(1, 256), (5, 96), (70, 128), (0, 32)]))
def test_products_of_integers(form: RowFormat, count: int, width: int) -> None:
    from actorium.kernels.triton.int8_mm import TritonInt8, has_row_scales

    rows, x = weight(40, width, form), drawn(count, width, dtype=torch.float32)
    assert has_row_scales(rows) and not has_row_scales(weight(40, 256, FORMS[8]))
    bias = drawn(40, seed=2, dtype=torch.float32)
    linear, residual = TritonInt8(rows, bias), drawn(count, 40, seed=3, dtype=torch.float32)
    assert linear.own.nbytes == WeightFormat(*form[:3]).held_bytes(40, width)
    own = unpack_rows(rows)
    close(linear.rows(torch.arange(40), torch.float32),
          dequantise_grouped(own, torch.float32), 1e-6)
    got = linear(x)
    assert got.shape == (count, 40)
    if count:
        want = grouped_mm(x, own) + bias
        close(got, want, 1e-5)
        close(linear.wide(x.to(BF16)), grouped_mm(x.to(BF16), own) + bias, 1e-5)
        close(linear.add(x, residual.clone()), want + residual, 1e-5)


def test_ops_choose_by_format() -> None:
    from actorium.kernels.grouped_rows import GroupedLinear
    from actorium.kernels.triton.grouped_mm import TritonGrouped, TritonGroupedGated
    from actorium.kernels.triton.int8_mm import TritonInt8
    from actorium.kernels.triton.triton_ops import TritonOps

    ops, x = TritonOps(), drawn(3, 64, dtype=torch.float32)
    for form, kind in ((FORMS[0], TritonGrouped), (FORMS[3], TritonGrouped),
                       (ROWS8[0], TritonInt8)):
        rows = weight(32, 64, form)
        assert type(ops.linear(rows)) is kind
        gated = ops.gated(rows, None, "silu")
        assert isinstance(gated, TritonGroupedGated) == (kind is TritonGrouped)
        want = silu_mul(ops.linear(rows)(x))
        got = gated(x)
        assert isinstance(got, Tensor)
        close(got, want, 1e-4)
    odd = pack_rows(quantise_grouped(drawn(8, 48), RowFormat(4, 16, False, 8)))
    assert type(ops.linear(odd)) is GroupedLinear
