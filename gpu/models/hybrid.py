"""Decoders that mix recurrent and attention layers, dense MLPs and experts: Qwen3-Next, Qwen3.5
(dense and sparse), and Qwen3-MoE, which has attention alone."""

from __future__ import annotations

from actorium.gpu.families.model_shape import DeltaShape, ModelShape
from actorium.gpu.families.tensor_specs import NORMS
from actorium.gpu.models.attention import attention
from actorium.gpu.models.decoder import Decoder, Layer, Mixer, Mlp
from actorium.gpu.models.gated_delta import delta_fused, gated_delta
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import dense, mixture, mixture_fused
from actorium.gpu.weights.loader import Fused


class HybridLM(Decoder):
    """Attention or GatedDeltaNet, and an MLP or experts, in each layer."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        """See `Decoder`."""
        fused: list[Fused] = []
        if i in s.recurrent:
            fused += delta_fused(f"{at}linear_attn.", _delta(s), s.hidden)
        if s.has_experts(i) and s.experts:
            fused += mixture_fused(f"{at}mlp.", s.hidden, s.experts)
        return fused

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        """See `Decoder`."""
        s, inner = self.shape, w.under("mlp.")
        mixer: Mixer
        if i in s.recurrent:
            mixer = gated_delta(w.under("linear_attn."), _delta(s), s.norm_eps,
                                s.recurrent.index(i))
        else:
            mixer = attention(w.under("self_attn."), s, i)
        mlp: Mlp = mixture(inner, s.experts) if s.has_experts(i) and s.experts else dense(inner)
        return Layer(mixer, mlp, s.norm_eps, *(w.norm(name) for name in NORMS))


def _delta(s: ModelShape) -> DeltaShape:
    assert isinstance(s.recurrence, DeltaShape)
    return s.recurrence
