"""Products of FP8: packed rows, the reference by definition, and Triton's kernels beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_compile import compiled
from helpers_fp8 import exact_fp8, in_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.kernels.backends import triton_fault
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.scaled_linear import (
    FP8,
    Scaled,
    ScaledLinear,
    dequantise,
    dequantise_rows,
    groups,
    is_packed,
    open_rows,
    pack,
    quantise,
    scaled_mm,
    unpack,
)

CPU = torch.device("cpu")
triton = pytest.importorskip("triton")
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
BF16 = torch.bfloat16


def weight(outs: int, width: int, kind: str, seed: int = 0) -> Scaled:
    """kind: whole | rows | blocks | apart (a scale for each row and 128 columns)."""
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(outs, width, generator=gen).to(FP8)
    size, share = {"whole": (1, 1), "rows": (outs, 1), "blocks": (groups(outs), groups(width)),
                   "apart": (outs, groups(width))}[kind], 128 if kind == "blocks" else 1
    scales = torch.rand(size, generator=gen) + 0.1
    return Scaled(w, scales.expand(outs, 1).contiguous() if kind == "whole" else scales, share)


def packed(w: Scaled) -> torch.Tensor:
    return pack(w.weight, w.scales.repeat_interleave(w.rows, 0)[:len(w.weight)])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 520), st.sampled_from(["whole", "rows", "apart"]))
def test_rows_carry_their_scales(outs: int, width: int, kind: str) -> None:
    w = weight(outs, width, kind)
    rows = packed(w)
    assert is_packed(rows) and rows.shape == (outs, width + 4 * groups(width))
    order = torch.randperm(outs)
    weights, scales = unpack(torch.cat((rows[order], rows)))
    every = w.scales.expand(-1, groups(width))
    assert torch.equal(weights.float(), torch.cat((w.weight.float()[order], w.weight.float())))
    assert torch.equal(scales, torch.cat((every[order], every)))
    assert torch.equal(dequantise_rows(rows, torch.float32),
                       dequantise(w.weight, w.scales, torch.float32))


def test_no_more_scales_than_are_needed() -> None:
    for kind, shape, share in (("whole", (256, 1), 1), ("rows", (256, 1), 1),
                               ("blocks", (2, 3), 128), ("apart", (256, 3), 1)):
        w = weight(256, 300, kind)
        got = open_rows(packed(w))
        assert (tuple(got.scales.shape), got.rows) == (shape, share)
        assert torch.equal(got.scales, w.scales)


def test_dequantised_by_definition() -> None:
    small, scales, wide = in_blocks(torch.randn(200, 300))
    every = scales.repeat_interleave(128, 0)[:200]
    assert torch.equal(dequantise(small, every, torch.float32), wide)
    assert torch.equal(dequantise(small, every, BF16), wide.to(BF16))


@pytest.mark.parametrize("columns", [128, 300])
def test_quantised_by_definition(columns: int) -> None:
    x = torch.randn(5, 300, dtype=BF16)
    x[1, :130] = 0
    x[2] *= 1e4
    q, scales = quantise(x, columns)
    for t in range(5):
        for j, part in enumerate(x[t].float().split(columns)):
            scale = part.abs().max() / 448
            assert scales[t, j] == (scale if scale else 1)
            own = q[t].split(columns)[j]
            assert torch.equal(own.float(), (part / scales[t, j]).to(FP8).float())
            assert own.float().abs().max() == (448 if scale else 0)


def test_product_by_definition() -> None:
    w, x = weight(70, 300, "apart"), torch.randn(4, 300)
    bias, residual = torch.randn(70), torch.randn(4, 70)
    q, s = quantise(x, 128)
    want = residual.double() + bias
    for k in range(300):
        want += torch.outer(q[:, k].double() * s[:, k // 128].double(),
                            w.weight[:, k].double() * w.scales[:, k // 128].double())
    got = scaled_mm(q, s, w, torch.float32, bias, residual)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-4)


def test_a_linear_is_what_it_stands_for() -> None:
    w, x = weight(70, 300, "apart"), torch.randn(4, 300)
    linear = TorchOps().linear(packed(w), torch.randn(70))
    assert isinstance(linear, ScaledLinear)
    want = x @ dequantise(w.weight, w.scales, torch.float32).t() + linear.bias
    assert (linear(x) - want).norm() < 0.05 * want.norm()
    assert torch.allclose(linear.add(x, want), want + linear(x), atol=1e-4)
    assert linear.wide(x.to(BF16)).dtype is torch.float32


@interpreted
@pytest.mark.parametrize(("rows", "outs", "width", "kind"), [
    (1, 33, 128, "blocks"), (3, 130, 300, "blocks"), (18, 256, 256, "blocks"),
    (3, 70, 300, "apart"), (70, 40, 130, "whole"), (2, 5, 7, "rows"), (0, 16, 128, "blocks")])
def test_triton_as_the_reference(rows: int, outs: int, width: int, kind: str,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    from actorium.kernels.triton import scaled_mm as ours

    exact_fp8(monkeypatch)
    w = weight(outs, width, kind)
    x = torch.randn(rows, 2 * width + 3, generator=torch.Generator().manual_seed(1))[:, 1:width + 1]
    x[::3] *= 100
    columns = width if w.scales.shape[1] == 1 else 128
    q, s = quantise(x, columns)
    mine, scales = ours.quantise(x, columns)
    assert torch.equal(mine.float(), q.float()) and torch.equal(scales, s)
    bias, residual = torch.randn(outs), torch.randn(rows, 2 * outs)[:, :outs]
    for extra in ((None, None), (bias, residual)):
        want = scaled_mm(q, s, w, torch.float32, *extra)
        torch.testing.assert_close(ours.scaled_mm(q, s, w, torch.float32, *extra), want,
                                   rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(ours.scaled_mm(q, s, w, BF16, *extra), want.to(BF16),
                                   rtol=2**-7, atol=1e-2)


def test_scales_by_row_in_torchs_product() -> None:
    from actorium.kernels.triton.scaled_mm import by_row

    w, (q, s) = weight(48, 64, "rows"), quantise(torch.randn(5, 64), 64)
    torch.testing.assert_close(by_row(q, s, w), scaled_mm(q, s, w, BF16), rtol=2**-6, atol=0.05)


COMPILED = """
import torch
from actorium.kernels.scaled_linear import FP8, Scaled
from actorium.kernels.triton.scaled_mm import quantise, scaled_mm
for rows, width, size, share in ((3, 4096, (16, 32), 128), (33, 4096, (16, 32), 128),
                                 (3, 1000, (70, 8), 1), (300, 4096, (64, 1), 1),
                                 (300, 4096, (16, 32), 128)):
    x = torch.empty(rows, width, dtype=torch.bfloat16)
    w = Scaled(torch.empty(size[0] * share, width, dtype=FP8), torch.empty(size), share)
    q, s = quantise(x, 128 if size[1] > 1 else width)
    y = scaled_mm(q, s, w, torch.bfloat16)
