"""DeepSeek-V3: latent attention, and experts in all layers but the first."""

from __future__ import annotations

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.decoder import NORMS, Decoder, Layer, Mlp, norm_wants
from actorium.gpu.models.grouped_experts import grouped_mixture, grouped_wants
from actorium.gpu.models.mla import latent_attention, latent_wants
from actorium.gpu.models.mlp import dense, dense_wants, mixture_fused
from actorium.gpu.models.mtp import DraftNames, deepseek_names
from actorium.gpu.models.weights import Weights
from actorium.gpu.weights.loader import Fused, Want


class DeepseekLM(Decoder):
    """Latent attention, and an MLP or experts, in each layer."""

    @staticmethod
    def layer_wants(s: ModelShape, i: int, at: str) -> list[Want]:
        """See `Decoder`."""
        wants = norm_wants(at, s) + latent_wants(f"{at}self_attn.", s)
        if s.has_experts(i) and s.experts:
            return wants + grouped_wants(f"{at}mlp.", s.hidden, s.experts)
        return wants + dense_wants(f"{at}mlp.", s.hidden, s.intermediate)

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        """See `Decoder`."""
        if s.has_experts(i) and s.experts:
            return mixture_fused(f"{at}mlp.", s.hidden, s.experts)
        return []

    @staticmethod
    def draft_names(s: ModelShape) -> DraftNames | None:
        """See `Decoder`."""
        return deepseek_names(s)

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
