"""Attention backends with the faults that quantised backends of others have had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actorium.gpu.attention.attention_backend import TorchAttention
from actorium.kernels.reference.paged_attention import Attend, ExtendChunk


@dataclass
class Chunk:
    """See `ExtendChunk`."""

    start: int
    count: int
    pages: Tensor


class SmoothsInPlace(TorchAttention):
    """Takes the mean off the keys of a chunk where they lie in the pages. A shift of all keys
    changes nothing, so a whole prompt is right; but later keys lie beside them unshifted."""

    def extend(self, rows: Sequence[ExtendChunk], page_size: int, *form: Any, **more: Any
               ) -> Attend:
        attend = super().extend(rows, page_size, *form, **more)

        def run(q: Tensor, layer: Tensor, out: Tensor | None = None,
                scales: Tensor | None = None) -> Tensor:
            for row in rows:
                place = row.start + row.pages.new_tensor(range(row.count)).long()
                index = row.pages.long()[place // page_size] * page_size + place % page_size
                keys = layer[index, :layer.shape[1] // 2]
                layer[index, :layer.shape[1] // 2] = keys - keys.mean(0)
            return attend(q, layer, out, scales)

        return run


class MasksByQueries(TorchAttention):
    """Takes the number of queries for that of keys: a chunk behind a prefix sees as many tokens
    from the sequence's start."""

    def extend(self, rows: Sequence[ExtendChunk], *form: Any, **more: Any) -> Attend:
        return super().extend([Chunk(0, row.count, row.pages) for row in rows], *form, **more)


class TakesOtherScales(TorchAttention):
    """Reads the scales of the head beside."""

    def extend(self, *args: Any, **more: Any) -> Attend:
        return _rolled(super().extend(*args, **more))

    def decode(self, *args: Any, **more: Any) -> Attend:
        return _rolled(super().decode(*args, **more))


def _rolled(attend: Attend) -> Attend:
    def run(q: Tensor, layer: Tensor, out: Tensor | None = None,
            scales: Tensor | None = None) -> Tensor:
        return attend(q, layer, out, None if scales is None else scales.roll(1))

    return run


def smoothing_worker(ctx: Any) -> Any:
    """A worker whose torch backend smooths in place."""
    from actorium.gpu.attention import backend_choice
    from actorium.gpu.worker.core import build

    backend_choice.TorchAttention = SmoothsInPlace  # type: ignore[misc]
    return build(ctx)
