"""Attention with a gate on what it gives, and rotation of a part of each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.loader import Want
from actorium.gpu.models.plan import AttentionPlan
from actorium.gpu.models.rotary import frequencies
from actorium.gpu.models.weights import Weights, linear_wants
from actorium.gpu.shape import ModelShape
from actorium.kernels.linear import Linear
from actorium.kernels.ops import TorchOps
from actorium.kernels.rope import rope_table


def attention_wants(at: str, s: ModelShape) -> list[Want]:
    """Tensors of the layer's attention."""
    wide = s.q_size * (2 if s.output_gate else 1)
    return [
        *linear_wants(f"{at}q_proj", wide, s.hidden, s.qkv_bias),
        *linear_wants(f"{at}k_proj", s.kv_size, s.hidden, s.qkv_bias),
        *linear_wants(f"{at}v_proj", s.kv_size, s.hidden, s.qkv_bias),
        *linear_wants(f"{at}o_proj", s.hidden, s.q_size, s.o_bias),
        *(Want(f"{at}{name}_norm.weight", (s.head_dim,)) for name in ("q", "k")),
    ]


def head_order(head_dim: int, rotary_dim: int) -> Tensor:
    """i64[head_dim]: the order of dimensions in which the rotated pairs lie half a head apart.

    The pairs of a part of a head lie half that part apart. Queries and keys are stored in this
    order, which changes no product of them, so that one kernel rotates whole heads and parts.
    """
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    a = torch.arange(head_dim)
    still = a[rotary_dim:]
    return torch.cat((a[:half], still[:rest], a[half:rotary_dim], still[rest:]))


def partial_rope_table(s: ModelShape) -> Tensor:
    """[max_model_len, 2, 1, head_dim], for heads in `head_order`: pairs that stay have angle 0."""
    rotary = s.rotary_dim or s.head_dim
    turning, scale = frequencies(s.ropes[0], rotary)
    still = turning.new_zeros((s.head_dim - rotary) // 2)
    table = rope_table(torch.cat((turning, still)), scale, s.max_model_len, s.dtype)
    halves = table.view(s.max_model_len, 2, 1, 2, -1)
    halves[:, 0, ..., rotary // 2:] = 1
    return table


@dataclass(slots=True)
class GatedAttention:
    """Weights of one layer's attention."""

    shape: ModelShape
    ops: TorchOps
    qkv: Linear
    gate: Linear | None
    o: Linear
    norm: Tensor
    """[heads + kv_heads, head_dim]: of every query and key head."""

    def __call__(
        self, x: Tensor, hidden: Tensor, rope: Tensor, kv_index: Tensor, pages: Tensor,
        plan: AttentionPlan, rows: Tensor | None,
    ) -> Tensor:
        """hidden + attention of x, both [T, hidden]; with `rows`, those rows of it."""
        s = self.shape
        qkv = self.qkv(x).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        self.ops.rotate_write(qkv, s.heads, self.norm, s.norm_eps, rope, pages, kv_index)
        q = qkv[:, :s.heads]
        if rows is None:
            out = plan.attend(q, pages)
        else:
            out, hidden = plan.attend_rows(q, pages, rows), hidden.index_select(0, rows)
            x = x.index_select(0, rows)
        out = out.reshape(-1, s.q_size)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid_()
        return self.o.add(out, hidden)


def gated_attention(w: Weights, s: ModelShape) -> GatedAttention:
    """The attention of these weights."""
    weight, bias = w.both(s.qkv_bias, "q_proj")
    order = head_order(s.head_dim, s.rotary_dim or s.head_dim).to(weight.device)
    q, gate = _split_gate(weight, s)
    k, v = (w.take(f"{name}_proj.weight") for name in ("k", "v"))
    qkv_bias = gate_bias = None
    if bias is not None:
        qb, gate_bias = _split_gate(bias, s)
        kb, vb = (w.take(f"{name}_proj.bias") for name in ("k", "v"))
        qkv_bias = torch.cat((_ordered(qb, order), _ordered(kb, order), vb))
    qkv = torch.cat((_ordered(q, order), _ordered(k, order), v))
    qn, kn = (w.norm(f"{name}_norm")[order] for name in ("q", "k"))
    return GatedAttention(
        s, w.ops, w.ops.linear(qkv, qkv_bias),
        w.ops.linear(gate, gate_bias) if gate is not None else None,
        w.linear(s.o_bias, "o_proj"),
        torch.cat((qn.expand(s.heads, -1), kn.expand(s.kv_heads, -1))))


def _split_gate(stacked: Tensor, s: ModelShape) -> tuple[Tensor, Tensor | None]:
    """Rows of the queries and of the gate; each head's lie one after the other."""
    if not s.output_gate:
        return stacked, None
    q, gate = stacked.view(s.heads, 2, s.head_dim, *stacked.shape[1:]).unbind(1)
    return q.flatten(0, 1), gate.flatten(0, 1)


def _ordered(rows: Tensor, order: Tensor) -> Tensor:
    """The rows of each head in this order."""
    return rows.view(-1, len(order), *rows.shape[1:])[:, order].flatten(0, 1)
