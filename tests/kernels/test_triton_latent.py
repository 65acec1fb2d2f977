"""Decode over latents in Triton: against the torch reference in the interpreter, compiled for
Hopper, and on a CUDA device."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers_attention import FEW, INTERPRETED
from helpers_compile import compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from actorium.gpu.attention.attention_backend import TorchAttention, TritonAttention
from actorium.gpu.plan.graph_memory import parts_estimate
from actorium.kernels.triton.device_limits import HOPPER
from actorium.kernels.triton.latent import LatentDecode, config, room_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FEW = settings(FEW, max_examples=10)


class Case:
    """Sequences whose last tokens attend. What is nobody's, and what lies beyond a length, is
    NaN."""

    def __init__(self, lens: list[int], q_len: int, heads: int, rank: int, rope: int, size: int,
                 dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> None:
        gen = torch.Generator().manual_seed(sum(lens) + rank)
        self.q_len, self.rank, self.size, self.span = q_len, rank, size, max(lens)
        self.scale = (rank + rope)**-0.5
        widths = [-(-n // size) for n in lens]
        dealt = (torch.randperm(sum(widths) + 1, generator=gen) + 1).to(torch.int32)
        layer = torch.full(((sum(widths) + 2) * size, 1, rank + rope), math.nan, dtype=dtype)
        pages = torch.full((len(lens), max(widths) + 1), int(dealt[-1]), dtype=torch.int32)
        for i, (n, own) in enumerate(zip(lens, dealt[:-1].split(widths), strict=True)):
            pages[i, :len(own)] = own
            place = torch.arange(n)
            layer[own.long()[place // size] * size + place % size] = torch.randn(
                n, 1, rank + rope, generator=gen).to(dtype)
        self.pages, self.layer = pages.to(device), layer.to(device)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        wide = torch.randn(len(lens) * q_len, heads, rank + rope + 3, generator=gen)
        self.q = wide.to(device, dtype)[..., :rank + rope]

    def run(self, splits: int = 0) -> Tensor:
        attend = LatentDecode(self.pages, self.lens, self.span, self.q_len, self.size, self.scale,
                              self.rank, splits)
        out = torch.full(self.q.shape, math.nan, dtype=self.q.dtype, device=self.q.device)
        assert attend(self.q, self.layer, out) is out
        return out[..., :self.rank]

    def wanted(self) -> Tensor:
        """f64, by the reference."""
        attend = TorchAttention(32).decode(self.pages, self.lens, self.span, self.q_len, self.size,
                                           0, self.scale)
        return attend(self.q.double(), self.layer.double())[..., :self.rank]

    def error(self, splits: int = 0) -> float:
        want = self.wanted()
        return float((self.run(splits).double() - want).norm() / want.norm())


class TestInterpreted:
    pytestmark = INTERPRETED

    @FEW
    @given(before=st.lists(st.integers(0, 150), min_size=1, max_size=3), q_len=st.integers(1, 5),
           heads=st.integers(1, 20),
           widths=st.sampled_from([(14, 4), (64, 16), (40, 24), (512, 64)]),
           size=st.sampled_from([16, 32, 128]), splits=st.sampled_from([0, 1, 2, 5]))
    def test_equals_torch(self, before: list[int], q_len: int, heads: int, widths: tuple[int, int],
                          size: int, splits: int) -> None:
        case = Case([n + q_len for n in before], q_len, heads, *widths, size)
        assert case.error(splits) < 1e-5

    @pytest.mark.parametrize("splits", [1, 3])
    def test_in_bf16(self, splits: int) -> None:
        """The interpreter cuts numbers off where they should be rounded."""
        assert Case([90, 7], 2, 6, 64, 16, 16, torch.bfloat16).error(splits) < 2e-2

    @pytest.mark.parametrize("splits", [1, 4])
    def test_a_row_beside_drafts_without_a_page(self, splits: int) -> None:
        """What a row does not see may lie where another sequence, or none, has its own."""
        case = Case([45, 70], 5, 4, 32, 8, 16)
        before = case.run(splits).view(2, 5, 4, 32)
        for i, n in enumerate((45, 70)):
            at = torch.arange(n - 3, n)
            case.layer[case.pages[i].long()[at // 16] * 16 + at % 16] = math.nan
        after = case.run(splits).view(2, 5, 4, 32)
        assert torch.equal(after[:, :2], before[:, :2])
        assert after[:, 2:].isnan().flatten(2).any(2).all()

    def test_one_list_serves_every_layer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And where there are as many sequences as programs, nothing is split or merged."""
        from triton.runtime.interpreter import InterpretedFunction

        run, names = InterpretedFunction.run, []

        def named(kernel: InterpretedFunction, *args: object, **options: object) -> object:
            names.append(kernel.fn.__name__)
            return run(kernel, *args, **options)

        monkeypatch.setattr(InterpretedFunction, "run", named)
        few = Case([1500, 40], 1, 4, 32, 8, 16)
        attend = TritonAttention(32).decode(few.pages, few.lens, few.span, 1, 16, 0, few.scale)
        layers = [few.layer, few.layer * 2, few.layer]
        first, other, again = [attend(few.q, layer)[..., :32].clone() for layer in layers]
        assert names == ["_list"] + ["_latent", "_merge_latent"] * 3
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert torch.allclose(first, few.wanted().float(), rtol=1e-4, atol=1e-5)
        names.clear()
        many = Case([1500] + [9] * 15, 1, 4, 32, 8, 16)
        assert many.error() < 1e-5 and names == ["_list", "_latent"]

    def test_nothing_and_lengths_beyond_the_first(self) -> None:
        ops = TritonAttention(32)
        assert ops.graphs and not TorchAttention(32).graphs
        case = Case([40], 1, 4, 32, 8, 16)
        empty = ops.decode(case.pages[:0], case.lens[:0], 1, 1, 16, 0, 0.3)(case.q[:0], case.layer)
        assert empty.shape == (0, 4, 40)
        # A graph's grid is made for the longest: lengths are read when it runs.
        attend = ops.decode(case.pages, case.lens, 4096, 1, 16, 0, case.scale)
        case.lens.fill_(33)
        got = attend(case.q, case.layer)[..., :32]
        assert torch.allclose(got, case.wanted().float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("sequences", "q_len"), [(1, 1), (16, 4), (64, 1), (700, 1)])
