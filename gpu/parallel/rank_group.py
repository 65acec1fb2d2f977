"""Forming the group of ranks that share a model: through shared memory on a CPU, with NCCL on
GPUs."""

from __future__ import annotations

from pathlib import Path

import torch

from actorium.gpu.parallel.rank_types import (
    ALONE,
    MAX_RANKS,
    GroupTimeout,
    LoneRank,
    RankGroup,
    RankPlace,
    RanksDiffer,
)
from actorium.gpu.parallel.shared_group import SharedMemoryGroup
from actorium.gpu.parallel.torch_group import TorchGroup
from actorium.kernels.cpu.native_library import library

__all__ = ["ALONE", "MAX_RANKS", "GroupTimeout", "LoneRank", "RankGroup", "RankPlace",
           "RanksDiffer", "open_group"]
JOIN_S = 60.0
"""How long ranks may take to start, by default."""


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
