"""What a group of ranks is to those who use it: its collectives, and the gate before its steps."""

from __future__ import annotations

import mmap
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import torch
from torch import Tensor

MAX_RANKS = 16
FILE = "gate"
LINE = 64
"""Bytes of a rank's line: where it has come to, and the last step that it began."""
STEPS = 40
"""Bits of a mark for the step; those above are the scheduler's epoch."""
LEFT = 2**62
"""Mark of a rank that computes no more."""
AWAKE_S, NAP_S = 100e-6, 50e-6
"""A rank looks again and again for so long, and then from time to time."""
_WORD = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which of how many ranks share a model (tensor parallelism)."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size <= MAX_RANKS:
            raise ValueError(f"rank {self.rank} of {self.size}: ranks are 0 to size - 1, at most "
                             f"{MAX_RANKS} of them")


ALONE = RankPlace(0, 1)


class GroupTimeout(Exception):
    """A rank did not come to a collective in time, or is known to have ended. The group is unusable
    from then on: every later call raises the same."""

    def __init__(self, text: str, missing: int) -> None:
        """missing: its rank; -1 where it is not known."""
        super().__init__(text)
        self.missing = missing


class RanksDiffer(Exception):
    """Two ranks came to different collectives: a bug, never a fault of the machine."""


class RankGroup(ABC):
    """The ranks of one model, as one of them sees them. All ranks call the same methods in the same
    order, with tensors of the same shapes and dtypes; what a sum gives has the same bits on all.

    Every collective raises `GroupTimeout` when a rank has not come for `timeout_s`, and soon after
    one has ended; a group fails as a whole, and once.
    """

    wide = False
    """Partial sums are best given in f32, whatever the model's dtype: then nothing is rounded
    before it is summed."""
    replays = False
    """Sums are calls of C kernels, so that a captured step can repeat them (`replay`)."""

    def __init__(self, place: RankPlace, timeout_s: float) -> None:
        self.place = place
        self.timeout_s = timeout_s
        """Of each collective; may be changed between two of them."""
        self.exact_ranks = 1
        """`--exact-ranks`, 1 = off; set before a model is loaded."""

    @property
    def leaves(self) -> int:
        """Parts in which each rank sums its columns, to have the bits of `exact_ranks` ranks."""
        return max(1, self.exact_ranks // self.place.size)

    def prepare(self, width: int, dtype: torch.dtype) -> None:  # noqa: B027
        """Choose how rows of so many numbers are summed, before anything is. All ranks call this
        once for each time that they load the model, where they call it at all."""

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in the memory of x where that is contiguous. x: f32, bf16 or f16;
        summed in f32, rounded once."""

    def reduce_to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of x over all ranks in this dtype, rounded once. x: [T, N]."""
        return self.all_reduce(x).to(dtype)

    def reduce_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + the sum of x over all ranks, in residual's dtype. residual: the same on all
        ranks."""
        return residual + self.all_reduce(x).to(residual.dtype)

    def sums(self, dtype: torch.dtype) -> bool:
        """Whether what is added to a sum, of this dtype, and the norm of that are made with it:
        `reduce_add` and `reduce_add_norm`."""
        return False

    def reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor,
                        eps: float) -> tuple[Tensor, Tensor]:
        """(total, normed): `reduce_add`, and RMSNorm of that. weight: [N]. Where it `sums`."""
        raise TypeError("these ranks sum, and norm, one after the other")

    def replay(self, program: Callable[[], None]) -> None:
        """Run what was captured of the group's sums, as all ranks do. Raises `GroupTimeout` as a
        collective does."""
        program()

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int = -1, columns: int | None = None) -> Tensor:
        """Every rank's x side by side along its last dimension, or along its first (dim=0).
        columns: of the last dimension so many at most, what lies behind them is left out. The
        result is contiguous."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """That of rank `source`, in the memory of x where that is contiguous."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have come."""

    def agreed(self, number: float) -> float:
        """The least of what the ranks have measured, which all of them go by: what they do next
        must be the same."""
        return float(self.all_gather(torch.tensor([number], dtype=torch.float64)).min())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Meanwhile collectives are those of a group of this rank alone: they give what it has, and
        wait for nobody. For a check of its own computations, which others do not take part in."""
        place, self.place = self.place, ALONE
        try:
            yield
        finally:
            self.place = place

    @abstractmethod
    def fence(self, missing: int) -> None:
        """Let all ranks that wait, and all that will, raise `GroupTimeout` now, naming this one.
        For any thread that knows that a rank has ended."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group: the others, if they wait for this rank, raise. May be called twice."""


class LoneRank(RankGroup):
    """A group of one: nothing is sent, and nobody waited for."""

    replays = True

    def __init__(self) -> None:
        super().__init__(ALONE, 0.0)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1, columns: int | None = None) -> Tensor:
        return x if columns is None else x[..., :columns].contiguous()

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def agreed(self, number: float) -> float:
        return number

    def barrier(self) -> None:
        pass

    def fence(self, missing: int) -> None:
        pass

    def close(self) -> None:
        pass


