"""One parametrised decoder: Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ in biases, norms, the
activation and the window of each layer."""

from __future__ import annotations

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.attention import attention, attention_wants
from actorium.gpu.models.decoder import NORMS, Decoder, Layer, norm_wants
from actorium.gpu.models.mlp import dense, dense_wants
from actorium.gpu.models.weights import Normed, Weights
from actorium.gpu.weights.loader import Want
from actorium.kernels.linear import Linear

SANDWICH = ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm",
            "post_feedforward_layernorm")
"""Norms before attention and before the MLP, and of what these two give."""


class CausalLM(Decoder):
    """Attention and a dense MLP in every layer."""

    @staticmethod
    def layer_wants(s: ModelShape, i: int, at: str) -> list[Want]:
        """See `Decoder`."""
        return [*attention_wants(f"{at}self_attn.", s),
                *dense_wants(f"{at}mlp.", s.hidden, s.intermediate, s.mlp_bias),
                *norm_wants(at, s, SANDWICH if s.sandwich_norms else NORMS)]

    def load_layer(self, w: Weights, i: int) -> Layer:
        """See `Decoder`."""
        s = self.shape
        mixer = attention(w.under("self_attn."), s, i)
        mlp = dense(w.under("mlp."), s.mlp_bias, s.activation)
        if not s.sandwich_norms:
            return Layer(mixer, mlp, *(w.norm(name) for name in NORMS))
        before, between, attended, done = (w.norm(name) for name in SANDWICH)
        assert isinstance(mixer.o, Linear) and isinstance(mlp.down, Linear)
        mixer.o = Normed(mixer.o, attended, s.norm_eps, w.ops)
        mlp.down = Normed(mlp.down, done, s.norm_eps, w.ops)
        return Layer(mixer, mlp, before, between)
