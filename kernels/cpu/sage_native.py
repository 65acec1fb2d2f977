"""Attention with queries and keys in 8 bits, in C: see `kernels/reference/sage.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from actorium.kernels.cpu.attention_native import address_of, chunk_rows
from actorium.kernels.reference.paged_attention import ExtendChunk
from actorium.kernels.reference.sage import KeyMeans


class NativeSage:
    """The C kernel `sage_extend`: chunks of sequences, of heads of multiples of 32 numbers up to
    256, over pages in bf16, or of codes in int8."""

    def __init__(self, lib: ctypes.CDLL, threads: int, rows: Sequence[ExtendChunk],
                 page_size: int, window: int, scale: float, means: KeyMeans) -> None:
        """rows: their page tables are kept alive."""
        self.lib, self.threads, self.rows, self.chunks = lib, threads, rows, chunk_rows(rows)
        self.page_bits, self.window, self.scale = page_size.bit_length() - 1, window, scale
        self.means = means

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None) -> Tensor:
        """See `Attend`."""
        _, heads, dim = q.shape
        out = q.new_empty(q.shape) if out is None else out
        self.lib.sage_extend(
            q.data_ptr(), q.stride(0), layer.data_ptr(), address_of(layer, scales),
            self.means(layer).data_ptr(), self.chunks.data_ptr(), len(self.chunks), out.data_ptr(),
            heads, layer.shape[1] // 2, dim, self.page_bits, self.window, self.scale, self.threads)
        return out
