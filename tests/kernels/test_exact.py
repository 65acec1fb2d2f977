"""A token's bits do not depend on what it is computed together with: kernel by kernel, on a CPU."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from helpers_builds import EACH_BUILD, built
from helpers_exact import by_rows
from helpers_pairs import pairs
from torch import Tensor

from actorium.gpu.attention.attention_backend import NativeAttention
from actorium.kernels.cpu.delta_native import NativeDelta, plan_runs
from actorium.kernels.cpu.mamba_native import NativeMamba
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.grouped_rows import RowFormat, pack_rows, quantise_grouped
from actorium.kernels.inputs import InputForm, plain
from actorium.kernels.ragged import ExtendRun
from actorium.kernels.reference.delta_rule import Heads
from actorium.kernels.reference.experts import route
from actorium.kernels.reference.logprobs import log_sum_exp, logprobs
from actorium.kernels.reference.ssd import SSDSizes
from actorium.kernels.scaled_linear import (
    FP8,
    dequantise,
    dequantise_rows,
    groups,
    pack,
    quantise,
)

pytestmark = pytest.mark.usefixtures("all_threads")
PAGE = 16


@pytest.fixture(params=EACH_BUILD)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(built(request.param), torch.get_num_threads())


@pytest.mark.parametrize(("columns", "outs"), [(64, 96), (576, 160), (2048, 64)])
def test_products(ops: NativeOps, columns: int, outs: int) -> None:
    weight = torch.randn(2 * outs, columns).mul_(columns**-0.5).bfloat16()
    x, linear = torch.randn(513, columns).bfloat16(), ops.linear(weight)
    by_rows(linear, x)
    by_rows(linear.wide, x)
    by_rows(ops.gated(weight, None, "silu"), x)
    by_rows(ops.gated(weight, None, "gelu"), x)
    by_rows(ops.clamped_gated(linear, 1.702, 7.0), x)
    assert not ops.inexact


@pytest.mark.parametrize(("columns", "outs"), [(1, 5), (40, 96), (100, 70), (1111, 64)])
def test_products_of_rows_that_are_no_whole_tiles(ops: NativeOps, columns: int, outs: int) -> None:
    exact = NativeOps(ops.lib, ops.threads, exact=True)
    weight = torch.randn(2 * outs, columns).mul_(columns**-0.5).bfloat16()
    bias = torch.randn(2 * outs).bfloat16()
    x, linear = torch.randn(513, columns).bfloat16(), exact.linear(weight, bias)
    torch.testing.assert_close(linear.wide(x), x.float() @ weight.float().t() + bias.float(),
                               atol=2e-3, rtol=1e-3)
    by_rows(linear, x)
    by_rows(linear.wide, x)
    residual = torch.randn(513, 2 * outs).bfloat16()
    by_rows(lambda both: linear.add(both[:, :columns].contiguous(), both[:, columns:]),
            torch.cat((x, residual), 1))
    by_rows(exact.gated(weight, None, "silu"), x)
    assert not exact.inexact


@pytest.mark.parametrize("vocab", [199, 1024, 49_152, 151_936])
def test_log_probabilities(vocab: int) -> None:
    """Of a vocabulary whose sums one row shares out among threads. The sums are near 1, so that
    their logarithms, near 0, show every bit of them."""
    logits, tokens = torch.randn(33, vocab) * 0.5 - 0.125 - math.log(vocab), torch.arange(33)
    found = log_sum_exp(logits)
    torch.testing.assert_close(found, logits.logsumexp(-1, keepdim=True))
    by_rows(log_sum_exp, logits, (2, 8, 33))
    by_rows(lambda x: logprobs(x, tokens[:len(x)] * 0, 3).top, logits, (2, 33))


def test_log_probabilities_of_nothing_and_of_one_token() -> None:
    logits = torch.full((3, 2000), -torch.inf)
    logits[1, 7], logits[2, :] = 2.0, torch.nan
    assert torch.equal(log_sum_exp(logits)[:2, 0], logits.logsumexp(-1)[:2])
    assert log_sum_exp(logits)[2].isnan()


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_codes(ops: NativeOps, bits: int) -> None:
    weight = torch.randn(192, 256).mul_(0.06)
    rows = pack_rows(quantise_grouped(weight, RowFormat(bits, 32, False, 1 << bits - 1)))
    x = torch.randn(513, 256).bfloat16()
    by_rows(ops.linear(rows), x)
    by_rows(ops.gated(rows, None, "silu"), x)


@pytest.mark.parametrize(("scales", "columns", "outs"), pairs(
    ["tensor", "row", "block", "columns"], [(256, 128), (200, 96)]))
def test_products_in_fp8(columns: int, outs: int, scales: str) -> None:
    """Of every layout of scales, tokens scaled one by one; by torch in every build."""
    ops = NativeOps(built("this"), torch.get_num_threads())
    weight = torch.randn(2 * outs, columns).mul_(100).to(FP8)
    shape = {"tensor": (1, 1), "row": (2 * outs, 1), "columns": (2 * outs, groups(columns)),
             "block": (-(-outs // 64), groups(columns))}[scales]
    own = torch.rand(shape).add_(0.1).mul_(1e-3)
    if scales == "block":
        own = own.repeat_interleave(128, 0)[:2 * outs]
    rows, bias = pack(weight, own), torch.randn(2 * outs).bfloat16()
    x, linear = torch.randn(66, columns).bfloat16(), ops.linear(rows, bias)
    q, by = quantise(x, columns if scales in ("tensor", "row") else 128)
    want = (dequantise(q, by, torch.float64) @ dequantise_rows(rows, torch.float64).t()) + bias
    assert (linear.wide(x) - want).abs().max() < 1e-4 * want.abs().max()
    by_rows(linear, x, (2, 17, 66))
    by_rows(linear.wide, x, (2, 17, 66))
    residual = torch.randn(66, 2 * outs).bfloat16()
    by_rows(lambda both: linear.add(both[:, :columns].contiguous(), both[:, columns:]),
            torch.cat((x, residual), 1), (2, 33))
    gated = ops.gated(pack(weight, own), None, "silu")
    by_rows(lambda x: plain(gated(x)), x, (2, 66))
    made = InputForm(128, plain=False)
    for part in (lambda x: gated.gate_quant(x, made).q.view(torch.uint8),
                 lambda x: gated.gate_quant(x, made).scales):
        by_rows(part, linear(x), (2, 66))
    assert not ops.inexact


@pytest.mark.parametrize("columns", [16384 + 96, 40_000])
def test_products_of_long_rows(ops: NativeOps, columns: int) -> None:
    weight = torch.randn(64, columns).mul_(columns**-0.5).bfloat16()
    x, bias = torch.randn(65, columns).bfloat16(), torch.randn(64).bfloat16()
    linear, residual = ops.linear(weight, bias), torch.randn(65, 64).bfloat16()
    want = x.double() @ weight.double().t() + bias.double()
    assert (linear.wide(x) - want).abs().max() < 3e-5
    assert (linear(x) - want).abs().max() < 0.02
    assert (linear.add(x, residual) - want - residual).abs().max() < 0.04
    by_rows(linear, x, (2, 33, 65))
    by_rows(linear.wide, x, (2, 33, 65))
    by_rows(lambda both: linear.add(both[:, :columns].contiguous(), both[:, columns:]),
            torch.cat((x, residual), 1), (2, 33))
    assert not ops.inexact


def test_a_product_that_is_not_exact_is_known(ops: NativeOps) -> None:
    ops.linear(torch.randn(64, 100).bfloat16())
    assert ops.inexact == {"64x100"}


def test_norms_gates_experts_and_softmax(ops: NativeOps) -> None:
    x, weight = torch.randn(513, 256).bfloat16(), torch.rand(256).bfloat16()
    by_rows(lambda x: ops.rms_norm(x, weight, 1e-6), x)
    by_rows(ops.silu_mul, x)
    by_rows(ops.gelu_mul, x)
    by_rows(lambda x: route(x, 8, True)[0], x)
    by_rows(lambda x: x.float().log_softmax(-1), x)


def test_a_rows_experts_are_weighted_as_alone(ops: NativeOps) -> None:
    """Many numbers: torch's product rounds one of 650,000 otherwise among a hundred rows."""
    x = torch.randn((513, 8 * 1000), generator=torch.Generator().manual_seed(1)).bfloat16()

    def run(x: Tensor) -> Tensor:
        return ops.combine(x[:, :8].contiguous(), x.view(-1, 1000))

    by_rows(run, x)
    want = (x[:, :8].double().unsqueeze(2) * x.double().view(-1, 8, 1000)).sum(1)
    torch.testing.assert_close(run(x).double(), want, rtol=2 ** -8, atol=1e-4)


