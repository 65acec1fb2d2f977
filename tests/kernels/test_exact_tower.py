"""What a vision tower takes of C: against torch's, and a patch's bits in any company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers_builds import EACH_BUILD, built
from helpers_exact import by_rows
from torch import Tensor

from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.cpu.tower_native import NativeTowerOps
from actorium.kernels.linear import Linear
from actorium.kernels.tower_ops import ERF, TANH, TowerOps, Weight

pytestmark = pytest.mark.usefixtures("all_threads")
CPU = torch.device("cpu")
LENGTHS = [64, 1, 130, 33, 300, 64, 12]
"""Patches of the segments of a call."""


@pytest.fixture(params=EACH_BUILD)
def tower(request: pytest.FixtureRequest) -> NativeTowerOps:
    own = NativeOps(built(request.param), torch.get_num_threads()).tower
    if not isinstance(own, NativeTowerOps):
        pytest.skip("this processor has no AVX2")
    return own


def normal(gen: torch.Generator, *size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(size, generator=gen).mul_(scale)


def floats(weight: Weight) -> Weight:
    return Weight(weight.rows.float(), None if weight.bias is None else weight.bias.float())


class Block:
    """A block's attention, in C and in torch, and what goes in."""

    def __init__(self, tower: TowerOps, heads: int, dim: int) -> None:
        gen = torch.Generator().manual_seed(dim)
        hidden, patches = 96, sum(LENGTHS)
        self.qkv = Weight(normal(gen, 3 * heads * dim, hidden, scale=0.1).bfloat16(),
                          normal(gen, 3 * heads * dim).bfloat16())
        self.out = Weight(normal(gen, hidden, heads * dim, scale=0.1).bfloat16(),
                          normal(gen, hidden).bfloat16())
        self.x, self.residual = normal(gen, 2, patches, hidden).bfloat16()
        angles = normal(gen, patches, dim // 2, scale=3.0)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.attention = tower.attention(heads, self.qkv, self.out)
        self.tower, self.heads = tower, heads

    def run(self, lengths: list[int], at: int = 0) -> Tensor:
        """Of segments of these lengths, the first of which begins at `at`."""
        own = slice(at, at + sum(lengths))
        turns = self.tower.turns(self.cos[own], self.sin[own])
        return self.attention(self.x[own], self.residual[own], turns,
                              self.tower.segments(lengths, CPU))


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 16), (2, 72), (1, 80), (2, 128), (1, 96)])
def test_attention_within_segments(tower: NativeTowerOps, heads: int, dim: int) -> None:
    block, plain = Block(tower, heads, dim), TowerOps()
    together, at = block.run(LENGTHS), 0
    reference = plain.attention(heads, floats(block.qkv), floats(block.out))
    want = reference(block.x.float(), block.residual.float(), plain.turns(block.cos, block.sin),
                     plain.segments(LENGTHS, CPU))
    assert (together.float() - want).abs().mean() < 0.01 * want.std()
    for length in LENGTHS:
        assert torch.equal(block.run([length], at), together[at:at + length]), length
        at += length
    assert torch.equal(block.run(LENGTHS[2:5], 65), together[65:65 + sum(LENGTHS[2:5])])
    assert not tower.inexact
    fewer = NativeOps(tower.lib, 1).tower
    assert torch.equal(Block(fewer, heads, dim).run(LENGTHS), together), "by one thread"


def test_a_patch_sees_all_of_its_segment(tower: NativeTowerOps) -> None:
    """And nothing of others: a number changed in one changes all of its own rows, and no other's.
    """
    block = Block(tower, 2, 64)
    before = block.run(LENGTHS)
    block.x[65 + 129] += 4
    changed = (block.run(LENGTHS) != before).any(1)
    assert changed[65:65 + 130].all() and not changed[:65].any() and not changed[195:].any()


@pytest.mark.parametrize("kind", [ERF, TANH])
def test_gelu_of_every_number(tower: NativeTowerOps, kind: str) -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    want = F.gelu(numbers.double(), approximate=kind).bfloat16()
    torch.testing.assert_close(tower.gelu(numbers, kind), want, rtol=0, atol=0, equal_nan=True)
    by_rows(lambda x: tower.gelu(x, kind), torch.randn(513, 77).bfloat16(), (2, 513))


@pytest.mark.parametrize("width", [96, 1152, 1280, 4608])
def test_norms_and_gates(tower: NativeTowerOps, width: int) -> None:
    x, weight = torch.randn(130, width).bfloat16(), torch.rand(width).bfloat16()
    bias = torch.randn(width).bfloat16()
    by_rows(lambda x: tower.layer_norm(x, weight, bias, 1e-6), x, (2, 33, 130))
    by_rows(lambda x: tower.rms_norm(x, weight, 1e-6), x, (2, 33, 130))
    parts = [Weight(torch.randn(100, width).mul_(width**-0.5).bfloat16(),
                    torch.randn(100).bfloat16()) for _ in range(2)]
    gated = tower.gated(*parts)
    by_rows(gated, x, (2, 33, 130))
    want = TowerOps().gated(*map(floats, parts))(x.float())
    assert not tower.inexact and (gated(x) - want).abs().max() < 0.02 * want.abs().max()


def test_torchs_tower_says_that_it_is_not_exact() -> None:
    plain = TowerOps()
    assert plain.inexact and type(plain.linear(Weight(torch.ones(2, 2), None))) is Linear
