"""The Triton kernel of attention of chunks against its torch reference and the formula."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_attention import (
    DTYPES,
    FEW,
    INTERPRETED,
    Paged,
    Row,
    check_sinks,
    check_soft_cap,
    error,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.kernels.reference.paged_attention import torch_extend
from actorium.kernels.triton.extend import ExtendLaunch, config, extend, plan_blocks, splits_of

pytestmark = INTERPRETED


def run(case: Paged, soft_cap: float = 0.0, splits: int = 0,
        sinks: torch.Tensor | None = None) -> torch.Tensor:
    out = case.poisoned()
    attend = extend(case.rows, case.page_size, case.window, case.scale, soft_cap, splits)
    assert attend(case.q, case.layer, out, None, sinks) is out
    return out


@settings(FEW, max_examples=7)
@given(
    spans=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=2),
    kv_heads=st.integers(1, 2), group=st.integers(1, 16),
    dim=st.sampled_from([10, 64, 80, 96, 128, 256]), page_size=st.sampled_from([16, 32, 64, 128]),
    window=st.sampled_from([0, 0, 1, 2, 15, 16, 17, 40, 64, 400]), splits=st.sampled_from([0, 3]),
)
def test_equals_torch(
    spans: list[tuple[int, int]], kv_heads: int, group: int, dim: int, page_size: int, window: int,
    splits: int,
) -> None:
    case = Paged(spans, kv_heads * group, kv_heads, dim, page_size, window)
    got = run(case, splits=splits)
    if not len(got):
        return
    some = [row for row in case.rows if row.count]
    want = torch_extend(some, page_size, window, case.scale)(case.q, case.layer)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    assert error(got, case.wanted()) < 1e-6


@pytest.mark.parametrize(("dtype", "kv_dtype", "bound"), DTYPES)
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype, bound: float) -> None:
    case = Paged([(30, 40), (0, 9)], 6, 2, 64, 16, dtype=dtype, kv_dtype=kv_dtype)
    got = run(case)
    assert got.dtype is dtype
    assert error(got, case.wanted()) < bound


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_soft_cap(cap: float) -> None:
    case = Paged([(70, 30), (0, 5)], 4, 2, 64, 16, window=50)
    check_soft_cap(case, cap, lambda: run(case, cap))


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_count_once(splits: int) -> None:
    case = Paged([(70, 30), (0, 5)], 4, 2, 64, 16, window=50)
    check_sinks(case, lambda sinks: run(case, splits=splits, sinks=sinks))


@pytest.mark.parametrize("window", [
    0, 31, 33, *(pytest.param(rarer, marks=pytest.mark.slow) for rarer in (1, 32, 64, 70))])
def test_windows_at_the_edges_of_blocks(window: int) -> None:
    assert config(1, 16, 4, 66).block == 32
    case = Paged([(62, 35), (31, 1), (32, 1), (33, 2), (0, 66)], 1, 1, 16, 16, window)
    for splits in (1, 2):
        assert error(run(case, splits=splits), case.wanted()) < 1e-6


@pytest.mark.parametrize(("programs", "keys", "rows", "least", "most"), [
    (8, 32768, 16, 30, 33), (8, 32768, 128, 16, 16), (100, 32768, 128, 1, 1), (1, 600, 16, 4, 5),
    (8, 100, 16, 1, 1), (4096, 32768, 128, 1, 1), (1, 131072, 16, 64, 64)])
def test_few_blocks_share_out_their_keys(
    programs: int, keys: int, rows: int, least: int, most: int
) -> None:
    shape = ExtendLaunch(rows, 64, 8, 5)
    assert least <= splits_of(programs, keys, shape, 132) <= most


def test_large_groups() -> None:
    """Of more heads than a tile has rows otherwise, and of a number that does not divide it."""
    assert config(150, 16, 4, 9).rows == 256
    for heads in (150, 7):
        case = Paged([(20, 3), (0, 10)], heads, 1, 16, 16)
        assert error(run(case), case.wanted()) < 1e-6


def test_small_chunks_take_small_tiles() -> None:
    assert config(4, 128, 2, 4).rows == 16
    case = Paged([(100, 1), (0, 4), (17, 3)], 4, 1, 32, 16)
    assert error(run(case), case.wanted()) < 1e-6


def test_masked_keys_do_not_matter() -> None:
    """A sequence full of NaN, and tokens before the window or after the chunk."""
    case = Paged([(0, 40), (200, 30), (10, 20)], 4, 2, 32, 16, window=64)
    before = run(case)
    case.layer[case.index(case.rows[2].pages, 30)] = math.nan
    case.layer[case.index(case.rows[1].pages, 201 - 64)] = math.inf
    after = run(case)
    assert torch.equal(before[:70], after[:70])
    assert after[70:].isnan().all()


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    """To the bit: else a prompt's tokens would depend on what else was in the step."""
    case = Paged([(0, 70), (33, 40), (129, 33)], 4, 2, 32, 16)
    together, first = run(case), 0
    for row in case.rows:
        q = case.q[first:first + row.count]
        alone = extend([row], 16, 0, case.scale)(q, case.layer)
        assert torch.equal(alone, together[first:first + row.count])
        first += row.count


def test_nothing_to_do() -> None:
    case = Paged([(9, 0), (0, 0)], 2, 1, 16, 16)
    assert run(case).shape == (0, 2, 16)
    assert extend([], 16, 0, 1.0)(case.q, case.layer).shape == (0, 2, 16)


@FEW
@given(spans=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 300)), max_size=9),
       tokens=st.integers(1, 128), window=st.sampled_from([0, 1, 100]))
def test_blocks_cover_every_token_once(
    spans: list[tuple[int, int]], tokens: int, window: int
) -> None:
    tables = [torch.zeros(1 + i, dtype=torch.int32) for i in range(len(spans))]
    rows = [Row(*span, table) for span, table in zip(spans, tables, strict=True)]
    work = plan_blocks(rows, tokens, window)
    owners: list[tuple[int, int]] = []
    for i, (start, count) in enumerate(spans):
        owners += [(tables[i].data_ptr(), place) for place in range(start, start + count)]
    seen: list[int] = []
    for low, high, first, place, size, keys in work.tolist():
        address = (low & 0xFFFFFFFF) | (high << 32)
        assert 1 <= size <= tokens
        for i in range(size):
            assert owners[first + i] == (address, place + i)
            seen.append(first + i)
        assert keys == place + size - (max(0, place + 1 - window) if window else 0)
    assert sorted(seen) == list(range(len(owners)))
    assert (work[1:, 5] <= work[:-1, 5]).all()
