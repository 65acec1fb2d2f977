"""The C attention of chunks of tokens against the formula, in fp32 on the same bf16 inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from helpers_builds import EACH_BUILD, built
from torch import Tensor

from actorium.gpu.attention.attention_backend import (
    AttentionBackend,
    NativeAttention,
    TorchAttention,
)
from actorium.kernels.cpu.attention_native import NativeDecode
from actorium.kernels.reference.paged_attention import torch_extend

pytestmark = pytest.mark.usefixtures("all_threads")
BF16 = torch.bfloat16


@dataclass
class Row:
    """A chunk, as a step names it."""

    start: int
    count: int
    pages: Tensor


@pytest.fixture(params=EACH_BUILD)
def ops(request: pytest.FixtureRequest) -> NativeAttention:
    found = NativeAttention(built(request.param), torch.get_num_threads())
    if not found.lib.extend_ready():
        pytest.skip("this processor has no AVX2")
    return found


class Case:
    """Sequences whose pages are dealt out at random; what no token was written to is NaN."""

    def __init__(
        self, spans: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, page_size: int,
        loud: float = 1.0,
    ) -> None:
        """spans: (start, count) of each sequence."""
        random = torch.Generator().manual_seed(sum(a + b for a, b in spans) + dim)
        self.page_size, self.heads, self.dim = page_size, heads, dim
        widths = [-(-(start + count) // page_size) for start, count in spans]
        tables = (torch.randperm(sum(widths), generator=random) + 1).to(torch.int32).split(widths)
        self.rows = [Row(*span, table) for span, table in zip(spans, tables, strict=True)]
        self.layer = torch.full(((sum(widths) + 1) * page_size, 2 * kv_heads, dim), math.nan,
                                dtype=BF16)
        for row in self.rows:
            size = row.start + row.count, 2 * kv_heads, dim
            self.layer[self.index(row)] = torch.randn(size, generator=random).to(BF16)
        tokens = sum(row.count for row in self.rows)
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=random) * loud
        self.q = qkv.to(BF16)[:, :heads]
        self.scale = dim**-0.5

    def index(self, row: Row) -> Tensor:
        """i64[start + count]: where a sequence's tokens lie."""
        inside = torch.arange(self.page_size)
        all_of = (row.pages.long()[:, None] * self.page_size + inside).flatten()
        return all_of[:row.start + row.count]

    def wanted(self, window: int) -> Tensor:
        """[N, H, D] in fp32."""
        done, first = [], 0
        for row in self.rows:
            q = self.q[first:first + row.count].float()
            keys, values = self.layer[self.index(row)].float().chunk(2, dim=1)
            group = self.heads // keys.shape[1]
            score = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)) * self.scale
            at = torch.arange(row.start, row.start + row.count)[:, None]
            place = torch.arange(row.start + row.count)
            hidden = place > at
            if window:
                hidden |= place <= at - window
            weight = score.masked_fill(hidden, -math.inf).softmax(-1)
            done.append(torch.einsum("hqk,khd->qhd", weight, values.repeat_interleave(group, 1)))
            first += row.count
        return torch.cat(done)

    def check(self, ops: AttentionBackend, window: int = 0) -> None:
        got = ops.extend(self.rows, self.page_size, window, self.scale)(self.q, self.layer)
        near(got, self.wanted(window))


def near(got: Tensor, want: Tensor) -> None:
    """Weights and outputs are rounded to bf16: each output is off by a part in 2**8 of what the
    values are, all of them together by far less."""
    assert got.shape == want.shape
    assert not got.isnan().any()
    assert torch.allclose(got.float(), want, rtol=2**-7, atol=2e-2)
    assert (got.float() - want).norm() < 4e-3 * want.norm()


MIXED = [(0, 1), (0, 300), (40, 7), (16, 16), (0, 17), (129, 100), (300, 1)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"),
                         [(2, 2, 32), (4, 2, 64), (3, 1, 96), (8, 1, 128), (2, 1, 256)])
def test_chunks_of_many_lengths(
    ops: NativeAttention, page_size: int, heads: int, kv_heads: int, dim: int
) -> None:
    Case(MIXED, heads, kv_heads, dim, page_size).check(ops)


@pytest.mark.parametrize("window", [1, 2, 33, 128, 200, 5000])
@pytest.mark.parametrize("heads", [2, 6])
def test_windows(ops: NativeAttention, window: int, heads: int) -> None:
    Case(MIXED, heads, 2, 64, 16).check(ops, window)


@pytest.mark.parametrize("window", [0, 1000])
def test_more_keys_than_are_packed_at_once(ops: NativeAttention, window: int) -> None:
    Case([(2500, 70), (0, 2300), (4400, 5)], 2, 1, 128, 16).check(ops, window)


