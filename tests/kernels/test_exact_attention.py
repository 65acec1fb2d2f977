"""`--exact on` on a device: a query's bits are the same decoded, in a window of drafts, and in
chunks of prompts of any length, alone and among others, however the keys are shared out.

The interpreter's products are numpy's, over tiles of the shape that a device is given: this shows
that a row's result is made of the same tiles in the same order. That a device's tensor cores keep
it, too, tests marked gpu are to show.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from helpers_attention import INTERPRETED, Paged, error
from torch import Tensor

from actorium.kernels.triton import exact_attention
from actorium.kernels.triton.exact_attention import (
    chunk_of,
    config,
    exact_decode,
    exact_extend,
    pieces_of,
)
from actorium.kernels.triton.extend import plan_blocks

pytestmark = INTERPRETED
BF16, CHUNK = torch.bfloat16, 128
SHAPES = [pytest.param(4, 2, 64, 0, BF16, id="bf16"),
          pytest.param(4, 1, 24, 0, BF16, id="odd", marks=pytest.mark.slow),
          pytest.param(4, 2, 64, 90, BF16, id="window"),
          pytest.param(2, 2, 32, 0, torch.int8, id="int8 pages", marks=pytest.mark.slow),
          pytest.param(2, 1, 32, 0, torch.float8_e4m3fn, id="fp8 pages", marks=pytest.mark.slow)]


def sequence(length: int, heads: int, kv: int, dim: int, window: int, kept: torch.dtype) -> Paged:
    """One whose tokens all attend; windows keep what is behind them."""
    case = Paged([(0, length)], heads, kv, dim, 16, 0, BF16, kept)
    case.window = window
    return case


def extended(case: Paged, start: int, count: int, splits: bool = False,
             sinks: Tensor | None = None, slopes: Tensor | None = None) -> Tensor:
    """A chunk of the only sequence."""
    row = case.rows[0]
    own = type(row)(start, count, row.pages)
    attend = exact_extend([own], case.page_size, case.window, case.scale, 0.0, CHUNK,
                          slopes)
    with patch.object(exact_attention, "programs_of", lambda *_: 1 << 20 if splits else 1):
        return attend(case.q[start:start + count], case.layer, None, case.scales, sinks)


def decoded(case: Paged, ends: list[int], q_len: int = 1, splits: bool = True,
            sinks: Tensor | None = None, slopes: Tensor | None = None) -> Tensor:
    """Rows of the only sequence, as of several that begin alike: those that end there."""
    tables = case.rows[0].pages[None].expand(len(ends), -1).contiguous()
    at = torch.tensor(ends)[:, None] - q_len + torch.arange(q_len)
    attend = exact_decode(tables, torch.tensor(ends, dtype=torch.int32), max(ends), q_len,
                          case.page_size, case.window, case.scale, 0.0, CHUNK, slopes)
    with patch.object(exact_attention, "PARTS", 1 << 30 if splits else 0):
        return attend(case.q[at.flatten()], case.layer, None, case.scales, sinks)


@pytest.mark.slow
def test_heads_of_512_by_the_tiles_of_older_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_attention, "config", lambda group, dim, eight, _: config(
        group, dim, eight, 89))
    test_a_query_has_the_same_bits_wherever_it_is_computed(4, 2, 512, 0, BF16)


@pytest.mark.parametrize(("heads", "kv", "dim", "window", "kept"), SHAPES)
def test_a_query_has_the_same_bits_wherever_it_is_computed(
    heads: int, kv: int, dim: int, window: int, kept: torch.dtype
) -> None:
    case = sequence(300, heads, kv, dim, window, kept)
    whole = extended(case, 0, 300)
    assert error(whole, case.wanted()) < 2e-2
    for cuts in ([0, 1, 300], [0, 37, 130, 300], [0, 128, 256, 300]):
        parts = [extended(case, a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert torch.equal(torch.cat(parts), whole), cuts
    assert torch.equal(extended(case, 283, 17, True), whole[283:])
    ends = [300, 1, 128, 129, 257, 64]
    rows = torch.tensor(ends) - 1
    for splits in (True, False):
        assert torch.equal(decoded(case, ends, 1, splits), whole[rows])
        assert torch.equal(decoded(case, ends[:1], 1, splits), whole[rows[:1]])
    window_rows = torch.tensor([[300, 129, 20]]).T - 3 + torch.arange(3)
    assert torch.equal(decoded(case, [300, 129, 20], 3), whole[window_rows.flatten()])


def test_sinks_have_the_same_bits_however_keys_are_shared_out() -> None:
    case, sinks = sequence(300, 4, 2, 32, 0, BF16), torch.linspace(-4, 4, 4)
    whole = extended(case, 0, 300, sinks=sinks)
    assert error(whole, case.wanted(sinks=sinks)) < 2e-2
    assert torch.equal(extended(case, 283, 17, True, sinks), whole[283:])
    for splits in (True, False):
        assert torch.equal(decoded(case, [300, 129], 1, splits, sinks), whole[[299, 128]])


def test_scores_that_fall_with_distance_have_the_same_bits() -> None:
    case, slopes = sequence(300, 4, 2, 32, 0, BF16), 2.0 ** -torch.linspace(0.5, 8, 4)
    whole = extended(case, 0, 300, slopes=slopes)
    assert error(whole, case.wanted(slopes=slopes)) < 2e-2
    assert torch.equal(extended(case, 283, 17, True, slopes=slopes), whole[283:])
    got = decoded(case, [300, 129], 1, slopes=slopes)
    assert torch.equal(got, whole[[299, 128]])


def test_neighbours_change_nothing() -> None:
    """Chunks and decodes of several sequences in one launch, and each alone."""
    case = Paged([(0, 40), (130, 21), (0, 3), (260, 1)], 4, 2, 32, 16, 0, BF16)
    rows, counts = case.rows, [row.count for row in case.rows]
    together = exact_extend(rows, 16, 0, case.scale, 0.0, CHUNK)(case.q, case.layer)
    alone = [exact_extend([row], 16, 0, case.scale, 0.0, CHUNK)(q, case.layer)
             for row, q in zip(rows, case.q.split(counts), strict=True)]
    assert torch.equal(together, torch.cat(alone))
    tables, lens = case.tables()
    last = torch.tensor(counts).cumsum(0) - 1
    decodes = exact_decode(tables, lens, 300, 1, 16, 0, case.scale, 0.0, CHUNK)
    assert torch.equal(decodes(case.q[last], case.layer), together[last])


def test_rows_of_drafts_read_nothing_behind_themselves() -> None:
    """A draft's key may be NaN, of the sink: the rows before it do not see it."""
    case = Paged([(128, 4)], 4, 2, 32, 16, 0, BF16)
    tables, lens = case.tables()
    want = exact_decode(tables, lens, 132, 4, 16, 0, case.scale, 0.0, CHUNK)(case.q, case.layer)
    case.layer[case.index(case.rows[0].pages, 132)[-1]] = torch.nan
    got = exact_decode(tables, lens, 132, 4, 16, 0, case.scale, 0.0, CHUNK)(case.q, case.layer)
    assert torch.equal(got[:3], want[:3]) and got[3].isnan().all()


def test_chunks_lie_where_they_lie_whatever_is_computed() -> None:
    from helpers_attention import Row

    table = torch.zeros(99, dtype=torch.int32)
    seen: dict[int, set[int]] = {}
    for start, count in ((0, 700), (511, 10), (600, 1), (512, 188)):
        items, tiles = pieces_of(plan_blocks([Row(start, count, table)], 16, 0), 256, 0)
        for _, _, _, place, size, chunk, _, zero in items.tolist():
            assert zero == 0 and chunk < -(-(place + size) // 256)
            seen.setdefault(place + size, set()).add(max(chunk, 0))
        assert tiles[:, 3].sum() == len(items) and (items[:, 6] == range(len(items))).all()
    assert seen[700] == {0, 1, 2} and seen[16] == {0}


@pytest.mark.parametrize(("longest", "keys"), [(2048, 512), (32768, 512), (131072, 2048), (0, 512),
                                               (40_000, 1024)])
def test_longer_sequences_have_longer_chunks(longest: int, keys: int) -> None:
    assert chunk_of(longest) == keys
