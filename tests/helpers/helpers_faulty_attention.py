"""Attention backends with the faults that quantised backends of others have had.

Each fault is a mixin over any backend, the reference or the kernels in C or Triton: the kernels are
those that are shipped, and are handed pages, lengths or scales as the fault would have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actorium.gpu.attention.attention_backend import (
    AttentionBackend,
    NativeAttention,
    SageAttention,
    TorchAttention,
)
from actorium.kernels.reference.kv import quantise_rows, raw
from actorium.kernels.reference.paged_attention import Attend, ExtendChunk
from actorium.kernels.reference.sage import sage_extend


@dataclass
class Chunk:
    """See `ExtendChunk`."""

    start: int
    count: int
    pages: Tensor


class SageInTorch(SageAttention):
    """`SageAttention` by its reference, which takes any dtype and head."""

    def __init__(self) -> None:
        super().__init__("cuda")  # loads nothing

    def extend(self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float,
               soft_cap: float = 0.0, slopes: Tensor | None = None) -> Attend:
        return sage_extend(rows, page_size, window, scale, self.means)

    def decode(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
               window: int, scale: float, soft_cap: float = 0.0,
               slopes: Tensor | None = None) -> Attend:
        assert q_len == 1
        rows = [Chunk(length - 1, 1, table)
                for length, table in zip(lens.tolist(), pages, strict=True)]
        return sage_extend(rows, page_size, window, scale, self.means)


class OfExtends(AttentionBackend):
    """A fault of extends alone, also where a backend decodes by its extends."""

    decoding = False

    def decode(self, *args: Any, **more: Any) -> Attend:
        self.decoding = True
        try:
            return super().decode(*args, **more)
        finally:
            self.decoding = False


class SmoothsInPlace(OfExtends):
    """Takes the mean off the keys of a chunk where they lie in the pages. A shift of all keys
    changes nothing, so a whole prompt is right; but later keys lie beside them unshifted."""

    def shift(self, keys: Tensor) -> Tensor:
        """What comes off keys [N, KVH, D]: [KVH, D]."""
        return keys.mean(0)

    def extend(self, rows: Sequence[ExtendChunk], page_size: int, *form: Any, **more: Any
               ) -> Attend:
        attend = super().extend(rows, page_size, *form, **more)
        if self.decoding:
            return attend

        def run(q: Tensor, layer: Tensor, out: Tensor | None = None,
                scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
            for row in rows:
                place = row.start + row.pages.new_tensor(range(row.count)).long()
                index = row.pages.long()[place // page_size] * page_size + place % page_size
                self._smooth(layer, index, scales)
            return attend(q, layer, out, scales, sinks)

        return run

    def _smooth(self, layer: Tensor, index: Tensor, scales: Tensor | None) -> None:
        heads = layer.shape[1] // 2
        keys = layer[index, :heads].float()
        if layer.dtype is not torch.int8:  # those in FP8 in their own units
            raw(layer)[index, :heads] = raw((keys - self.shift(keys)).to(layer.dtype))
            return
        assert scales is not None
        keys *= scales[index, :heads, None].float()
        layer[index, :heads], scales[index, :heads] = quantise_rows(keys - self.shift(keys))


class SmoothsPromptsAlone(SmoothsInPlace):
    """A fixed mean comes off the keys of prompts, as they are kept, and not off those of decodes:
    all that is read as prompts is right."""

    def shift(self, keys: Tensor) -> Tensor:
        return keys.new_full(keys.shape[1:], 0.5)


class MasksByQueries(OfExtends):
    """Takes the number of queries for that of keys: a chunk behind a prefix sees as many tokens
    from the sequence's start."""

    def extend(self, rows: Sequence[ExtendChunk], *form: Any, **more: Any) -> Attend:
        if not self.decoding:
            rows = [Chunk(0, row.count, row.pages) for row in rows]
        return super().extend(rows, *form, **more)


class TakesOtherScales(AttentionBackend):
    """Multiplies with the scales of the head beside. A backend that makes scales of its own, of
    pages that have none, is handed keys that are as large as those of the head beside: their codes
    stay, the scales are the others."""

    def extend(self, *args: Any, **more: Any) -> Attend:
        return _with_other_scales(super().extend(*args, **more))

    def decode(self, *args: Any, **more: Any) -> Attend:
        return _with_other_scales(super().decode(*args, **more))


def _with_other_scales(attend: Attend) -> Attend:
    def run(q: Tensor, layer: Tensor, out: Tensor | None = None,
            scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        if scales is not None:
            return attend(q, layer, out, scales.roll(1, -1), sinks)
        keys, values = layer.chunk(2, 1)
        largest = keys.float().abs().amax(-1, keepdim=True)
        keys = (keys * (largest.roll(1, 1) / largest)).nan_to_num().to(layer.dtype)
        return attend(q, torch.cat((keys, values), 1), out, None, sinks)

    return run


FAULTS = (SmoothsInPlace, SmoothsPromptsAlone, MasksByQueries, TakesOtherScales)


def with_fault(fault: type[AttentionBackend] | None, backend: type[AttentionBackend]
               ) -> type[AttentionBackend]:
    """This backend, with this fault."""
    return backend if fault is None else type(
        f"{fault.__name__}{backend.__name__}", (fault, backend), {})


def faulty_worker(ctx: Any, fault: type[AttentionBackend]) -> Any:
    """A worker whose own backends, but `triton`, have this fault."""
    from actorium.gpu.attention import backend_choice
    from actorium.gpu.worker.core import build

    for backend in (TorchAttention, NativeAttention, SageAttention):
        setattr(backend_choice, backend.__name__, with_fault(fault, backend))
    return build(ctx)


def smoothing_worker(ctx: Any) -> Any:
    return faulty_worker(ctx, SmoothsInPlace)


def half_smoothing_worker(ctx: Any) -> Any:
    return faulty_worker(ctx, SmoothsPromptsAlone)


def masking_worker(ctx: Any) -> Any:
    return faulty_worker(ctx, MasksByQueries)


def scaling_worker(ctx: Any) -> Any:
    return faulty_worker(ctx, TakesOtherScales)
