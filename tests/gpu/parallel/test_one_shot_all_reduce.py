"""When GPUs' ranks sum by one kernel, and that NCCL remains where it cannot be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from actorium.gpu.parallel.one_shot_all_reduce import ROWS, OneShotAllReduce, open_all_reduce, reach
from actorium.gpu.parallel.rank_group import GroupTimeout, RankPlace
from actorium.gpu.parallel.torch_group import TorchGroup
from actorium.kernels.triton.all_reduce import PeerRows, room_of

HALF, CPU = torch.bfloat16, torch.device("cpu")


class Joined(TorchGroup):
    """A rank of two, whose NCCL doubles what it is given."""

    def __init__(self, one_shot: OneShotAllReduce | None) -> None:
        self.place, self.device, self.timeout_s = RankPlace(0, 2), CPU, 1.0
        self.one_shot, self.failure, self.gathered = one_shot, "", list[torch.device]()

    def _gathered(self, x: Tensor) -> list[Tensor]:
        self.gathered.append(x.device)
        return [x, x]


def kernels(rows: int, width: int) -> OneShotAllReduce:
    peers = PeerRows(torch.zeros(2, dtype=torch.int64), torch.zeros(257, dtype=torch.int32), 0,
                     room_of(width, 2))
    return OneShotAllReduce(peers, HALF, rows, 4 * rows)


def test_as_many_rows_as_gain_without_a_gap() -> None:
    assert reach([2, 2, 1.5, 1.2, 1.1]) == ROWS[-1]
    assert reach([2, 2, 1.0, 3, 3]) == ROWS[1]
    assert reach([1.01, 9, 9, 9, 9]) == 0
    assert reach([float("nan"), 9, 9, 9, 9]) == 0


def test_what_sums_how_many_rows() -> None:
    group = Joined(kernels(4, 64))
    asked: list[tuple[str, int]] = []

    def sum_rows(x: Tensor, peers: PeerRows) -> Tensor:
        asked.append(("sum", len(x)))
        return x

    def sum_rows_norm(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        asked.append(("norm", len(x)))
        return x, x

    with patch.multiple("actorium.kernels.triton.all_reduce", sum_rows=sum_rows,
                        sum_rows_norm=sum_rows_norm):
        for rows, width, dtype in ((1, 64, HALF), (4, 64, HALF), (5, 64, HALF), (4, 65, HALF),
                                   (4, 999, HALF), (1, 64, torch.float32)):
            x = torch.ones(rows, width, dtype=dtype)
            assert torch.equal(group.all_reduce(x), x) or not asked
        for rows in (4, 16):
            x = torch.ones(rows, 64, dtype=HALF)
            group.reduce_add_norm(x, x, x[0], 1e-5)
    assert asked == [("sum", 1), ("sum", 4), ("norm", 4), ("norm", 16)]
    assert group.sums(HALF) and not group.sums(torch.float32) and not Joined(None).sums(HALF)


def test_more_rows_are_summed_and_normed_apart() -> None:
    """In Triton's interpreter: what NCCL sums, then the residual and the norm."""
    group, x = Joined(kernels(1, 64)), torch.randn(5, 64).to(HALF)
    ones = torch.ones_like(x)
    total, normed = group.reduce_add_norm(x.clone(), ones, ones[0], 1e-5)
    torch.testing.assert_close(total.float(), 2 * x.float() + 1, rtol=2e-2, atol=2e-2)
    assert normed.float().square().mean(-1).sub(1).abs().max() < 0.05


def test_a_group_that_is_over_launches_nothing() -> None:
    group = Joined(kernels(4, 64))
    group.failure = "rank 1 is missing"
    x = torch.ones(1, 64, dtype=HALF)
    with pytest.raises(GroupTimeout, match="rank 1 is missing"):
        group.all_reduce(x)
    with pytest.raises(GroupTimeout, match="rank 1 is missing"):
        group.reduce_add_norm(x, x, x[0], 1e-5)


def test_what_ranks_agree_on_lies_on_their_device() -> None:
    """NCCL refuses all else."""
    group = Joined(None)
    group.device = torch.device("meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        group.agreed(1.0)  # nothing is on that device
    assert group.gathered == [group.device]
    group.device = CPU
    assert group.agreed(3.0) == 3.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it may be had")
def test_without_symmetric_memory_nccl_remains(tmp_path: Path,
                                               caplog: pytest.LogCaptureFixture) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
    with caplog.at_level(logging.INFO, "actorium.ranks"):
        assert open_all_reduce(Joined(None), CPU, store, "group", 64, HALF) is None
    assert "sums over 2 ranks: NCCL's alone: symmetric memory: " in caplog.text
