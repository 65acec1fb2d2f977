"""A group of ranks by torch.distributed: NCCL on GPUs, with a kernel of our own for few rows; gloo
elsewhere. `open_group` forms it, or one through shared memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actorium.gpu.parallel.one_shot_all_reduce import OneShotAllReduce, open_all_reduce
from actorium.gpu.parallel.rank_group import GroupTimeout, LoneRank, RankGroup, RankPlace
from actorium.gpu.parallel.shared_group import SharedMemoryGroup
from actorium.kernels.cpu.native_library import library

JOIN_S = 60.0
"""How long ranks may take to start, by default."""
STORE = "store"
SMALL = (torch.bfloat16, torch.float16)


class TorchGroup(RankGroup):
    """See `RankGroup`. With NCCL a collective is queued on the current stream like a kernel, and
    the host waits for none: who waits for the step's result sees that a rank is missing, and calls
    `fence`; NCCL itself gives up after `timeout_s` as it was when the group was formed."""

    def __init__(self, place: RankPlace, path: Path, timeout_s: float, join_s: float,
                 device: torch.device) -> None:
        super().__init__(place, timeout_s)
        self.device, self.failure = device, ""
        self.name = str(path)
        self.one_shot: OneShotAllReduce | None = None
        """What sums few rows on GPUs, once it is chosen."""
        self.calls = 0
        """Collectives that this rank has come to, as the others can read."""
        self.store = dist.FileStore(str(path / STORE), place.size)
        self.store.set_timeout(timedelta(seconds=join_s))
        self.group = self._joined(join_s)
        self.barrier()

    def _joined(self, join_s: float) -> Any:
        place, wait = self.place, timedelta(seconds=join_s)
        if self.device.type != "cuda":
            gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = wait
            # What listens here asks nobody who he is.
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            return self._guarded("join", lambda: dist.ProcessGroupGloo(
                self.store, place.rank, place.size, gloo))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        return dist.ProcessGroupNCCL(self.store, place.rank, place.size, options)

    def prepare(self, width: int, dtype: torch.dtype) -> None:
        # It stays over a sleep: the others have its memory open.
        if self.device.type == "cuda" and self.place.size > 1 and self.one_shot is None:
            self.one_shot = open_all_reduce(self, self.device, self.store, self.name, width, dtype)

    def sums(self, dtype: torch.dtype) -> bool:
        own = self.one_shot
        return own is not None and own.normed > 0 and dtype is own.dtype

    def reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor,
                        eps: float) -> tuple[Tensor, Tensor]:
        """See `RankGroup`. Of more rows than that pays for NCCL sums, and rounds."""
        from actorium.kernels.triton.all_reduce import sum_rows_norm
        from actorium.kernels.triton.norm import add_rms_norm

        own = self.one_shot
        if self.place.size > 1 and own is not None and own.norms(x, residual, weight):
            self._raise_if_over()
            return sum_rows_norm(x, own.peers, residual, weight, eps)
        normed, total = add_rms_norm(self.all_reduce(x), residual, weight, eps)
        return total, normed

    def all_reduce(self, x: Tensor) -> Tensor:
        own = x if x.is_contiguous() else x.contiguous()
        if self.place.size == 1:
            return own
        if self.one_shot is not None and self.one_shot.sums(own):
            from actorium.kernels.triton.all_reduce import sum_rows

            self._raise_if_over()
            return sum_rows(own, self.one_shot.peers)
        if self.device.type == "cuda":
            self._run("all_reduce", lambda: self.group.allreduce([own]))
            return own
        # gloo sums bf16 in bf16: each rank sums all parts itself, in f32 and in order.
        parts = self._gathered(own.float() if own.dtype in SMALL else own)
        return own.copy_(sum(parts[1:], parts[0]))

    def all_gather(self, x: Tensor, dim: int = -1, columns: int | None = None) -> Tensor:
        parts = self._gathered(x.contiguous())
        if columns is not None:
            # Cut before they are put together: the same copy leaves no gap between rows.
            wide = x.shape[-1]
            parts = [part[..., :max(0, columns - at * wide)] for at, part in enumerate(parts)]
        return torch.cat(parts, dim)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        if self.place.size == 1:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.place.size)]
        self._run("all_gather", lambda: self.group.allgather([parts], [x]))
        return parts

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        own = x if x.is_contiguous() else x.contiguous()
        if self.place.size == 1:
            return own
        self._run("broadcast", lambda: self.group.broadcast(own, source))
        return own

    def barrier(self) -> None:
        if self.place.size > 1:
            self._run("barrier", lambda: self.group.allreduce([
                torch.zeros(1, device=self.device)]))

    def agreed(self, number: float) -> float:
        # NCCL sends what lies on a device.
        own = torch.tensor([number], dtype=torch.float64, device=self.device)
        return float(self.all_gather(own).min())

    def fence(self, missing: int) -> None:
        self.failure = (f"tensor parallelism: rank {missing} of {self.place.size} is missing, "
                        "by another's word")
        self.close()

    def close(self) -> None:
        self.failure = self.failure or "tensor parallelism: this rank has left its group"
        if self.one_shot is not None:
            with suppress(RuntimeError):  # a device in error waits for nobody
                self.one_shot.give_up(torch.cuda.Stream(self.device))
        abort = getattr(self.group, "abort", None)
        if abort is not None:
            abort()

    def _raise_if_over(self) -> None:
        if self.failure:
            raise GroupTimeout(self.failure, -1)

    def _run(self, what: str, call: Callable[[], dist.Work]) -> None:
        self._raise_if_over()
        if self.device.type == "cuda":
            call().wait()  # of the stream, not of the host
            return
        self.calls += 1
        self.store.set(f"calls/{self.place.rank}", str(self.calls))
        self._guarded(what, lambda: call().wait(timedelta(seconds=self.timeout_s)))

    def _guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """What gloo throws when a rank does not come, as a `GroupTimeout` that names it."""
        try:
            return call()
        except RuntimeError:
            rank = next((rank for rank in range(self.place.size) if self._calls_of(rank)
                         < self.calls), -1)
            self.failure = (f"tensor parallelism: {what}: rank {rank} of {self.place.size} did not "
                            f"come within {self.timeout_s:g} s, or has ended")
            raise GroupTimeout(self.failure, rank) from None

    def _calls_of(self, rank: int) -> int:
        key = f"calls/{rank}"
        return int(self.store.get(key)) if self.store.check([key]) else 0


def open_group(place: RankPlace, path: Path, timeout_s: float,
               device: torch.device = torch.device("cpu"), join_s: float = JOIN_S) -> RankGroup:
    """The group, when all its ranks have come: each calls this with its own place.

    path: a directory of this epoch of the group alone; it is made, for this user only, where it is
    missing. Nothing is left in it that outlives the ranks' processes. timeout_s: of each
    collective, see `RankGroup`; join_s: of this call. device: where the tensors lie; on a CPU
    without a C compiler torch's gloo serves.

    Raises `GroupTimeout` naming a rank that did not come, and `OSError` where the directory cannot
    be used.
    """
    if place.size == 1:
        return LoneRank()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lib = library() if device.type == "cpu" else None
    if lib is not None:
        return SharedMemoryGroup(place, path, timeout_s, join_s, lib)
    return TorchGroup(place, path, timeout_s, join_s, device)
