"""Attention over paged keys and values, in C: the `Attend`s of steps on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .attention import Attend, Chunk, torch_decode

TILE_DIM = 32
"""What the head dimension must be a multiple of for `paged_extend`."""


class NativeDecode:
    """The C kernel `paged_decode`: the last tokens of every sequence."""

    def __init__(
        self, lib: ctypes.CDLL, threads: int, pages: Tensor, lens: Tensor, span: int, q_len: int,
        page_size: int, window: int, scale: float,
    ) -> None:
        """See `attention.torch_decode`, which serves pages that the kernel does not."""
        self.lib, self.threads, self.pages, self.lens = lib, threads, pages, lens.contiguous()
        self.span, self.q_len, self.page_size = span, q_len, page_size
        self.window, self.scale = window, scale
        self.plain: Attend | None = None

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None) -> Tensor:
        """See `Attend`."""
        if layer.dtype is not torch.bfloat16:
            return self._plain(q, layer, out, scales)
        rows, heads, dim = q.shape
        out = q.new_empty(q.shape) if out is None else out
        self.lib.paged_decode(
            q.data_ptr(), q.stride(0), layer.data_ptr(), self.pages.data_ptr(),
            self.pages.stride(0), self.lens.data_ptr(), out.data_ptr(), rows, self.q_len, heads,
            layer.shape[1] // 2, dim, self.page_size.bit_length() - 1, self.window, self.scale,
            self.threads)
        return out

    def _plain(self, q: Tensor, layer: Tensor, out: Tensor | None,
               scales: Tensor | None) -> Tensor:
        if self.plain is None:
            self.plain = torch_decode(self.pages, self.lens, self.span, self.q_len, self.page_size,
                                      self.window, self.scale)
        return self.plain(q, layer, out, scales)


class NativeExtend:
    """The C kernel `paged_extend`: chunks of sequences."""

    def __init__(
        self, lib: ctypes.CDLL, threads: int, chunks: Tensor, tables: Sequence[Tensor],
        page_size: int, window: int, scale: float, plain: Callable[[], Attend],
    ) -> None:
        """chunks: i64[n, 4]: address of the page table, first row in q, tokens before, tokens.
        tables: kept alive; plain: makes what serves pages the kernel does not."""
        self.lib, self.threads, self.chunks, self.tables = lib, threads, chunks, tables
        self.bits, self.window, self.scale = page_size.bit_length() - 1, window, scale
        self.plain = plain

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None) -> Tensor:
        """See `Attend`."""
        _, heads, dim = q.shape
        if layer.dtype is not torch.bfloat16 or dim % TILE_DIM:
            return self.plain()(q, layer, out, scales)
        out = q.new_empty(q.shape) if out is None else out
        self.lib.paged_extend(
            q.data_ptr(), q.stride(0), layer.data_ptr(), self.chunks.data_ptr(),
            len(self.chunks), out.data_ptr(), heads, layer.shape[1] // 2, dim, self.bits,
            self.window, self.scale, self.threads)
        return out


def chunk_rows(rows: Sequence[Chunk]) -> Tensor:
    """`NativeExtend`'s chunks, the most work first."""
    found: list[tuple[int, int, int, int]] = []
    first = 0
    for row in rows:
        found.append((row.pages.data_ptr(), first, row.start, row.count))
        first += row.count
    found.sort(key=lambda c: -c[3] * (2 * c[2] + c[3]))
    return torch.tensor(found)