def test_the_memory_plan_has_room_for_all_parts(
    heads: int, sequences: int, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("latent", "work"):
        monkeypatch.setattr(f"actorium.kernels.triton.{module}.device_limits",
                            lambda _: HOPPER._replace(processors=160))
    shape = config(q_len * heads, q_len > 1, 2)
    room = room_for(sequences, 10**6, q_len * heads, 512, shape, CPU)
    if room.items > sequences:
        rows = -(-q_len * heads // shape.rows) * min(q_len * heads, shape.rows)
        planned = parts_estimate(cast(Any, SimpleNamespace(latent=SimpleNamespace(rank=512))), 1)
        assert room.items * rows * 513 * 4 <= planned
    assert (room.items > sequences) == (sequences < 700), "few are split"


CODE = """
import torch
from test_triton_latent import Case
for q_len, heads, splits in ((1, 128, 2), (1, 16, 1), (3, 16, 2)):
    Case([70], q_len, heads, 512, 64, 16, torch.bfloat16).run(splits)
"""


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert compiled(CODE, tmp_path) == [
        "_list", "_latent", "_merge_latent", "_list", "_latent", "_list", "_latent",
        "_merge_latent"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("q_len", "heads"), [(1, 16), (1, 128), (3, 16)])
@pytest.mark.parametrize("splits", [0, 1, 7])
def test_on_the_device(q_len: int, heads: int, splits: int) -> None:
    case = Case([1000, 4096, 5, 77], q_len, heads, 512, 64, 16, torch.bfloat16, CUDA)
    assert case.error(splits) < 1e-2
    assert torch.equal(case.run(splits), case.run(splits))
