"""One rank's part of what files have whole: of plain tensors, of rows in FP8 that carry their
scales (`kernels/scaled_linear.py`), and of rows of codes (`kernels/grouped_rows.py`).

What is taken of a mapped file is a view where rows lie together, so that no page of the others'
rows is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from actorium.actors.errors import BadConfig
from actorium.gpu.families.architectures import model_tensors
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import held_format
from actorium.gpu.parallel.rank_group import RankPlace
from actorium.gpu.parallel.rank_slices import Span, TensorSlice, part_of, rank_slices
from actorium.gpu.weights.lazy_tensors import LazyTensor
from actorium.kernels.grouped_rows import (
    Grouped,
    columns_of,
    is_grouped,
    pack_rows,
    row_format,
    unpack_rows,
)
from actorium.kernels.scaled_linear import COLUMNS, is_packed, pack, unpack

LOG = logging.getLogger("actorium.model")


@dataclass(frozen=True, slots=True)
class RankSlices:
    """What a rank has of each tensor; of a rank that is alone, all."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of those in the files of which it has a part."""
    slices: Mapping[str, TensorSlice] = field(default_factory=dict)

    def taken(self, name: str, tensor: Tensor, mapped: bool = False) -> Tensor:
        """The rank's part of a whole tensor; no memory of the rest is kept, unless it is `mapped`
        from a file. Raises `BadConfig` where it cannot be taken apart there."""
        own = self.slices.get(name)
        if own is None:
            return tensor
        part = sliced(name, tensor, own)
        return part if mapped else _apart(part)

    def lazily(self, name: str, whole: LazyTensor) -> LazyTensor:
        """The same of one that is not there yet."""
        own = self.slices.get(name)
        if own is None:
            return whole
        part = None if whole.cut is None else whole.cut(own)
        return part or LazyTensor(whole.dtype, partial(_read_slice, name, whole, own))

    def check_order(self, name: str) -> None:
        """Raises `BadConfig` for a weight whose columns are shared out and lie in an order of their
        own: of a group of columns, each rank would have some."""
        own = self.slices.get(name)
        if own is not None and own.dim == 1:
            raise _cannot(name, "its columns lie in an order of their own (act-order)")


def slices_of(whole: ModelShape, place: RankPlace) -> RankSlices:
    """Those of a rank of this model. Raises `BadConfig`, see `ModelShape.split`."""
    if place.size == 1:
        return RankSlices()
    specs, own = model_tensors(whole), model_tensors(whole.split(place.size))
    slices = rank_slices(specs, own, place.rank, place.size)
    wide = [all_.name for all_, part in zip(specs, own, strict=True)
            if held_format(whole.grouped, all_) and not held_format(whole.grouped, part)]
    if wide:
        LOG.warning("--tp %d: of %d weights (%s, ...) a rank has no whole groups of columns that "
                    "share a scale: they are held in %s", place.size, len(wide), wide[0],
                    whole.dtype)
    return RankSlices({spec.name: spec.shape for spec in specs if spec.name in slices},
                      slices)


def own_heads(scales: Tensor, whole: ModelShape, place: RankPlace) -> Tensor:
    """Of scales of a layer's keys and values, f32[2 * kv_heads], those of the rank's heads; of
    latents, which all ranks have, the same."""
    if place.size == 1 or whole.latent is not None:
        return scales
    each = whole.split(place.size).kv_heads
    start = part_of(whole.kv_heads, each, place.rank, place.size) * each
    return scales.view(2, -1)[:, start:start + each].reshape(-1).contiguous()


def sliced(name: str, tensor: Tensor, own: TensorSlice) -> Tensor:
    """See `RankSlices.taken`. name: for what is said."""
    if own.dim == 0:
        return _rows(tensor, own.spans)
    [span] = own.spans
    if is_grouped(tensor):
        return _grouped_columns(name, tensor, span)
    if is_packed(tensor):
        return _packed_columns(name, tensor, span)
    return _padded(tensor[:, span.start:span.stop], span.size - (span.stop - span.start), 1)


def _read_slice(name: str, whole: LazyTensor, own: TensorSlice) -> Tensor:
    return _apart(sliced(name, whole.read(), own))


def _apart(part: Tensor) -> Tensor:
    """In memory of its own."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()


def _rows(tensor: Tensor, spans: tuple[Span, ...]) -> Tensor:
    parts = []
    for span in spans:
        part, missing = tensor[span.start:span.stop], span.size - (span.stop - span.start)
        parts.append(part)
        if missing and (is_grouped(tensor) or is_packed(tensor)):
            parts.append(_nothing(tensor[max(0, span.stop - 1):][:1]).expand(missing, -1))
        elif missing:
            parts.append(tensor.new_zeros((missing, *tensor.shape[1:])))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _nothing(row: Tensor) -> Tensor:
    """A row of zeros in the format, and with the scales, of this one, so that rows that share
    scales still do."""
    if is_packed(row):
        weight, scales = unpack(row)
        return pack(torch.zeros_like(weight), scales)
    own = unpack_rows(row)
    zeros = own._replace(codes=torch.full_like(own.codes, own.format.zero),
                         mins=None if own.mins is None else torch.zeros_like(own.mins))
    return pack_rows(zeros)


def _packed_columns(name: str, rows: Tensor, span: Span) -> Tensor:
    weight, scales = unpack(rows)
    by_row = bool((scales == scales[:, :1]).all())
    if not by_row and span.start % COLUMNS:
        raise _cannot(name, f"in FP8, columns share scales by {COLUMNS}")
    missing, first = span.size - (span.stop - span.start), span.start // COLUMNS
    cut = _padded(weight.view(torch.uint8)[:, span.start:span.stop], missing, 1)
    count = -(-span.size // COLUMNS)
    own = scales[:, :1] if by_row else scales[:, first:first + count]
    if own.shape[1] not in (1, count):
        own = torch.cat((own, own[:, -1:].expand(-1, count - own.shape[1])), 1)
    return pack(cut.view(weight.dtype), own)


def _grouped_columns(name: str, rows: Tensor, span: Span) -> Tensor:
    form, columns, size = row_format(rows), columns_of(rows), span.stop - span.start
    group = form.group
    if group and (span.start % group or span.size % group or size % group):
        raise _cannot(name, f"columns {span.start:,} to {span.stop:,} of {columns:,} are not whole "
                      f"groups of {group} that share a scale")
    own = unpack_rows(rows)
    at = slice(span.start // group, span.stop // group) if group else slice(None)
    part = Grouped(own.codes[:, span.start:span.stop], own.scales[:, at],
                   None if own.mins is None else own.mins[:, at], form)
    if missing := span.size - size:
        many = missing // group if group else 0
        part = Grouped(
            _padded(part.codes, missing, 1, form.zero), _padded(part.scales, many, 1),
            None if part.mins is None else _padded(part.mins, many, 1), form)
    return pack_rows(part)


def _padded(tensor: Tensor, missing: int, dim: int, value: int = 0) -> Tensor:
    """Contiguous, with so many more rows or columns."""
    if not missing:
        return tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_full(shape, value)), dim)


def _cannot(name: str, why: str) -> BadConfig:
    return BadConfig(f"--tp: tensor {name} cannot be shared out: {why}", "tp")
