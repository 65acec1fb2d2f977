"""The Triton kernel of decode attention against its torch reference and the formula."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_attention import BF16, DTYPES, FEW, INTERPRETED, Paged, check_soft_cap, error
from hypothesis import given
from hypothesis import strategies as st

from actorium.kernels.attention import torch_decode
from actorium.kernels.merge import merge as torch_merge
from actorium.kernels.triton import decode as module
from actorium.kernels.triton.decode import Decode, Shares, config, decode, shares
from actorium.kernels.triton.merge import merge

pytestmark = INTERPRETED


def run(case: Paged, q_len: int, soft_cap: float = 0.0, splits: int = 0) -> torch.Tensor:
    tables, lens = case.tables()
    attend = decode(tables, lens, int(lens.max()), q_len, case.page_size, case.window, case.scale,
                    soft_cap, splits)
    out = case.poisoned()
    assert attend(case.q, case.layer, out) is out
    return out


def reference(case: Paged, q_len: int) -> torch.Tensor:
    tables, lens = case.tables()
    return torch_decode(tables, lens, int(lens.max()), q_len, case.page_size, case.window,
                        case.scale)(case.q, case.layer)


@FEW
@given(
    before=st.lists(st.integers(0, 120), min_size=1, max_size=2), q_len=st.integers(1, 8),
    kv_heads=st.integers(1, 2), group=st.integers(1, 16),
    dim=st.sampled_from([10, 64, 80, 96, 128, 256]), page_size=st.sampled_from([16, 32, 64, 128]),
    window=st.sampled_from([0, 0, 1, 2, 15, 16, 17, 40, 400]), splits=st.sampled_from([0, 1, 2, 5]),
)
def test_equals_torch(
    before: list[int], q_len: int, kv_heads: int, group: int, dim: int, page_size: int,
    window: int, splits: int,
) -> None:
    case = Paged([(n, q_len) for n in before], kv_heads * group, kv_heads, dim, page_size, window)
    got = run(case, q_len, splits=splits)
    assert torch.allclose(got, reference(case, q_len), rtol=1e-4, atol=1e-5)
    assert error(got, case.wanted()) < 1e-6


@pytest.mark.parametrize(("dtype", "kv_dtype", "bound"),
                         [*DTYPES, (BF16, torch.float32, 1e-2)])
@pytest.mark.parametrize("splits", [1, 3])
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype, bound: float, splits: int) -> None:
    case = Paged([(90, 2), (0, 2)], 6, 2, 64, 16, dtype=dtype, kv_dtype=kv_dtype)
    got = run(case, 2, splits=splits)
    assert got.dtype is dtype
    assert error(got, case.wanted()) < bound


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_soft_cap(cap: float) -> None:
    case = Paged([(70, 3), (3, 3)], 4, 2, 64, 16, window=50)
    check_soft_cap(case, cap, lambda: run(case, 3, cap, splits=2))


def test_more_rows_than_a_program_takes() -> None:
    case = Paged([(30, 7), (0, 7)], 20, 1, 16, 16)  # 140 rows share keys
    assert config(140, 16, 4, True).rows == 128
    for splits in (1, 2):
        assert error(run(case, 7, splits=splits), case.wanted()) < 1e-6


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_beside_drafts_without_a_page(bad: float, splits: int) -> None:
    """The tokens a row does not see may lie where another sequence, or none, has its own."""
    case = Paged([(20, 5), (31, 5)], 4, 2, 32, 16)
    before = run(case, 5, splits=splits)
    for row in case.rows:
        case.layer[case.index(row.pages, row.start + 5)[-3:]] = bad
    after = run(case, 5, splits=splits).view(2, 5, 4, 32)
    assert torch.equal(after[:, :2], before.view(2, 5, 4, 32)[:, :2])
    assert after[:, 2:].isnan().flatten(2).any(2).all()


def test_padding_reads_the_sink_alone() -> None:
    """Length 1 on page 0, whatever the window of drafts."""
    case = Paged([(40, 4)], 4, 2, 32, 16)
    case.layer[0] = 3.0
    tables, lens = case.tables()
    tables, lens = torch.cat((tables, tables * 0)), torch.cat((lens, lens * 0 + 1))
    q = torch.cat((case.q, case.q))
    for splits in (1, 3):
        got = decode(tables, lens, 44, 4, 16, 0, case.scale, splits=splits)(q, case.layer)
        assert error(got[:4], case.wanted()) < 1e-6
        assert torch.allclose(got[4:], torch.tensor(3.0))


def test_lengths_are_read_when_it_runs() -> None:
    """One grid serves all lengths up to its bound, as a captured graph does."""
    case = Paged([(99, 1), (64, 1)], 4, 2, 32, 16)
    tables, lens = case.tables()
    now = torch.ones_like(lens)
    attend = decode(tables, now, 4096, 1, 16, 0, case.scale, splits=7)
    for _ in range(2):
        attend(case.q, case.layer)
        now.copy_(lens)
    assert error(attend(case.q, case.layer), case.wanted()) < 1e-6


def test_what_lies_behind_a_window_is_not_read() -> None:
    case = Paged([(70, 2), (35, 2)], 4, 2, 32, 16, window=20)
    before = run(case, 2)
    for row in case.rows:
        case.layer[case.index(row.pages, row.start + 1 - 20)] = math.nan
    assert torch.equal(run(case, 2), before)


def test_no_rows() -> None:
    case = Paged([(9, 1)], 2, 1, 16, 16)
    tables, lens = case.tables()
    attend = decode(tables[:0], lens[:0], 0, 1, 16, 0, 1.0)
    assert attend(case.q[:0], case.layer).shape == (0, 2, 16)


@FEW
@given(count=st.integers(1, 37), rows=st.integers(0, 3), heads=st.integers(1, 3),
       dim=st.sampled_from([16, 80, 256]), seed=st.integers(0, 99))
def test_merge(count: int, rows: int, heads: int, dim: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    parts = torch.randn((count, rows, heads, dim), generator=random)
    lse = torch.randn((count, rows, heads), generator=random) * 20
    empty = torch.rand(lse.shape, generator=random) < 0.3
    lse[empty], parts[empty] = -math.inf, math.nan
    out = torch.full((rows, heads, dim), math.nan)
    want = torch_merge(parts, lse, torch.empty_like(out))
    assert merge(parts, lse, out) is out
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-6)


def test_merge_gives_attention_over_both_parts() -> None:
    """A prefix and a chunk: weights of one softmax over all keys."""
    score, values = torch.randn(3, 2, 11), torch.randn(11, 2, 16)
    cut, out = 4, torch.empty(3, 2, 16)
    sides = [slice(0, cut), slice(cut, 11)]
    parts = [torch.einsum("nhk,khd->nhd", score[..., s].softmax(-1), values[s]) for s in sides]
    lse = torch.stack([score[..., s].logsumexp(-1) for s in sides])
    merge(torch.stack(parts), lse, out)
    want = torch.einsum("nhk,khd->nhd", score.softmax(-1), values)
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-6)


def test_a_part_of_nan_spoils_the_whole() -> None:
    lse = torch.zeros(3, 1, 1)
    lse[1] = math.nan
    assert merge(torch.ones(3, 1, 1, 16), lse, torch.zeros(1, 1, 16)).isnan().all()


@pytest.mark.parametrize(("sequences", "kv_heads", "span", "splits"), [
    (1, 8, 131072, 33), (1, 8, 1024, 8), (1, 8, 100, 1), (1, 8, 0, 1), (1, 1, 131072, 128),
    (32, 8, 131072, 16), (128, 8, 131072, 4), (132, 8, 131072, 1), (512, 8, 131072, 1)])
def test_splits_fill_the_device(sequences: int, kv_heads: int, span: int, splits: int) -> None:
    assert shares(sequences, kv_heads, span, 4, 64, 132) == (splits, 264, 2)


def test_long_sequences_have_more_shares_than_short_ones() -> None:
    """640 tokens beside 30 and 60: what all have is shared out evenly, within what the grid has."""
    case = Paged([(639, 1), (29, 1), (59, 1)], 2, 1, 16, 16)
    tables, lens = case.tables()
    attend = decode(tables, lens, 4096, 1, 16, 0, case.scale)
    assert isinstance(attend, Decode)
    for chosen, used in ((Shares(12, 6, 1), [5, 1, 1]), (Shares(3, 8, 1), [3, 1, 1]),
                         (Shares(12, 6, 8), [1, 1, 1]), (Shares(12, 99, 1), [10, 1, 1])):
        attend.shares = chosen
        found: list[torch.Tensor] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "merge", lambda parts, lse, out, found=found: (
                found.append(lse), merge(parts, lse, out))[1])
            assert error(attend(case.q, case.layer, case.poisoned()), case.wanted()) < 1e-6
        assert (found[0] > -math.inf)[:, :, 0].sum(0).tolist() == used
