"""Experts grouped on the device, in Triton, against their reference: in the interpreter, compiled
for Hopper, on a CUDA device, and in whole models."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers_compile import compiled
from helpers_deepseek import write_deepseek
from helpers_fp8 import exact_fp8
from helpers_hybrid import MOE, SPARSE, write_hybrid
from helpers_pairs import pairs
from helpers_speculation import Work, tokens_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from actorium.actors.config.tree import Config, DeviceConfig
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.registry import load_model
from actorium.kernels.backends import triton_fault
from actorium.kernels.fp4_weights import dequantise_fp4, pack_fp4, stack_fp4
from actorium.kernels.grouped_rows import FP4, pack_rows, quantise_grouped
from actorium.kernels.reference.activation import clamped_swiglu, silu_mul
from actorium.kernels.reference.experts import EachExpert, ExpertExtras, Experts, StackedExperts
from actorium.kernels.scaled_linear import ScaledLinear, groups, pack
from actorium.kernels.triton.device_limits import HOPPER
from actorium.kernels.triton.experts import GroupedExperts, tile
from actorium.kernels.triton.fp4_experts import Fp4Experts
from actorium.kernels.triton.scaled_experts import ScaledExperts
from actorium.kernels.triton.triton_ops import TritonOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")


class Layer:
    """A random layer, and rows with the experts that they want."""

    def __init__(self, rows: int, experts: int, chosen: int, width: int, inner: int,
                 dtype: torch.dtype, device: torch.device = CPU, few: int = 0) -> None:
        """few: nobody wants others than the first so many experts; 0: all are wanted."""
        gen = torch.Generator().manual_seed(rows + experts)

        def normal(*size: int) -> torch.Tensor:
            return (torch.randn(size, generator=gen) * size[-1]**-0.25).to(device, dtype)

        self.gate_up, self.down = normal(experts, 2 * inner, width), normal(experts, width, inner)
        self.x = torch.full((rows, width + 3), torch.nan, dtype=dtype, device=device)[:, :width]
        self.x[:] = normal(rows, width)
        order = [torch.randperm(few or experts, generator=gen)[:chosen] for _ in range(rows)]
        self.chosen = torch.stack(order or [torch.zeros(chosen).long()])[:rows].to(device)
        self.weights = torch.rand(rows, chosen, generator=gen).to(device, dtype)

    def exact(self) -> torch.Tensor:
        """f64[T, H]"""
        own = StackedExperts(self.gate_up.double(), self.down.double())
        return own(self.x.double(), self.weights.double(), self.chosen)

    def check(self, experts: Experts, most: float) -> torch.Tensor:
        """`experts` gives what it should, but for this share."""
        got, want = experts(self.x, self.weights, self.chosen), self.exact()
        assert got.dtype is self.x.dtype and got.shape == self.x.shape
        assert (got.double() - want).norm() <= most * want.norm()
        return got


@interpreted
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(0, 40), experts=st.integers(1, 9), chosen=st.integers(1, 4),
       width=st.sampled_from([16, 40, 130]), inner=st.sampled_from([8, 33, 96]),
       few=st.booleans())
@example(rows=300, experts=2, chosen=1, width=16, inner=8, few=False)
@example(rows=70, experts=2, chosen=2, width=72, inner=70, few=False)
def test_as_the_reference(rows: int, experts: int, chosen: int, width: int, inner: int,
                          few: bool) -> None:
    """Experts that nobody wants, that all want; more rows than a tile has, and none."""
    chosen = min(chosen, experts)
    layer = Layer(rows, experts, chosen, width, inner, torch.float32, CPU, chosen * few)
    layer.check(GroupedExperts(layer.gate_up, layer.down), 1e-5)
    layer.check(StackedExperts(layer.gate_up, layer.down), 1e-5)


@interpreted
@pytest.mark.parametrize(("rows", "limit"), [(0, 7.0), (21, 7.0), (70, 0.5)])
def test_biases_and_clamped_gates(rows: int, limit: float) -> None:
    layer = Layer(rows, 5, 2, 72, 33, torch.float32)
    gen = torch.Generator().manual_seed(rows)
    extras = ExpertExtras(torch.randn(5, 66, generator=gen), torch.randn(5, 72, generator=gen),
                          (1.702, limit))
    want = StackedExperts(layer.gate_up, layer.down, extras)(layer.x, layer.weights, layer.chosen)
    got = GroupedExperts(layer.gate_up, layer.down, extras)(layer.x, layer.weights, layer.chosen)
    assert torch.allclose(got, want, atol=1e-4)
    assert not rows or (layer.exact() - want).norm() > 0.1 * want.norm()
    one = clamped_swiglu(torch.tensor([[limit + 2, -3.0, torch.nan, -limit - 2, 0.5, 1.0]]), 1.7,
                         limit)
    assert one[0, 0] == pytest.approx(limit / (1 + math.exp(-1.7 * limit)) * (1 - limit))
    assert one[0, 2].isnan()


@interpreted
@pytest.mark.parametrize(("rows", "dtype", "plain"), [
    (0, torch.float32, True), (21, torch.float32, False), (70, torch.float32, True),
    (21, torch.bfloat16, False)])
def test_experts_in_mxfp4(rows: int, dtype: torch.dtype, plain: bool) -> None:
    """Scales at both ends of e8m0 too, of weights that nobody notices or that are 0."""
    layer = Layer(rows, 5, 2, 96, 64, dtype)
    gen = torch.Generator().manual_seed(rows)
    extras = ExpertExtras() if plain else ExpertExtras(
        torch.randn(5, 128, generator=gen).to(dtype), torch.randn(5, 96, generator=gen).to(dtype),
        (1.702, 7.0))
    held = []
    for weight in (layer.gate_up, layer.down):
        rows_of = [pack_rows(quantise_grouped(own.float(), FP4)) for own in weight]
        own = stack_fp4([pack_fp4(each) for each in rows_of])
        own.scales[0, 0] = 0
        own.scales[1, 1] = 254
        own.codes[1, 1] = 0
        held.append(own)
    wide = [dequantise_fp4(own, dtype) for own in held]
    want = StackedExperts(*wide, extras)(layer.x, layer.weights, layer.chosen)
    got = Fp4Experts(*held, extras)(layer.x, layer.weights, layer.chosen)
    assert (got - want).float().norm() <= (1e-5 if dtype is torch.float32 else 1e-2) * (
        want.float().norm())


@interpreted
def test_in_bf16() -> None:
    layer = Layer(21, 5, 2, 40, 24, torch.bfloat16)
    layer.check(GroupedExperts(layer.gate_up, layer.down), 1e-2)


@interpreted
@pytest.mark.parametrize("rows", [0, 1, 21])
def test_without_a_gate(rows: int) -> None:
    """As each expert's products in turn; the first has half of these rows."""
    layer = Layer(rows, 5, 2, 40, 24, torch.float32)
    up = layer.gate_up[:, :24].contiguous()
    got = TritonOps().squared_experts(up, layer.down)(layer.x, layer.weights, layer.chosen)
    each = EachExpert([partial(lambda one, two, x: (x @ one.T).relu().square() @ two.T, *own)
                       for own in zip(up, layer.down, strict=True)])
    want = each(layer.x, layer.weights, layer.chosen)[:, :40]
    torch.testing.assert_close(got, want[:rows], rtol=1e-4, atol=1e-4)


