"""Attention backends with the faults that quantised backends of others have had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from actorium.gpu.attention.attention_backend import AttentionBackend, TorchAttention
from actorium.gpu.attention.sage_attention import SageAttention
from actorium.kernels.reference import sage
from actorium.kernels.reference.paged_attention import Attend, ExtendChunk
from actorium.kernels.reference.sage import code_rows, sage_extend


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
               soft_cap: float = 0.0) -> Attend:
        return sage_extend(rows, page_size, window, scale, self.means)

    def decode(self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int,
               window: int, scale: float, soft_cap: float = 0.0) -> Attend:
        assert q_len == 1
        rows = [Chunk(length - 1, 1, table)
                for length, table in zip(lens.tolist(), pages, strict=True)]
        return sage_extend(rows, page_size, window, scale, self.means)


class _Smooths(AttentionBackend):
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


class SmoothsInPlace(_Smooths, TorchAttention):
    """The same in 16 or 32 bits."""


class SageSmoothsInPlace(_Smooths, SageInTorch):
    """The same in 8 bits, where it was made."""


class _MasksByQueries(AttentionBackend):
    """Takes the number of queries for that of keys: a chunk behind a prefix sees as many tokens
    from the sequence's start."""

    def extend(self, rows: Sequence[ExtendChunk], *form: Any, **more: Any) -> Attend:
        return super().extend([Chunk(0, row.count, row.pages) for row in rows], *form, **more)


class MasksByQueries(_MasksByQueries, TorchAttention):
    """The same in 16 or 32 bits."""


class SageMasksByQueries(_MasksByQueries, SageInTorch):
    """The same in 8 bits."""


class SageTakesOtherScales(SageInTorch):
    """Multiplies codes of keys and queries with the scales of the head beside."""

    def extend(self, *args: Any, **more: Any) -> Attend:
        return _with_rolled_codes(super().extend(*args, **more))

    def decode(self, *args: Any, **more: Any) -> Attend:
        return _with_rolled_codes(super().decode(*args, **more))


def _with_rolled_codes(attend: Attend) -> Attend:
    def rolled(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = code_rows(x)
        return codes, scales.roll(1, -1)

    def run(q: Tensor, layer: Tensor, out: Tensor | None = None,
            scales: Tensor | None = None) -> Tensor:
        with patch.object(sage, "code_rows", rolled):
            return attend(q, layer, out, scales)

    return run


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
