"""What products take: their input as it is, quantised to 8 bits, or both, or not yet normed; and
sums not yet made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class InputForm(NamedTuple):
    """In which form a product takes its input."""

    columns: int = 0
    """Of the input that share a scale, in 8 bits; 0: it is not taken in 8 bits."""
    plain: bool = True
    """It is taken as it is."""
    norms: Callable[[int], bool] | None = None
    """Whether so many rows are better normed by the product itself: it takes them `Unnormed` then.
    None: it never does."""
    int8: bool = False
    """It is taken in INT8, not in FP8."""

    def also(self, other: InputForm) -> InputForm:
        """The form that serves both products: as it is, where they want it in 8 bits differently,
        and each quantises it then. Normed in any case."""
        if self.columns and other.columns and (self.columns, self.int8) != (other.columns,
                                                                            other.int8):
            return InputForm()
        return InputForm(self.columns or other.columns, self.plain or other.plain,
                         int8=self.int8 or other.int8)


@dataclass(frozen=True, slots=True)
class Quantised:
    """An input in FP8 or INT8, quantised once for all products that take it."""

    q: Tensor
    """e4m3[T, K], or i8[T, K]"""
    scales: Tensor
    """f32[T, ceil(K / columns)]"""
    dtype: torch.dtype
    """Of what was quantised: that of the products, too."""
    plain: Tensor | None = None
    """[T, K]: what was quantised, where some product takes it as it is."""
    sums: Tensor | None = None
    """i32[T]: of each row's integers, where whole rows share a scale and a kernel makes them."""

    @property
    def shape(self) -> torch.Size:
        """(T, K)"""
        return self.q.shape

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.q.device

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, rows: slice) -> Quantised:
        return self._each(lambda own: own[rows])

    def index_select(self, dim: int, rows: Tensor) -> Quantised:
        """Returns those rows; dim: 0."""
        return self._each(lambda own: own.index_select(dim, rows))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Quantised:
        return Quantised(change(self.q), change(self.scales), self.dtype, *(
            None if own is None else change(own) for own in (self.plain, self.sums)))


@dataclass(frozen=True, slots=True)
class Unnormed:
    """An input that the only product to take it norms on its way: see `InputForm.norms`."""

    x: Tensor
    """[T, K]"""
    weight: Tensor
    """[K]: of the norm, `norm.rms_norm`."""
    eps: float

    @property
    def shape(self) -> torch.Size:
        """(T, K)"""
        return self.x.shape

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows, and of the products."""
        return self.x.dtype

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice) -> Unnormed:
        return Unnormed(self.x[rows], self.weight, self.eps)

    def index_select(self, dim: int, rows: Tensor) -> Unnormed:
        """Returns those rows; dim: 0."""
        return Unnormed(self.x.index_select(dim, rows), self.weight, self.eps)


Input = Tensor | Quantised | Unnormed


def plain(x: Input) -> Tensor:
    """The input as it is. Raises `ValueError` where only its 8 bits were kept, or it is not
    normed."""
    if isinstance(x, Unnormed):
        raise ValueError("a product takes its input normed, but was given it without")
    if not isinstance(x, Quantised):
        return x
    if x.plain is None:
        raise ValueError("a product takes its input as it is, but only its 8 bits were kept")
    return x.plain


HiddenStream = Tensor | tuple[Tensor, Tensor]
"""Hidden states between two layers, [T, hidden]; or two that are still to be added up, which the
next norm does on its way."""


def settled(stream: HiddenStream) -> Tensor:
    """The hidden states, the sum made."""
    return stream if isinstance(stream, Tensor) else stream[0] + stream[1]
