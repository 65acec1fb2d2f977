"""Chunks of prompts over latents in Triton: against the torch reference in the interpreter, and
compiled for Hopper; on a CUDA device behind a long prefix."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest
import torch
from helpers_attention import FEW, INTERPRETED
from helpers_compile import compiled
from helpers_memory import most_held
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from actorium.gpu.attention.attention_backend import (
    AttentionBackend,
    TorchAttention,
    TritonAttention,
)
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.plan import non_cache_memory
from actorium.gpu.plan.memory_plan import Demand
from actorium.gpu.plan.non_cache_memory import attention_bytes
from actorium.kernels.reference import attention_blocks, paged_attention
from actorium.kernels.reference.kv import quantise_rows
from actorium.kernels.triton.latent_extend import LatentExtend

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn


class Chunk(NamedTuple):
    start: int
    count: int
    pages: Tensor


class Prompts:
    """Chunks (start, count) of sequences. What is nobody's, or lies behind a chunk, is NaN."""

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

    @settings(FEW, max_examples=12)
    @given(parts=st.lists(st.tuples(st.sampled_from([0, 1, 15, 40, 130]), st.integers(1, 8)),
                          min_size=1, max_size=2),
           heads=st.sampled_from([1, 3, 16, 20]),
           widths=st.sampled_from([(14, 4), (64, 16), (40, 24)]),
           size=st.sampled_from([16, 32, 128]), splits=st.sampled_from([0, 1, 2, 5]))
    def test_equals_torch(self, parts: list[tuple[int, int]], heads: int, widths: tuple[int, int],
                          size: int, splits: int) -> None:
        """Chunks that begin behind nothing, in a page and behind one of any size. A tile of fp32
        is 16 rows: several tokens of few heads, or a part of a token of 20; a block is 16 keys."""
        assert Prompts(parts, heads, *widths, size).error(splits) < 1e-5

    def test_widths_of_real_models(self) -> None:
        """Two tiles of rows, two blocks of keys."""
        assert Prompts([(20, 5)], 16, 512, 64, 16).error(2) < 1e-5

    @pytest.mark.slow
    @settings(FEW, max_examples=20)
    @given(parts=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 40)), min_size=1,
                          max_size=3),
           heads=st.integers(1, 20),
           widths=st.sampled_from([(14, 4), (64, 16), (40, 24), (512, 64)]),
           size=st.sampled_from([16, 32, 128]), splits=st.sampled_from([0, 1, 2, 5]))
    def test_equals_torch_in_long_chunks(self, parts: list[tuple[int, int]], heads: int,
                                         widths: tuple[int, int], size: int, splits: int) -> None:
        assert Prompts(parts, heads, *widths, size).error(splits) < 1e-5

    @pytest.mark.parametrize(("heads", "splits"), [
        (64, 1), (96, 3), (128, 1), *(pytest.param(*more, marks=pytest.mark.slow)
                                      for more in ((64, 3), (96, 1), (128, 3)))])
    def test_more_heads_than_a_tile_holds(self, heads: int, splits: int) -> None:
        """Of 64 rows, as 16 bits have them. The interpreter cuts numbers off."""
        parts = [(17, 2), (0, 1)]
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


def check_long_prefix(case: Prompts, bound: float) -> None:
    """Triton's beside the reference in blocks; and what each holds, beside the plan's figure."""
    device, heads = case.q.device, case.q.shape[1]
    model = SimpleNamespace(
        kv_row=(1, case.q.shape[2]), latent=SimpleNamespace(row=case.q.shape[2]), heads=heads,
        dtype="bfloat16", itemsize=2, max_model_len=1 << 20, groups=(), index=None,
        bidirectional=False)
    model.kinds = (model,)
    shape = cast(ModelShape, model)
    demand = Demand(8, chunk=len(case.q))
    found = []
    for name, backend in (("triton", TritonAttention(case.rank)), ("torch", TorchAttention(
            case.rank))):
        def run(backend: AttentionBackend = backend) -> None:
            found.append(backend.extend(case.rows, case.size, 0, case.scale)(case.q, case.layer))

        held = held_on(device, run) - found[-1].nbytes
        assert held <= attention_bytes(shape, demand, "cuda", name == "torch") + (1 << 16)
    one, other = (x[..., :case.rank].double() for x in found)
    assert (one - other).norm() / other.norm() < bound


def held_on(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that torch held at once, at most, beyond those of before."""
    if device.type == "cpu":
        return most_held(run)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class TestLongPrefix:
    pytestmark = INTERPRETED

    @pytest.mark.parametrize("part", [(300, 20), (500, 1)])
    def test_in_small(self, part: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        """What the next one does, without a device."""
        monkeypatch.setattr(paged_attention, "keeps_scores", lambda _: False)
        for module, name in ((attention_blocks, "BYTES"), (non_cache_memory, "BLOCKS")):
            monkeypatch.setattr(module, name, 40_000)
        check_long_prefix(Prompts([part], 4, 32, 8, 16), 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("part", [(65_000, 500), (130_000, 17), (0, 2048)])
def test_behind_a_long_prefix_on_the_device(part: tuple[int, int], heads: int) -> None:
    """DeepSeek-V3's heads; neither way's memory grows with the prefix."""
    check_long_prefix(Prompts([part], heads, 512, 64, 16, torch.bfloat16, torch.device("cuda")),
                      1e-2)
