"""Chunks of prompts over latents in Triton: against the torch reference in the interpreter, compiled
for Hopper, and on a CUDA device, behind a long prefix as well."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers_attention import FEW, INTERPRETED
from helpers_compile import compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from actorium.gpu.attention.attention_backend import TorchAttention, TritonAttention
from actorium.kernels.reference.kv import quantise_rows
from actorium.kernels.triton.latent_extend import LatentExtend

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn


class Chunk(NamedTuple):
    start: int
    count: int
    pages: Tensor


class Prompts:
    """Chunks (start, count) of sequences. What is nobody's, and what lies behind a chunk, is NaN."""

    def __init__(self, parts: list[tuple[int, int]], heads: int, rank: int, rope: int, size: int,
                 dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> None:
        gen = torch.Generator().manual_seed(sum(map(sum, parts)) + rank)
        self.rank, self.size, self.scale = rank, size, (rank + rope)**-0.5
        widths = [-(-(start + count) // size) for start, count in parts]
        dealt = (torch.randperm(sum(widths), generator=gen) + 1).to(torch.int32)
        layer = torch.full(((sum(widths) + 1) * size, 1, rank + rope), math.nan)
        for (start, count), own in zip(parts, dealt.split(widths), strict=True):
            place = torch.arange(start + count)
            layer[own.long()[place // size] * size + place % size] = torch.randn(
                start + count, 1, rank + rope, generator=gen)
        self.rows = [Chunk(*part, own.to(device))
                     for part, own in zip(parts, dealt.split(widths), strict=True)]
        self.layer = layer.to(device, dtype)
        wide = torch.randn(sum(count for _, count in parts), heads, rank + rope + 3, generator=gen)
        self.q = wide.to(device, dtype)[..., :rank + rope]

    def run(self, splits: int = 0, layer: Tensor | None = None,
            scales: Tensor | None = None) -> Tensor:
        attend = LatentExtend(self.rows, self.size, self.scale, self.rank, splits)
        out = torch.full(self.q.shape, math.nan, dtype=self.q.dtype, device=self.q.device)
        assert attend(self.q, self.layer if layer is None else layer, out, scales) is out
        return out[..., :self.rank]

    def error(self, splits: int = 0, layer: Tensor | None = None,
              scales: Tensor | None = None) -> float:
        """Beside the reference in f64."""
        attend = TorchAttention(self.rank).extend(self.rows, self.size, 0, self.scale)
        pages = self.layer.double() if layer is None else layer
        want = attend(self.q.double(), pages, None, scales)[..., :self.rank]
        return float((self.run(splits, layer, scales).double() - want).norm() / want.norm())


class TestInterpreted:
    pytestmark = INTERPRETED

    @settings(FEW, max_examples=20)
    @given(parts=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1,
                          max_size=3),
           heads=st.integers(1, 20),
           widths=st.sampled_from([(14, 4), (64, 16), (40, 24), (512, 64)]),
           size=st.sampled_from([16, 32, 128]), splits=st.sampled_from([0, 1, 2, 5]))
    def test_equals_torch(self, parts: list[tuple[int, int]], heads: int, widths: tuple[int, int],
                          size: int, splits: int) -> None:
        assert Prompts(parts, heads, *widths, size).error(splits) < 1e-5

    @pytest.mark.parametrize("heads", [64, 96, 128])
    @pytest.mark.parametrize("splits", [1, 3])
    def test_more_heads_than_a_tile_holds(self, heads: int, splits: int) -> None:
        """Of 64 rows, as 16 bits have them. The interpreter cuts numbers off."""
        parts = [(33, 3), (0, 2)]
        assert Prompts(parts, heads, 32, 8, 16, torch.bfloat16).error(splits) < 2e-2
        assert Prompts(parts, heads, 32, 8, 16, torch.float16).error(splits) < 5e-3

    @pytest.mark.parametrize("splits", [1, 3])
    def test_pages_of_8_bits(self, splits: int) -> None:
        case = Prompts([(50, 20), (0, 9)], 6, 32, 8, 16)
        codes, scales = quantise_rows(case.layer)
        assert case.error(splits, codes, scales) < 1e-5
        scale = torch.tensor([0.5])
        assert case.error(splits, (case.layer / scale).to(E4M3), scale) < 1e-5

    def test_one_plan_serves_every_layer(self) -> None:
        case = Prompts([(70, 9), (3, 40)], 4, 32, 8, 16)
        attend = TritonAttention(32).extend(case.rows, 16, 0, case.scale)
        assert isinstance(attend, LatentExtend)
        layers = [case.layer, case.layer * 2, case.layer]
        first, other, again = [attend(case.q, layer)[..., :32].clone() for layer in layers]
        work = attend.work
        assert torch.equal(first, again) and not torch.equal(first, other)
        attend(case.q, case.layer)
        assert attend.work is work

    def test_nothing(self) -> None:
        empty = TritonAttention(32).extend([], 16, 0, 0.3)
        assert empty(torch.empty(0, 4, 40), torch.empty(16, 1, 40)).shape == (0, 4, 40)


CODE = """
import torch
from test_triton_latent_extend import Prompts
for heads, splits in ((128, 2), (16, 1)):
    Prompts([(70, 9)], heads, 512, 64, 16, torch.bfloat16).run(splits)
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert compiled(CODE, tmp_path) == ["_latent_extend", "_merge", "_latent_extend"]
