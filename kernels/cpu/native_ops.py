"""The C backend: bf16 on a CPU."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actorium.kernels.cpu.attention_native import address_of
from actorium.kernels.cpu.column_parts import LongLinear, can_split, leaf_linear
from actorium.kernels.cpu.experts_native import choose_experts, combine_rows, native_experts
from actorium.kernels.cpu.grouped_native import (
    GroupedMemory,
    NativeGrouped,
    NativeGroupedGated,
    can_group,
)
from actorium.kernels.cpu.latent_native import NativeHeads, SplitLinear, split_floats
from actorium.kernels.cpu.tower_native import (
    ALL,
    WHOLE,
    WIDEST,
    NativePrompts,
    NativeTowerOps,
    NumberMap,
    number_table,
)
from actorium.kernels.grouped_rows import BlockRows
from actorium.kernels.inputs import InputForm, Quantised
from actorium.kernels.linear import (
    MAX_TILE_INS,
    Gated,
    Linear,
    NativeLinear,
    Reordered,
    TileGated,
    TileLinear,
    can_pack,
    can_pad,
    can_tile,
    huge,
    padded_columns,
)
from actorium.kernels.reference.activation import NO_ALPHAS, Alphas
from actorium.kernels.reference.experts import (
    EachExpert,
    ExpertChoice,
    ExpertProducts,
    Experts,
    UngatedProducts,
    combine,
)
from actorium.kernels.reference.kv import write_kv
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.scaled_linear import EXACT_COLUMNS, is_packed, to_form
from actorium.kernels.tower_ops import TowerOps

MAX_SCORED = 512
"""Numbers of an indexer's head, at most; as `MAX_HEAD` in `cpu/common.h`."""
SMALL_WEIGHT = 4 << 20
"""Elements of a weight of which two layouts are kept."""


