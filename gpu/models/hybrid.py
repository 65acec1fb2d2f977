"""Decoders that mix recurrent and attention layers, dense MLPs and experts: Qwen3-Next, Qwen3.5
(dense and sparse), and Qwen3-MoE, which has attention alone."""

from __future__ import annotations

from actorium.gpu.families.hybrid_shape import DeltaShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.attention import attention, attention_wants
from actorium.gpu.models.decoder import NORMS, Decoder, Layer, Mixer, Mlp, norm_wants
from actorium.gpu.models.gated_delta import delta_fused, delta_wants, gated_delta
from actorium.gpu.models.mlp import dense, dense_wants, mixture, mixture_fused, mixture_wants
from actorium.gpu.models.mtp import DraftNames, qwen_names
from actorium.gpu.models.weights import Weights
from actorium.gpu.weights.loader import Fused, Want


class HybridLM(Decoder):
    """Attention or GatedDeltaNet, and an MLP or experts, in each layer."""

    @staticmethod
    def layer_wants(s: ModelShape, i: int, at: str) -> list[Want]:
        """See `Decoder`."""
        wants = norm_wants(at, s)
        if i in s.recurrent:
            wants += delta_wants(f"{at}linear_attn.", _delta(s), s.hidden)
        else:
            wants += attention_wants(f"{at}self_attn.", s)
        if s.has_experts(i) and s.experts:
            return wants + mixture_wants(f"{at}mlp.", s.hidden, s.experts)
        return wants + dense_wants(f"{at}mlp.", s.hidden, s.intermediate)

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        """See `Decoder`."""
        fused: list[Fused] = []
        if i in s.recurrent:
            fused += delta_fused(f"{at}linear_attn.", _delta(s), s.hidden)
        if s.has_experts(i) and s.experts:
            fused += mixture_fused(f"{at}mlp.", s.hidden, s.experts)
        return fused

    @staticmethod
    def draft_names(s: ModelShape) -> DraftNames | None:
        """See `Decoder`."""
        return qwen_names(s)

    def load_layer(self, w: Weights, i: int) -> Layer:
        """See `Decoder`."""
        s, inner = self.shape, w.under("mlp.")
        mixer: Mixer
        if i in s.recurrent:
            mixer = gated_delta(w.under("linear_attn."), _delta(s), s.norm_eps,
                                s.recurrent.index(i))
        else:
            mixer = attention(w.under("self_attn."), s, i)
        mlp: Mlp = mixture(inner, s.experts) if s.has_experts(i) and s.experts else dense(inner)
        return Layer(mixer, mlp, *(w.norm(name) for name in NORMS))


def _delta(s: ModelShape) -> DeltaShape:
    assert isinstance(s.recurrence, DeltaShape)
    return s.recurrence
