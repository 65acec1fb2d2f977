"""The set of kernels a model runs on: torch everywhere, C where it can be had."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actorium.kernels.cpu.attention_native import NativeDecode, NativeExtend, chunk_rows
from actorium.kernels.cpu.native_library import library
from actorium.kernels.inputs import HiddenStream, Input, InputForm, PendingSum, Quantised, Unnormed
from actorium.kernels.linear import (
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
from actorium.kernels.ragged import Ragged
from actorium.kernels.reference.activation import gelu_mul, silu_mul
from actorium.kernels.reference.apply_plan import apply_plan
from actorium.kernels.reference.causal_conv import conv_extend
from actorium.kernels.reference.delta_rule import delta_extend
from actorium.kernels.reference.delta_window import DeltaLayer, delta_window
from actorium.kernels.reference.experts import Experts
from actorium.kernels.reference.gated_norm import gated_norm, norm_gated
from actorium.kernels.reference.kv import write_kv
from actorium.kernels.reference.latent import Latent
from actorium.kernels.reference.norm import rms_norm
from actorium.kernels.reference.paged_attention import (
    Attend,
    AttentionOps,
    ExtendChunk,
    torch_decode,
    torch_extend,
)
from actorium.kernels.reference.rope import apply_rope
from actorium.kernels.reference.ssd import SSDInputs, ssd_step
from actorium.kernels.sampling_ops import TorchSampling
from actorium.kernels.scaled_linear import ScaledLinear, is_packed, to_fp8

SMALL_WEIGHT = 4 << 20
"""Elements of a weight of which two layouts are kept."""


class TorchOps:
    """The reference: any device, any dtype."""

    name = "torch"
    reads_lengths = False
    """See `AttentionOps`."""

    groups_experts = False
    """All experts of a layer in one product, without the host; see `experts`."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product with this weight, in the layout that serves it best; see
        `scaled_mm.pack` for one in FP8."""
        if is_packed(weight):
            return ScaledLinear(weight, bias)
        return PackedLinear(weight, bias) if can_pack(weight) else Linear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None, activation: str) -> Gated:
        """silu (or gelu) of gate, times up; weight: [2 * I, K], gate's rows before those of up."""
        gates = ((self.gelu_mul, self.gelu_mul_fp8) if activation == "gelu"
                 else (self.silu_mul, self.silu_mul_fp8))
        return Gated(self.linear(weight, bias), *gates)

    def tune(self, device: torch.device) -> None:
        """Choose among ways to run the products that steps so far have run, by measuring. Waits
        for the device."""

    def experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        """Experts gated by SiLU; gate_up: [E, 2 * I, H]; down: [E, H, I]; or both in FP8, see
        `scaled_mm.pack`. Only where `groups_experts`."""
        raise TypeError(f"{self.name}: experts are run one by one")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `norm.rms_norm`."""
        return rms_norm(x, weight, eps)

    def rms_norm_add(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
        """See `norm.rms_norm_add`."""
        return residual + self.rms_norm(x, weight, eps)

    def norm(self, x: HiddenStream, weight: Tensor, eps: float,
             form: InputForm = InputForm()) -> tuple[Input, Tensor]:
        """(`norm.rms_norm` of x in this form, x): of hidden states, which may still be summed.
        In FP8 the same bits as the norm, rounded to its dtype, and `scaled_mm.quantise`."""
        if form.norms is not None and isinstance(x, Tensor) and form.norms(len(x)):
            return Unnormed(x, weight, eps), x
        if isinstance(x, PendingSum):
            if form.columns:
                return self.add_rms_norm_fp8(*x, weight, eps, form)
            return self.add_rms_norm(*x, weight, eps)
        if form.columns:
            return self.rms_norm_fp8(x, weight, eps, form), x
        return self.rms_norm(x, weight, eps), x

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor,
                     eps: float) -> tuple[Tensor, Tensor]:
        """See `norm.add_rms_norm`."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rms_norm_fp8(self, x: Tensor, weight: Tensor, eps: float, form: InputForm) -> Quantised:
        """See `norm`; x: [T, K]."""
        return to_fp8(self.rms_norm(x, weight, eps), form)

    def add_rms_norm_fp8(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                         form: InputForm) -> tuple[Quantised, Tensor]:
        """See `norm`; x, residual: [T, K]."""
        normed, total = self.add_rms_norm(x, residual, weight, eps)
        return to_fp8(normed, form), total

    def gated_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        """See `gated_norm.gated_norm`."""
        return gated_norm(x, weight, gate, eps)

    def norm_gated(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float,
                   groups: int) -> Tensor:
        """See `gated_norm.norm_gated`."""
        return norm_gated(x, weight, gate, eps, groups)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `activation.silu_mul`."""
        return silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """See `activation.gelu_mul`."""
        return gelu_mul(gate_up)

    def silu_mul_fp8(self, gate_up: Tensor, columns: int) -> Quantised:
        """`silu_mul`, rounded to its dtype, and then `scaled_mm.quantise`: so many columns of the
        result share a scale. gate_up: [T, 2 * I] -> [T, I]."""
        return to_fp8(self.silu_mul(gate_up), InputForm(columns, plain=False))

    def gelu_mul_fp8(self, gate_up: Tensor, columns: int) -> Quantised:
        """The same of `gelu_mul`."""
        return to_fp8(self.gelu_mul(gate_up), InputForm(columns, plain=False))

    def rotate_write(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, rope: Tensor,
        pages: Tensor, index: Tensor, scales: Tensor | None = None,
    ) -> None:
        """Norm and rotate queries in place and keys, then write keys and values to the pages. What
        is left of the keys in qkv is of no use.

        qkv: [T, heads + 2 * kv_heads, D]; norm: [heads + kv_heads, D] or None; rope: [T, 2, 1, D];
        pages: [P, 2 * kv_heads, D]; index: i64[T]; scales: of the pages, see `kv.write_kv`.
        """
        qk = qkv[:, :(qkv.shape[1] + heads) // 2]
        normed = qk if norm is None else rms_norm(qk, norm, eps)
        qk.copy_(apply_rope(normed, rope))
        write_kv(pages, qkv[:, heads:], index, scales)

    def decode(
        self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int,
        scale: float,
    ) -> Attend:
        """Attention of a step's decode rows, for every layer with this window.

        pages: i32[B, P]; lens: i32[B], with the q_len new tokens in them; span >= max(lens).
        """
        return torch_decode(pages, lens, span, q_len, page_size, window, scale)

    def extend(
        self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float
    ) -> Attend:
        """Attention of a step's chunks of prompts, for every layer with this window."""
        return torch_extend(rows, page_size, window, scale)

    def conv_extend(self, x: Tensor, columns: Tensor, weight: Tensor, plan: Ragged,
                    bias: Tensor | None = None) -> Tensor:
        """See `causal_conv.conv_extend`."""
        return conv_extend(x, columns, weight, plan, bias)

    def delta_extend(self, p: Tensor, states: Tensor, columns: Tensor, plan: Ragged,
                     layer: DeltaLayer) -> Tensor:
        """GatedDeltaNet between its projections, the tokens of an extend step; states and columns
        go on, and are kept where the plan says. p: [T, ...], as of `delta_step`. Returns
        [T, HV, V], in fp32 or p's dtype."""
        qkv = self.conv_extend(p[:, :layer.heads.channels], columns, layer.conv, plan)
        return delta_extend(qkv, *layer.gates(p), states, plan, layer.heads)

    def delta_step(self, p: Tensor, states: Tensor, columns: Tensor, rows: Tensor,
                   layer: DeltaLayer) -> Tensor:
        """GatedDeltaNet between its projections, one more token for each row; see
        `delta_window.Delta`. p: [B, ...], queries, keys and values first, b and a last; returns
        f32[B, HV, V]."""
        return layer.advance(layer.inputs(p), (states, columns), rows)

    def delta_window(self, p: Tensor, states: Tensor, columns: Tensor, pending: Tensor,
                     rows: Tensor, accepted: Tensor, layer: DeltaLayer) -> Tensor:
        """Windows of tokens; p: [B * q, ...], as of `delta_step`, the rest as of
        `delta_window.delta_window`. Returns f32[B * q, HV, V]."""
        x = layer.inputs(p).view(len(rows), len(p) // len(rows), -1)
        return delta_window(x, states, columns, pending, rows, accepted, layer)

    def ssd_step(self, inputs: SSDInputs, states: Tensor, rows: Tensor, a: Tensor,
                 skip: Tensor) -> Tensor:
        """See `mamba2.ssd_step`."""
        return ssd_step(inputs, states, rows, a, skip)

    def apply_plan(self, tables: Sequence[Tensor], addresses: Tensor, entries: Tensor) -> None:
        """See `apply_plan.apply_plan`."""
        apply_plan(tables, addresses, entries)

    @property
    def sampling(self) -> TorchSampling:
        """The kernels that sample."""
        return TorchSampling()

    def latent(self, rank: int) -> AttentionOps:
        """Attention over latents of this width, each with a rotated part behind it."""
        return Latent()


class NativeOps(TorchOps):
    """bf16 on the CPU, with the C library."""

    name = "native"

    def __init__(self, lib: ctypes.CDLL, threads: int, tiles: bool | None = None) -> None:
        """threads: of each call, torch's own. tiles: weights lie in tiles; None: where that is
        faster."""
        self.lib, self.threads = lib, threads
        in_tiles = lib.tiles_fast() if tiles is None else tiles
        self.scratch = huge(threads * lib.linear_scratch()) if in_tiles else None
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
        pages: Tensor, index: Tensor, scales: Tensor | None = None,
    ) -> None:
        """See `TorchOps.rotate_write`."""
        if pages.dtype is not torch.bfloat16 and pages.dtype.itemsize > 1:
            return super().rotate_write(qkv, heads, norm, eps, rope, pages, index, scales)
        rows, width, dim = qkv.shape
        to, at = pages, index
        if pages.dtype.itemsize == 1:
            to = qkv.new_empty((rows, width - heads, dim))
            at = torch.arange(rows)
        self.lib.rotate_write(
            qkv.data_ptr(), 0 if norm is None else norm.data_ptr(), rope.data_ptr(),
            to.data_ptr(), at.data_ptr(), rows, heads, (width - heads) // 2, dim, eps,
            self.threads)
        if to is not pages:
            write_kv(pages, to, index, scales)

    def decode(
        self, pages: Tensor, lens: Tensor, span: int, q_len: int, page_size: int, window: int,
        scale: float,
    ) -> Attend:
        """See `TorchOps.decode`."""
        return NativeDecode(self.lib, self.threads, pages, lens, span, q_len, page_size, window,
                            scale)

    def extend(
        self, rows: Sequence[ExtendChunk], page_size: int, window: int, scale: float
    ) -> Attend:
        """See `TorchOps.extend`."""
        plain = functools.cache(functools.partial(torch_extend, rows, page_size, window, scale))
        if not self.tiles:
            return plain()
        return NativeExtend(self.lib, self.threads, chunk_rows(rows), [r.pages for r in rows],
                            page_size, window, scale, plain)


