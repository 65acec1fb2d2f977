"""What a vision tower runs on in C, in bf16: a patch's row has the same bits whatever other images
there are, on however many threads.

Products are those of the decoder's layers, weights with rows of any length among them. Attention is
that of prompts, in which every patch sees its whole segment; heads that are no multiple of 32
numbers have zeros behind their halves, in the rows and columns of the weights around them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.linear import Linear
from actorium.kernels.reference.activation import NO_ALPHAS, Alphas, activate
from actorium.kernels.reference.prompt_attention import AlikePrompts, prompt_rows
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.tower_ops import ERF, TANH, PatchAttention, TowerOps, Weight

WHOLE = 32
"""Numbers of which the kernel takes as many as hold a head."""
WIDEST = 256
"""Numbers of a head that it takes at most."""
SLICE = 1 << 14
"""Numbers that torch takes in one piece, all alike."""
GELUS = {ERF: "gelu_erf", TANH: "gelu"}
"""What `reference.activation` calls them."""
ALL = -1
"""A window that hides nothing."""


@dataclass(frozen=True, slots=True)
class NativeSegments:
    """As the kernel takes them."""

    chunks: Tensor
    """i64[segments, 4]: see `NativeExtend`. The most work first."""
    table: Tensor
    """i32[P]: pages of one token each, kept alive."""


def native_segments(lengths: Sequence[int]) -> NativeSegments:
    """Segments of so many rows, one after the other."""
    sizes = np.array(lengths, np.int64)
    starts, table = sizes.cumsum() - sizes, torch.arange(int(sizes.sum()), dtype=torch.int32)
    rows = np.stack((table.data_ptr() + 4 * starts, starts, 0 * sizes, sizes), 1)
    return NativeSegments(torch.from_numpy(rows[np.argsort(-sizes, kind="stable")]), table)


class NativePrompts:
    """Where the prompts of a step lie: for the kernel, and, where that cannot serve a layer, for
    torch."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.segments, self.longest = native_segments(lengths), max(lengths, default=0)
        self._lengths, self._device = lengths, device

    @functools.cached_property
    def rows(self) -> list[AlikePrompts]:
        """As `prompt_attention.prompt_rows` gives them."""
        return prompt_rows(self._lengths, self._device)


