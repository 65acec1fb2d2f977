"""A group of ranks on one machine's CPU: collectives in C through a mapped file
(`kernels/cpu/all_reduce.c`)."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from actorium.gpu.parallel.rank_group import GroupTimeout, RankGroup, RankPlace, RanksDiffer

FILE = "ranks"
HEADER, SLOT = 4096, 1 << 20
"""Bytes: of the ranks' lines, and of one of a rank's two slots. Larger tensors go in parts."""
SPIN_NS = 100_000
"""That a rank spins for another before it sleeps; less where ranks share cores."""
CROWDED_NS = 5_000
POLL_S = 0.002
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LATE, GONE, FENCED, DIFFERS = 1, 2, 3, 4


class CallState(ctypes.Structure):
    """`struct group` of the C file."""

    _fields_ = [(name, ctypes.c_int64) for name in (
        "base", "slot", "rank", "size", "fd", "spin", "timeout", "phase", "outcome", "missing",
        "threads")]


class SharedMemoryGroup(RankGroup):
    """See `RankGroup`. The file is unlinked as soon as all ranks have mapped it, and
    its memory with the last of them."""

    wide = replays = True

    def __init__(self, place: RankPlace, path: Path, timeout_s: float, join_s: float,
                 lib: ctypes.CDLL) -> None:
        super().__init__(place, timeout_s)
        self.lib, self.failure = lib, ""
        self._missing = -1
        file, size = path / FILE, HEADER + 2 * place.size * SLOT
        self.fd = _create_file(file, size) if place.rank == 0 else _open_file(file, size, join_s)
        _hold(self.fd, place.rank)
        self.memory = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        cores = len(os.sched_getaffinity(0))
        self.state = CallState(
            whole.data_ptr(), SLOT, place.rank, place.size, self.fd,
            SPIN_NS if cores >= place.size else CROWDED_NS, 0, 0, 0, 0, torch.get_num_threads())
        self.at = self.met_at = ctypes.addressof(self.state)
        """Of what collectives are called with; `met_at`: of that of the real group, always."""
        if place.rank == 0:
            os.rename(file.with_suffix(".new"), file)
        try:
            self._join(join_s)
        finally:
            if place.rank == 0:
                file.unlink(missing_ok=True)

    def _join(self, join_s: float) -> None:
        """All ranks meet once. A rank that has not yet opened the file holds no lock in it: here
        that is no sign that it has ended."""
        deadline, own = time.monotonic() + join_s, self.place.rank
        marks = [HEADER - self.place.size + rank for rank in range(self.place.size)]
        self.memory[marks[own]:marks[own] + 1] = b"\1"
        while time.monotonic() < deadline:
            here = [self.memory[at] for at in marks]
            if all(here):
                break
            time.sleep(POLL_S)
        else:
            rank = here.index(0)
            self.close()
            raise GroupTimeout(f"tensor parallelism: rank {rank} of {self.place.size} has not "
                               f"joined the group within {join_s:g} s", rank)
        waits, self.timeout_s = self.timeout_s, join_s
        self.barrier()
        self.timeout_s = waits

    # --- collectives -----------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        own = x if x.is_contiguous() else x.contiguous()
        self._begin()
        self.lib.rank_all_reduce(self.at, own.data_ptr(), own.numel(), TYPES[x.dtype])
        self._check("all_reduce")
        return own

    def reduce_to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype is not torch.bfloat16 or x.dtype is dtype:
            return self.all_reduce(x).to(dtype)
        return self.reduce_add_norm(x, None, None, 0.0)[0]

    def reduce_add(self, x: Tensor, residual: Tensor) -> Tensor:
        if residual.dtype is not torch.bfloat16:
            return residual + self.all_reduce(x).to(residual.dtype)
        return self.reduce_add_norm(x, residual, None, 0.0)[0]

    def sums(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16

    def reduce_add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor | None,
                        eps: float) -> tuple[Tensor, Tensor]:
        """(total, normed): residual + the sum of x over all ranks, summed in f32 and rounded once,
        and RMSNorm of that (without a weight: total again).

        x: [T, N], f32 or bf16; residual: bf16[T, N], None = zeros; weight: bf16[N].
        """
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        total = x.new_empty(x.shape, dtype=torch.bfloat16)
        normed = total if weight is None else torch.empty_like(total)
        self._begin()
        self.lib.rank_reduce_add_norm(
            self.at, x.data_ptr(), TYPES[x.dtype],
            0 if residual is None else residual.data_ptr(), total.data_ptr(),
            0 if weight is None else weight.data_ptr(), eps, normed.data_ptr(), *x.shape)
        self._check("reduce_add_norm")
        return total, normed

    def all_gather(self, x: Tensor, dim: int = -1, columns: int | None = None) -> Tensor:
        own, size = x.contiguous(), self.place.size
        if dim == 0:
            rows, shape = 1, (size * x.shape[0], *x.shape[1:])
        else:
            wide = size * x.shape[-1]
            rows = x.shape[:-1].numel()
            shape = (*x.shape[:-1], wide if columns is None else min(wide, columns))
        y = x.new_empty(shape)
        self._begin()
        self.lib.rank_all_gather(self.at, own.data_ptr(), y.data_ptr(), rows,
                                 own.nbytes // max(1, rows), y.nbytes // max(1, rows))
        self._check("all_gather")
        return y

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        own = x if x.is_contiguous() else x.contiguous()
        self._begin()
        self.lib.rank_broadcast(self.at, own.data_ptr(), own.nbytes, source)
        self._check("broadcast")
        return own

    def replay(self, program: Callable[[], None]) -> None:
        self._begin()
        program()
        self._check("a captured step")

    def barrier(self) -> None:
        self._begin()
        self.lib.rank_barrier(self.at)
        self._check("barrier")

    @contextmanager
    def alone(self) -> Iterator[None]:
        memory, state, at = mmap.mmap(-1, HEADER + 2 * SLOT), self.state, self.at
        own = CallState.from_buffer_copy(state)
        own.base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        own.rank, own.size, own.phase = 0, 1, 0
        self.state, self.at = own, ctypes.addressof(own)
        try:
            with super().alone():
                yield
        finally:
            self.state, self.at = state, at

    def fence(self, missing: int) -> None:
        self.lib.rank_fence(self.met_at, missing)

    def close(self) -> None:
        if self.fd < 0:
            return
        self.failure = self.failure or "tensor parallelism: this rank has left its group"
        fd, self.fd = self.fd, -1
        _hold(fd, self.place.rank, fcntl.F_UNLCK)
        # Another thread may be about to call `fence`: the mapping ends with this object.
        os.close(fd)

    def _begin(self) -> None:
        if self.failure:
            raise GroupTimeout(self.failure, self._missing)
        self.state.timeout = int(self.timeout_s * 1e9)

    def _check(self, what: str) -> None:
        outcome, rank, size = self.state.outcome, self.state.missing, self.place.size
        if not outcome:
            return
        who = f"tensor parallelism: {what}: rank {rank} of {size}"
        if outcome == DIFFERS:
            self.failure = f"{who} came to another collective"
            self.fence(rank)
            raise RanksDiffer(self.failure)
        why = {LATE: f"did not come within {self.timeout_s:g} s", GONE: "has ended",
               FENCED: "is missing, by another's word"}[outcome]
        self.failure, self._missing = f"{who} {why}", rank
        self.fence(rank)
        raise GroupTimeout(self.failure, rank)


def _create_file(file: Path, size: int) -> int:
    """A new file of so many bytes, all of them there, under a name that nobody looks for yet."""
    fd = os.open(file.with_suffix(".new"),
                 os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        file.with_suffix(".new").unlink()
        raise
    return fd


def _open_file(file: Path, size: int, join_s: float) -> int:
    """Rank 0's file, when it is there."""
    deadline = time.monotonic() + join_s
    while True:
        try:
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            break
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise GroupTimeout(f"tensor parallelism: rank 0 has not made {file} within "
                                   f"{join_s:g} s", 0) from None
            time.sleep(POLL_S)
    found = os.fstat(fd)
    if found.st_size != size or found.st_uid != os.getuid():
        os.close(fd)
        raise OSError(f"{file}: is not of this group: {found.st_size} bytes of user "
                      f"{found.st_uid}, not {size} of {os.getuid()}")
    return fd


def _hold(fd: int, rank: int, how: int = fcntl.F_WRLCK) -> None:
    """Lock the rank's byte of the file, for as long as this process has it open; or unlock it."""
    lock = struct.pack("hhqqi4x", how, os.SEEK_SET, rank, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        raise OSError(error.errno, f"rank {rank} is there already") from None
