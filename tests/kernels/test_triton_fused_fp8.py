"""Norms and activations that quantise what they give: in Triton, as the reference, and as each part
done one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_compile import compiled
from helpers_fp8 import exact_fp8
from helpers_pairs import pairs

from actorium.kernels.backends import triton_fault
from actorium.kernels.inputs import InputForm, Quantised, plain
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.scaled_linear import to_form

pytest.importorskip("triton")
from actorium.kernels.triton.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
pytestmark = pytest.mark.skipif(bool(triton_fault(DEVICE)), reason="Triton compiles for CUDA here")


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        exact_fp8(monkeypatch)


def numbers(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, one of zeros."""
    torch.manual_seed(rows * width)
    x = torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]
    x[rows // 2] = 0
    return x.to(device=DEVICE, dtype=dtype)


def same(got: Quantised, want: Quantised) -> None:
    """Bit for bit."""
    assert got.q.shape == want.q.shape and got.scales.shape == want.scales.shape
    assert torch.equal(got.scales, want.scales)
    assert torch.equal(got.q.view(torch.uint8), want.q.view(torch.uint8))
    assert got.dtype is want.dtype and (got.plain is None) == (want.plain is None)
    assert got.plain is None or torch.equal(got.plain, plain(want))


@pytest.mark.parametrize(("width", "columns", "dtype"), pairs(
    [(64, 64), (200, 200), (1000, 1000), (1000, 128), (384, 128), (4096, 4096), (4096, 128)],
    [torch.bfloat16, torch.float32]))
def test_norms_as_their_parts(width: int, columns: int, dtype: torch.dtype) -> None:
    """The bits of Triton's norm, quantised by the reference; kept as it is where that is asked."""
    ops, x = TritonOps(), numbers(5, width, dtype)
    weight, residual = numbers(5, width, dtype)[0] + 1, numbers(5, width, dtype) * 0.3
    for keep in (False, True):
        form = InputForm(columns, keep)
        want = TorchOps.rms_norm_quant(ops, x, weight, EPS, form)
        same(ops.rms_norm_quant(x, weight, EPS, form), want)
        summed, total = ops.add_rms_norm_quant(x, residual, weight, EPS, form)
        normed, sums = ops.add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(total, sums)
        same(summed, to_form(normed, form))


@pytest.mark.parametrize("columns", [300, 128])
def test_norms_as_the_reference(columns: int) -> None:
    ops, reference, x = TritonOps(), TorchOps(), numbers(7, 300, torch.float32)
    form, more = InputForm(columns, True), x.flip(0)
    (one, two), (alone, whole) = (
        (each.rms_norm_quant(x, x[0], EPS, form), each.add_rms_norm_quant(x, more, x[0], EPS, form))
        for each in (ops, reference))
    assert torch.equal(two[1], whole[1])
    for got, want in ((one, alone), (two[0], whole[0])):
        assert torch.allclose(plain(got), plain(want), rtol=1e-5)
        assert torch.allclose(got.scales, want.scales, rtol=1e-5)
        apart = (got.q.float() - want.q.float()).abs()
        assert float((apart > 0).float().mean()) < 0.01, "ties alone round the other way"


@pytest.mark.parametrize(("width", "columns", "name"), pairs(
    [(48, 48), (96, 96), (1000, 1000), (1000, 128), (2500, 128), (9000, 9000)],
    ["silu_mul", "gelu_mul"]))
def test_activations_as_their_parts(width: int, columns: int, name: str) -> None:
    ops, form = TritonOps(), InputForm(columns, plain=False)
    for dtype in (torch.bfloat16, torch.float32):
        both = numbers(4, 2 * width, dtype)
        want = getattr(TorchOps, f"{name}_quant")(ops, both, form)
        same(getattr(ops, f"{name}_quant")(both, form), want)
        wide = numbers(4, 2 * width + 7, dtype)[:, :2 * width]
        same(getattr(ops, f"{name}_quant")(wide, form),
             getattr(ops, f"{name}_quant")(wide.contiguous(), form))


def test_no_rows() -> None:
    ops, x = TritonOps(), torch.empty(0, 256, dtype=torch.bfloat16, device=DEVICE)
    got = ops.rms_norm_quant(x, torch.ones_like(x[:1].sum(0)), EPS, InputForm(128, True))
    assert got.scales.shape == (0, 2) and len(plain(got)) == 0
    assert ops.silu_mul_quant(x, InputForm(128, plain=False)).scales.shape == (0, 1)


def test_forms_of_several_products() -> None:
    rows, blocks, as_it_is = InputForm(512, False), InputForm(128, False), InputForm()
    assert rows.also(rows) == rows and rows.also(as_it_is) == InputForm(512, True)
    assert rows.also(blocks) == as_it_is, "each quantises it then"
    assert as_it_is.also(as_it_is) == as_it_is


def test_rows_of_an_input() -> None:
    ops, x = TorchOps(), numbers(6, 256, torch.float32)
    whole = ops.rms_norm_quant(x, x[1], EPS, InputForm(128, True))
    picked = whole.index_select(0, torch.tensor([4, 1], device=DEVICE))
    for got, rows in ((whole[1:3], [1, 2]), (picked, [4, 1])):
        same(got, ops.rms_norm_quant(x[rows], x[1], EPS, InputForm(128, True)))
    alone = ops.rms_norm_quant(x, x[1], EPS, InputForm(128, False))
    with pytest.raises(ValueError, match="only its 8 bits were kept"):
        plain(alone)


CODE = """
import torch
from ptxas_device import facts
from actorium.kernels.inputs import InputForm
from actorium.kernels.triton.triton_ops import TritonOps

BF16, ops = torch.bfloat16, TritonOps()
x = torch.empty(3, 8192, dtype=BF16)
ops.add_rms_norm_quant(x, x, x[0], 1e-5, InputForm(8192, True))
ops.silu_mul_quant(torch.empty(3, 2 * 14336, dtype=BF16), InputForm(14336, False))
x = torch.empty(3, 7168, dtype=BF16)
ops.add_rms_norm_quant(x, x, x[0], 1e-5, InputForm(128, True))
ops.gelu_mul_quant(torch.empty(3, 4096, dtype=BF16), InputForm(128, False))
for kernel in hopper.kernels:
    found = facts(kernel, 90)
    assert found.spills == (0, 0), found
"""


@pytest.mark.slow
def test_compile_for_hopper(tmp_path: Path) -> None:
    """For rows of large models, without spills."""
    assert compiled(CODE, tmp_path) == ["_norm_fp8", "_gate_rows", "_norm_fp8", "_gate_groups"]
