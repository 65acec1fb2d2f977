"""Attention, with or without biases, norms of heads, rotation of a part of each, and a gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.forward_context import ForwardContext
from actorium.gpu.models.layer_weights import LayerWeights, NormedLinear
from actorium.gpu.models.rotary import head_order
from actorium.gpu.weights.kv_scales import NAME as KV_SCALES
from actorium.kernels.inputs import HiddenStream, Input, InputForm
from actorium.kernels.linear import Linear
from actorium.kernels.ops import Ops


@dataclass(slots=True)
class Attention:
    """Weights of one layer's attention; q, k and v are one matrix."""

    shape: ModelShape
    ops: Ops
    qkv: Linear
    gate: Linear | None
    o: Linear | NormedLinear
    norm: Tensor | None
    """[heads + kv_heads, head_dim]: of every query and key head."""
    group: int
    """Its place in `ModelShape.groups`."""
    place: int
    """Its place in the group."""
    rope: int
    """Its place in `ModelShape.ropes`."""
    kv_scales: Tensor | None = None
    """Of pages in FP8, f32[2 * kv_heads]; None: all 1."""

    @property
    def inner(self) -> int:
        """See `Mixer`."""
        return self.shape.q_size

    @property
    def form(self) -> InputForm:
        """See `Mixer`."""
        return self.qkv.form if self.gate is None else self.qkv.form.also(self.gate.form)

    @property
    def rereads(self) -> bool:
        """See `Mixer`."""
        return self.gate is not None

    def before(self, x: Input, step: ForwardContext) -> Tensor:
        """See `Mixer`: heads of queries, rotated; what lies behind them is of no more use."""
        s, (kv_index, layers, _) = self.shape, step.groups[self.group]
        qkv = self.qkv(x).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        self.ops.rotate_write(qkv, s.heads, self.norm, s.norm_eps, step.ropes[self.rope],
                              layers[self.place], kv_index, self.kv_scales)
        return qkv

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None,
                out: Tensor | None = None) -> Tensor:
        """See `Mixer`."""
        s, (_, layers, plan) = self.shape, step.groups[self.group]
        q, pages = p[:, :s.heads], layers[self.place]
        if rows is not None:
            y = plan.attend_rows(q, pages, rows, self.kv_scales)
        else:
            y = plan.attend(q, pages, out if out is None else out.view(q.shape), self.kv_scales)
        return y.reshape(-1, s.q_size)

    def after(self, y: Tensor, x: Input | None, hidden: Tensor) -> HiddenStream:
        """See `Mixer`."""
        if self.gate is not None and x is not None:
            y = y * self.gate(x).sigmoid_()
        return self.o.onto(y, hidden)


def attention(w: LayerWeights, s: ModelShape, i: int) -> Attention:
    """The attention of these weights, in the i-th layer."""
    weight, bias = w.both(s.qkv_bias, "q_proj")
    order = head_order(s.head_dim, s.rotary_dim or s.head_dim).to(weight.device)
    q, gate = _split_gate(weight, s)
    k, v = (w.pop(f"{name}_proj.weight") for name in ("k", "v"))
    qkv_bias = gate_bias = None
    if bias is not None:
        qb, gate_bias = _split_gate(bias, s)
        kb, vb = (w.pop(f"{name}_proj.bias") for name in ("k", "v"))
        qkv_bias = torch.cat((_ordered(qb, order), _ordered(kb, order), vb))
    qkv, norm = torch.cat((_ordered(q, order), _ordered(k, order), v)), None
    if s.qk_norm:
        qn, kn = (w.norm(f"{name}_norm")[order] for name in ("q", "k"))
        norm = torch.cat((qn.expand(s.heads, -1), kn.expand(s.kv_heads, -1)))
    group, place = s.place(i)
    return Attention(
        s, w.ops, w.ops.linear(qkv, qkv_bias),
        w.ops.linear(gate, gate_bias) if gate is not None else None,
        w.linear(s.o_bias, "o_proj"), norm, group, place,
        len(s.ropes) - 1 if i < s.layers and s.windows[i] else 0, w.optional(KV_SCALES))


def _split_gate(stacked: Tensor, s: ModelShape) -> tuple[Tensor, Tensor | None]:
    """Rows of the queries and of the gate; each head's lie one after the other."""
    if not s.output_gate:
        return stacked, None
    q, gate = stacked.view(s.heads, 2, s.head_dim, *stacked.shape[1:]).unbind(1)
    return q.flatten(0, 1), gate.flatten(0, 1)


def _ordered(rows: Tensor, order: Tensor) -> Tensor:
    """The rows of each head in this order."""
    return rows.view(-1, len(order), *rows.shape[1:])[:, order].flatten(0, 1)
