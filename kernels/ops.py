"""The set of kernels a model runs on: torch everywhere, C where it can be had."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .activation import gelu_mul, silu_mul
from .attention import Attend, AttentionOps, Chunk, torch_decode, torch_extend
from .attention_native import NativeDecode, NativeExtend, chunk_rows
from .kv import write_kv
from .linear import (
    Gated,
    Linear,
    NativeLinear,
    PackedLinear,
    TileGated,
    TileLinear,
    can_pack,
    can_tile,
    huge,
)
from .mla import Latent
from .native import library
from .norm import rms_norm
from .rope import apply_rope

SMALL_WEIGHT = 4 << 20
"""Elements of a weight of which two layouts are kept."""


class TorchOps:
    """The reference: any device, any dtype."""

    name = "torch"

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product with this weight, in the layout that serves it best."""
        return PackedLinear(weight, bias) if can_pack(weight) else Linear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Gated:
        """silu (or gelu) of gate, times up; weight: [2 * I, K], gate's rows before those of up."""
        return Gated(self.linear(weight, bias),
                     self.gelu_mul if activation == "gelu" else self.silu_mul)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `norm.rms_norm`."""
        return rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `activation.silu_mul`."""
        return silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `activation.gelu_mul`."""
        return gelu_mul(gate_up)

    def rotate_write(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, rope: Tensor,
        pages: Tensor, index: Tensor,
    ) -> None:
        """Norm and rotate queries and keys in place, then write keys and values to the pages.

        qkv: [T, heads + 2 * kv_heads, D]; norm: [heads + kv_heads, D] or None; rope: [T, 2, 1, D];
        pages: [P, 2 * kv_heads, D]; index: i64[T].
        """
        qk = qkv[:, :(qkv.shape[1] + heads) // 2]
        normed = qk if norm is None else rms_norm(qk, norm, eps)
        qk.copy_(apply_rope(normed, rope))
        write_kv(pages, qkv[:, heads:], index)

    def decode(
        self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int,
        scale: float,
    ) -> Attend:
        """Attention of a step's decode rows, for every layer with this window.

        pages: i32[B, P]; lens: i32[B], with the q_len new tokens in them; span >= max(lens).
        """
        return torch_decode(pages, lens, span, q_len, page_size, window, scale)

    def extend(
        self, rows: Sequence[Chunk], page_size: int, window: int, scale: float
    ) -> Attend:
        """Attention of a step's chunks of prompts, for every layer with this window."""
        return torch_extend(rows, page_size, window, scale)

    @property
    def latent(self) -> AttentionOps:
        """Attention over latents."""
        return Latent()


class NativeOps(TorchOps):
    """bf16 on the CPU, with the C library."""

    name = "native"

    def __init__(self, lib: ctypes.CDLL, threads: int) -> None:
        """threads: of each call, torch's own."""
        self.lib, self.threads = lib, threads
        self.scratch = huge(threads * lib.linear_scratch()) if lib.amx_ready() else None
        self.tiles = bool(lib.extend_ready())

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `TorchOps.linear`."""
        if self.scratch is not None and can_tile(weight):
            return TileLinear(weight, bias, self.lib, self.threads, self.scratch)
        if weight.numel() <= SMALL_WEIGHT and can_pack(weight):
            return NativeLinear(weight, bias, self.lib, self.threads)
        return super().linear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Gated:
        """See `TorchOps.gated`."""
        if (activation == "silu" and self.scratch is not None and can_tile(weight)
                and weight.shape[0] % 32 == 0):
            return TileGated(weight, bias, self.lib, self.threads, self.scratch)
        return super().gated(weight, bias, activation)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `norm.rms_norm`."""
        y = torch.empty_like(x)
        self.lib.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1],
                          eps, self.threads)
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `activation.silu_mul`."""
        return self._gate(self.lib.silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `activation.gelu_mul`."""
        return self._gate(self.lib.gelu_mul, gate_up)

    def _gate(self, call: Callable[..., None], gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        y = gate_up.new_empty((rows, width // 2))
        call(gate_up.data_ptr(), y.data_ptr(), rows, width // 2, self.threads)
        return y

    def rotate_write(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, rope: Tensor,
        pages: Tensor, index: Tensor,
    ) -> None:
        """See `TorchOps.rotate_write`."""
        if pages.dtype is not torch.bfloat16:
            return super().rotate_write(qkv, heads, norm, eps, rope, pages, index)
        rows, width, dim = qkv.shape
        self.lib.rotate_write(
            qkv.data_ptr(), 0 if norm is None else norm.data_ptr(), rope.data_ptr(),
            pages.data_ptr(), index.data_ptr(), rows, heads, (width - heads) // 2, dim, eps,
            self.threads)

    def decode(
        self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int,
        scale: float,
    ) -> Attend:
        """See `TorchOps.decode`."""
        return NativeDecode(self.lib, self.threads, pages, lens, span, q_len, page_size, window,
                            scale)

    def extend(
        self, rows: Sequence[Chunk], page_size: int, window: int, scale: float
    ) -> Attend:
        """See `TorchOps.extend`."""
        plain = functools.cache(functools.partial(torch_extend, rows, page_size, window, scale))
        if not self.tiles:
            return plain()
        return NativeExtend(self.lib, self.threads, chunk_rows(rows), [r.pages for r in rows],
                            page_size, window, scale, plain)


def select_ops(dtype: torch.dtype, device: torch.device, head_dim: int, native: bool) -> TorchOps:
    """The fastest kernels for a model; native=False keeps to torch."""
    if native and device.type == "cpu" and dtype is torch.bfloat16 and head_dim <= 256:
        lib = library()
        if lib is not None:
            return NativeOps(lib, torch.get_num_threads())
    return TorchOps()
