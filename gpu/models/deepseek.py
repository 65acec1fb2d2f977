"""DeepSeek-V3: latent attention, and experts in all layers but the first."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from actorium.gpu.families.model_shape import ExpertShape, ModelShape, Routing
from actorium.gpu.families.tensor_specs import NORMS
from actorium.gpu.models.decoder import Decoder, Layer, Mlp
from actorium.gpu.models.latent_attention import latent_attention
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import Dense, dense, experts, mixture_fused
from actorium.gpu.parallel.rank_types import RankGroup
from actorium.gpu.parallel.split_layers import MixtureSum
from actorium.gpu.passes.canonical_ops import add, all_reduce, route_in_groups
from actorium.gpu.weights.loader import Fused
from actorium.kernels.inputs import Input, InputForm, plain
from actorium.kernels.linear import Linear
from actorium.kernels.ops import Ops
from actorium.kernels.reference.experts import Experts, route_groups

SMALLEST = 1e-20
"""Added to the sum that weights are divided by."""


class DeepseekLM(Decoder):
    """Latent attention, and an MLP or experts, in each layer."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        """See `Decoder`."""
        if s.has_experts(i) and s.experts:
            return mixture_fused(f"{at}mlp.", s.hidden, s.experts)
        return []

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        """See `Decoder`."""
        s, inner = self.shape, w.under("mlp.")
        mlp: Mlp
        if s.has_experts(i) and s.experts and s.routing:
            mlp = grouped_mixture(inner, s.experts, s.routing)
        else:
            mlp = dense(inner)
        mixer = latent_attention(w.under("self_attn."), s, i)
        return Layer(mixer, mlp, s.norm_eps, *(w.norm(name) for name in NORMS))


@dataclass(slots=True)
class GroupedMixture:
    """Experts behind a router that looks at groups of them first."""

    shape: ExpertShape
    routing: Routing
    ops: Ops
    router: Linear
    """To the experts, in f32."""
    bias: Tensor
    """f32[E]: on the scores, when experts are chosen."""
    experts: Experts
    shared: Dense
    total: RankGroup | MixtureSum | None
    """See `Mixture`."""

    @property
    def waits(self) -> bool:
        """See `Mlp`."""
        return self.experts.waits

    @property
    def form(self) -> InputForm:
        """See `Mlp`: the router takes it as it is."""
        return InputForm().also(self.experts.form).also(self.shared.form)

    def forward(self, x: Tensor) -> Tensor:
        """See `Mlp`."""
        routed = route_in_groups(x, self)
        out = add(self.shared.forward(x), routed)
        return out if self.total is None else all_reduce(out, self.total)

    def route(self, x: Input) -> Tensor:
        """What the chosen experts give, weighted: [T, hidden]."""
        weights, chosen = self.choose(plain(x))
        return self.experts(x, weights.to(x.dtype), chosen)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, hidden] -> f32[T, chosen] weights, i64[T, chosen] experts."""
        s, r = self.shape, self.routing
        scores = self.ops.sigmoid(self.router.wide(x))
        weights, chosen = route_groups(scores, self.bias, r.groups, r.chosen_groups, s.chosen)
        if s.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST)
        return weights * r.factor, chosen


def grouped_mixture(w: LayerWeights, s: ExpertShape, routing: Routing) -> GroupedMixture:
    """The mixture of these weights."""
    return GroupedMixture(
        s, routing, w.ops, w.ops.float_linear(w.pop("gate.weight")),
        w.pop("gate.e_score_correction_bias"),
        experts(w, s.number), dense(w.under("shared_experts.").parts()), w.mixture_sum())
