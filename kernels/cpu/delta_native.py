"""A GatedDeltaNet layer in C: one call for all between its two projections."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.kernels.ragged import ExtendRun
from actorium.kernels.reference.delta_rule import Heads

MAX_DIM, MAX_WIDTH = 256, 8


class Runs(NamedTuple):
    """The sequences of an extend step as the C kernel takes them, i64."""

    number: int
    runs: Tensor
    """[S, 3]: first token, tokens, row"""
    saves: Tensor
    """[.., 2]: tokens, row; those of a sequence follow one another, rising"""
    starts: Tensor
    """[S + 1]: where they begin"""
    owners: Tensor
    """[T]: which sequence each token is of"""


def plan_runs(runs: Sequence[ExtendRun]) -> Runs:
    """Made once a step and used by every layer."""
    table, saves, starts, at = [], [], [0], 0
    for run in runs:
        table.append((at, run.length, run.row))
        at += run.length
        saves += sorted(run.saves)
        starts.append(len(saves))
    lengths = torch.tensor([run.length for run in runs])
    return Runs(len(runs), torch.tensor(table), torch.tensor(saves or [(0, 0)]),
                torch.tensor(starts), torch.repeat_interleave(lengths))


class NativeDelta:
    """Convolution, gates, delta rule, norm and output gate, bf16. p, of both: bf16[T, ...],
    queries, keys, values, z, b, a, of any row stride; columns: bf16 [rows, W - 1, channels];
    states: f32 or bf16 [rows, HV, V, K], both in place. They return bf16[T, HV * V]."""

    def __init__(self, lib: ctypes.CDLL, threads: int, heads: Heads, conv: Tensor, decay: Tensor,
                 bias: Tensor, norm: Tensor, eps: float, tiles: bool | None = None,
                 exact: bool = False) -> None:
        """conv: f32[W, channels]; decay, bias: f32[HV]; norm: f32[V]; all contiguous.
        tiles: blocks of extends go by tiles; None: where that is faster. exact: extends go token by
        token, and have the bits of as many steps; may be changed between two steps."""
        self.lib, self.threads, self.eps = lib, threads, eps
        self.exact = exact
        self.recorder: Callable[..., None] | None = None
        """Called with this object, its method and the arguments before each call that has an exact
        and a fast way."""
        self.held = (conv, decay, bias, norm)
        self.conv, self.decay, self.bias, self.norm = (t.data_ptr() for t in self.held)
        self.width = heads.values * heads.value_dim
        tiles = lib.tiles_fast() if tiles is None else tiles
        self.sizes = [torch.tensor([len(conv), heads.keys, heads.values, heads.key_dim,
                                    heads.value_dim, narrow, tiles], dtype=torch.int32)
                      for narrow in (0, 1)]

    def step(self, p: Tensor, columns: Tensor, states: Tensor, rows: Tensor) -> Tensor:
        """One token a sequence. rows: i64[T], of columns and states; below 0 for padding, which
        has neither, and gives zeros."""
        out = p.new_empty((len(p), self.width))
        sizes = self.sizes[states.dtype is torch.bfloat16]
        self.lib.delta_step(
            p.data_ptr(), p.stride(0), len(p), rows.data_ptr(), columns.data_ptr(), self.conv,
            states.data_ptr(), self.decay, self.bias, self.norm, out.data_ptr(), sizes.data_ptr(),
            self.eps, self.threads)
        return out

    def window(self, p: Tensor, columns: Tensor, states: Tensor, pending: Tensor, rows: Tensor,
               accepted: Tensor) -> Tensor:
        """Delayed commit (`kernels/reference/window.py`) of T / B tokens a sequence. pending: bf16
        [rows, K, channels + 2 HV], in place; rows, as of `step`, and accepted: i64[B]."""
        count, held = len(p) // len(rows), pending.shape[1]
        out = p.new_empty((len(p), self.width))
        sizes = self.sizes[states.dtype is torch.bfloat16]
        self.lib.delta_window(
            p.data_ptr(), p.stride(0), len(rows), rows.data_ptr(), columns.data_ptr(), self.conv,
            states.data_ptr(), self.decay, self.bias, self.norm, out.data_ptr(), sizes.data_ptr(),
            pending.data_ptr(), accepted.data_ptr(), count, held, self.eps, self.threads)
        return out

    def extend(self, p: Tensor, columns: Tensor, states: Tensor, plan: Runs) -> Tensor:
        """Many tokens a sequence; states and columns are kept where the plan says."""
        if self.recorder is not None:
            self.recorder(self, self.extend, p, columns, states, plan)
        out = p.new_empty((len(p), self.width))
        sizes = self.sizes[states.dtype is torch.bfloat16]
        run = self.lib.delta_extend_steps if self.exact else self.lib.delta_extend
        run(
            p.data_ptr(), p.stride(0), plan.number, plan.runs.data_ptr(), plan.saves.data_ptr(),
            plan.starts.data_ptr(), columns.data_ptr(), self.conv, states.data_ptr(), self.decay,
            self.bias, self.norm, out.data_ptr(), sizes.data_ptr(), self.eps, self.threads)
        return out


def can_run_delta(heads: Heads, width: int) -> bool:
    """Whether the C kernels take these sizes."""
    return max(heads.key_dim, heads.value_dim) <= MAX_DIM and width <= MAX_WIDTH
