"""GatedDeltaNet between its two projections, without norm and gate: one token or a window of drafts
per sequence. The reference of the fused kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.kernels.reference.causal_conv import conv_step
from actorium.kernels.reference.delta_rule import Heads, delta_gates, delta_step
from actorium.kernels.reference.window import run_window


class DeltaLayer(NamedTuple):
    """The weights of a layer's convolution, gates and rule."""

    heads: Heads
    conv: Tensor
    """f32[W, channels]"""
    decay: Tensor
    """f32[HV]: exp(A_log)"""
    bias: Tensor
    """f32[HV]: of a."""

    def inputs(self, p: Tensor) -> Tensor:
        """[T, channels + 2 HV]: queries, keys and values, b and a, of p: [T, ...], which has z
        between them."""
        return torch.cat((p[:, :self.heads.channels], p[:, -2 * self.heads.values:]), 1)

    def gates(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """(g, beta), f32[T, HV]. p: [T, ...], of which b and a are the last."""
        n = self.heads.values
        return delta_gates(p[:, -2 * n:-n], p[:, -n:], self.decay, self.bias)

    def advance(self, x: Tensor, pools: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Advances each row by one token. x: [B, channels + 2 HV]; pools: states [rows, HV, V, K]
        and columns [rows, W - 1, channels], in place; rows: i64[B], below 0 for padding, which has
        neither -> f32[B, HV, V]."""
        states, columns = pools
        qkv = conv_step(x[:, :self.heads.channels], columns, rows, self.conv)
        return delta_step(qkv, *self.gates(x), states, rows, self.heads)


def delta_window(x: Tensor, states: Tensor, columns: Tensor, pending: Tensor, rows: Tensor,
                 accepted: Tensor, layer: DeltaLayer) -> Tensor:
    """Computes windows of q tokens for B sequences (see `run_window`).

    x: [B, q, channels + 2 HV]; states: [rows, HV, V, K]; columns: [rows, W - 1, channels]; pending:
    [rows, K >= q - 1, channels + 2 HV]; these three in place; rows, accepted: i64[B]. Returns f32[B
    * q, HV, V].
    """
    return run_window(layer.advance, x, (states, columns), pending, rows, accepted)