scaled_mm(q, s, w, torch.float32, y[0], y)
assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3" in hopper.kernels[-1].asm["ptx"]
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    names = compiled(COMPILED, tmp_path)
    assert names.count("_product") == 6
    assert set(names) == {"_product", "_quantise_groups", "_quantise_rows"}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 300])
@pytest.mark.parametrize(("outs", "width", "kind"), [
    (256, 512, "blocks"), (4096, 4096, "blocks"), (1000, 1000, "apart"), (4096, 4096, "whole"),
    (1024, 2048, "rows"), (70, 300, "rows")])
def test_on_a_device_against_fp64(rows: int, outs: int, width: int, kind: str) -> None:
    from actorium.kernels.triton.scaled_mm import TritonScaledLinear
    from actorium.kernels.triton.scaled_mm import quantise as on_device

    w, gen = weight(outs, width, kind), torch.Generator().manual_seed(2)
    x = torch.randn(rows, width, generator=gen).to(BF16)
    bias, residual = torch.randn(outs, generator=gen).to(BF16), torch.randn(rows, outs).to(BF16)
    columns = width if w.scales.shape[1] == 1 else 128
    q, s = quantise(x, columns)
    mine, scales = on_device(x.cuda(), columns)
    assert torch.equal(mine.cpu().float(), q.float()) and torch.equal(scales.cpu(), s)
    linear = TritonScaledLinear(packed(w).cuda(), bias.cuda())
    wide = dequantise(q, s, torch.float32).double() @ dequantise(
        w.weight, w.scales.repeat_interleave(w.rows, 0), torch.float32).double().t() + bias
    for got, want in ((linear(x.cuda()), wide),
                      (linear.add(x.cuda(), residual.cuda()), wide + residual)):
        got = got.cpu().double()
        assert got.isfinite().all()
        assert (got - want).abs().max() < 0.02 * want.abs().max()
        assert (got - want).norm() < 5e-3 * want.norm()