class Pages:
    """A layer's pages with one sequence, and queries of all its tokens."""

    def __init__(self, heads: int, kv_heads: int, dim: int, length: int, kind: str,
                 sunk: bool = False, sloped: bool = False) -> None:
        """sunk: heads have sinks, and scores are capped; sloped: these fall with distance."""
        gen = torch.Generator().manual_seed(heads * dim + length)
        width = -(-length // PAGE)
        shape = ((width + 1) * PAGE, 2 * kv_heads, dim)
        self.layer = torch.randn(shape, generator=gen).bfloat16()
        self.scales: Tensor | None = None
        if kind == "fp8":
            self.layer = self.layer.to(torch.float8_e4m3fn)
            self.scales = torch.rand(2 * kv_heads, generator=gen).add_(0.5)
        if kind == "int8":
            self.layer = torch.randint(-127, 128, shape, generator=gen, dtype=torch.int8)
            self.scales = torch.rand(shape[:2], generator=gen).mul_(0.02).bfloat16()
        self.table = (1 + torch.randperm(width, generator=gen)).int()
        # Some scores lie far above those before them, so that the maximum moves more than once.
        self.q = torch.randn(length, heads, dim, generator=gen).mul_(3).bfloat16()
        self.cap = 12.0 if sunk else 0.0
        self.sinks = torch.linspace(-20, 20, heads) if sunk else None
        self.slopes = 2.0 ** -torch.linspace(0.5, 8, heads) if sloped else None

    def extended(self, own: NativeAttention, window: int, sizes: list[int]) -> Tensor:
        parts, at = [], 0
        for size in sizes:
            row = SimpleNamespace(start=at, count=size, pages=self.table)
            attend = own.extend([row], PAGE, window, 0.2, self.cap, self.slopes)
            parts.append(attend(self.q[at:at + size].contiguous(), self.layer, None, self.scales,
                                self.sinks))
            at += size
        return torch.cat(parts)

    def decoded(self, own: NativeAttention, window: int, ends: list[int], q_len: int) -> Tensor:
        """Several lengths of the sequence as so many sequences of a step."""
        lens = torch.tensor(ends, dtype=torch.int32)
        q = torch.cat([self.q[end - q_len:end] for end in ends])
        attend = own.decode(self.table.expand(len(ends), -1).contiguous(), lens, max(ends), q_len,
                            PAGE, window, 0.2, self.cap, self.slopes)
        return attend(q, self.layer, None, self.scales, self.sinks).view(
            len(ends), q_len, *q.shape[1:])


@pytest.mark.parametrize("pages", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "length", "window"), [
    (4, 2, 64, 290, 0), (3, 3, 32, 140, 50), (8, 1, 128, 270, 0), (4, 2, 256, 140, 0),
    (7, 1, 96, 300, 129)])
