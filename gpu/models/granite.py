"""Granite-4 hybrid: Mamba-2 and attention layers, an MLP for all tokens, and experts beside it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from actorium.gpu.families.granite_config import routed_alone
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import MambaShape
from actorium.gpu.families.tensor_specs import NORMS
from actorium.gpu.models.attention import attention
from actorium.gpu.models.decoder import Decoder, Layer, Mixer, Mlp
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.models.mlp import Dense, Mixture, mixture, mixture_fused
from actorium.gpu.models.recurrent import mamba2
from actorium.gpu.passes.canonical_ops import add
from actorium.gpu.weights.loader import Fused
from actorium.kernels.inputs import InputForm


class GraniteLM(Decoder):
    """Attention or Mamba-2, and an MLP with or without experts, in each layer."""

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        return mixture_fused(at, s.hidden, s.experts) if s.experts else []

    def load_layer(self, w: LayerWeights, i: int) -> Layer:
        s = self.shape
        mixer: Mixer
        if i in s.recurrent and isinstance(s.recurrence, MambaShape):
            mixer = mamba2(w.under("mamba."), s.recurrence, s.recurrent.index(i))
        else:
            mixer = attention(w.under("self_attn."), s, i)
        mlp: Mlp
        if s.experts is None:
            mlp = _shared(w)
        elif s.experts.shared:
            mlp = Beside(mixture(w, routed_alone(s.experts)), _shared(w))
        else:
            mlp = mixture(w, s.experts)
        return Layer(mixer, mlp, s.norm_eps, *(w.norm(name) for name in NORMS))


def _shared(w: LayerWeights) -> Dense:
    """The MLP that all tokens of a layer go through."""
    w = w.under("shared_mlp.")
    return Dense(w.gated(False, "silu", "input_linear"), w.summed(False, "output_linear"))


@dataclass(slots=True)
class Beside:
    """Experts, and an MLP that all tokens go through."""

    experts: Mixture
    shared: Dense

    @property
    def waits(self) -> bool:
        return self.experts.waits

    @property
    def form(self) -> InputForm:
        return self.experts.form.also(self.shared.form)

    def forward(self, x: Tensor) -> Tensor:
        routed = self.experts.forward(x)
        return add(self.shared.forward(x), routed)
