"""A Mamba-2 layer in C: convolution, time steps and recurrence in one call, and the gated norm; a
convolution alone; the scan of Mamba; and Kimi Delta Attention."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from actorium.kernels.cpu.delta_native import MAX_WIDTH, Runs
from actorium.kernels.reference.ssd import SSDSizes

MAX_STATE, MAX_HEAD = 64, 256
"""Of `scan.c`, and of `kda.c`."""
MANY = 4096
CONSTANTS = (torch.zeros(MANY, dtype=torch.int64), torch.ones(MANY, dtype=torch.int64),
             torch.arange(MANY))
"""What plans of single tokens are made of: what is recorded of a step may not be allocated by it."""


class NativeMamba:
    """p, of all: bf16, of any row stride; columns: bf16[rows, W - 1, channels]; states: f32 or
    bf16[rows, H, P, N], both in place. A token at a time, whether of prompts or decodes: they have
    the same bits. torch's chunks of 128 and 512 tokens took 1.2 to 2 times as long."""

    def __init__(self, lib: ctypes.CDLL, threads: int, sizes: SSDSizes, conv: Tensor,
                 conv_bias: Tensor | None, weights: Sequence[Tensor],
                 limit: tuple[float, float], norm: Tensor, eps: float) -> None:
        """conv: f32[W, channels]; conv_bias: f32[channels] or None; weights: a, skip and the bias
        of time steps, f32[H] each; limit: of time steps; norm: f32[H * P]."""
        self.lib, self.threads, self.sizes, self.eps = lib, threads, sizes, eps
        self.limit, self.norm = limit, norm
        self._held = [t.contiguous() for t in (conv, *weights, norm)]
        self._held += [] if conv_bias is None else [conv_bias.contiguous()]
        self._conv, self._a, self._skip, self._bias, self._norm = (
            t.data_ptr() for t in self._held[:5])
        self._conv_bias = 0 if conv_bias is None else self._held[5].data_ptr()
        self._sizes = [torch.tensor([len(conv), sizes.heads, sizes.groups, sizes.head_dim,
                                     sizes.state_dim, narrow], dtype=torch.int32)
                       for narrow in (0, 1)]

    def extend(self, x: Tensor, columns: Tensor, states: Tensor, plan: Runs) -> Tensor:
        """Many tokens a sequence; states and columns are kept where the plan says. x: the
        convolution's channels, and dt -> f32[T, H, P]."""
        s = self.sizes
        y = torch.empty((len(x), s.heads, s.head_dim))
        mixed = torch.empty((len(x), s.channels))
        self.lib.mamba_steps(
            x.data_ptr(), x.stride(0), plan.number, len(x), plan.owners.data_ptr(),
            plan.runs.data_ptr(), plan.saves.data_ptr(), plan.starts.data_ptr(),
            columns.data_ptr(), self._conv, self._conv_bias, states.data_ptr(), self._a,
            self._skip, self._bias, mixed.data_ptr(), y.data_ptr(),
            self._sizes[states.dtype is torch.bfloat16].data_ptr(), *self.limit, self.threads)
        return y

    def step(self, x: Tensor, columns: Tensor, states: Tensor, rows: Tensor) -> Tensor:
        """One token a sequence. rows: i64[T], of columns and states; below 0 for padding, which
        has neither, and gives zeros."""
        return self.extend(x, columns, states, single_tokens(rows))

    def gate(self, y: Tensor, z: Tensor) -> Tensor:
        """See `TorchOps.norm_gated`. y: f32[T, H, P]; z: bf16[T, H * P], of any row stride."""
        out = torch.empty((len(y), self.sizes.inner), dtype=z.dtype)
        self.lib.norm_gated(y.data_ptr(), self._norm, z.data_ptr(), z.stride(0), out.data_ptr(),
                            len(y), self.sizes.inner, self.sizes.groups, self.eps, self.threads)
        return out


