"""DeepSeek-V3: latent attention, and experts in all layers but the first."""

from __future__ import annotations

import torch
from torch import Tensor

from actorium.gpu.loader import Fused, Want
from actorium.gpu.models.decoder import Decoder, Layer, Mlp
from actorium.gpu.models.grouped_experts import grouped_mixture, grouped_wants
from actorium.gpu.models.mla import latent_attention, latent_wants
from actorium.gpu.models.mlp import dense, dense_wants, mixture_fused
from actorium.gpu.models.mtp import deepseek_draft, draft_wants
from actorium.gpu.models.weights import Weights
from actorium.gpu.shape import ModelShape

NORMS = ("input_layernorm", "post_attention_layernorm")


class DeepseekLM(Decoder):
    """Checkpoints have the layers that draft, `ModelShape.mtp_layers`, behind the others."""

    @staticmethod
    def layer_wants(s: ModelShape, i: int, at: str) -> list[Want]:
        """See `Decoder`."""
        wants = [*(Want(f"{at}{name}.weight", (s.hidden,)) for name in NORMS),
                 *latent_wants(f"{at}self_attn.", s)]
        if _sparse(s, i) and s.experts:
            return wants + grouped_wants(f"{at}mlp.", s.hidden, s.experts)
        return wants + dense_wants(f"{at}mlp.", s.hidden, s.intermediate)

    @staticmethod
    def layer_fused(s: ModelShape, i: int, at: str) -> list[Fused]:
        """See `Decoder`."""
        if _sparse(s, i) and s.experts:
            return mixture_fused(f"{at}mlp.", s.hidden, s.experts)
        return []

    @classmethod
    def wants(cls, s: ModelShape) -> list[Want]:
        """See `Decoder`; those of the layers that draft, too."""
        wants = super().wants(s)
        for i, at in _drafting(s):
            wants += [*cls.layer_wants(s, i, at), *draft_wants(s, at)]
        return wants

    @classmethod
    def fused(cls, s: ModelShape) -> list[Fused]:
        """See `Decoder`; those of the layers that draft, too."""
        return super().fused(s) + [
            own for i, at in _drafting(s) for own in cls.layer_fused(s, i, at)]

    def load_layer(self, w: Weights, i: int) -> Layer:
        """See `Decoder`; i: `ModelShape.layers` and above for those that draft."""
        s, inner = self.shape, w.under("mlp.")
        mlp: Mlp
        if _sparse(s, i) and s.experts and s.routing:
            mlp = grouped_mixture(inner, s.experts, s.routing)
        else:
            mlp = dense(inner)
        mixer = latent_attention(w.under("self_attn."), s, i if i < s.layers else 0)
        return Layer(mixer, mlp, *(w.norm(name) for name in NORMS))

    def __init__(
        self, shape: ModelShape, tensors: dict[str, Tensor], device: torch.device,
        native: bool = True,
    ) -> None:
        """See `Decoder`."""
        super().__init__(shape, tensors, device, native)
        self.drafts = []
        for i, at in _drafting(shape):
            w = Weights(tensors, at, self.ops, False)
            self.drafts.append(deepseek_draft(w, shape, self.embed, self.load_layer(w, i)))


def _sparse(s: ModelShape, i: int) -> bool:
    """Whether layer i has experts; those that draft always do."""
    return i in s.sparse or i >= s.layers


def _drafting(s: ModelShape) -> list[tuple[int, str]]:
    """(number, prefix of its tensors' names) of the layers that draft."""
    return [(i, f"model.layers.{i}.") for i in range(s.layers, s.layers + s.mtp_layers)]
