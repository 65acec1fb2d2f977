"""Rows of state pools, of which padding has none."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from actorium.kernels.reference import state_rows
from actorium.kernels.reference.state_rows import NOBODY, read_rows, write_rows

DRAWN = torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("asks", [True, False], ids=["as on a CPU", "as on a device"])
@pytest.mark.parametrize("rows", [[4, 0, 2], [NOBODY, 4, NOBODY, 0], [0, NOBODY], [NOBODY],
                                  [NOBODY, NOBODY, -5], [3, NOBODY, NOBODY]])
def test_nothing_is_read_or_written_for_padding(rows: list[int], asks: bool) -> None:
    pool = torch.full((6, 2, 3), torch.nan)
    own = [row for row in rows if row >= 0]
    pool[own] = DRAWN[:len(own)]
    at, values = torch.tensor(rows), DRAWN[-len(rows):]
    want = pool.clone()
    for row, value in zip(rows, values, strict=True):
        if row >= 0:
            want[row] = value
    with patch.object(state_rows, "all_real", state_rows.all_real if asks else lambda _: False):
        found = read_rows(pool, at)
        write_rows(pool, at, values)
    for row, value in zip(rows, found, strict=True):
        assert not value.any() if row < 0 else value.isfinite().all()
    assert torch.equal(found[at >= 0], DRAWN[:len(own)])
    assert torch.equal(pool.nan_to_num(7.5), want.nan_to_num(7.5))


def test_a_view_of_a_pool_is_written() -> None:
    """As the first drafts of those that there is room for."""
    pool = torch.zeros(4, 3, 2)
    write_rows(pool[:, :2], torch.tensor([2, NOBODY, 1]), DRAWN[:3, :, :2])
    assert torch.equal(pool[[2, 1], :2], DRAWN[[0, 2], :, :2])
    assert not pool[[0, 3]].any() and not pool[:, 2].any()
