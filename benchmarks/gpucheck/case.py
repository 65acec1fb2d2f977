"""What the tables of kernels are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actorium.gpu.attention.attention_backend import TorchAttention, TritonAttention

BF16 = torch.bfloat16
Run = Callable[[], Any]


class Truth(NamedTuple):
    """What a result must be."""

    kernel: str
    dtype: str
    """Both as in `truth.TOLERANCES`."""
    reference: Run
    """Gives as many tensors as the case's first run does, which comes behind it: what a run changes
    in place it leaves alone."""


class Case(NamedTuple):
    """How one row is checked and measured."""

    run: Run
    """Gives its results, those that it changes in place among them."""
    truth: Truth
    bytes: float = 0.0
    """That must be moved at least."""
    flops: float = 0.0
    """Where arithmetic is the limit."""
    peers: Mapping[str, Callable[[], Run]] = {}
    """Each is made when its turn comes: it may fail at that."""
    fp8: bool = False
    """Its arithmetic is FP8's."""


class Setting(NamedTuple):
    """Where cases are made."""

    device: torch.device
    toy: bool
    ops: Any
    attention: type[TorchAttention | TritonAttention]

    def size(self, full: int, toy: int) -> int:
        """Of a dimension."""
        return toy if self.toy else full

    def randn(self, *size: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(size, device=self.device, dtype=torch.float32).to(dtype)

    def arange(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.arange(count, device=self.device, dtype=dtype)


Named = Iterator[tuple[str, Callable[[], Case]]]
"""(name of the row, what makes the case): nothing is allocated for a row that is left out."""


def ready(run: Run) -> Callable[[], Run]:
    """Of a peer that needs no making."""
    return lambda: run
