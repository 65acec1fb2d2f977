"""Attention over latents, products of heads and routers in f32, in C: against torch's, and a
token's bits whatever it is computed together with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers_builds import EACH_BUILD, built
from helpers_exact import by_rows
from torch import Tensor

from actorium.gpu.attention.attention_backend import NativeAttention, TorchAttention
from actorium.kernels.cpu.latent_native import split_floats
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.reference.experts import ExpertChoice as Of
from actorium.kernels.reference.experts import choose as reference_choose
from actorium.kernels.reference.kv import quantise_rows
from actorium.kernels.reference.latent import HeadProducts

pytestmark = pytest.mark.usefixtures("all_threads")
PAGE = 16
SHAPES = [(16, 576, 0, 300), (4, 40, 0, 270), (3, 64, 50, 140), (33, 100, 0, 150)]
"""Heads, numbers of a row, window, tokens."""


@pytest.fixture(params=EACH_BUILD)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(built(request.param), torch.get_num_threads())


class Latents:
    """A layer's pages with one sequence, NaN where it has none, and queries of all its tokens."""

    def __init__(self, heads: int, row: int, window: int, length: int, dtype: torch.dtype) -> None:
        gen = torch.Generator().manual_seed(heads * row + length)
        width = -(-length // PAGE)
        self.window = window
        self.table = (1 + torch.randperm(width, generator=gen)).int()
        tokens = (self.table.long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        rows = torch.randn(length, 1, row, generator=gen)
        shape = ((width + 1) * PAGE, 1, row)
        self.scales: Tensor | None = None
        if dtype is torch.int8:
            self.layer = torch.full(shape, 77, dtype=torch.int8)
            self.scales = torch.full(shape[:2], torch.nan, dtype=torch.bfloat16)
            self.layer[tokens], self.scales[tokens] = quantise_rows(rows)
        else:
            self.layer = torch.full(shape, torch.nan).to(dtype)
            self.layer[tokens] = rows.to(dtype)
        if dtype.itemsize == 1 and self.scales is None:
            self.scales = torch.tensor([0.75])
        # Some scores lie far above those before them, so that the maximum moves more than once.
        self.q = torch.randn(length, heads, row, generator=gen).mul_(1.5).bfloat16()

    def extended(self, own: NativeAttention | TorchAttention, sizes: list[int]) -> Tensor:
        parts, at = [], 0
        for size in sizes:
            row = SimpleNamespace(start=at, count=size, pages=self.table)
            attend = own.extend([row], PAGE, self.window, 0.2)
            parts.append(attend(self.q[at:at + size].contiguous(), self.layer, None, self.scales))
            at += size
        return torch.cat(parts)

    def decoded(self, own: NativeAttention, ends: list[int], q_len: int) -> Tensor:
        """Several lengths of the sequence as so many sequences of a step, which know of pages
        behind them that are nobody's."""
        lens = torch.tensor(ends, dtype=torch.int32)
        tables = torch.nn.functional.pad(self.table, (0, 2)).repeat(len(ends), 1)
        q = torch.cat([self.q[end - q_len:end] for end in ends])
        attend = own.decode(tables, lens, max(ends), q_len, PAGE, self.window, 0.2)
        return attend(q, self.layer, None, self.scales).view(len(ends), q_len, *q.shape[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn],
                         ids=["bf16", "int8", "fp8"])
@pytest.mark.parametrize(("heads", "row", "window", "length"), SHAPES)
def test_attention(ops: NativeOps, heads: int, row: int, window: int, length: int,
                   dtype: torch.dtype) -> None:
    """Chunks of any size, decodes alone and together, and windows of drafts."""
    own = NativeAttention(ops.lib, ops.threads, latent_rank=row - 8)
    assert own.exact
    case = Latents(heads, row, window, length, dtype)
    whole = case.extended(own, [length])
    want = case.extended(TorchAttention(row - 8), [length])
    assert (whole - want).abs().max() < 0.03 * want.abs().max()
    for size in (7, 64, 130):
        sizes = [size] * (length // size) + [length % size]
        assert torch.equal(case.extended(own, [n for n in sizes if n]), whole), size
    ends = [5, 31, 32, 33, 64, 127, 128, 129, length - 1, length]
    for q_len in (1, 2, 5):
        together = case.decoded(own, ends, q_len)
        for end, got in zip(ends, together, strict=True):
            assert torch.equal(got, whole[end - q_len:end]), (end, q_len)
    for end in ends:
        assert torch.equal(case.decoded(own, [end], 1)[0, 0], whole[end - 1]), end


def test_a_row_shorter_than_its_window_of_drafts(ops: NativeOps) -> None:
    """Padding: what comes out is of no use, but nothing in front of a table is read."""
    own, case = NativeAttention(ops.lib, ops.threads, latent_rank=56), Latents(
        2, 64, 0, 20, torch.bfloat16)
    lens = torch.tensor([1, 20], dtype=torch.int32)
    attend = own.decode(case.table.repeat(2, 1), lens, 20, 3, PAGE, 0, 0.2)
    got = attend(torch.cat((case.q[:3], case.q[17:])), case.layer)
    assert torch.equal(got[3:], case.extended(own, [20])[17:]) and bool(got.isfinite().all())


@pytest.mark.parametrize(("heads", "columns", "outs"), [(16, 128, 512), (3, 16, 32), (5, 40, 72)])
def test_products_of_heads(ops: NativeOps, heads: int, columns: int, outs: int) -> None:
    weight = torch.randn(heads, columns, outs).mul_(columns ** -0.5).bfloat16()
    own, x = ops.head_products(weight), torch.randn(150, heads, columns).bfloat16()
    torch.testing.assert_close(own(x).float(), HeadProducts(weight.double())(x.double()).float(),
                               atol=2e-2, rtol=1e-2)
    by_rows(own, x, (2, 31, 32, 33, 97))
    by_rows(lambda x: own(x[..., :columns]), torch.randn(70, heads, columns + 7).bfloat16(),
            (5, 33))
    assert not ops.inexact
    assert own(x[:0]).shape == (0, heads, outs)


@pytest.mark.parametrize(("columns", "number"), [
    pytest.param(7168, 256, marks=pytest.mark.slow), (1100, 256), (64, 8), (100, 20)])
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "f32"])
def test_the_choice_of_experts(ops: NativeOps, columns: int, number: int, wide: bool) -> None:
    router = torch.randn(number, columns).mul_(columns ** -0.5)
    router = router if wide else router.bfloat16().float()
    x, own = torch.randn(133, columns).bfloat16(), ops.float_linear(router)
    assert not ops.inexact
    want = x.double() @ router.double().t()
    assert own.wide(x).dtype is torch.float32
    assert (own.wide(x) - want).abs().max() < 3e-5
    by_rows(own.wide, x, (2, 17, 32, 33, 133))
    bias = torch.randn(number).mul_(0.2)
    for chosen in (2, 3, 6, 8):
        choice = Of(min(chosen, number // 2), True, 4, 2)

        def choose(x: Tensor, choice: Of = choice) -> Tensor:
            return torch.cat(ops.choose_experts(own.wide(x), bias, choice, torch.bfloat16), 1)

        by_rows(choose, x, (2, 33, 133))


@pytest.mark.parametrize("choice", [
    Of(3, True, softmax=True, added=0.0), Of(4, softmax=True), Of(6, True),
    Of(5, True, 8, 3, 2, factor=2.5), Of(2, True, 4, 1, 1, softmax=True, least=0.9),
    Of(1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_experts_as_by_torch(ops: NativeOps, choice: Of, dtype: torch.dtype) -> None:
    """Where no two are alike; of equal ones the first is chosen, of such as are no numbers the
    last."""
    bias = torch.randn(64).mul_(0.2) if not choice.softmax else None
    scores = torch.stack([torch.randperm(64) for _ in range(40)]).float() / 9 - 3
    logits = scores.to(dtype)[:, :64]
    weights, experts = ops.choose_experts(logits, bias, choice, torch.bfloat16)
    want, those = reference_choose(logits.double(), bias, choice)
    assert torch.equal(experts, those)
    torch.testing.assert_close(weights.double(), want, rtol=2 ** -8, atol=0)
    alike = torch.zeros(1, 64)
    alike[0, ::2] = torch.nan
    _, experts = ops.choose_experts(alike, None, Of(40), torch.bfloat16)
    assert experts.unique().numel() == 40 and experts.max() < 64


def test_a_weight_in_f32_is_the_sum_of_its_parts() -> None:
    weight = torch.randn(50, 64) * 10.0 ** torch.randint(-12, 12, (50, 64)).float()
    weight[3] = 0
    parts = split_floats(weight)
    assert len(parts) == 3
    assert torch.equal(sum(part.double() for part in parts), weight.double())
    assert len(split_floats(weight.bfloat16().float())) == 1
