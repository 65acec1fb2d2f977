"""Which part of each of a checkpoint's tensors one rank has: what the whole model's `TensorSpec`s
and the rank's say together. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from actorium.gpu.families.tensor_specs import TensorSpec


class Span(NamedTuple):
    """Rows (or columns) of a tensor that a rank has one after the other."""

    start: int
    stop: int
    size: int
    """With zeros behind them where a number that ranks share is not divisible, on the last rank."""


class TensorSlice(NamedTuple):
    """A rank's part of a tensor."""

    dim: int
    """0: it has some of the rows; 1: of each row, some columns."""
    spans: tuple[Span, ...]


def rank_slices(whole: Sequence[TensorSpec], own: Sequence[TensorSpec], rank: int,
                size: int) -> dict[str, TensorSlice]:
    """By name, the part of each tensor that the rank has not all of. whole, own: of
    `model_tensors`, of the model and of the rank's shape."""
    found = {}
    for all_, part in zip(whole, own, strict=True):
        assert all_.name == part.name
        if all_.shape != part.shape:
            found[all_.name] = _slice(all_, part, rank, size)
    return found


def _slice(whole: TensorSpec, own: TensorSpec, rank: int, size: int) -> TensorSlice:
    [dim] = [d for d, (a, b) in enumerate(zip(whole.shape, own.shape, strict=True)) if a != b]
    if dim > 1:
        raise ValueError(f"{whole.name}: dimension {dim} of {whole.shape} is not shared out")
    parts = (whole.segments, own.segments) if dim == 0 and whole.segments else (
        (whole.shape[dim],), (own.shape[dim],))
    return TensorSlice(dim, tuple(_spans(*parts, rank, size)))


def _spans(whole: Sequence[int], own: Sequence[int], rank: int, size: int) -> Iterator[Span]:
    at = 0
    for count, part in zip(whole, own, strict=True):
        start = part_of(count, part, rank, size) * part
        yield Span(at + min(start, count), at + min(start + part, count), part)
        at += count


def part_of(count: int, part: int, rank: int, size: int) -> int:
    """Which of the parts of `part` out of `count` a rank has: its own; or, where there are fewer
    than ranks (key and value heads), the one that neighbours have as well."""
    parts = -(-count // part)
    return rank * parts // size if size % parts == 0 else rank
