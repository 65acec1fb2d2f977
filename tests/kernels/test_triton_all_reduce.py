"""Sums over ranks in one launch: all ranks in one process, in the interpreter, and two on one CUDA
device, each on a stream of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from actorium.kernels.backends import triton_fault
from actorium.kernels.reference.all_reduce import sum_parts, sum_parts_norm
from actorium.kernels.triton.all_reduce import (
    PeerRows,
    memory_bytes,
    room_of,
    sum_rows,
    sum_rows_norm,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT, HALF = torch.float32, torch.bfloat16
MOST = 5
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")


class Ranks:
    """The memory of all ranks, full of NaN where it is not what is told."""

    def __init__(self, size: int, width: int, dtype: torch.dtype, turn: int = 0,
                 device: torch.device = CPU) -> None:
        """turn: that each program has come to."""
        room = room_of(width, dtype.itemsize)
        self.memory = torch.full((size, memory_bytes(size, MOST, room)), 255, dtype=torch.uint8,
                                 device=device)
        told = self.memory[:, :4 * size * MOST]
        told.copy_(torch.full((size, size * MOST), turn, dtype=torch.int32,
                              device=device).view(torch.uint8))
        addresses = torch.tensor([own.data_ptr() for own in self.memory], device=device)
        self.peers = [PeerRows(addresses, torch.tensor([turn] * MOST + [0], dtype=torch.int32,
                                                       device=device), rank, room)
                      for rank in range(size)]
        self.gen = torch.Generator().manual_seed(size + width)
        self.size, self.width, self.dtype, self.device = size, width, dtype, device

    def drawn(self, *size: int) -> Tensor:
        return torch.randn((*size, self.width), generator=self.gen).to(self.device, self.dtype)


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("size", "width"), [(2, 64), (4, 37), (3, 1100), (2, 1)])
def test_all_ranks_have_the_same_bits(size: int, width: int, dtype: torch.dtype) -> None:
    """Those of the reference, where nothing is added; steps of more and of fewer rows follow one
    another, so that programs are at different turns."""
    ranks = Ranks(size, width, dtype)
    for rows in (1, 4, 2, MOST, 1, 1, 0):
        parts = ranks.drawn(size, rows)
        want = sum_parts(list(parts))
        own = [part.clone() for part in parts]
        for gives in (True, False):
            for part, peers in zip(own, ranks.peers, strict=True):
                assert sum_rows(part, peers, gives, not gives) is part
        # The interpreter cuts off what bf16 does not hold, the reference rounds.
        for got in own:
            assert torch.equal(got, own[0])
            torch.testing.assert_close(got, want, rtol=0 if dtype is FLOAT else 2**-7, atol=1e-30)
    assert {tuple(peers.turns.tolist()) for peers in ranks.peers} == {(6, 3, 2, 2, 1, 0)}


@interpreted
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("size", "width"), [(2, 64), (4, 37), (8, 1100)])
def test_with_a_residual_and_its_norm(size: int, width: int, dtype: torch.dtype) -> None:
    ranks = Ranks(size, width, dtype)
    for rows in (3, 1, MOST):
        parts, residual, weight = ranks.drawn(size, rows), ranks.drawn(rows), ranks.drawn(1)[0]
        want, right = sum_parts_norm(list(parts), residual, weight, 1e-5)
        for gives in (True, False):
            found = [sum_rows_norm(part, peers, residual, weight, 1e-5, gives, not gives)
                     for part, peers in zip(parts, ranks.peers, strict=True)]
        most = 1e-6 if dtype is FLOAT else 2**-6
        for total, normed in found:
            assert torch.equal(total, found[0][0]) and torch.equal(normed, found[0][1])
            torch.testing.assert_close(total, want, rtol=most, atol=most)
            torch.testing.assert_close(normed, right, rtol=most, atol=most)


@interpreted
def test_a_rank_may_be_a_turn_ahead_and_turns_go_round() -> None:
    """What is given for the next turn does not lie over what the others have not read yet; behind
    2**31 - 1 comes - 2**31."""
    ranks = Ranks(2, 40, FLOAT, 2**31 - 2)
    early, late = ranks.peers
    for turn in range(4):
        (a, b), (c, d) = ranks.drawn(2, 1), ranks.drawn(2, 1)
        mine, theirs, next_ = a.clone(), b.clone(), c.clone()
        sum_rows(theirs, late, takes=False)
        sum_rows(mine, early)
        sum_rows(next_, early, takes=False)
        sum_rows(theirs, late, gives=False)
        assert torch.equal(mine, a + b) and torch.equal(theirs, a + b), turn
        own = d.clone()
        sum_rows(own, late)
        sum_rows(next_, early, gives=False)
        assert torch.equal(own, c + d) and torch.equal(next_, c + d)
    assert int(early.turns[0]) == -(2**31) + 6


@interpreted
def test_nobody_is_waited_for_once_a_rank_has_ended() -> None:
    """It would never end."""
    ranks = Ranks(2, 40, FLOAT)
    peers = ranks.peers[0]
    peers.turns[-1] = 1
    sum_rows(torch.ones(3, 40), peers)
    assert peers.turns.tolist() == [1, 1, 1, 0, 0, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["fp32", "bf16"])
def test_two_ranks_on_one_device(dtype: torch.dtype) -> None:
    """Each on a stream of its own, so that they wait for one another; from graphs, too."""
    ranks, streams = Ranks(2, 5120, dtype, device=CUDA), [torch.cuda.Stream() for _ in range(2)]
    parts, residual, weight = ranks.drawn(2, MOST), ranks.drawn(MOST), ranks.drawn(1)[0]

    def run(rank: int) -> tuple[Tensor, Tensor]:
        return sum_rows_norm(parts[rank], ranks.peers[rank], residual, weight, 1e-5)

    torch.cuda.synchronize()
    graphs, found = [], []
    for rank, stream in enumerate(streams):  # compiled without anybody to wait for
        ranks.peers[rank].turns[-1] = 1
        with torch.cuda.stream(stream):
            run(rank)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            found.append(run(rank))
        ranks.peers[rank].turns[-1] = 0
    for _ in range(200):
        parts.copy_(ranks.drawn(2, MOST))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        total, normed = sum_parts_norm(list(parts), residual, weight, 1e-5)
        most = 1e-5 if dtype is FLOAT else 2**-6
        for own in found:
            assert torch.equal(own[0], total) and torch.equal(own[1], found[0][1])
            torch.testing.assert_close(own[1], normed, rtol=most, atol=most)
