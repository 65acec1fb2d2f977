"""Gemma 3n's layers: hidden states in several streams, a low-rank product beside attention, and
MLPs whose smaller gates are cut off."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from torch import Tensor

from actorium.gpu.families.layer_shapes import AltUpShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import MERGE, SPREAD
from actorium.gpu.models.decoder import Layer, Mixer, Mlp
from actorium.gpu.models.forward_context import ForwardContext
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import dense
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.passes import canonical_ops as ops
from actorium.kernels.inputs import InputForm
from actorium.kernels.linear import Linear
from actorium.kernels.reference.torch_ops import TorchOps


@dataclass(slots=True)
class TokenGate:
    """What adds a token's own input for this layer to its hidden state."""

    first: int
    """Of the layer's columns of that input."""
    size: int
    gate: Linear
    back: Linear
    norm: Tensor
    eps: float

    def inputs(self, step: ForwardContext) -> Tensor:
        """[T, size], which lie apart."""
        return step.ropes[-1][:, self.first:self.first + self.size]

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """hidden: [T, hidden]; rows: [T, size], see `inputs`."""
        return ops.add(self.addend(hidden, rows), hidden)

    def addend(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """What `forward` adds."""
        y = ops.gelu_by(ops.linear(hidden, self.gate), rows)
        return ops.norm(ops.linear(y, self.back), self.norm, self.eps)


@dataclass(slots=True)
class AltUp:
    """How a layer's streams follow from its input, and from what it makes of one of them."""

    number: int
    chosen: int
    """The active one of them."""
    ops: TorchOps
    norm: Tensor
    """[K], as the scale: of what the router takes."""
    router: Linear
    prediction: Linear
    """From `streams` numbers to `streams` for each stream."""
    correction: Linear
    eps: float = field(kw_only=True)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.number, -1)

    def _routed(self, x: Tensor) -> Tensor:
        """[T, streams]"""
        normed = self.ops.rms_norm(x.contiguous(), self.norm, self.eps)
        return self.ops.tanh(self.router(normed * (1 / x.shape[1])))

    def active(self, x: Tensor) -> Tensor:
        """See `canonical_ops`, as of the others."""
        return self._split(x)[:, self.chosen].contiguous()

    def predict(self, x: Tensor) -> Tensor:
        parts = self._split(x)
        routed = self._routed(parts[:, self.chosen])
        shares = self.prediction(routed).view(-1, self.number, self.number, 1).float()
        total = wide = parts.float()
        # One by one: a product's sums may depend on how many rows there are.
        for i in range(self.number):
            total = total + shares[:, :, i] * wide[:, i:i + 1]
        return total.to(x.dtype).view_as(x)

    def correct(self, predicted: Tensor, y: Tensor) -> Tensor:
        parts = self._split(predicted)
        shares = self.correction(self._routed(y)) + 1
        news = (y - parts[:, self.chosen]).unsqueeze(1) * shares.unsqueeze(2)
        return (news + parts).view_as(predicted)

    def add_to_others(self, x: Tensor, y: Tensor) -> Tensor:
        self._split(x)[:, 1:].add_(y.unsqueeze(1))
        return x


@dataclass(slots=True)
class Streams:
    """Streams of an embedding, and one hidden state of streams."""

    into: list[Linear]
    out: list[Linear]
    ops: TorchOps

    def spread(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, streams * K]."""
        return torch.cat([x, *(self.ops.as_large(product(x), x) for product in self.into)], 1)

    def merge(self, x: Tensor) -> Tensor:
        """[T, streams * K] -> [T, K]."""
        first, *others = x.chunk(len(self.out) + 1, 1)
        total = first.float()
        for product, part in zip(self.out, others, strict=True):
            total = total + self.ops.as_large(product(part.contiguous()), first)
        return (total / (len(self.out) + 1)).to(x.dtype)


def streams_of(w: LayerWeights, s: AltUpShape) -> Streams:
    """Those of a model's weights."""
    into, out = ([w.linear(False, f"{at}{i}") for i in range(s.streams - 1)]
                 for at in (SPREAD, MERGE))
    return Streams(into, out, w.ops)


