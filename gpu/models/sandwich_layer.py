"""Gemma 3's layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from actorium.gpu.models.decoder import Layer
from actorium.gpu.models.forward_context import ForwardContext
from actorium.gpu.passes.canonical_ops import add, norm


@dataclass(slots=True)
class SandwichLayer(Layer):
    """Attention and MLP are normed before they are added, too (Gemma 3)."""

    attended: Tensor
    done: Tensor

    def forward(self, hidden: Tensor, step: ForwardContext) -> Tensor:
        """See `Layer`."""
        y = self.mixer.forward(norm(hidden, self.mixer_norm, self.eps), step)
        hidden = add(norm(y, self.attended, self.eps), hidden)
        y = self.mlp.forward(norm(hidden, self.mlp_norm, self.eps))
        return add(norm(y, self.done, self.eps), hidden)
