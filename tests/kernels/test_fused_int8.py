"""Norms and activations that quantise to INT8 what they give, and the products that take it: to the
bits of both done one after the other, in C and in Triton."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from actorium.kernels.backends import triton_fault
from actorium.kernels.cpu.grouped_native import NativeGrouped, NativeGroupedGated
from actorium.kernels.cpu.native_library import library
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.grouped_rows import (
    RowFormat,
    pack_rows,
    quantise_grouped,
    quantise_input,
    to_int8,
)
from actorium.kernels.inputs import InputForm, Quantised, plain
from actorium.kernels.linear import ConcatLinear
from actorium.kernels.reference.torch_ops import TorchOps

EPS, BF16 = 1e-5, torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
interpreted = pytest.mark.skipif(bool(triton_fault(DEVICE)), reason="Triton compiles for CUDA here")


@pytest.fixture(scope="module")
def native() -> NativeOps:
    lib = library()
    if lib is None:
        pytest.skip("the C library cannot be built here")
    return NativeOps(lib, 2)


def numbers(rows: int, width: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of very different sizes, one of zeros, some groups of zeros."""
    torch.manual_seed(rows * width)
    x = torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]
    x[rows // 2] = 0
    x[:, :32] *= torch.arange(rows)[:, None] % 2
    return x.to(dtype)


def rows_of(form: RowFormat, outs: int, width: int) -> Tensor:
    torch.manual_seed(outs + width)
    return pack_rows(quantise_grouped(torch.randn(outs, width), form))


def same(got: Quantised, want: Quantised) -> None:
    """Bit for bit."""
    assert torch.equal(got.q, want.q) and torch.equal(got.scales, want.scales)
    assert got.dtype is want.dtype and (got.plain is None) == (want.plain is None)
    assert got.plain is None or torch.equal(got.plain, plain(want))
    assert got.sums is None or torch.equal(got.sums, want.q.sum(1, dtype=torch.int32))


# --- in C -----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("width", "columns"), [(64, 32), (256, 128), (1024, 32), (96, 96)])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_norms_in_c(width: int, columns: int, rows: int, native: NativeOps) -> None:
    """The bits of C's norm, quantised by the reference."""
    x, weight = numbers(rows, width), numbers(3, width)[2]
    for keep in (False, True):
        form = InputForm(columns, keep, int8=True)
        same(native.rms_norm_quant(x, weight, EPS, form),
             to_int8(native.rms_norm(x, weight, EPS), form))
        got, total = native.add_rms_norm_quant(x, x.flip(0), weight, EPS, form)
        assert torch.equal(total, x + x.flip(0))
        same(got, to_int8(native.rms_norm(total, weight, EPS), form))


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize(("width", "columns"), [(64, 32), (256, 128), (1056, 32), (96, 96)])
def test_gates_in_c(width: int, columns: int, name: str, native: NativeOps) -> None:
    form = InputForm(columns, plain=False, int8=True)
    for rows in (1, 30):
        both = numbers(rows, 2 * width)
        same(getattr(native, f"{name}_quant")(both, form),
             to_int8(getattr(native, name)(both), form))


FORMATS = [RowFormat(8, 32, False, 128), RowFormat(8, 0, False, 128), RowFormat(8, 128, False, 128),
           RowFormat(4, 32, True), RowFormat(6, 16, False, 32), RowFormat(4, 64, False, 8)]


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("count", [1, 4, 6, 13])
def test_products_take_codes(form: RowFormat, count: int, native: NativeOps) -> None:
    """As if they quantised by themselves: alone, summing, wide, and with their gate."""
    rows = rows_of(form, 80, 256)
    linear, x = native.linear(rows, torch.randn(80).to(BF16)), numbers(count, 256)
    assert isinstance(linear, NativeGrouped) and linear.form.int8 and not linear.form.plain
    given, residual = to_int8(x, linear.form), torch.randn(count, 80).to(BF16)
    assert torch.equal(linear(given), linear(x))
    assert torch.equal(linear.add(given, residual), linear.add(x, residual))
    assert torch.equal(linear.wide(given), linear.wide(x))
    gated = native.gated(rows_of(form, 64, 256), None, "silu")
    assert isinstance(gated, NativeGroupedGated) and gated.form == linear.form
    want = gated(x)
    assert isinstance(want, Tensor) and torch.equal(plain(gated(given)), want)
    assert torch.equal(gated.halves(given), gated.halves(x))
    assert len(linear(given[:0])) == 0
    picked = torch.tensor([count - 1, 0])
    assert torch.equal(linear(given.index_select(0, picked)), linear(x[picked]))


def test_factors_and_numbers_that_are_none(native: NativeOps) -> None:
    """Weights whose scales f16 cannot hold, inputs that are infinite, and some next to nothing."""
    form = RowFormat(8, 32, False, 128)
    for size in (1e-9, 1e9):
        own = quantise_grouped(torch.randn(32, 64) * size, form)
        linear, x = native.linear(pack_rows(own)), numbers(7, 64)
        assert torch.equal(linear(to_int8(x, linear.form)), linear(x))
    ones = torch.ones(64, dtype=BF16)
    x = numbers(7, 64)
    x[0, 3], x[1, 40], x[2] = float("inf"), float("nan"), 1e-38
    got = native.rms_norm_quant(x, ones, EPS, linear.form)
    want = linear(native.rms_norm(x, ones, EPS))
    assert torch.equal(linear(got).isnan(), want.isnan()) and want.isnan().any()
    assert torch.equal(linear(got).nan_to_num(), want.nan_to_num())


def test_products_side_by_side_share_an_input(native: NativeOps) -> None:
    """Of other bits and groups: quantised once where as many columns have a scale."""
    four, six, rows = (native.linear(rows_of(form, 48, 128)) for form in (
        RowFormat(4, 32, True), RowFormat(6, 16, False, 32), RowFormat(8, 0, False, 128)))
    x, weight = numbers(9, 128), numbers(3, 128)[2]
    shared, apart = ConcatLinear([four, six]), ConcatLinear([four, rows])
    assert shared.form == four.form and apart.form == InputForm()
    beside = ConcatLinear([four, native.linear(torch.randn(32, 128).to(BF16))])
    assert beside.form == four.form._replace(plain=True)
    normed = native.rms_norm(x, weight, EPS)
    for each in (shared, beside):
        got = each(native.rms_norm_quant(x, weight, EPS, each.form))
        assert torch.equal(got, each(normed))
    with pytest.raises(ValueError, match="only its 8 bits were kept"):
        rows(native.rms_norm_quant(x, weight, EPS, four.form))


# --- in Triton ------------------------------------------------------------------------------------

def same_as_parts(ops: TorchOps, quantise: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
                  got: Quantised, whole: Tensor) -> None:
    """What `quantise` makes of what was rounded."""
    codes, scales, sums = quantise(whole)
    assert torch.equal(got.q, codes) and torch.equal(got.scales[:, 0], scales)
    assert got.sums is not None and torch.equal(got.sums, sums)


@interpreted
@pytest.mark.parametrize("width", [64, 200, 1024, 4096])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_norms_in_triton(width: int, dtype: torch.dtype) -> None:
    from actorium.kernels.triton.int8_mm import quantise_int8
    from actorium.kernels.triton.triton_ops import TritonOps

    ops, x = TritonOps(), numbers(5, width, dtype).to(DEVICE)
    weight, residual = numbers(3, width, dtype)[2].to(DEVICE), x.flip(0) * 0.3
    for keep in (False, True):
        form = InputForm(width, keep, int8=True)
        got = ops.rms_norm_quant(x, weight, EPS, form)
        same_as_parts(ops, quantise_int8, got, ops.rms_norm(x, weight, EPS))
        assert (got.plain is not None) == keep
        if keep:
            assert torch.equal(plain(got), ops.rms_norm(x, weight, EPS))
        got, total = ops.add_rms_norm_quant(x, residual, weight, EPS, form)
        normed, sums = ops.add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(total, sums)
        same_as_parts(ops, quantise_int8, got, normed)
    assert ops.rms_norm_quant(x[:0], weight, EPS, form).scales.shape == (0, 1)


@interpreted
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("width", [48, 1000, 9000])
def test_gates_in_triton(width: int, name: str) -> None:
    from actorium.kernels.triton.int8_mm import quantise_int8
    from actorium.kernels.triton.triton_ops import TritonOps

    ops, form = TritonOps(), InputForm(width, plain=False, int8=True)
    for dtype in (BF16, torch.float32):
        both = numbers(3, 2 * width + 7, dtype).to(DEVICE)[:, :2 * width]
        same_as_parts(ops, quantise_int8, getattr(ops, f"{name}_quant")(both, form),
                      getattr(ops, name)(both))


@interpreted
def test_triton_is_the_reference() -> None:
    """Where the norm itself is rounded alike."""
    from actorium.kernels.triton.int8_mm import TritonInt8
    from actorium.kernels.triton.triton_ops import TritonOps

    x, form = numbers(6, 256, torch.float32).to(DEVICE), InputForm(256, True, int8=True)
    weight = torch.ones(256, device=DEVICE)
    got, want = (ops.rms_norm_quant(x, weight, EPS, form) for ops in (TritonOps(), TorchOps()))
    assert torch.allclose(got.scales, want.scales, rtol=1e-5)
    assert float((got.q != want.q).float().mean()) < 0.01, "ties alone round the other way"
    codes, scales = quantise_input(plain(got), 256)
    assert torch.equal(got.q, codes) and torch.equal(got.scales, scales)
    rows = rows_of(RowFormat(8, 0, False, 128), 48, 256).to(DEVICE)
    linear = TritonInt8(rows)
    assert linear.form == form._replace(plain=False)
    assert torch.equal(linear(got), linear(plain(got)))
    assert torch.equal(linear(got[2:4]), linear(plain(got)[2:4]))
    assert torch.equal(linear(want), linear(plain(want))), "without sums it quantises by itself"


def test_forms_in_int8_and_fp8_are_not_one() -> None:
    one, other = InputForm(128, False, int8=True), InputForm(128, False)
    assert one.also(other) == InputForm() and one.also(one) == one
    assert one.also(InputForm()) == InputForm(128, True, int8=True)