@dataclass(slots=True)
class CutMlp:
    """A dense MLP, of whose gates each token keeps those that are far enough above its mean."""

    both: Linear
    """Gate and up."""
    down: Linear
    deviations: float
    width: int
    """Gates of all ranks."""
    ranks: RankGroup
    ops: TorchOps

    @property
    def waits(self) -> bool:
        return False

    @property
    def form(self) -> InputForm:
        return self.both.form

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(ops.cut_gelu_mul(ops.linear(x, self.both), self), self.down)

    def cut_gelu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * I] -> [T, I]"""
        summed = self.ranks.all_reduce if self.ranks.place.size > 1 else None  # padding is 0
        return self.ops.cut_gelu_mul(gate_up, self.deviations, self.width, summed)


@dataclass(slots=True)
class LowRank:
    """The low-rank product beside attention, with its norm."""

    left: Linear
    right: Linear
    norm: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        y = ops.linear(ops.linear(x, self.left), self.right)
        return ops.add(ops.norm(y, self.norm, self.eps), x)


@dataclass(slots=True)
class AltUpLayer(Layer):
    """A layer of Gemma 3n."""

    altup: AltUp = field(kw_only=True)
    low_rank: LowRank = field(kw_only=True)
    token_gate: TokenGate = field(kw_only=True)
    half: Tensor = field(kw_only=True)
    """[K], one number: on the sum of two."""
    out_scale: Tensor | None = field(kw_only=True)
    """[K]: see `AltUpShape.scaled`."""
    streams: Streams | None = field(default=None, kw_only=True)
    """Of the last layer, whose streams become one."""

    def forward(self, hidden: Tensor, step: ForwardContext) -> Tensor:
        # Read before attention, behind which there may be fewer rows.
        rows = ops.token_rows(step, self.token_gate)
        predicted = ops.predict(hidden, self.altup)
        chosen = ops.active(predicted, self.altup)
        x = ops.shared_norm(chosen, self.mixer_norm, self.eps)  # type: ignore[arg-type]
        low_rank = self.low_rank.forward(x)
        y = self.mixer.forward(x, step)
        both = ops.add(ops.add(self.normed(y, self.mixer_out_norm), chosen), low_rank)
        both = ops.scale(both, self.half)
        assert self.mlp is not None
        y = self.mlp.forward(self.normed(both, self.mlp_norm))
        out = ops.correct(predicted, ops.add(self.normed(y, self.mlp_out_norm), both), self.altup)
        first = ops.active(out, self.altup)
        if self.out_scale is not None:
            first = ops.scale(first, self.out_scale)
        out = ops.add_to_others(out, self.token_gate.addend(first, rows), self.altup)
        return out if self.streams is None else ops.merge(out, self.streams)


def altup_layer(w: LayerWeights, s: ModelShape, a: AltUpShape, i: int, mixer: Mixer,
                gate: TokenGate) -> AltUpLayer:
    """The i-th layer of these weights, with this attention."""
    own, low = w.under("altup."), w.under("laurel.")
    altup = AltUp(a.streams, a.active, w.ops, own.norm("router_norm"),
                  *(own.linear(False, name) for name in (
                      "modality_router", "prediction_coefs", "correction_coefs")), eps=s.norm_eps)
    scale, inner = own.pop("correct_output_scale"), w.under("mlp.")
    mlp: Mlp
    if a.sparsity[i]:
        mlp = CutMlp(inner.linear(False, "gate_proj", "up_proj"), inner.summed(False, "down_proj"),
                     NormalDist().inv_cdf(a.sparsity[i]), s.whole_intermediate or s.intermediate,
                     w.group, w.ops)
    else:
        mlp = dense(inner, activation=s.activation)
    return AltUpLayer(
        mixer, mlp, s.norm_eps, *map(w.norm, s.layer_norms), altup=altup,
        low_rank=LowRank(low.linear(False, "linear_left"), low.linear(False, "linear_right"),
                       low.norm("post_laurel_norm"), s.norm_eps),
        token_gate=gate, half=torch.full_like(scale, 2.0 ** -0.5),
        out_scale=scale if a.scaled else None)