def select_ops(dtype: torch.dtype, device: torch.device, head_dim: int, native: bool,
               kernels: str = "auto") -> TorchOps:
    """The kernels for a model. native=False: none in C.

    kernels: auto (the fastest: Triton's on CUDA, in C on a CPU) | torch | triton.
    Raises `ValueError` where those asked for cannot run.
    """
    if takes_triton(device, kernels):
        from actorium.kernels.triton.triton_ops import TritonOps
        return TritonOps()
    if (kernels == "auto" and native and device.type == "cpu" and dtype is torch.bfloat16
            and head_dim <= 256):
        lib = library()
        if lib is not None:
            return NativeOps(lib, torch.get_num_threads())
    return TorchOps()


def takes_triton(device: torch.device, kernels: str) -> bool:
    """Whether Triton's kernels are those to run on this device; kernels: see `select_ops`.

    Raises `ValueError` where they were asked for and cannot run.
    """
    if kernels != "triton" and (kernels != "auto" or device.type != "cuda"):
        return False
    fault = triton_fault(device)
    if fault and kernels == "triton":
        raise ValueError(f"kernels: triton was asked for, but {fault}")
    return not fault


def triton_fault(device: torch.device) -> str:
    """Why Triton's kernels cannot run on this device; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        return ""
    from triton import knobs
    if knobs.runtime.interpret:
        return ""
    return "without a CUDA device they run in Triton's interpreter alone (TRITON_INTERPRET=1)"
