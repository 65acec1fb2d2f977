"""A model's embedding and head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import EMBED, HEAD
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.parallel.split_layers import SplitEmbedding, SplitHead
from actorium.gpu.passes.canonical_ops import logits, norm
from actorium.kernels.grouped_rows import RowLookup
from actorium.kernels.linear import Linear


def embedding_and_head(w: LayerWeights, s: ModelShape) -> tuple[Tensor | RowLookup, Linear]:
    """([V, hidden], or what gives its rows; the head), of one matrix where they are tied. Of
    several ranks, each has its rows of both."""
    embed, looked_up = w.embedding(EMBED.removesuffix(".weight"), s.tied)
    head = (looked_up if s.tied and looked_up
            else w.linear(False, HEAD.removesuffix(".weight")))
    if w.group.place.size == 1:
        return embed, head
    return (SplitEmbedding(embed, s.vocab_size, w.group),
            SplitHead(head, s.vocabulary, w.group))


@dataclass(slots=True)
class Head:
    """The end of a model: the final norm and the head."""

    norm: Tensor
    eps: float
    product: Linear
    scale: float

    def forward(self, rows: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab], written plainly."""
        return logits(norm(rows, self.norm, self.eps), self.product, self.scale)
