"""Before a step all ranks make sure that all of them have its plan.

A scheduler that dies may have sent its last plan, or the masks of one, to some ranks alone. These
would wait in their first collective for ranks that never come. So each rank says, in memory that
all share, which step it has come to, and begins when all are there; or learns that another one has
already heard of the next scheduler, and drops the plan, whose result nobody waits for any more.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from time import monotonic, sleep

from actorium.gpu.parallel.rank_types import GroupTimeout, RankPlace

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


class StepGate:
    """The gate, as one rank sees it. All ranks come to the same steps of one scheduler in the same
    order; marks only rise.

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