class NativeTowerOps(TowerOps):
    """See the module."""

    def __init__(self, ops: TorchOps, lib: ctypes.CDLL, threads: int, left: set[str]) -> None:
        """ops: whose products and norms are exact; left: shapes of weights that it has left to
        libraries."""
        self.ops, self.lib, self.threads, self._left = ops, lib, threads, left
        self._gelus = {kind: NumberMap(lib, threads, number_table(own))
                       for kind, own in GELUS.items()}
        self._wide = False

    @property
    def inexact(self) -> Sequence[str]:
        shapes = f"images (weights of {', '.join(sorted(self._left))}, by oneDNN)"
        wide = f"images (heads of more than {WIDEST} numbers, by torch)"
        return [shapes] * bool(self._left) + [wide] * self._wide

    def linear(self, weight: Weight) -> Linear:
        return self.ops.linear(*weight)

    def gated(self, gate: Weight, up: Weight) -> Callable[[Tensor], Tensor]:
        bias = (None if gate.bias is None or up.bias is None
                else torch.cat((gate.bias, up.bias)))
        own = self.ops.gated(torch.cat((gate.rows, up.rows)), bias, "silu")

        def run(x: Tensor) -> Tensor:
            y = own(x)
            assert isinstance(y, Tensor)
            return y
        return run

    def gelu(self, x: Tensor, kind: str) -> Tensor:
        return self._gelus[kind](x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.ops.rms_norm(x.contiguous(), weight, eps)

    def attention(self, heads: int, qkv: Weight, out: Weight) -> PatchAttention:
        if room(len(qkv.rows) // (3 * heads)) > WIDEST:
            self._wide = True
            return super().attention(heads, qkv, out)
        return NativePatchAttention(self, heads, qkv, out)

    def turns(self, cos: Tensor, sin: Tensor) -> Tensor:
        if self._wide:
            return super().turns(cos, sin)
        more = room(2 * cos.shape[1]) // 2 - cos.shape[1]
        return super().turns(F.pad(cos, (0, more)), F.pad(sin, (0, more))).contiguous()

    def segments(self, lengths: Sequence[int], device: torch.device) -> Any:
        if self._wide:
            return super().segments(lengths, device)
        return native_segments(lengths)


class NativePatchAttention(PatchAttention):
    """In C from the product before to the one behind."""

    def __init__(self, own: NativeTowerOps, heads: int, qkv: Weight, out: Weight) -> None:
        dim = len(qkv.rows) // (3 * heads)
        self.own, self.heads, self.dim, self.scale = own, heads, room(dim), dim**-0.5
        if self.dim != dim:
            qkv, out = widened(qkv, out, heads, dim, self.dim)
        self.qkv, self.out = own.linear(qkv), own.linear(out)

    def __call__(self, x: Tensor, residual: Tensor, turns: Tensor, segments: Any) -> Tensor:
        lib, threads, heads, dim = self.own.lib, self.own.threads, self.heads, self.dim
        qkv, width = self.qkv(x), heads * dim
        kept, y = x.new_empty((len(x), 2 * width)), x.new_empty((len(x), width))
        lib.turn_heads_wide(qkv.data_ptr(), turns.data_ptr(), kept.data_ptr(), len(x), heads, dim,
                            threads)
        lib.paged_extend(qkv.data_ptr(), 3 * width, kept.data_ptr(), 0, segments.chunks.data_ptr(),
                         len(segments.chunks), y.data_ptr(), heads, heads, dim, 0, ALL, self.scale,
                         threads, 0, 0.0, 0)
        return self.out.add(y, residual)


def room(dim: int) -> int:
    """Numbers that a head of `dim` has here."""
    return -(-dim // WHOLE) * WHOLE


def widened(qkv: Weight, out: Weight, heads: int, dim: int, wide: int) -> tuple[Weight, Weight]:
    """The weights around heads of `wide` numbers, in which those of `dim` lie: each half of a head
    at the beginning of a half."""
    place = torch.arange(dim)
    place[dim // 2:] += wide // 2 - dim // 2
    rows = qkv.rows.new_zeros((3 * heads, wide, qkv.rows.shape[1]))
    rows[:, place] = qkv.rows.unflatten(0, (3 * heads, dim))
    bias = None
    if qkv.bias is not None:
        bias = qkv.bias.new_zeros((3 * heads, wide))
        bias[:, place] = qkv.bias.unflatten(0, (3 * heads, dim))
        bias = bias.flatten()
    columns = out.rows.new_zeros((len(out.rows), heads, wide))
    columns[:, :, place] = out.rows.unflatten(1, (heads, dim))
    return Weight(rows.flatten(0, 1), bias), Weight(columns.flatten(1), out.bias)


class NumberMap:
    """A function of one number in bf16, of each number of a tensor."""

    def __init__(self, lib: ctypes.CDLL, threads: int, table: Tensor) -> None:
        """table: see `number_table`."""
        self.lib, self.threads, self.table = lib, threads, table

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self.lib.map_numbers(x.data_ptr(), self.table.data_ptr(), y.data_ptr(), x.numel(),
                             self.threads)
        return y


@functools.cache
def number_table(kind: str, alphas: Alphas = NO_ALPHAS) -> Tensor:
    """bf16[65536]: an activation of the numbers whose bits count from 0 on. Made in f64, in pieces
    within which torch does the same for each."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16).double()
    return torch.cat([activate(part, kind, alphas) for part in numbers.split(SLICE)]).bfloat16()
