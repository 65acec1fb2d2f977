"""Kernels of codes in 4 to 8 bits, where they run: at the sizes of models on a CUDA device, at
small ones in the interpreter. Products are held against fp64; what is quantised, and attention by
codes, against the reference."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import Paged, error
from helpers_fp8 import exact_fp8
from helpers_pairs import pairs
from torch import Tensor

from actorium.kernels.backends import triton_fault
from actorium.kernels.grouped_rows import (
    RowFormat,
    grouped_mm,
    pack_rows,
    quantise_grouped,
    quantise_input,
    unpack_rows,
)
from actorium.kernels.inputs import InputForm, Quantised, plain
from actorium.kernels.reference.sage import KeyMeans, sage_extend
from actorium.kernels.reference.torch_ops import TorchOps

pytest.importorskip("triton")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning")
              for what in ("divide by zero", "All-NaN slice", ".*encountered in")]
BF16, FP32, EPS = torch.bfloat16, torch.float32, 1e-6
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(
        bool(triton_fault(torch.device("cpu"))), reason="Triton compiles for CUDA here")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device")])]
FORMS = {"int4, 128": RowFormat(4, 128, False, 8), "int4, 32, mins": RowFormat(4, 32, True),
         "int4, rows": RowFormat(4, 0, False, 8), "int5": RowFormat(5, 32, True),
         "int6": RowFormat(6, 16, False, 32), "int8, 32": RowFormat(8, 32, False, 128)}
BY_ROW = {"int8": RowFormat(8, 0, False, 128), "int8, zero": RowFormat(8, 0, False, 120),
          "int8, mins": RowFormat(8, 0, True)}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        exact_fp8(monkeypatch)
    return torch.device(request.param)


def ops() -> TorchOps:
    from actorium.kernels.triton.triton_ops import TritonOps

    return TritonOps()


def drawn(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=random).to(device, dtype)


def spread(device: torch.device, rows: int, width: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of very different sizes, one of zeros."""
    x = drawn(device, rows, width, dtype=FP32) * torch.logspace(-3, 3, rows, device=device)[:, None]
    x[rows // 2] = 0
    return x.to(dtype)


def rows_and_sizes(device: torch.device) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Rows of x, one tile of each kind among them; (outs, ins) of weights."""
    if device.type == "cpu":
        return (1, 17), [(48, 256)]
    return (1, 8, 16, 17, 64, 65, 257, 2048), [(6144, 4096), (1000, 1152), (4096, 14336)]


def close(got: Tensor, want: Tensor, within: float) -> None:
    """Each row by its own length."""
    got, want = got.double(), want.double()
    assert got.isfinite().all()
    apart = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(apart.max()) < within


@pytest.mark.parametrize("name", FORMS)
def test_products_of_groups(device: torch.device, name: str) -> None:
    """Alone, with bias and residual, and gated; of weights widened as the kernels see them."""
    from actorium.kernels.triton.grouped_mm import TritonGrouped, reference

    counts, sizes = rows_and_sizes(device)
    for outs, ins in sizes:
        rows = pack_rows(quantise_grouped(drawn(device, outs, ins) * ins**-0.5, FORMS[name]))
        bias, wide = drawn(device, outs), reference(rows, FP32).double()
        linear, gated = TritonGrouped(rows, bias), ops().gated(rows, None, "silu")
        assert isinstance(linear, type(ops().linear(rows)))
        for count in counts:
            x, residual = drawn(device, count, ins), drawn(device, count, outs)
            want = x.double() @ wide.t()
            close(linear(x), want + bias, 0.01)
            close(linear.add(x, residual.clone()), want + bias + residual, 0.01)
            gate, up = want.chunk(2, 1)
            close(gated(x), torch.nn.functional.silu(gate) * up, 0.02)


@pytest.mark.parametrize("name", BY_ROW)
def test_products_of_integers(device: torch.device, name: str) -> None:
    from actorium.kernels.triton.int8_mm import TritonInt8, quantise_int8

    counts, sizes = rows_and_sizes(device)
    for outs, ins in sizes:
        rows = pack_rows(quantise_grouped(drawn(device, outs, ins) * ins**-0.5, BY_ROW[name]))
        bias, own = drawn(device, outs), unpack_rows(rows)
        linear = TritonInt8(rows, bias)
        for count in counts:
            x, residual = drawn(device, count, ins), drawn(device, count, outs)
            codes, scales, sums = quantise_int8(x)
            want_codes, want_scales = quantise_input(x, ins)
            assert torch.equal(codes, want_codes) and torch.equal(scales[:, None], want_scales)
            assert torch.equal(sums.long(), want_codes.sum(1, dtype=torch.int64))
            want = grouped_mm(x, own)
            close(linear(x), want + bias, 5e-3)
            close(linear.add(x, residual.clone()), want + bias + residual, 5e-3)
            close(linear.wide(x), want + bias, 1e-4)


def same(got: Quantised, whole: Tensor, form: InputForm) -> None:
    """What the reference makes of what was rounded, but for ties."""
    if form.int8:
        codes, scales = quantise_input(whole, form.columns)
        assert got.sums is not None
        assert torch.equal(got.sums.long(), got.q.sum(1, dtype=torch.int64))
    else:
        want = TorchOps.rms_norm_quant(_Whole(), whole, whole, EPS, form)
        codes, scales = want.q, want.scales
    torch.testing.assert_close(got.scales, scales, rtol=1e-6, atol=0)
    assert float((got.q.float() != codes.float()).float().mean()) < 1e-3
    assert not form.plain or torch.equal(plain(got), whole)


class _Whole(TorchOps):
    """Whose norms leave everything as it is."""

    rms_norm = staticmethod(lambda x, weight, eps: x)


@pytest.mark.parametrize("int8", [False, True])
def test_norms_that_quantise(device: torch.device, int8: bool) -> None:
    """The bits of the norm, then its codes: in FP8 by row and by groups of columns, in INT8."""
    for width in (256, 1000) if device.type == "cpu" else (1000, 4096, 5120, 8192):
        x, weight = spread(device, 7, width), drawn(device, width)
        residual = drawn(device, 7, width)
        own = ops()
        for columns in (width,) if int8 else (width, 128):
            for keep in (False, True):
                form = InputForm(columns, keep, int8=int8)
                same(own.rms_norm_quant(x, weight, EPS, form), own.rms_norm(x, weight, EPS), form)
                got, total = own.add_rms_norm_quant(x, residual, weight, EPS, form)
                normed, sums = own.add_rms_norm(x, residual, weight, EPS)
                assert torch.equal(total, sums)
                same(got, normed, form)


@pytest.mark.parametrize(("name", "int8"), pairs(["silu_mul", "gelu_mul"], [False, True]))
def test_gates_that_quantise(device: torch.device, name: str, int8: bool) -> None:
    for width in (256, 1000) if device.type == "cpu" else (1000, 3072, 14336):
        own, both = ops(), spread(device, 7, 2 * width + 8)[:, :2 * width]
        for columns in (width,) if int8 else (width, 128):
            form = InputForm(columns, plain=False, int8=int8)
            same(getattr(own, f"{name}_quant")(both, form), getattr(own, name)(both), form)


SPANS = {"prompts": ([(0, 700), (300, 257)], 0, 128), "a window": ([(0, 1000)], 256, 64),
         "a long prefix": ([(4000, 33)], 0, 128), "wide heads": ([(900, 90)], 0, 256),
         "decodes": ([(4096, 1), (100, 1)], 0, 128), "drafts": ([(500, 3), (7, 3)], 0, 128)}


@pytest.mark.parametrize(("name", "kv_dtype"), pairs(SPANS, [BF16, torch.int8]))
def test_attention_by_codes(device: torch.device, name: str, kv_dtype: torch.dtype) -> None:
    """Prompts, behind prefixes, and decodes, with drafts, too: by as many splits as it chooses, and
    by a given number."""
    from actorium.kernels.triton.sage import sage_decode
    from actorium.kernels.triton.sage import sage_extend as extend

    spans, window, dim = SPANS[name]
    if device.type == "cpu":
        spans = [(start // 50, min(count, 9)) for start, count in spans]
        window, dim = window // 32, dim // 4
    case = Paged(spans, 16 if device.type == "cuda" else 4, 2, dim, 16, window, BF16, kv_dtype,
                 device.type)
    means = KeyMeans()
    means.store(case.layer, torch.linspace(-2, 2, 2 * dim, device=device).view(2, dim))
    want = sage_extend(case.rows, 16, window, case.scale, means)(
        case.q, case.layer, None, case.scales).double().cpu()
    assert error(want, case.wanted()) < 0.03, "the reference is not far from fp64"
    count, (tables, lens) = spans[0][1], case.tables()
    for splits in (0, 1, 3):
        ways = [extend(case.rows, 16, window, case.scale, means, splits)]
        if name in ("decodes", "drafts"):
            ways.append(sage_decode(tables, lens, int(lens.max()), count, 16, window, case.scale,
                                    means, splits))
        for way in ways:
            got = way(case.q, case.layer, case.poisoned(), case.scales)
            assert got.isfinite().all() and error(got, want) < 0.01
