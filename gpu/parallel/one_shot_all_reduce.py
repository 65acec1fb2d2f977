"""Sums of few rows over GPUs that can read each other's memory, by one kernel instead of NCCL's
(`kernels/triton/all_reduce.py`): whether that can be had here, whether it is right, and up to how
many rows it is faster.

The memory is torch's symmetric memory. All ranks go through the same stages, and agree after each
one, so that what fails on one of them leaves all with NCCL. Before anything is timed the kernels
are compiled in launches that wait for nobody, and what they give is held against what NCCL gives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from actorium.gpu.graphs.capture import CudaCapturer
from actorium.gpu.parallel.rank_group import RankGroup

LOG = logging.getLogger("actorium.ranks")
T = TypeVar("T")
ROWS = (1, 4, 16, 64, 256)
"""Ends of ranges of rows, each timed at its end. NCCL sums more."""
CALLS, TURNS = 16, 5
"""Calls in a graph that is timed, and how often it is replayed."""
GAIN = 1.05
"""Times as fast as NCCL, on every rank: less is no reason to leave it."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of the largest number, to what NCCL and a norm of its own give: it rounds more often."""


class OneShotAllReduce(NamedTuple):
    """The kernels, and up to how many rows they are used."""

    peers: Any
    """`PeerRows`"""
    dtype: torch.dtype
    summed: int
    """Rows of a sum by itself, at most."""
    normed: int
    """Rows of one with a residual and a norm."""
    held: tuple[Any, ...] = ()
    """What the addresses are of."""

    def sums(self, x: Tensor) -> bool:
        """Whether this sum is made so."""
        return x.dim() == 2 and len(x) <= self.summed and self._takes(x)

    def norms(self, x: Tensor, residual: Tensor, weight: Tensor) -> bool:
        """The same with what is added, and the norm of that."""
        alike = x.dtype is residual.dtype is weight.dtype
        return alike and len(x) <= self.normed and self._takes(x)

    def _takes(self, x: Tensor) -> bool:
        return x.dtype is self.dtype and bool(self.peers.serves(x))

    def give_up(self, stream: Any) -> None:
        """Let kernels that wait for a rank wait no longer. stream: another one than theirs."""
        with torch.cuda.stream(stream):
            self.peers.turns[-1:].fill_(1)


def reach(gains: Sequence[float], rows: Sequence[int] = ROWS) -> int:
    """Up to how many rows every range gained; 0 = not even one row does. gains: of each range, how
    many times as fast as NCCL the slowest rank was."""
    most = 0
    for end, gain in zip(rows, gains, strict=True):
        if not gain >= GAIN:
            break
        most = end
    return most


def open_all_reduce(group: RankGroup, device: torch.device, store: Any, name: str, width: int,
                    dtype: torch.dtype) -> OneShotAllReduce | None:
    """The kernels for rows of `width` numbers, where they can be used and gain something; all ranks
    call this. store: that they meet through; name: of the group, on this machine. Logs what was
    chosen, and why."""
    try:
        found = _stages(group, device, store, name, width, dtype)
    except _Failed as failure:
        LOG.info("sums over %d ranks: NCCL's alone: %s", group.place.size, failure)
        return None
    if found.summed or found.normed:
        LOG.info("sums over %d ranks: one-shot up to %d rows, with a norm up to %d; NCCL's beyond",
                 group.place.size, found.summed, found.normed)
        return found
    LOG.info("sums over %d ranks: NCCL's alone, which were as fast", group.place.size)
    return None


class _Failed(Exception):
    """A stage failed, on this rank or on another; in words."""


def _agreed(group: RankGroup, what: str, run: Callable[[], T]) -> T:
    """What `run` returned, where it did on every rank."""
    result: T | None = None
    why = "another rank could not"
    try:
        result = run()
    except Exception as error:  # whatever it is, NCCL remains
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        LOG.debug("%s", what, exc_info=True)
    done = result is not None
    if not group.agreed(float(done)):
        raise _Failed(f"{what}: {why}")
    assert result is not None
    return result


def _stages(group: RankGroup, device: torch.device, store: Any, name: str, width: int,
            dtype: torch.dtype) -> OneShotAllReduce:
    from actorium.kernels.triton import all_reduce as kernels

    place, room = group.place, kernels.room_of(width, dtype.itemsize)
    size = kernels.memory_bytes(place.size, ROWS[-1], room)
    memory = _agreed(group, "symmetric memory", partial(_allocated, group, device, store, name,
                                                        size))
    handle, addresses = _agreed(group, "its rendezvous", partial(_met, memory, place.size, size))
    turns = torch.zeros(ROWS[-1] + 1, dtype=torch.int32, device=device)
    peers = kernels.PeerRows(torch.tensor(addresses, device=device), turns, place.rank, room)
    one_shot = OneShotAllReduce(peers, dtype, ROWS[-1], ROWS[-1], (memory, handle))
    x = torch.randn((ROWS[-1], width), generator=torch.Generator().manual_seed(place.rank))
    trial = _Trial(group, one_shot, x.to(device, dtype))
    turns[-1:].fill_(1)
    _agreed(group, "its kernels", trial.launch)
    turns[-1:].fill_(0)
    if not group.agreed(float(trial.right())):
        raise _Failed("the kernels do not give what NCCL gives")
    return one_shot._replace(summed=reach(trial.gains(trial.summed, trial.nccl)),
                             normed=reach(trial.gains(trial.normed, trial.nccl_normed)))