@interpreted
def test_a_row_of_nan_disturbs_no_other() -> None:
    """As that of padding may be."""
    layer = Layer(9, 4, 2, 40, 24, torch.float32)
    experts = GroupedExperts(layer.gate_up, layer.down)
    want = experts(layer.x, layer.weights, layer.chosen)
    layer.x[4] = torch.nan
    got = experts(layer.x, layer.weights, layer.chosen)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(got[others], want[others]) and got[4].isnan().all()


def packed(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """u8[E, N, ...]: in FP8, with scales by blocks, by rows, or one for each expert."""
    rows = []
    for own in weight.float():
        n, k = own.shape
        most = own.abs().amax(1, keepdim=True) if kind == "rows" else own.abs().amax().view(1, 1)
        scales = (most / 448).expand(n, groups(k)).contiguous()
        if kind == "blocks":
            places = torch.arange(-(-n // 128) * groups(k), device=own.device).float()
            scales = (scales[0, 0] * (1 + places.view(-1, groups(k)) / 10)
                      ).repeat_interleave(128, 0)[:n]
        each = scales.repeat_interleave(128, 1)[:, :k]
        rows.append(pack((own / each).to(torch.float8_e4m3fn), scales))
    return torch.stack(rows)


def check_fp8(layer: Layer, kind: str, most: float) -> None:
    """As each expert's products in the reference, whose inputs are quantised alike."""
    gate_up, down = packed(layer.gate_up, kind), packed(layer.down, kind)
    each = EachExpert([
        lambda y, g=ScaledLinear(g), d=ScaledLinear(d): d(silu_mul(g(y)))
        for g, d in zip(gate_up, down, strict=True)])
    want = each(layer.x, layer.weights, layer.chosen).double()
    got = ScaledExperts(gate_up, down)(layer.x, layer.weights, layer.chosen)
    assert got.dtype is layer.x.dtype
    assert (got.double() - want).norm() <= most * want.norm() and want.norm() > 0


@interpreted
@pytest.mark.parametrize(("rows", "experts", "width", "inner", "kind"), pairs(
    [(5, 4, 256, 128), (1, 3, 130, 70), (110, 2, 32, 16)], ["blocks", "rows", "whole"]))
def test_in_fp8(kind: str, rows: int, experts: int, width: int, inner: int,
                monkeypatch: pytest.MonkeyPatch) -> None:
    exact_fp8(monkeypatch)
    check_fp8(Layer(rows, experts, 2, width, inner, torch.float32), kind, 1e-2)


@interpreted
def test_many_rows_in_fp8_on_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_fp8(monkeypatch)
    monkeypatch.setattr("actorium.kernels.triton.scaled_experts.device_limits",
                        lambda _: HOPPER._replace(capability=89))
    check_fp8(Layer(110, 2, 2, 130, 70, torch.float32), "rows", 1e-2)


def test_loads_under_way_fit_the_device() -> None:
    for shared, stages in ((HOPPER.shared, 4), (163 * 1024, 4), (99 * 1024, 3)):
        assert tile(1, 128, True, shared=shared).stages == stages


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    rows = [tile(count, 8, True).rows for count in (1, 128, 129, 400, 700, 2000)]
    assert rows == [16, 16, 32, 64, 64, 128]


CODE = """
import torch
from actorium.kernels.triton.experts import GroupedExperts
for number, width, inner in ((128, 2048, 768), (8, 1000, 300)):
    experts = GroupedExperts(torch.empty(number, 2 * inner, width, dtype=torch.bfloat16),
                             torch.empty(number, width, inner, dtype=torch.bfloat16))
    for rows in (1, 200, 600, 3000):
        chosen = torch.arange(8).repeat(rows, 1)
        experts(torch.empty(rows, width, dtype=torch.bfloat16),
                torch.empty(rows, 8, dtype=torch.bfloat16), chosen)
"""


FP8_CODE = """
import torch
from actorium.kernels.scaled_linear import pack
from actorium.kernels.triton.scaled_experts import ScaledExperts

def rows(e, n, k, block):
    scales = torch.ones(e, n, k // 128)
    if block:
        scales += torch.arange(n // 128).repeat_interleave(128)[:, None] + torch.arange(k // 128)
    return pack(torch.zeros(e, n, k).to(torch.float8_e4m3fn), scales)

for block in (True, False):
    experts = ScaledExperts(rows(8, 2 * 768, 2048, block), rows(8, 2048, 768, block))
    assert experts.down.rows == (128 if block else 1)
    for count in (1, 600):
        experts(torch.empty(count, 2048, dtype=torch.bfloat16),
                torch.empty(count, 2, dtype=torch.bfloat16), torch.arange(2).repeat(count, 1))
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert compiled(CODE, tmp_path) == ["_product"] * 16


@pytest.mark.slow
def test_fp8_compiles_for_hopper(tmp_path: Path) -> None:
    assert compiled(FP8_CODE, tmp_path) == (["_quantise_groups", "_product"] * 4
                                            + ["_quantise_rows", "_product"] * 4)


@interpreted
@pytest.mark.parametrize("architecture", [
    *(pytest.param(own, marks=pytest.mark.slow) for own in (MOE, SPARSE)), "deepseek"])
def test_models_speak_as_on_torch(tmp_path: Path, architecture: str) -> None:
    if architecture == "deepseek":
        write_deepseek(tmp_path)
    else:
        write_hybrid(tmp_path, architecture)
    work = Work([[5, 9, 2, 41, 17] * 2, [7, 3, 3]],
                [ResolvedParams(max_tokens=4, temperature=0.0)] * 2)
    found = []
    for kernels in ("torch", "triton"):
        config = Config(device=DeviceConfig(kernels=kernels))
        model = load_model(tmp_path, config, CPU, lambda *_: None)
        assert model.waits == (kernels == "torch")
        found.append(tokens_of(work.plain(model)))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 7, 64, 500, 3000])
def test_on_the_device(rows: int, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    layer = Layer(rows, 32, 4, 1024, 384, dtype, CUDA)
    experts = GroupedExperts(layer.gate_up, layer.down)
    most = 1e-5 if dtype is torch.float32 else 1e-2
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = experts(layer.x, layer.weights, layer.chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(layer.check(experts, most), first)
    each = EachExpert([lambda y, g=g, d=d: (
        torch.nn.functional.silu((y @ g.t()).float().chunk(2, 1)[0])
        * (y @ g.t()).float().chunk(2, 1)[1]).to(dtype) @ d.t()
        for g, d in zip(layer.gate_up, layer.down, strict=True)])
    layer.check(each, most)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["blocks", "rows"])
@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_in_fp8_on_the_device(rows: int, kind: str) -> None:
    check_fp8(Layer(rows, 32, 4, 1024, 384, torch.bfloat16, CUDA), kind, 2e-2)
