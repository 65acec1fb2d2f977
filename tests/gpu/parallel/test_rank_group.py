"""Collectives against what they mean, and what becomes of a group whose rank is gone."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers_ranks import gloo, run_ranks, whole
from torch import Tensor

from actorium.gpu.parallel import shared_group
from actorium.gpu.parallel.rank_group import (
    GroupTimeout,
    LoneRank,
    RankGroup,
    RankPlace,
    RanksDiffer,
)
from actorium.gpu.parallel.shared_group import SharedMemoryGroup
from actorium.gpu.parallel.torch_group import open_group

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


FORMS = pytest.mark.parametrize("form", [open_group, gloo])


def drawn(rank: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    seed = torch.Generator().manual_seed(97 * rank + sum(size))
    return torch.randn(size, generator=seed).to(dtype)


@FORMS
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_those_of_all_ranks_in_order(tmp_path: Path, size: int, form: Callable) -> None:
    """Also where a tensor is larger than a slot, and where some ranks' shares are empty."""
    lengths = (0, 1, 31, 1024, 65_537, 300_001)

    def body(group: RankGroup) -> list[Tensor]:
        return [group.all_reduce(drawn(group.place.rank, n, dtype=dtype))
                for dtype in DTYPES for n in lengths]

    found = whole(run_ranks(tmp_path, size, body, form=form))
    wanted = []
    for dtype in DTYPES:
        for n in lengths:
            parts = [drawn(rank, n, dtype=dtype).float() for rank in range(size)]
            if form is open_group and size == 4:  # a tree of neighbours
                parts = [parts[0] + parts[1], parts[2] + parts[3]]
            wanted.append(sum(parts[1:], parts[0]).to(dtype))
    for own in found:
        for at, (sum_, right) in enumerate(zip(own, wanted, strict=True)):
            assert torch.equal(sum_, right), at


CUT = ((5, 7, 19), (3, 5000, 14_999), (4, 2, 3), (4, 5, 15), (4, 5, 99), (0, 5, 9))
"""Rows, columns of each of three ranks, columns that are wanted."""


@FORMS
def test_gathers_and_broadcasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                form: Callable) -> None:
    monkeypatch.setattr(shared_group, "SLOT", 4096)

    def body(group: RankGroup) -> list[Tensor]:
        rank = group.place.rank
        return [group.all_gather(drawn(rank, 5, 7)), group.all_gather(drawn(rank, 5, 7), 0),
                group.all_gather(drawn(rank, 3, 5000)), group.all_gather(drawn(rank, 1500, 2, 3)),
                *(group.all_gather(drawn(rank, rows, wide), columns=columns)
                  for rows, wide, columns in CUT), group.broadcast(drawn(rank, 3000), 2)]

    def right(dim: int, *size: int) -> Tensor:
        return torch.cat([drawn(rank, *size) for rank in range(3)], dim)

    wanted = [right(-1, 5, 7), right(0, 5, 7), right(-1, 3, 5000), right(-1, 1500, 2, 3),
              *(right(-1, rows, wide)[:, :columns] for rows, wide, columns in CUT), drawn(2, 3000)]
    for own in whole(run_ranks(tmp_path, 3, body, form=form)):
        for got, what in zip(own, wanted, strict=True):
            assert torch.equal(got, what) and got.is_contiguous()


def test_a_long_run_of_collectives_of_random_sizes(tmp_path: Path) -> None:
    """Slots are used again and again, by ranks that are now early and now late."""
    sizes = torch.randint(1, 60_000, (150,), generator=torch.Generator().manual_seed(3)).tolist()

    def body(group: RankGroup) -> list[bool]:
        rank, right = group.place.rank, []
        for at, n in enumerate(sizes):
            if at % 7 == rank:
                time.sleep(0.001)
            if at % 3 == 2:
                x = group.all_gather(torch.full((n,), rank + at), 0)
                right.append(bool((x[:n] == at).all()) and bool((x[2 * n:] == 2 + at).all()))
            else:
                x = group.all_reduce(torch.full((n,), float(rank + at)))
                right.append(bool((x == 3 + 3 * at).all()))
        return right

    assert all(all(own) for own in whole(run_ranks(tmp_path, 3, body)))


