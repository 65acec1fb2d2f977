"""Which part of each of a checkpoint's tensors one rank has, as the `TensorSpec`s of the whole
model and of the rank say; and whether several numbers of ranks can give the same bits
(`--exact-ranks`). Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from actorium.actors.errors import BadConfig
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import MambaShape
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


# --- Equal bits ----------------------------------------------------------------------------------

def rank_faults(s: ModelShape, ranks: int) -> list[str]:
    """What keeps 1, 2, 4 ... `ranks` ranks from giving the same bits, in words; empty: nothing.

    s: of the whole model. ranks: a power of two.
    """
    try:
        part = s.split(ranks)
    except BadConfig as error:
        return [error.message.removeprefix("--tp: ")]
    found = []
    if s.dtype != "bfloat16":
        found.append(f"weights in {s.dtype}")
    if s.grouped is not None or s.fp8 is not None:
        found.append("weights in 4 to 8 bits, whose inputs are rounded together")
    widths = {"MLPs": s.intermediate} if s.has_dense else {}
    if s.experts is not None:
        widths |= {"experts": s.experts.size, "an expert that all tokens go through":
                   s.experts.shared}
        if s.experts.bias:
            found.append("biases of experts, which one rank adds")
    if s.mtp_layers:
        widths["the product that joins what is drafted from"] = 2 * s.hidden
    found += [f"{ranks} parts of {what} of {width} are not equal"
              for what, width in widths.items() if width % ranks]
    if s.vision is not None and s.vision.deepstack:
        found.append("DeepStack's rows, which several ranks add before they round their sum")
    if s.whole_qk_norm:
        found.append("the norms over all heads of queries and keys, which ranks would share")
    if any(own.attention and own.recurrent for own in s.parts):
        found.append("the sum of attention and the recurrent layer beside it, of which ranks would "
                     "add their parts")
    if isinstance(part.recurrence, MambaShape) and part.recurrence.shared_by > 1:
        found.append("the norm over a group of Mamba-2's heads, which ranks would share")
    return found


def require_rank_bits(s: ModelShape, ranks: int, passes: tuple[str, ...], native: bool) -> None:
    """Raise `BadConfig` where they cannot. passes: that are on; native: by kernels for the CPU."""
    if ranks == 1:
        return
    found = rank_faults(s, ranks)
    if not native:
        found.append("kernels that are not the CPU's own")
    if ("reduce_norm" in passes) != ("product_add" in passes):
        found.append("of the passes reduce_norm and product_add one alone")
    if found:
        raise BadConfig(f"exact_ranks: {ranks} ranks and fewer would not have the same bits: "
                        f"{'; '.join(found)}", "device.exact_ranks")
