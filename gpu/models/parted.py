"""Decoders whose layers differ in the parts they have (`ModelShape.parts`): a recurrent layer,
attention, or both; and an MLP, or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from actorium.gpu.families.layer_shapes import LayerParts
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import ConvShape, KdaShape, MambaShape, ScanShape
from actorium.gpu.models.attention import Attention, attention
from actorium.gpu.models.decoder import Decoder, Layer, Mixer, Mlp
from actorium.gpu.models.deepseek import latent_attention
from actorium.gpu.models.forward_context import ForwardContext
from actorium.gpu.models.kimi import kda, kda_fused
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mamba1 import mamba1
from actorium.gpu.models.mlp import (
    Dense,
    Ungated,
    dense,
    grouped_mixture,
    mixture,
    mixture_fused,
    ungated,
)
from actorium.gpu.models.recurrent import RecurrentLayer, mamba2
from actorium.gpu.models.short_conv import short_conv
from actorium.gpu.parallel.split_layers import SummedLinear
from actorium.gpu.passes.canonical_ops import linear, recur
from actorium.gpu.weights.loader import Fused
from actorium.kernels.inputs import InputForm
from actorium.kernels.linear import ConcatLinear, Linear, Multiplied, SideBySide

Factors = Sequence[tuple[int, float]]
"""(columns, what they are multiplied by), one behind the other."""


class PartedLM(Decoder):
    """Layers of the parts that the shape says."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        parts = s.parts_of(i)
        found, mlp = parts.attention, parts.mlp
        fused = mixture_fused(mlp, s.hidden, s.experts) if s.has_experts(i) and s.experts else []
        if parts.recurrent and isinstance(s.recurrence, KdaShape):
            fused += kda_fused(parts.recurrent, s.recurrence)
        if not found:
            return fused
        for theirs, ours, shape in (("out_proj", "o_proj", (s.hidden, s.q_size)),
                                    ("q_layernorm", "q_norm", (s.head_dim,)),
                                    ("k_layernorm", "k_norm", (s.head_dim,))):
            fused.append(Fused(f"{found}{theirs}.weight", shape,
                               partial(_renamed, f"{found}{ours}.weight")))
        return fused

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        s, w = self.shape, w.at("")
        parts = s.parts_of(i)
        mlp: Mlp | None = None
        if parts.mlp and s.has_experts(i) and s.experts:
            inner = w.at(parts.mlp)
            mlp = (grouped_mixture(inner, s.experts, s.routing) if s.routing
                   else mixture(inner, s.experts))
        elif parts.mlp:
            mlp = self._mlp(w.at(parts.mlp))
        return Layer(self._mixer(w, i, parts), mlp, s.norm_eps, w.norm(parts.norm),
                     w.norm(parts.mlp_norm) if mlp else None)

    def _mixer(self, w: LayerWeights, i: int, parts: LayerParts) -> Mixer:
        s = self.shape
        if not parts.recurrent and s.latent is not None:
            return latent_attention(w.at(parts.attention), s, i)
        if not parts.recurrent:
            return attention(w.at(parts.attention), s, i)
        recurrent = recurrent_layer(w.at(parts.recurrent), s, s.recurrent.index(i))
        if not parts.attention:
            return recurrent
        return self._both(recurrent, attention(w.at(parts.attention), s, i))

    def _both(self, recurrent: RecurrentLayer, attends: Attention) -> RecurrentBesideAttention:
        s, m, r = self.shape, self.shape.multipliers, self.shape.recurrence
        assert m is not None and isinstance(r, MambaShape)
        shared = r.groups * r.state_dim
        into = [self._multiplied(
            recurrent.project,
            list(zip((r.inner, r.inner, shared, shared, r.heads), m.projected, strict=True)),
            m.recurrent_in, r.proj_bias), self._multiplied(
            attends.qkv, [(s.q_size, 1.0), (s.kv_size, m.key), (s.kv_size, 1.0)],
            m.attention_in, s.qkv_bias)]
        out, group = [recurrent.o, attends.o], None
        if all(isinstance(own, SummedLinear) for own in out):  # the ranks sum but once
            group = out[0].group  # type: ignore[attr-defined]
            out = [own.linear for own in out]  # type: ignore[attr-defined]
        joined = SideBySide(out, (r.inner, s.q_size), (m.recurrent_out, m.attention_out))
        return RecurrentBesideAttention(recurrent, attends, ConcatLinear(into),
                                        joined if group is None else SummedLinear(joined, group),
                                        r.inner + r.channels + r.heads)

    def _mlp(self, w: LayerWeights) -> Dense | Ungated:
        s, m = self.shape, self.shape.multipliers
        if not s.gated:
            return ungated(w, s)
        if m is None:
            return dense(w, s.mlp_bias, s.activation, s.dense_names)
        *first, down = s.dense_names
        products = self._multiplied(w.linear(s.mlp_bias, *first),
                                    [(s.intermediate, m.gate), (s.intermediate, 1.0)])
        return Dense(w.ops.gated_by(products, s.activation),
                     self._multiplied(w.summed(s.mlp_bias, down), [(s.hidden, m.down)]),
                     s.activation)

    def _multiplied(self, product: Linear, factors: Factors, before: float = 1.0,
                    bias: bool = False) -> Linear:
        """before: on its input; of a product with a bias it is no factor of what that gives."""
        apart = before if bias else 1.0
        each = torch.cat([torch.full((columns,), factor * before / apart, device=self.device)
                          for columns, factor in factors])
        if apart == 1 and bool((each == 1).all()):
            return product
        return Multiplied(product, each, apart)


def _renamed(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor


def recurrent_layer(w: LayerWeights, s: ModelShape, index: int) -> RecurrentLayer:
    """The layer of these weights; index: among the recurrent ones."""
    if isinstance(s.recurrence, ConvShape):
        return short_conv(w, s.recurrence, index)
    if isinstance(s.recurrence, KdaShape):
        return kda(w, s.recurrence, s.norm_eps, index)
    if isinstance(s.recurrence, ScanShape):
        return mamba1(w, s.recurrence, index)
    assert isinstance(s.recurrence, MambaShape)
    return mamba2(w, s.recurrence, index)


@dataclass(slots=True)
class RecurrentBesideAttention:
    """A recurrent layer and attention that take the same input; what they give is added."""

    recurrent: RecurrentLayer
    attention: Attention
    project: Linear
    """The recurrent layer's columns, then queries, keys and values."""
    o: Linear
    columns: int
    """The recurrent layer's of them."""

    @property
    def inner(self) -> int:
        return self.recurrent.inner + self.attention.inner

    @property
    def form(self) -> InputForm:
        return self.project.form

    def forward(self, x: Tensor, step: ForwardContext) -> Tensor:
        return linear(recur(linear(x, self.project), self, step), self.o)

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None = None,
                out: Tensor | None = None) -> Tensor:
        """See `Mixer`: keys and values are written here as well."""
        heads = self.attention.rotate_write(p[:, self.columns:].contiguous(), step)
        return torch.cat((self.recurrent.between(p[:, :self.columns], step, rows),
                          self.attention.between(heads, step, rows)), 1, out=out)