def test_a_sum_that_is_not_contiguous(tmp_path: Path) -> None:
    def body(group: RankGroup) -> Tensor:
        return group.all_reduce(torch.ones(4, 6).t()[1:])

    for own in whole(run_ranks(tmp_path, 2, body)):
        assert torch.equal(own, torch.full((5, 4), 2.0))


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 5), (torch.bfloat16, 5),
                                             (torch.float32, 3001), (torch.bfloat16, 900)])
def test_sum_residual_and_norm_in_one(tmp_path: Path, dtype: torch.dtype, rows: int) -> None:
    columns, eps = 96, 1e-6
    residual, weight = (drawn(9, rows, columns).bfloat16(), drawn(8, columns).bfloat16())

    def body(group: RankGroup) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(group, SharedMemoryGroup)
        part = drawn(group.place.rank, rows, columns, dtype=dtype)
        total, normed = group.reduce_add_norm(part, residual, weight, eps)
        alone, same = group.reduce_add_norm(part, residual, None, eps)
        assert same is alone and torch.equal(alone, total)
        return total, normed, residual

    right = (drawn(0, rows, columns, dtype=dtype).float()
             + drawn(1, rows, columns, dtype=dtype).float() + residual.float()).bfloat16()
    found = whole(run_ranks(tmp_path, 2, body))
    for total, normed, _ in found:
        assert torch.equal(total, right)
        wide = right.float()
        norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
        assert torch.allclose(normed.float(), norm, rtol=1e-2, atol=1e-2)
    assert torch.equal(found[0][1], found[1][1])


@FORMS
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, form: Callable) -> None:
    def body(group: RankGroup) -> float:
        group.timeout_s = 0.3
        group.barrier()
        start = time.monotonic()
        if group.place.rank == 1:
            time.sleep(0.9)
        try:
            group.all_reduce(torch.ones(3))
        except GroupTimeout as error:
            assert error.missing == 1 and "rank 1 of 3" in str(error)
            with pytest.raises(GroupTimeout):
                group.barrier()  # the group has failed as a whole, and stays so
            return time.monotonic() - start
        raise AssertionError("nobody was missed")

    waited = run_ranks(tmp_path, 3, body, form=form)
    assert all(isinstance(waited[rank], float) and 0.2 < waited[rank] < 0.8 for rank in (0, 2))
    if form is open_group:  # it is late: it may not go on alone
        assert isinstance(waited[1], float)


def test_a_rank_that_ends_is_noticed_at_once(tmp_path: Path) -> None:
    def body(group: RankGroup) -> float:
        group.barrier()
        if group.place.rank == 2:
            group.close()
            with pytest.raises(GroupTimeout, match="has left"):
                group.barrier()
            return 0.0
        start = time.monotonic()
        with pytest.raises(GroupTimeout) as error:
            group.all_reduce(torch.ones(3))
        assert error.value.missing == 2
        return time.monotonic() - start

    assert max(whole(run_ranks(tmp_path, 3, body))) < 5.0


def test_others_learn_that_a_rank_has_ended(tmp_path: Path) -> None:
    def body(group: RankGroup) -> str:
        group.barrier()
        if group.place.rank == 0:
            time.sleep(0.1)
            group.fence(1)
            return ""
        if group.place.rank == 1:
            time.sleep(0.3)
        with pytest.raises(GroupTimeout) as error:
            group.all_reduce(torch.ones(3))
        assert error.value.missing == 1
        return str(error.value)

    assert "rank 1 of 3 is missing" in whole(run_ranks(tmp_path, 3, body))[2]


def test_different_collectives_raise(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 2, lambda group: group.all_reduce(
        torch.ones(3 + group.place.rank)))
    assert any(isinstance(own, RanksDiffer) for own in found)
    assert all(isinstance(own, RanksDiffer | GroupTimeout) for own in found)