def _allocated(group: RankGroup, device: torch.device, store: Any, name: str,
               size: int) -> Tensor:
    from torch.distributed import _symmetric_memory as symmetric

    place, symmetric_memory = group.place, symmetric._SymmetricMemory
    others = [other for other in range(place.size) if other != place.rank]
    blocked = [other for other in others if not torch.cuda.can_device_access_peer(device, other)]
    if blocked:
        raise RuntimeError(f"{device} cannot read the memory of {blocked}")
    symmetric_memory.set_group_info(name, place.rank, place.size,
                                    dist.PrefixStore("symmetric_memory", store))
    memory: Tensor = symmetric_memory.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
    memory.zero_()
    torch.cuda.synchronize(device)  # before another rank can write to it
    return memory


def _met(memory: Tensor, ranks: int, size: int) -> tuple[Any, list[int]]:
    from torch.distributed import _symmetric_memory as symmetric

    handle = symmetric._SymmetricMemory.rendezvous(memory)
    return handle, [handle.get_buffer(rank, (size,), torch.uint8).data_ptr()
                    for rank in range(ranks)]


class _Trial:
    """The kernels beside NCCL."""

    def __init__(self, group: RankGroup, one_shot: OneShotAllReduce, x: Tensor) -> None:
        """x: this rank's part, of as many rows as there can be."""
        self.group, self.peers, self.x = group, one_shot.peers, x
        generator = torch.Generator().manual_seed(99)
        self.residual = torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
        self.weight = self.residual[0].abs() + 0.5
        self.capturer = CudaCapturer(x.device)

    def summed(self, rows: int) -> tuple[Tensor, ...]:
        """The sum."""
        from actorium.kernels.triton.all_reduce import sum_rows

        return (sum_rows(self.x[:rows].clone(), self.peers),)

    def normed(self, rows: int) -> tuple[Tensor, ...]:
        """With the residual, and the norm of that."""
        from actorium.kernels.triton.all_reduce import sum_rows_norm

        return sum_rows_norm(self.x[:rows], self.peers, self.residual[:rows], self.weight, 1e-6)

    def nccl(self, rows: int) -> tuple[Tensor, ...]:
        """The same by NCCL."""
        return (self.group.all_reduce(self.x[:rows].clone()),)

    def nccl_normed(self, rows: int) -> tuple[Tensor, ...]:
        """The same by NCCL, and a norm of its own."""
        from actorium.kernels.triton.norm import add_rms_norm

        normed, total = add_rms_norm(self.group.all_reduce(self.x[:rows].clone()),
                                     self.residual[:rows], self.weight, 1e-6)
        return total, normed

    def launch(self) -> bool:
        """Compile both; nobody is waited for, and what they give means nothing."""
        self.summed(1)
        self.normed(1)
        torch.cuda.synchronize(self.x.device)
        return True

    def right(self) -> bool:
        """Whether the kernels give what NCCL gives, and all ranks the same bits; some times, since
        an error that moves is a race."""
        good = True
        for rows in (*ROWS, 3, 1):
            for own, other in ((self.summed, self.nccl), (self.normed, self.nccl_normed)):
                for got, want in zip(own(rows), other(rows), strict=True):
                    apart = (got.float() - want.float()).abs().max()
                    good &= bool(apart <= TOLERANCE[got.dtype] * want.float().abs().max())
                    alike = self.group.all_gather(got, 0).view(-1, *got.shape)
                    good &= bool((alike == alike[:1]).all())
        return good

    def gains(self, own: Callable[[int], object], other: Callable[[int], object]) -> list[float]:
        """Of each range of rows, how many times as fast as NCCL the kernels are, on the rank on
        which that is least."""
        return [self.group.agreed(self._seconds(other, rows) / self._seconds(own, rows))
                for rows in ROWS]

    def _seconds(self, work: Callable[[int], object], rows: int) -> float:
        """Of some calls replayed from a graph, as steps do it; the least of some turns."""
        def calls() -> None:
            for _ in range(CALLS):
                work(rows)

        graph, _ = self.capturer.capture(calls)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        found = []
        for _ in range(TURNS):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        return min(found)