def test_attention(ops: NativeOps, heads: int, kv_heads: int, dim: int, length: int, window: int,
                   pages: str) -> None:
    """Chunks of any size, decodes alone and together, and windows of drafts."""
    check_attention(ops, Pages(heads, kv_heads, dim, length, pages), length, window)


@pytest.mark.parametrize("pages", ["bf16", "int8"])
def test_attention_with_sinks_and_capped_scores(ops: NativeOps, pages: str) -> None:
    check_attention(ops, Pages(6, 2, 64, 290, pages, True), 290, 0)
    check_attention(ops, Pages(3, 3, 32, 140, pages, True), 140, 50)


@pytest.mark.parametrize("pages", ["bf16", "int8"])
def test_attention_with_scores_that_fall_with_distance(ops: NativeOps, pages: str) -> None:
    check_attention(ops, Pages(6, 2, 64, 290, pages, sloped=True), 290, 0)
    check_attention(ops, Pages(3, 3, 32, 140, pages, sloped=True), 140, 50)


def check_attention(ops: NativeOps, case: Pages, length: int, window: int) -> None:
    own = NativeAttention(ops.lib, ops.threads, exact=True)
    whole = case.extended(own, window, [length])
    for size in (7, 64, 130):
        sizes = [size] * (length // size) + [length % size]
        assert torch.equal(case.extended(own, window, [n for n in sizes if n]), whole), size
    ends = [5, 31, 32, 33, 64, 127, 128, 129, length - 1, length]
    together = case.decoded(own, window, ends, 1)
    for end, got in zip(ends, together, strict=True):
        assert torch.equal(got[0], whole[end - 1]), end
        assert torch.equal(case.decoded(own, window, [end], 1)[0], got), end
    for q_len in (2, 3, 5):
        for end, got in zip(ends, case.decoded(own, window, ends, q_len), strict=True):
            assert torch.equal(got, whole[end - q_len:end]), (end, q_len)


@pytest.mark.parametrize("heads", [Heads(2, 4, 32, 24), Heads(1, 3, 20, 11)])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_prompts_through_delta_layers(ops: NativeOps, heads: Heads, state_dtype: torch.dtype
                                      ) -> None:
    """They are as many steps; states and columns that are kept on the way, too."""
    gen, values, value_dim, key_dim = (torch.Generator().manual_seed(0), heads.values,
                                       heads.value_dim, heads.key_dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen)

    runs = [ExtendRun(3, 40, ((16, 10), (32, 11), (40, 12))), ExtendRun(1, 2, ((1, 13),)),
            ExtendRun(2, 33)]
    tokens = sum(run.length for run in runs)
    p = normal(tokens, heads.channels + values * (value_dim + 2)).bfloat16()
    columns = normal(20, 3, heads.channels).bfloat16()
    states = normal(20, values, value_dim, key_dim).to(state_dtype)
    layer = NativeDelta(ops.lib, ops.threads, heads, normal(4, heads.channels),
                        normal(values).square(), normal(values), normal(value_dim), 1e-6,
                        exact=True)
    own = columns.clone(), states.clone()
    got, at = layer.extend(p, *own, plan_runs(runs)), 0
    for run in runs:
        row, saves = torch.tensor([run.row]), dict(run.saves)
        for t in range(run.length):
            want = layer.step(p[at + t:at + t + 1], columns, states, row)
            assert torch.equal(got[at + t:at + t + 1], want)
            if (to := saves.get(t + 1)) is not None:
                columns[to], states[to] = columns[run.row], states[run.row]
        at += run.length
    assert torch.equal(own[0], columns)
    assert torch.equal(own[1], states)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [SSDSizes(4, 2, 16, 24), SSDSizes(6, 1, 7, 32)])