def test_more_columns_than_a_task_takes(ops: NativeAttention) -> None:
    Case([(30, 700), (0, 3)], 8, 1, 32, 16).check(ops)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(ops: NativeAttention, threads: int) -> None:
    Case([(0, 200), (64, 33)], 3, 3, 64, 16).check(NativeAttention(ops.lib, threads))


def test_large_scores(ops: NativeAttention) -> None:
    case = Case([(0, 200), (50, 60)], 4, 2, 64, 16, loud=300.0)
    case.check(ops)


def test_scores_that_climb_and_scores_that_fall(ops: NativeAttention) -> None:
    for slope in (0.05, -0.05):
        case = Case([(0, 700)], 2, 1, 64, 16)
        climb = (torch.arange(700) * slope)[:, None].to(BF16)
        case.layer[case.index(case.rows[0]), 0] = climb.expand(-1, 64)
        case.q.fill_(1.0)
        case.check(ops)


def test_masked_keys_do_not_matter(ops: NativeAttention) -> None:
    """A sequence full of NaN, and tokens before the window or after the chunk."""
    case = Case([(0, 40), (200, 30), (10, 20)], 4, 2, 64, 16)
    attend = ops.extend(case.rows, 16, 64, case.scale)
    before = attend(case.q, case.layer).clone()
    case.layer[case.index(case.rows[2])] = math.nan
    case.layer[case.index(case.rows[1])[:200 - 63]] = math.inf
    after = attend(case.q, case.layer)
    assert torch.equal(before[:70], after[:70])
    assert after[70:].isnan().all()


def test_a_row_is_the_same_alone_and_in_a_batch(ops: NativeAttention) -> None:
    case = Case(MIXED, 4, 2, 64, 16)
    together = ops.extend(case.rows, 16, 0, case.scale)(case.q, case.layer)
    first = 0
    for row in case.rows:
        q = case.q[first:first + row.count]
        alone = ops.extend([row], 16, 0, case.scale)(q, case.layer)
        near(alone, together[first:first + row.count].float())
        first += row.count


@pytest.mark.parametrize("q_len", range(2, 9))
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 1)])
def test_decode_of_several_tokens(
    ops: NativeAttention, q_len: int, heads: int, kv_heads: int
) -> None:
    lens = [q_len, 17, 16, 130, 1000]
    case = Case([(n - q_len, q_len) for n in lens], heads, kv_heads, 64, 16)
    tables = torch.nn.utils.rnn.pad_sequence([row.pages for row in case.rows], batch_first=True)
    attend = ops.decode(tables, torch.tensor(lens, dtype=torch.int32), max(lens), q_len, 16, 0,
                        case.scale)
    assert isinstance(attend, NativeDecode)
    near(attend(case.q, case.layer), case.wanted(0))


def test_rows_without_tokens_yet_are_harmless(ops: NativeAttention) -> None:
    """A row of padding: length 1, on the sink page."""
    q, layer = torch.ones(4, 2, 32, dtype=BF16), torch.ones(16, 2, 32, dtype=BF16)
    attend = ops.decode(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 1,
                        4, 16, 0, 1.0)
    assert torch.equal(attend(q, layer), q)


def test_output_is_written_to_out(ops: NativeAttention) -> None:
    for kernels in (ops, TorchAttention()):
        for spans in ([(0, 20)], [(0, 20), (0, 20), (5, 3)]):
            case = Case(spans, 4, 2, 64, 16)
            out = torch.empty(case.q.shape, dtype=BF16)
            got = kernels.extend(case.rows, 16, 0, case.scale)(case.q, case.layer, out)
            assert got.data_ptr() == out.data_ptr()
            near(out, case.wanted(0))


@pytest.mark.parametrize("window", [0, 20])
def test_torch_chunks(window: int) -> None:
    case = Case([(0, 20), (0, 20), (0, 33), (40, 7), (0, 20)], 4, 2, 24, 16)
    got = torch_extend(case.rows, 16, window, case.scale)(case.q.float(), case.layer.float())
    assert torch.allclose(got, case.wanted(window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 23, 100, 128, 250])
def test_a_token_does_not_depend_on_where_its_chunk_begins(ops: NativeAttention, cut: int) -> None:
    """To the bit: else a prompt's tokens would depend on what else was in the step."""
    case = Case([(0, 300)], 4, 2, 64, 16, loud=6.0)
    want = ops.extend(case.rows, 16, 0, case.scale)(case.q, case.layer)
    rest = [Row(cut, 300 - cut, case.rows[0].pages)]
    assert torch.equal(ops.extend(rest, 16, 0, case.scale)(case.q[cut:], case.layer), want[cut:])
