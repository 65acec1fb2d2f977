"""Ranks of a group as threads of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actorium.gpu.parallel.rank_group import RankGroup, RankPlace, open_group

Body = Callable[[RankGroup], Any]


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
