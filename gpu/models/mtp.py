"""Layers that draft: multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.loader import Want
from actorium.gpu.models.decoder import Layer
from actorium.gpu.models.plan import AttentionPlan, GroupStep, Step
from actorium.gpu.models.weights import Weights
from actorium.gpu.shape import ModelShape
from actorium.kernels.linear import Linear
from actorium.kernels.ops import TorchOps

JOIN, NORMS = "eh_proj", ("enorm", "hnorm", "shared_head.norm")


def draft_wants(s: ModelShape, at: str) -> list[Want]:
    """Tensors that such a layer has beside those of a decoder layer. Embedding and head are the
    model's: the copies that checkpoints may have of them are not read."""
    return [Want(f"{at}{JOIN}.weight", (s.hidden, 2 * s.hidden)),
            *(Want(f"{at}{name}.weight", (s.hidden,)) for name in NORMS)]


@dataclass(slots=True)
class DeepseekDraft:
    """One such layer."""

    ops: TorchOps
    eps: float
    embed: Tensor
    """The model's."""
    token_norm: Tensor
    hidden_norm: Tensor
    join: Linear
    layer: Layer
    """Its mixer takes the pages at place 0 of group 0."""
    norm: Tensor

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, hiddens: Tensor, rope: Tensor, kv_index: Tensor,
        plan: AttentionPlan, pages: Tensor, rows: Tensor | None = None,
    ) -> Tensor:
        """[R, hidden] after the layer's norm: for the model's head, and for the next of a chain.

        hiddens: [T, hidden], after the model's final norm, or what this gave, further on in a
        chain. tokens: i64[T], each the one that follows on the token of its hidden. rope:
        [T, 2, 1, head_dim]; kv_index: i64[T]; plan: as of the hiddens' positions; pages: the
        layer's. rows: i64[R] of the T rows; None = all.
        """
        ops, layer = self.ops, self.layer
        token = ops.rms_norm(self.embed.index_select(0, tokens), self.token_norm, self.eps)
        hidden = self.join(torch.cat((token, ops.rms_norm(hiddens, self.hidden_norm, self.eps)),
                                     -1))
        step = Step([rope], [GroupStep(kv_index, [pages], plan)], None, [])
        x = ops.rms_norm(hidden, layer.mixer_norm, self.eps)
        hidden = layer.mixer(x, hidden, step, rows)
        x = ops.rms_norm(hidden, layer.mlp_norm, self.eps)
        return ops.rms_norm(layer.mlp.add(x, hidden), self.norm, self.eps)


def deepseek_draft(w: Weights, s: ModelShape, embed: Tensor, layer: Layer) -> DeepseekDraft:
    """The draft layer of these weights, of which `layer` has taken its own."""
    return DeepseekDraft(w.ops, s.norm_eps, embed, w.norm(NORMS[0]), w.norm(NORMS[1]),
                         w.linear(False, JOIN), layer, w.norm(NORMS[2]))