# --- The gate before a step ----------------------------------------------------------------------

class StepGate:
    """The gate, as one rank sees it: before a step all ranks make sure that all have its plan.

    A scheduler that dies may have sent its last plan, or the masks of one, to some ranks alone.
    These would wait in their first collective for ranks that never come. So each rank says, in
    memory that all share, which step it has come to, and begins when all have come; or learns that
    another one has already adopted the next scheduler, and drops the plan, whose result nobody
    waits for any more. All ranks come to the same steps of one scheduler in the same order; marks
    only rise.

    Why all decide alike: a rank begins a step when all are there, and says so before it goes on. If
    one has begun it, all came to it, and whoever sees another one ahead also sees that it, or one
    before it, began the step: nobody drops it. If a rank went on without it, nobody begins it.
    """

    def __init__(self, place: RankPlace, path: Path, timeout_s: float) -> None:
        """path: the directory of the group's epoch, which is there; timeout_s: seconds to wait for
        another rank. Raises `OSError`."""
        self.place, self.timeout_s = place, timeout_s
        self._others = [rank for rank in range(place.size) if rank != place.rank]
        if self._others:
            fd = os.open(path / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(fd, 0, LINE * place.size)
                self._lines = mmap.mmap(fd, LINE * place.size)
            finally:
                os.close(fd)

    def opens(self, epoch: int, step: int, late: bool = False) -> bool:
        """Wait until all ranks have come to this step of the scheduler of this epoch; late: to its
        masks, which came after the plan. False: another rank has gone on without it. Raises
        `GroupTimeout` naming a rank that did not come."""
        mark = epoch << STEPS | 2 * step + late
        if not self._others:
            return True
        self._write(0, mark)
        began = monotonic()
        while (missing := self._behind(mark)) is not None:
            waited = monotonic() - began
            if waited > self.timeout_s:
                raise GroupTimeout(f"tensor parallelism: rank {missing} of {self.place.size} has "
                                   f"not come to step {step} within {self.timeout_s:g} s", missing)
            sleep(0 if waited < AWAKE_S else NAP_S)
        ahead = any(self._read(rank, 0) >> STEPS > epoch for rank in self._others)
        if ahead and not any(self._read(rank, 1) >= mark for rank in self._others):
            return False
        self._write(1, mark)
        return True

    def pass_by(self, epoch: int) -> None:
        """From now on this rank computes for the scheduler of this epoch: none of an older one's
        steps."""
        if self._others:
            self._write(0, epoch << STEPS)

    def leave(self) -> None:
        """This rank begins no step any more."""
        if self._others:
            self._write(0, LEFT)

    def _behind(self, mark: int) -> int | None:
        """A rank that has not come so far; None if there is none."""
        return next((rank for rank in self._others if self._read(rank, 0) < mark), None)

    def _read(self, rank: int, word: int) -> int:
        value: int = _WORD.unpack_from(self._lines, LINE * rank + 8 * word)[0]
        return value

    def _write(self, word: int, mark: int) -> None:
        _WORD.pack_into(self._lines, LINE * self.place.rank + 8 * word, mark)
