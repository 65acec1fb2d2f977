"""Ranks of a group as threads of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actorium.gpu.parallel.rank_group import RankGroup, RankPlace
from actorium.gpu.parallel.torch_group import TorchGroup, open_group

Body = Callable[[RankGroup], Any]


def gloo(place: RankPlace, path: Path, timeout_s: float) -> RankGroup:
    """A group of processes of torch, as ranks on GPUs are one, on the CPU."""
    path.mkdir(exist_ok=True)
    return TorchGroup(place, path, timeout_s, 20.0, torch.device("cpu"))


def run_ranks(path: Path, size: int, body: Body, timeout_s: float = 20.0,
              form: Callable[..., RankGroup] = open_group) -> list[Any]:
    """What each rank's `body` returned, or the exception it raised."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            group = form(RankPlace(rank, size), path, timeout_s)
            try:
                found[rank] = body(group)
            finally:
                group.close()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def whole(found: list[Any]) -> list[Any]:
    """The same, where no rank raised."""
    for own in found:
        if isinstance(own, BaseException):
            raise own
    return found