class NativeOps(TorchOps):
    """bf16 on the CPU, with the C library."""

    name = "native"

    def __init__(self, lib: ctypes.CDLL, threads: int, tiles: bool | None = None,
                 exact: bool = False) -> None:
        """threads: of each call, torch's own. tiles: weights lie in tiles; None: where the
        processor has products for that. exact: whatever it costs; recurrent layers go token by
        token."""
        self.lib, self.threads, self.exact = lib, threads, exact
        in_tiles = lib.linear_ready() if tiles is None else tiles
        self.scratch = huge(threads * lib.linear_scratch()) if in_tiles else None
        self.padded = Counter[tuple[int, int]]()
        """Shapes of those small weights that have columns of zeros behind their own to be exact."""
        self.inexact: set[str] = set()
        """Shapes of the weights whose products go to libraries, which sum many rows otherwise than
        few."""
        self.uncut: set[str] = set()
        """Shapes of those that were to be summed in leaves, and are not."""

    @functools.cached_property
    def grouped_memory(self) -> GroupedMemory:
        """That of all weights in 4 to 8 bits."""
        return GroupedMemory()

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if can_group(weight):
            return NativeGrouped(weight, bias, self.lib, self.threads, self.grouped_memory)
        if self.scratch is not None and can_tile(weight):
            return TileLinear(weight, bias, self.lib, self.threads, self.scratch)
        if self.scratch is not None and can_pad(weight) and (
                self.exact or weight.numel() > SMALL_WEIGHT):
            # A small product takes no longer than the columns that are put behind its input.
            self.padded[weight.shape[0], weight.shape[1]] += weight.numel() <= SMALL_WEIGHT
            wide, order = padded_columns(weight)
            return Reordered(
                TileLinear(wide, bias, self.lib, self.threads, self.scratch), order)
        if is_packed(weight) and weight.shape[1] <= EXACT_COLUMNS:
            return super().linear(weight, bias)
        if self.scratch is not None and can_split(weight):
            return LongLinear(weight, bias, self.linear)
        self._leave(weight)
        if weight.numel() <= SMALL_WEIGHT and can_pack(weight):
            return NativeLinear(weight, bias, self.lib, self.threads)
        return super().linear(weight, bias)

    def _leave(self, weight: Tensor) -> None:
        """To a library."""
        self.inexact.add("x".join(map(str, weight.shape)))

    def linear_in_leaves(self, weight: Tensor, bias: Tensor | None, leaves: int) -> Linear:
        own = None if self.scratch is None else leaf_linear(weight, bias, leaves, self.lib,
                                                            self.threads, self.scratch)
        if own is None:
            self.uncut.add("x".join(map(str, weight.shape)))
            return self.linear(weight, bias)
        return own

    def gated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Gated:
        if activation == "silu" and can_group(weight) and weight.shape[0] % 32 == 0:
            return NativeGroupedGated(weight, bias, self.lib, self.threads, self.grouped_memory)
        if (activation == "silu" and self.scratch is not None and can_tile(weight)
                and weight.shape[0] % 32 == 0):
            return TileGated(weight, bias, self.lib, self.threads, self.scratch)
        return super().gated(weight, bias, activation)

    def linear_of_blocks(self, weight: BlockRows, bias: Tensor | None = None) -> Linear:
        if can_group(weight):
            return NativeGrouped(weight, bias, self.lib, self.threads, self.grouped_memory)
        return super().linear_of_blocks(weight, bias)

    def gated_of_blocks(self, weight: BlockRows, bias: Tensor | None, activation: str) -> Gated:
        if activation == "silu" and can_group(weight) and weight.outs % 32 == 0:
            return NativeGroupedGated(weight, bias, self.lib, self.threads, self.grouped_memory)
        return self.gated_by(self.linear_of_blocks(weight, bias), activation)

    def float_linear(self, weight: Tensor) -> Linear:
        scratch = self.scratch
        if scratch is None or weight.shape[1] > MAX_TILE_INS:
            self._leave(weight)
            return super().float_linear(weight)
        own, order = padded_columns(weight)
        tiles = [TileLinear(part, None, self.lib, self.threads, scratch)
                 for part in split_floats(own)]
        return SplitLinear(tiles) if len(order) == weight.shape[1] else Reordered(
            SplitLinear(tiles), order)

    def head_products(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        if self.scratch is None or weight.dtype is not torch.bfloat16:
            self._leave(weight)
            return super().head_products(weight)
        return NativeHeads(weight, self.lib, self.threads, self.scratch)

    def token_scores(self, q: Tensor, weights: Tensor, keys: Tensor, pages: Tensor, lens: Tensor,
                     page_size: int, span: int) -> Tensor:
        """A score has the same bits among any others."""
        batch, rows, heads, dim = q.shape
        if keys.dtype is not torch.bfloat16 or dim > MAX_SCORED:
            return super().token_scores(q, weights, keys, pages, lens, page_size, span)
        scores = torch.empty((batch, rows, span))
        q, weights, pages = q.float().contiguous(), weights.contiguous(), pages.contiguous()
        lens = lens.contiguous()
        self.lib.token_scores(
            q.data_ptr(), weights.data_ptr(), keys.data_ptr(), pages.data_ptr(), pages.shape[1],
            lens.data_ptr(), scores.data_ptr(), batch, rows, span, heads, dim,
            page_size.bit_length() - 1, self.threads)
        return scores

    def experts_of(self, own: Sequence[ExpertProducts]) -> Experts:
        joined = native_experts([each.gate_up for each in own], [each.down for each in own], [],
                                self.lib, self.threads, self.scratch)
        return EachExpert(own, self.combine) if joined is None else joined

    def ungated_experts(self, own: Sequence[UngatedProducts]) -> Experts:
        joined = native_experts([each.up for each in own], [each.down for each in own],
                                [each.activation for each in own], self.lib, self.threads,
                                self.scratch)
        return EachExpert(own, self.combine) if joined is None else joined

    def choose_experts(self, logits: Tensor, bias: Tensor | None, choice: ExpertChoice,
                       dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if dtype is not torch.bfloat16 or logits.stride(1) != 1:
            return super().choose_experts(logits, bias, choice, dtype)
        return choose_experts(self.lib, self.threads, logits, bias, choice)

    def combine(self, weights: Tensor, outs: Tensor) -> Tensor:
        """See `reference.experts.combine`: of bf16 a row has the same bits among any others."""
        if not weights.dtype == outs.dtype == torch.bfloat16:
            return combine(weights, outs)
        return combine_rows(self.lib, self.threads, weights, outs)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self.lib.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1],
                          eps, self.threads)
        return y

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float,  # type: ignore[override]
                   out: Tensor | None = None) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        rows, *parts, dim = x.shape
        self.lib.layer_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), y.data_ptr(),
                            y.stride(0), rows, *(parts or [1]), dim, eps, self.threads)
        return y

    def activation(self, kind: str, alphas: Alphas = NO_ALPHAS) -> Callable[[Tensor], Tensor]:
        return NumberMap(self.lib, self.threads, number_table(kind, alphas))

    def rms_norm_quant(self, x: Tensor, weight: Tensor, eps: float, form: InputForm) -> Quantised:
        if not form.int8:
            return super().rms_norm_quant(x, weight, eps, form)
        made = _room(x, x.shape[1], form)
        self.lib.rms_norm_int8(
            x.data_ptr(), weight.data_ptr(), 0 if made.plain is None else made.plain.data_ptr(),
            made.q.data_ptr(), made.scales.data_ptr(), *x.shape, form.columns, eps, self.threads)
        return made

    def silu_mul_quant(self, gate_up: Tensor, form: InputForm) -> Quantised:
        return (self._gate_quant(gate_up, form, 0) if form.int8
                else super().silu_mul_quant(gate_up, form))

    def gelu_mul_quant(self, gate_up: Tensor, form: InputForm) -> Quantised:
        return (self._gate_quant(gate_up, form, 1) if form.int8
                else super().gelu_mul_quant(gate_up, form))

    def _gate_quant(self, gate_up: Tensor, form: InputForm, gelu: int) -> Quantised:
        made = _room(gate_up, gate_up.shape[1] // 2, form)
        self.lib.gate_mul_int8(
            gate_up.data_ptr(), made.q.data_ptr(), made.scales.data_ptr(), *made.q.shape,
            form.columns, gelu, self.threads)
        return made

    @property
    def tower(self) -> TowerOps:
        """It is exact even where decoders need not be: its products have many rows, for which the
        columns that are put behind a weight's own count for little."""
        if self.scratch is None or not self.lib.extend_ready():
            return super().tower
        own = NativeOps(self.lib, self.threads, True, exact=True)
        return NativeTowerOps(own, self.lib, self.threads, own.inexact)

    def attends_prompts(self, dim: int) -> bool:
        """Whether `attend_prompts` is C's for heads of so many numbers, without windows."""
        return dim % WHOLE == 0 and dim <= WIDEST and bool(self.lib.extend_ready())

    def prompt_rows(self, lengths: Sequence[int], device: torch.device) -> NativePrompts:
        return NativePrompts(lengths, device)

    def attend_prompts(self, q: Tensor, kv: Tensor, prompts: NativePrompts, scale: float,
                       window: int = 0, distances: Tensor | None = None) -> Tensor:
        if not self.attends_prompts(q.shape[2]) or 0 < window < prompts.longest or (
                distances is not None):
            return super().attend_prompts(q, kv, prompts.rows, scale, window, distances)
        kv, y = kv.contiguous(), q.new_empty(q.shape)
        own = prompts.segments
        self.lib.paged_extend(
            q.data_ptr(), q.stride(0), kv.data_ptr(), 0, own.chunks.data_ptr(), len(own.chunks),
            y.data_ptr(), q.shape[1], kv.shape[1] // 2, q.shape[2], 0, ALL, scale, self.threads, 0,
            0.0, 0)
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(self.lib.silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(self.lib.gelu_mul, gate_up)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        y, x, gate = torch.empty_like(gate), x.contiguous(), gate.contiguous()
        self.lib.sigmoid_mul(x.data_ptr(), gate.data_ptr(), y.data_ptr(), y.numel())
        return y

    def sigmoid_scale(self, y: Tensor, gate: Tensor) -> Tensor:
        return self._gate_rows(y, gate, 0)

    def gate_add(self, out: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return self._gate_rows(y, gate, out.contiguous().data_ptr())

    def _gate_rows(self, x: Tensor, gate: Tensor, add: int) -> Tensor:
        """add: an address, or 0."""
        x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        self.lib.gate_rows(x.data_ptr(), gate.data_ptr(), gate.stride(0), add, y.data_ptr(),
                           *x.shape, self.threads)
        return y

    def clamped_gated(self, linear: Linear, alpha: float, limit: float) -> Gated:
        def gate(gate_up: Tensor) -> Tensor:
            rows, width = gate_up.shape
            y = gate_up.new_empty((rows, width // 2))
            self.lib.clamped_swiglu(gate_up.data_ptr(), y.data_ptr(), rows, width // 2, alpha,
                                    limit, self.threads)
            return y

        return Gated(linear, gate, lambda y, form: to_form(gate(y), form))

    def turn(self, x: Tensor, rows: Tensor) -> Tensor:
        """See `apply_rope`."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
        count, heads, dim = y.shape
        self.lib.rotate_write(y.data_ptr(), 0, rows.contiguous().data_ptr(), y.data_ptr(), 0,
                              y.data_ptr(), count, heads, 0, dim, 0.0, self.threads)
        return y

    @functools.cached_property
    def tanh(self) -> Callable[[Tensor], Tensor]:  # type: ignore[override]
        return self.activation("tanh")

    def cut_gelu_mul(self, gate_up: Tensor, deviations: float,  # type: ignore[override]
                     width: int, summed: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if summed is not None:
            return super().cut_gelu_mul(gate_up, deviations, width, summed)
        y = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
        self.lib.cut_gelu_mul(gate_up.data_ptr(), y.data_ptr(), *y.shape, deviations, width,
                              self.threads)
        return y

    def as_large(self, x: Tensor, as_of: Tensor) -> Tensor:  # type: ignore[override]
        x, as_of, y = x.contiguous(), as_of.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        self.lib.as_large(x.data_ptr(), as_of.data_ptr(), y.data_ptr(), *x.shape, self.threads)
        return y

    def _gate(self, call: Callable[..., None], gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        y = gate_up.new_empty((rows, width // 2))
        call(gate_up.data_ptr(), y.data_ptr(), rows, width // 2, self.threads)
        return y

    def rotate_write(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, rope: Tensor,
        pages: Tensor, index: Tensor, scales: Tensor | None = None,
    ) -> None:
        if pages.dtype is not torch.bfloat16 and pages.dtype.itemsize > 1:
            return super().rotate_write(qkv, heads, norm, eps, rope, pages, index, scales)
        rows, width, dim = qkv.shape
        to, at = pages, index
        fp8 = pages.dtype.itemsize == 1 and pages.dtype is not torch.int8
        if fp8:
            to = qkv.new_empty((rows, width - heads, dim))
            at = torch.arange(rows)
        self.lib.rotate_write(
            qkv.data_ptr(), 0 if norm is None else norm.data_ptr(), rope.data_ptr(),
            to.data_ptr(), address_of(to, scales), at.data_ptr(), rows, heads,
            (width - heads) // 2, dim, eps, self.threads)
        if fp8:
            write_kv(pages, to, index, scales)


def _room(x: Tensor, width: int, form: InputForm) -> Quantised:
    """For rows of so many columns in INT8, made of the rows of x."""
    rows = len(x)
    return Quantised(torch.empty((rows, width), dtype=torch.int8),
                     torch.empty((rows, width // form.columns)), x.dtype,
                     torch.empty_like(x) if form.plain else None)