class NativeConv:
    """x: bf16[T, C], of any row stride; columns: bf16[rows, W - 1, C], in place. Prompts and
    decodes have the same bits."""

    def __init__(self, lib: ctypes.CDLL, threads: int, weight: Tensor, bias: Tensor | None,
                 activate: bool) -> None:
        """weight: f32[W, C]; bias: f32[C] or None; activate: by SiLU."""
        self.lib, self.threads, self.activate = lib, threads, activate
        self.width, self.channels = weight.shape
        self._held = [weight.contiguous(), *([] if bias is None else [bias.contiguous()])]
        self._weight, self._bias = self._held[0].data_ptr(), (
            0 if bias is None else self._held[1].data_ptr())

    def extend(self, x: Tensor, columns: Tensor, plan: Runs) -> Tensor:
        """Many tokens a sequence; columns are kept where the plan says: f32[T, C]."""
        out = torch.empty((len(x), self.channels))
        self.lib.conv_steps(
            x.data_ptr(), x.stride(0), plan.number, len(x), plan.owners.data_ptr(),
            plan.runs.data_ptr(), plan.saves.data_ptr(), plan.starts.data_ptr(),
            columns.data_ptr(), self._weight, self._bias, out.data_ptr(), self.channels,
            self.width, self.activate, self.threads)
        return out

    def step(self, x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        """One token a sequence: f32[T, C]. rows: i64[T], below 0 for padding, which gives zeros.
        """
        return self.extend(x, columns, single_tokens(rows))


class NativeScan:
    """x, dt (not yet a time step): bf16[T, C]; b, c: bf16[T, N], all contiguous; states: f32 or
    bf16[rows, 1, C, N], in place. Prompts and decodes have the same bits."""

    def __init__(self, lib: ctypes.CDLL, threads: int, a: Tensor, skip: Tensor,
                 bias: Tensor) -> None:
        """a: f32[C, N]; skip, bias of time steps: f32[C]."""
        self.lib, self.threads = lib, threads
        self.channels, self.state_dim = a.shape
        self._held = [t.contiguous() for t in (a, skip, bias)]
        self._weights = [t.data_ptr() for t in self._held]

    def extend(self, inputs: Sequence[Tensor], states: Tensor, plan: Runs) -> Tensor:
        """Many tokens a sequence; states are kept where the plan says. inputs: x, dt, b, c ->
        f32[T, C]."""
        y = torch.empty((len(inputs[0]), self.channels))
        self.lib.scan_steps(
            *(own.data_ptr() for own in inputs), plan.number, plan.runs.data_ptr(),
            plan.saves.data_ptr(), plan.starts.data_ptr(), states.data_ptr(), *self._weights,
            y.data_ptr(), self.channels, self.state_dim, states.dtype is torch.bfloat16,
            self.threads)
        return y

    def step(self, inputs: Sequence[Tensor], states: Tensor, rows: Tensor) -> Tensor:
        """One token a sequence: f32[T, C]. rows: i64[T], below 0 for padding, which gives zeros.
        """
        return self.extend(inputs, states, single_tokens(rows))


class NativeKda:
    """qkv: f32[T, 3 * H * D], convolved; f, what decays are made of: bf16[T, H * D]; b, what beta
    is made of: bf16[T, H], all contiguous; states: f32 or bf16[rows, H, D, D], in place. Prompts
    and decodes have the same bits."""

    def __init__(self, lib: ctypes.CDLL, threads: int, decay: Tensor, bias: Tensor) -> None:
        """decay: f32[H]; bias: f32[H * D]."""
        self.lib, self.threads = lib, threads
        self.heads, self.dim = len(decay), len(bias) // len(decay)
        self._held = [decay.contiguous(), bias.contiguous()]
        self._weights = [t.data_ptr() for t in self._held]

    def extend(self, inputs: Sequence[Tensor], states: Tensor, plan: Runs) -> Tensor:
        """Many tokens a sequence; states are kept where the plan says. inputs: qkv, f, b ->
        f32[T, H, D]."""
        y = torch.empty((len(inputs[0]), self.heads, self.dim))
        self.lib.kda_steps(
            *(own.data_ptr() for own in inputs), plan.number, plan.runs.data_ptr(),
            plan.saves.data_ptr(), plan.starts.data_ptr(), states.data_ptr(), *self._weights,
            y.data_ptr(), self.heads, self.dim, states.dtype is torch.bfloat16, self.threads)
        return y

    def step(self, inputs: Sequence[Tensor], states: Tensor, rows: Tensor) -> Tensor:
        """One token a sequence: f32[T, H, D]. rows: i64[T], below 0 for padding, which gives zeros.
        """
        return self.extend(inputs, states, single_tokens(rows))


def single_tokens(rows: Tensor) -> Runs:
    """The plan of one token for each of these rows, i64[T]."""
    count = len(rows)
    zeros, ones, numbers = (own[:count + 1] for own in CONSTANTS) if count < MANY else (
        torch.zeros(count + 1, dtype=torch.int64), torch.ones(count + 1, dtype=torch.int64),
        torch.arange(count + 1))
    runs = torch.stack((numbers[:count], ones[:count], rows), 1)
    return Runs(count, runs, CONSTANTS[0][:2].view(1, 2), zeros, numbers)


def can_run_kda(width: int, head_dim: int) -> bool:
    """Whether the C kernels take these sizes."""
    return width <= MAX_WIDTH and head_dim <= MAX_HEAD


def can_run_scan(width: int, state_dim: int) -> bool:
    """Whether the C kernels take these sizes."""
    return width <= MAX_WIDTH and state_dim <= MAX_STATE


def can_run_mamba(width: int) -> bool:
    """Whether the C kernels take convolutions of this width."""
    return width <= MAX_WIDTH
