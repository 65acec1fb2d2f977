"""The indexer of layers that attend to chosen tokens: see `kernels/reference/token_choice.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.families.layer_shapes import IndexShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import INDEXER
from actorium.gpu.models.layer_weights import LayerWeights, Part
from actorium.kernels.linear import Linear
from actorium.kernels.reference.torch_ops import TorchOps

INDEX_EPS = 1e-6
"""Of the norm of keys."""


@dataclass(slots=True)
class Indexer:
    """Weights of one layer's; what it projects hidden states to, a key and the weights of its
    heads, the first product of attention gives."""

    sizes: IndexShape
    rope: int
    """Leading numbers of queries and keys that are rotated."""
    ops: TorchOps
    queries: Linear
    """From the normed latent of the queries."""
    norm: Tensor
    """[2, dim]: of keys."""
    layer_index: int
    """Index among the layers of a pool that have an indexer."""

    def key(self, p: Tensor, rope: Tensor) -> Tensor:
        """[T, dim]. p: [T, *], what the first product gave, in front of which lies the
        indexer's."""
        key = p[:, :self.sizes.dim].contiguous()
        return self._turned(self.ops.layer_norm(key, self.norm, INDEX_EPS).unsqueeze(1),
                            rope).squeeze(1)

    def query(self, p: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """([T, heads, dim], f32[T, heads]): queries, and the weights of their heads. p: as of
        `key`; latent: of the queries, normed."""
        s = self.sizes
        q = self._turned(self.queries(latent).view(-1, s.heads, s.dim), rope)
        return q, p[:, s.dim:s.dim + s.heads].float() * (s.heads * s.dim) ** -0.5

    def _turned(self, x: Tensor, rope: Tensor) -> Tensor:
        turned, plain = x.split((self.rope, self.sizes.dim - self.rope), -1)
        return torch.cat((self.ops.turn(turned, rope), plain), -1)


def indexer(w: LayerWeights, shape: ModelShape, i: int) -> tuple[Indexer, list[Part]]:
    """The indexer of the i-th layer's attention, of these weights, and the projections of hidden
    states that belong into its first product."""
    s, m, own = shape.index, shape.latent, w.under(INDEXER)
    assert s is not None and m is not None
    index = len(shape.index_layers(range(i))) if i < shape.layers else 0
    order = torch.arange(s.dim)
    if s.interleaved:
        order = torch.cat((order[:m.rope:2], order[1:m.rope:2], order[m.rope:]))
    key, queries = own.part(False, "wk"), own.part(False, "wq_b")
    order = order.to(key.weight.device)
    key = key._replace(weight=key.weight[order])
    turned = queries.weight.view(s.heads, s.dim, -1)[:, order].flatten(0, 1)
    norm = torch.stack((own.pop("k_norm.weight"), own.pop("k_norm.bias")))[:, order].contiguous()
    return (Indexer(s, m.rope, w.ops, w.product([queries._replace(weight=turned)]), norm, index),
            [key, own.part(False, "weights_proj")])