def test_prompts_through_mamba_layers(ops: NativeOps, sizes: SSDSizes,
                                      state_dtype: torch.dtype) -> None:
    """They are as many steps; states and columns that are kept on the way, too; and steps are the
    same alone and together, beside rows that fill up a batch."""
    gen = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen)

    runs = [ExtendRun(3, 40, ((16, 10), (32, 11), (40, 12))), ExtendRun(1, 2, ((1, 13),)),
            ExtendRun(2, 33)]
    heads, tokens = sizes.heads, sum(run.length for run in runs)
    x = normal(tokens, sizes.channels + heads).bfloat16()
    columns = normal(20, 3, sizes.channels).bfloat16()
    states = normal(20, heads, sizes.head_dim, sizes.state_dim).to(state_dtype)
    layer = NativeMamba(ops.lib, ops.threads, sizes, normal(4, sizes.channels), None,
                        (-normal(heads).exp(), normal(heads), normal(heads)), (0.0, math.inf),
                        normal(sizes.inner), 1e-6)
    own = columns.clone(), states.clone()
    got, at = layer.extend(x, *own, plan_runs(runs)), 0
    for run in runs:
        row, saves = torch.tensor([run.row]), dict(run.saves)
        for t in range(run.length):
            want = layer.step(x[at + t:at + t + 1], columns, states, row)
            assert torch.equal(got[at + t:at + t + 1], want)
            if (to := saves.get(t + 1)) is not None:
                columns[to], states[to] = columns[run.row], states[run.row]
        at += run.length
    assert torch.equal(own[0], columns)
    assert torch.equal(own[1], states)
    rows = torch.tensor([4, -1, 6, 7, -1, 9])
    together = layer.step(x[:6], own[0], own[1], rows)
    alone = [layer.step(x[i:i + 1], columns, states, rows[i:i + 1]) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(own[1], states)
    gate = normal(tokens, sizes.inner + 3).bfloat16()
    by_rows(lambda both: layer.gate(both[:, :sizes.inner].view(-1, heads, sizes.head_dim)
                                    .contiguous(), both[:, sizes.inner:].bfloat16()),
            torch.cat((got.flatten(1), gate[:, 3:].float()), 1), (2, 5, 75))
