"""What the table of `gpu_kernels` is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

BF16 = torch.bfloat16
Run = Callable[[], Any]


class Case(NamedTuple):
    """One row of the table."""

    kernel: str
    shape: str
    run: Run
    bytes: float = 0.0
    """That must be moved at least."""
    flops: float = 0.0
    """Where arithmetic is the limit."""
    peers: dict[str, Run] = {}
    waiting: dict[str, Run] = {}
    """Peers that ask the device something on their way. They are never captured, nor compared with
    what is: beside them stands the case without a graph."""


class Setting(NamedTuple):
    """Where cases are made."""

    device: torch.device
    toy: bool
    ops: Any

    def size(self, full: int, toy: int) -> int:
        """Of a dimension."""
        return toy if self.toy else full

    def randn(self, *size: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(size, device=self.device, dtype=torch.float32).to(dtype)

    def arange(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.arange(count, device=self.device, dtype=dtype)
