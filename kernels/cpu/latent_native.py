"""What a layer with latent attention and a router in f32 takes of C: attention over latents,
products of heads, and products with weights in f32. A row comes out the same whatever others there
are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.cpu.attention_native import NativeExtend, address_of
from actorium.kernels.inputs import Input
from actorium.kernels.linear import Linear, TileLinear
from actorium.kernels.reference.latent import HeadProducts

WHOLE = 32
"""Numbers of which the kernel takes as many as hold a row."""
PANELS = 64
"""Columns of two panels, of which a head's part is a multiple (`linear_heads`)."""


class NativeLatents(NativeExtend):
    """The C kernel `latent_extend`: chunks of sequences over pages of latents, and decodes, which
    are chunks of one token: those of a window too, so that each reads nothing behind itself."""

    @classmethod
    def of_decodes(cls, lib: ctypes.CDLL, threads: int, pages: Tensor, lens: Tensor, q_len: int,
                   page_size: int, window: int, scale: float) -> NativeLatents:
        tables, rows = [own.contiguous() for own in pages], len(lens) * q_len
        starts = lens.long()[:, None] + torch.arange(-q_len, 0)
        chunks = torch.ones((rows, 4), dtype=torch.int64)
        chunks[:, 0] = torch.tensor([own.data_ptr() for own in tables]).repeat_interleave(q_len)
        chunks[:, 1] = torch.arange(rows)
        chunks[:, 2] = starts.flatten().clamp_(min=0)  # padding may be shorter than its rows
        order = chunks[:, 2].argsort(descending=True, stable=True)
        return cls(lib, threads, chunks[order], tables, page_size, window, scale)

    def __call__(self, q: Tensor, layer: Tensor, out: Tensor | None = None,
                 scales: Tensor | None = None) -> Tensor:
        row = q.shape[2]
        if not (more := -row % WHOLE):
            return super().__call__(q, layer, out, scales)
        own = super().__call__(F.pad(q, (0, more)), layer, None, scales)[..., :row]
        return own.contiguous() if out is None else out.copy_(own)

    def _run(self, q: Tensor, layer: Tensor, chunks: Tensor, out: Tensor,
             scales: Tensor | None = None) -> None:
        self.lib.latent_extend(
            q.data_ptr(), q.stride(0), layer.data_ptr(), address_of(layer, scales),
            chunks.data_ptr(), len(chunks), out.data_ptr(), q.shape[1], layer.shape[2],
            self.page_size.bit_length() - 1, self.window, self.scale, self.threads)


class NativeHeads(HeadProducts):
    """The weights of all heads in tiles, one behind the other."""

    def __init__(self, weight: Tensor, lib: ctypes.CDLL, threads: int, scratch: Tensor) -> None:
        """weight: bf16[H, N, M]; not kept. The rest: see `TileLinear`."""
        self.heads, columns, self.outs = weight.shape
        self.more, self.lib, self.threads = -columns % WHOLE, lib, threads
        self.room = self.outs + -self.outs % PANELS
        turned = F.pad(weight, (0, self.room - self.outs, 0, self.more)).transpose(1, 2)
        self.tiles = TileLinear(turned.flatten(0, 1), None, lib, threads, scratch)

    def __call__(self, x: Tensor) -> Tensor:
        own = (F.pad(x, (0, self.more)) if self.more else x).transpose(0, 1).contiguous()
        y = x.new_empty((len(x), self.heads, self.room))
        self.lib.linear_heads(self.tiles.packed_at, own.data_ptr(), y.data_ptr(), len(x),
                              self.heads, self.threads)
        return y if self.room == self.outs else y[..., :self.outs]


class SplitLinear(Linear):
    """A weight in f32 as a sum of weights in bf16, without loss: one where it is bf16 in truth, as
    in most checkpoints, else three. Products with inputs in bf16 are then as in f32."""

    def __init__(self, parts: Sequence[TileLinear]) -> None:
        self.parts = parts

    def __call__(self, x: Input) -> Tensor:
        return self.wide(x)

    def wide(self, x: Input) -> Tensor:
        """y as f32."""
        y = self.parts[0].wide(x)
        for part in self.parts[1:]:
            y += part.wide(x)
        return y


def split_floats(weight: Tensor) -> list[Tensor]:
    """bf16 tensors whose sum is this weight, f32: as many as it takes, at most three, but for what
    is smaller than bf16's numbers are."""
    parts: list[Tensor] = []
    rest = weight
    while not parts or (len(parts) < 3 and bool(rest.any())):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return parts
