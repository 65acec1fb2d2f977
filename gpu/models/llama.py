"""One parametrised decoder: Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ in biases, norms, the
activation and the window of each layer."""

from __future__ import annotations

from actorium.gpu.families.llama_config import SANDWICH_NORMS
from actorium.gpu.families.tensor_specs import NORMS
from actorium.gpu.models.attention import attention
from actorium.gpu.models.decoder import Decoder, Layer
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import dense
from actorium.gpu.models.sandwich_layer import SandwichLayer


class CausalLM(Decoder):
    """Attention and a dense MLP in every layer."""

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        """See `Decoder`."""
        s = self.shape
        mixer = attention(w.under("self_attn."), s, i)
        mlp = dense(w.under("mlp."), s.mlp_bias, s.activation)
        if not s.sandwich_norms:
            return Layer(mixer, mlp, s.norm_eps, *(w.norm(name) for name in NORMS))
        before, between, attended, done = (w.norm(name) for name in SANDWICH_NORMS)
        return SandwichLayer(mixer, mlp, s.norm_eps, before, between, attended, done)
