"""Whether rows come out as they do alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

COUNTS = (2, 3, 5, 17, 32, 33, 100, 513)


def by_rows(run: Callable[[Tensor], Tensor], x: Tensor, counts: tuple[int, ...] = COUNTS) -> None:
    """Each row comes out as it does alone, first and last of any number of them."""
    alone = torch.cat([run(x[i:i + 1]) for i in range(len(x))])
    for count in counts:
        for at in (0, len(x) - count):
            assert torch.equal(run(x[at:at + count].contiguous()), alone[at:at + count]), count