def test_a_rank_that_never_joins_is_named(tmp_path: Path) -> None:
    with pytest.raises(GroupTimeout, match="rank 1 of 2 has not joined"):
        open_group(RankPlace(0, 2), tmp_path, 1.0, join_s=0.1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(GroupTimeout, match="rank 0 has not made"):
        open_group(RankPlace(1, 2), tmp_path, 1.0, join_s=0.1)


def test_a_group_of_one_sends_nothing(tmp_path: Path) -> None:
    group = open_group(RankPlace(0, 1), tmp_path / "none", 1.0)
    x = torch.ones(3)
    assert isinstance(group, LoneRank) and not (tmp_path / "none").exists()
    assert group.all_reduce(x) is x and group.all_gather(x) is x and group.broadcast(x) is x
    group.barrier()
    group.fence(0)
    group.close()


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0), (0, 17)])
def test_places_that_cannot_be(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="ranks are"):
        RankPlace(rank, size)


def test_nobody_else_can_read_it_and_nothing_is_left(tmp_path: Path) -> None:
    path, modes = tmp_path / "epoch", []

    def body(group: RankGroup) -> list[str]:
        assert isinstance(group, SharedMemoryGroup)
        modes.append(stat.S_IMODE(os.fstat(group.fd).st_mode))
        group.barrier()  # rank 0 takes the file away when all have it, on its way here
        return [own.name for own in path.iterdir()]

    assert whole(run_ranks(path, 2, body)) == [[], []]
    assert modes == [0o600, 0o600] and stat.S_IMODE(path.stat().st_mode) == 0o700


KILLED = """
import sys, time
from pathlib import Path
import torch
from actorium.gpu.parallel.rank_group import RankPlace
from actorium.gpu.parallel.torch_group import open_group
group = open_group(RankPlace(1, 2), Path(sys.argv[1]), 20.0)
group.all_reduce(torch.ones(3))
print("there", flush=True)
while True:
    group.all_reduce(torch.ones(300_000))
"""


def test_a_rank_killed_in_the_middle_leaves_no_file_and_nobody_waiting(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        group = open_group(RankPlace(0, 2), tmp_path, 20.0)
        group.all_reduce(torch.ones(3))
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        for _ in range(5):
            group.all_reduce(torch.ones(300_000))
        child.send_signal(signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(GroupTimeout, match="rank 1 of 2 has ended"):
            while True:
                group.all_reduce(torch.ones(300_000))
        assert time.monotonic() - start < 5.0
        assert list(tmp_path.iterdir()) == []
    finally:
        child.kill()
        child.wait()


@FORMS
def test_alone_a_rank_waits_for_nobody(tmp_path: Path, form: Callable) -> None:
    """What it calls meanwhile the others never come to, and the group is as it was."""
    def body(group: RankGroup) -> tuple[list[Tensor], Tensor]:
        rank = group.place.rank
        sums: list[Tensor] = []
        if rank == 1:
            with group.alone():
                with group.alone():  # as one that compares within one that measures
                    group.all_reduce(drawn(1, 3))
                assert group.place.size == 1
                sums = [group.all_reduce(drawn(1, n)) for n in (31, 300_001)]
                sums += [group.reduce_add(drawn(1, 3, 64), drawn(2, 3, 64)),
                        group.reduce_add(drawn(1, 3, 64), drawn(2, 3, 64).bfloat16()),
                        group.all_gather(drawn(1, 5, 7)), group.broadcast(drawn(1, 6))]
                group.barrier()
        return sums, group.all_reduce(drawn(rank, 10))

    (nothing, one), (own, other) = whole(run_ranks(tmp_path, 2, body, form=form))
    assert not nothing and torch.equal(one, other)
    wanted = [drawn(1, 31), drawn(1, 300_001), drawn(1, 3, 64) + drawn(2, 3, 64),
              None, drawn(1, 5, 7), drawn(1, 6)]
    for got, right in zip(own, wanted, strict=True):
        assert right is None or torch.equal(got, right)
    assert torch.allclose(own[3].float(), wanted[2], atol=0.05)
    assert torch.equal(one, drawn(0, 10) + drawn(1, 10))
