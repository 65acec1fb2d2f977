"""Attention over paged keys and values, in C: the `Attend`s of steps on the CPU.

Pages are bf16, or codes in int8 with a scale for each head of a token. Those in FP8 are made bf16
when they are read, some megabytes at a time; their scales go into the queries and the results."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.reference.kv import key_and_value_scales, scaled_heads
from actorium.kernels.reference.paged_attention import ExtendChunk, seen_pages
from actorium.kernels.reference.sage import KeyMeans

READ = (torch.bfloat16, torch.int8)
"""Pages that the kernels read as they are."""
WHOLE = 32
"""Numbers of which the kernel of latents takes as many as hold a row."""
ROUND = 128
"""Tokens at whose multiples the kernels' rounds begin: so must what is given them of a sequence."""
WIDENED = 1 << 25
"""Elements of pages in FP8 that a decode makes bf16 at a time, unless one sequence has more."""


class NativeDecode:
    """The C kernel `paged_decode`, or `latent_decode`: the last tokens of every sequence."""

    def __init__(
        self, lib: ctypes.CDLL, threads: int, pages: Tensor, lens: Tensor, q_len: int,
        page_size: int, window: int, scale: float, exact: bool = False, soft_cap: float = 0.0,
        slopes: Tensor | None = None, latents: bool = False,
        recorder: Callable[..., None] | None = None,
    ) -> None:
        """See `paged_attention.torch_decode`. exact: with the bits that `NativeExtend` gives the
        same tokens, where that can run; latents: see there; recorder: see `NativeDelta`."""
        self.soft_cap, self.slopes, self.latents = soft_cap, slopes, latents
        self.recorder = recorder
        self.lib, self.threads, self.pages, self.lens = lib, threads, pages, lens.contiguous()
        self.q_len, self.page_size = q_len, page_size
        self.window, self.scale, self.exact = window, scale, exact
        self.seen: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        if self.recorder is not None:
            self.recorder(self, self.__call__, q, layer, out, scales, sinks)
        if self.latents and q.shape[2] % WHOLE:
            return padded_rows(self, q, layer, out, scales)
        out = q.new_empty(q.shape) if out is None else out
        sunk = address(sinks)
        if layer.dtype in READ:
            self._run(q, layer, self.pages, self.lens, out, scales, sunk)
            return out
        return scaled(q, out, scales, lambda x: self._widened(x, layer, out, sunk))

    def _run(self, q: Tensor, layer: Tensor, pages: Tensor, lens: Tensor, out: Tensor,
             scales: Tensor | None, sinks: int) -> None:
        """sinks: their address, or 0."""
        rows, heads, dim = q.shape
        if self.latents:
            self.lib.latent_decode(
                q.data_ptr(), q.stride(0), layer.data_ptr(), address_of(layer, scales),
                pages.data_ptr(), pages.stride(0), lens.data_ptr(), out.data_ptr(), rows,
                self.q_len, heads, layer.shape[2], self.page_size.bit_length() - 1, self.window,
                self.scale, self.threads)
            return
        self.lib.paged_decode(
            q.data_ptr(), q.stride(0), layer.data_ptr(), address_of(layer, scales),
            pages.data_ptr(), pages.stride(0), lens.data_ptr(), out.data_ptr(), rows, self.q_len,
            heads, layer.shape[1] // 2, dim, self.page_size.bit_length() - 1,
            self.window, self.scale, self.threads, self.exact, sinks, self.soft_cap,
            address(self.slopes))

    def _widened(self, q: Tensor, layer: Tensor, out: Tensor, sinks: int) -> None:
        """Over pages in FP8, of some sequences at a time."""
        if self.seen is None:
            self.seen = self._seen()
        tables, lens = self.seen
        each = max(1, tables.shape[1] * self.page_size * layer[0].numel())
        step = max(1, WIDENED // each)
        for at in range(0, len(lens), step):
            own, rows = tables[at:at + step], slice(at * self.q_len, (at + step) * self.q_len)
            wide = widen(self.lib, self.threads, layer, own, self.page_size)
            self._run(q[rows], wide, torch.arange(own.numel(), dtype=torch.int32).view(own.shape),
                      lens[at:at + step], out[rows], None, sinks)

    def _seen(self) -> tuple[Tensor, Tensor]:
        """The page tables without what no row sees, and lengths that go with them."""
        tables, lens = self.pages, self.lens
        if self.window:
            tables, lens = seen_pages(tables, lens, self.page_size, self.window + self.q_len - 1,
                                      ROUND)
        width = -(-int(lens.max()) // self.page_size) if len(lens) else 0
        return tables[:, :max(1, width)].contiguous(), lens.contiguous()


class NativeExtend:
    """The C kernel `paged_extend`: chunks of sequences, of heads of multiples of 32 numbers; or
    `latent_extend`, over pages of latents, with rows of any width."""

    def __init__(
        self, lib: ctypes.CDLL, threads: int, chunks: Tensor, tables: Sequence[Tensor],
        page_size: int, window: int, scale: float, latents: bool = False, soft_cap: float = 0.0,
        slopes: Tensor | None = None,
    ) -> None:
        """chunks: i64[n, 4]: address of the page table, first row in q, tokens before, tokens.
        tables: kept alive. soft_cap, slopes: not of latents, as no sinks are."""
        self.soft_cap, self.slopes = soft_cap, slopes
        self.lib, self.threads, self.chunks, self.latents = lib, threads, chunks, latents
        self.tables = {table.data_ptr(): table for table in tables}
        self.page_size, self.window, self.scale = page_size, window, scale

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        if self.latents and q.shape[2] % WHOLE:
            return padded_rows(self, q, layer, out, scales)
        out = q.new_empty(q.shape) if out is None else out
        sunk = address(sinks)
        if layer.dtype in READ:
            self._run(q, layer, self.chunks, out, scales, sunk)
            return out
        return scaled(q, out, scales, lambda x: self._widened(x, layer, out, sunk))

    def _run(self, q: Tensor, layer: Tensor, chunks: Tensor, out: Tensor,
             scales: Tensor | None, sinks: int) -> None:
        """sinks: their address, or 0."""
        _, heads, dim = q.shape
        kernel, sizes, more = ((self.lib.latent_extend, [layer.shape[2]], []) if self.latents
                               else (self.lib.paged_extend, [layer.shape[1] // 2, dim],
                                     [sinks, self.soft_cap, address(self.slopes)]))
        kernel(q.data_ptr(), q.stride(0), layer.data_ptr(), address_of(layer, scales),
               chunks.data_ptr(), len(chunks), out.data_ptr(), heads, *sizes,
               self.page_size.bit_length() - 1, self.window, self.scale, self.threads, *more)

    def _widened(self, q: Tensor, layer: Tensor, out: Tensor, sinks: int) -> None:
        """Over pages in FP8, chunk by chunk."""
        size, several = self.page_size, max(1, ROUND // self.page_size)
        for address, first, start, count in self.chunks.tolist():
            behind = (max(0, start + 1 - self.window) // (several * size) * several
                      if self.window else 0)
            own = self.tables[address][behind:-(-(start + count) // size)]
            wide = widen(self.lib, self.threads, layer, own, size)
            table = torch.arange(len(own), dtype=torch.int32)
            self._run(q, wide, torch.tensor([[table.data_ptr(), first, start - behind * size,
                                              count]]), out, None, sinks)


def padded_rows(attend: NativeDecode | NativeExtend, q: Tensor, layer: Tensor, out: Tensor | None,
                scales: Tensor | None) -> Tensor:
    """What it gives for queries of a width that the kernel does not take."""
    row = q.shape[2]
    own = attend(F.pad(q, (0, -row % WHOLE)), layer, None, scales)[..., :row]
    return own.contiguous() if out is None else out.copy_(own)


def address(numbers: Tensor | None) -> int:
    """Where they lie; 0: there are none."""
    return 0 if numbers is None else numbers.data_ptr()


def address_of(layer: Tensor, scales: Tensor | None) -> int:
    """Where the kernels find the scales of these pages, bf16[tokens, 2 * kv_heads]; 0: pages are
    bf16."""
    if layer.dtype is not torch.int8:
        return 0
    assert scales is not None and scales.dtype is torch.bfloat16 and scales.is_contiguous()
    return scales.data_ptr()


def scaled(q: Tensor, out: Tensor, scales: Tensor | None,
           attend: Callable[[Tensor], None]) -> Tensor:
    """`out`, which `attend` fills for the queries it is given, with the scales of the pages."""
    if scales is None:
        attend(q)
        return out
    keys, values = key_and_value_scales(scales)
    attend(scaled_heads(q, keys))
    return out.copy_(scaled_heads(out, values))


@functools.cache
def numbers(dtype: torch.dtype) -> Tensor:
    """bf16[256]: what each byte means in this dtype of 8 bits."""
    assert dtype.itemsize == 1, dtype
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.bfloat16)


def widen(lib: ctypes.CDLL, threads: int, layer: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """These pages, i32, of a layer in FP8, one behind the other: bf16[pages * page_size, ...],
    without their scales."""
    pages = pages.contiguous()
    wide = torch.empty((pages.numel() * page_size, *layer.shape[1:]), dtype=torch.bfloat16)
    lib.widen_pages(layer.data_ptr(), page_size * layer[0].numel(), pages.data_ptr(),
                    pages.numel(), numbers(layer.dtype).data_ptr(), wide.data_ptr(), threads)
    return wide


def chunk_rows(rows: Sequence[ExtendChunk]) -> Tensor:
    """`NativeExtend`'s chunks, the most work first."""
    chunks: list[tuple[int, int, int, int]] = []
    first = 0
    for row in rows:
        chunks.append((row.pages.data_ptr(), first, row.start, row.count))
        first += row.count
    chunks.sort(key=lambda c: -c[3] * (2 * c[2] + c[3]))
    return torch.tensor(chunks)


# --- Queries and keys in 8 bits ------------------------------------------------------------------

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
                 scales: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        _, heads, dim = q.shape
        out = q.new_empty(q.shape) if out is None else out
        self.lib.sage_extend(
            q.data_ptr(), q.stride(0), layer.data_ptr(), address_of(layer, scales),
            self.means(layer).data_ptr(), self.chunks.data_ptr(), len(self.chunks), out.data_ptr(),
            heads, layer.shape[1] // 2, dim, self.page_bits, self.window, self.scale, self.threads)
        return out
