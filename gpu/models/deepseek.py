"""DeepSeek-V3: latent attention, and experts in all layers but the first."""

from __future__ import annotations

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import NORMS
from actorium.gpu.models.decoder import Decoder, Layer, Mlp
from actorium.gpu.models.grouped_experts import grouped_mixture
from actorium.gpu.models.mla import latent_attention
from actorium.gpu.models.mlp import dense, mixture_fused
from actorium.gpu.models.weights import Weights
from actorium.gpu.weights.loader import Fused


class DeepseekLM(Decoder):
    """Latent attention, and an MLP or experts, in each layer."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        """See `Decoder`."""
        if s.has_experts(i) and s.experts:
            return mixture_fused(f"{at}mlp.", s.hidden, s.experts)
        return []

    def load_layer(self, w: Weights, i: int) -> Layer:
        """See `Decoder`."""
        s, inner = self.shape, w.under("mlp.")
        mlp: Mlp
        if s.has_experts(i) and s.experts and s.routing:
            mlp = grouped_mixture(inner, s.experts, s.routing)
        else:
            mlp = dense(inner)
        mixer = latent_attention(w.under("self_attn."), s, i)
        return Layer(mixer, mlp, *(w.norm(name) for name in NORMS))
