"""The set of kernels a model runs on: torch everywhere, C where it can be had."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from .activation import silu_mul
from .attention import decode_mask, paged_decode, token_index
from .kv import write_kv
from .linear import Linear, NativeLinear, PackedLinear, can_pack
from .native import library
from .norm import rms_norm
from .rope import apply_rope

SMALL_WEIGHT = 4 << 20
"""Elements of a weight of which two layouts are kept."""

Decode = Callable[[Tensor, Tensor], Tensor]
"""(q [B * Q, H, D], a layer's pages) -> [B * Q, H, D]"""


class TorchOps:
    """The reference: any device, any dtype."""

    name = "torch"

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product with this weight, in the layout that serves it best."""
        return PackedLinear(weight, bias) if can_pack(weight) else Linear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `norm.rms_norm`."""
        return rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `activation.silu_mul`."""
        return silu_mul(gate_up)

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
    ) -> Decode:
        """Attention of a step's decode rows, for every layer with this window.

        pages: i32[B, P]; lens: i32[B], with the q_len new tokens in them; span >= max(lens).
        """
        index = token_index(pages, lens, page_size, span)
        mask = decode_mask(lens, q_len, span, window)

        def run(q: Tensor, layer: Tensor) -> Tensor:
            out = paged_decode(q.view(-1, q_len, *q.shape[1:]), layer, index, mask, scale)
            return out.reshape(q.shape)

        return run


class NativeOps(TorchOps):
    """bf16 on the CPU, with the C library."""

    name = "native"

    def __init__(self, lib: ctypes.CDLL, threads: int) -> None:
        """threads: of each call, torch's own."""
        self.lib, self.threads = lib, threads

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """See `TorchOps.linear`."""
        if weight.numel() <= SMALL_WEIGHT and can_pack(weight):
            return NativeLinear(weight, bias, self.lib, self.threads)
        return super().linear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `norm.rms_norm`."""
        y = torch.empty_like(x)
        self.lib.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1],
                          eps, self.threads)
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `activation.silu_mul`."""
        rows, width = gate_up.shape
        y = gate_up.new_empty((rows, width // 2))
        self.lib.silu_mul(gate_up.data_ptr(), y.data_ptr(), rows, width // 2, self.threads)
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
    ) -> Decode:
        """See `TorchOps.decode`."""
        if q_len != 1:
            return super().decode(pages, lens, span, q_len, page_size, window, scale)
        bits = page_size.bit_length() - 1
        lens = lens.contiguous()
        plain: list[Decode] = []

        def run(q: Tensor, layer: Tensor) -> Tensor:
            if layer.dtype is not torch.bfloat16:
                if not plain:
                    plain.append(TorchOps.decode(
                        self, pages, lens, span, q_len, page_size, window, scale))
                return plain[0](q, layer)
            rows, heads, dim = q.shape
            out = q.new_empty((rows, heads, dim))
            self.lib.paged_decode(
                q.data_ptr(), q.stride(0), layer.data_ptr(), pages.data_ptr(), pages.stride(0),
                lens.data_ptr(), out.data_ptr(), rows, heads, layer.shape[1] // 2, dim, bits,
                window, scale, self.threads)
            return out

        return run


def select_ops(dtype: torch.dtype, device: torch.device, head_dim: int, native: bool) -> TorchOps:
    """The fastest kernels for a model; native=False keeps to torch."""
    if native and device.type == "cpu" and dtype is torch.bfloat16 and head_dim <= 256:
        lib = library()
        if lib is not None:
            return NativeOps(lib, torch.get_num_threads())
    return TorchOps()
