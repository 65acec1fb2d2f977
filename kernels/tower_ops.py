"""What a vision tower runs on: plain torch here, on any device and in any dtype.

P = patches of a call. Patches attend to one another within segments, which lie one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.linear import Linear
from actorium.kernels.reference.rope import apply_rope

ERF, TANH = "none", "tanh"
"""Kinds of GELU, as torch names them."""


class Weight(NamedTuple):
    """Of a product."""

    rows: Tensor
    """[N, K]"""
    bias: Tensor | None
    """[N]"""


class PatchAttention(ABC):
    """The attention of a block, with the products before and behind it."""

    @abstractmethod
    def __call__(self, x: Tensor, residual: Tensor, turns: Tensor, segments: Any) -> Tensor:
        """residual + what comes of x. x, residual: [P, hidden]; turns, segments: as `TowerOps`
        gives them."""


class TowerOps:
    """The operations of a tower, which it asks for its layers once, with their weights."""

    @property
    def inexact(self) -> Sequence[str]:
        """Why an image's rows depend on what it is computed together with; empty: they do not."""
        return ("images, by torch",)

    def linear(self, weight: Weight) -> Linear:
        """A product."""
        return Linear(*weight)

    def gated(self, gate: Weight, up: Weight) -> Callable[[Tensor], Tensor]:
        """silu(gate) * up of [P, K]."""
        first, second = self.linear(gate), self.linear(up)
        return lambda x: F.silu(first(x)) * second(x)

    def gelu(self, x: Tensor, kind: str) -> Tensor:
        """Of each number; kind: ERF or TANH."""
        return F.gelu(x, approximate=kind)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Of rows, [P, N]."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Of rows, [P, N]: a row by one thread, in an order that follows from N alone."""
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def attention(self, heads: int, qkv: Weight, out: Weight) -> PatchAttention:
        """Of `heads` heads, the rows of whose queries come first, then those of the keys."""
        return TorchPatchAttention(heads, self.linear(qkv), self.linear(out))

    def turns(self, cos: Tensor, sin: Tensor) -> Tensor:
        """What turns heads, of the angles of their pairs, f32[P, D / 2] each: halves of a head are
        pairs."""
        both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        return both.unsqueeze(2)

    def segments(self, lengths: Sequence[int], device: torch.device) -> Any:
        """Segments of so many patches, one after the other."""
        sizes, ends = np.array(lengths), np.cumsum(lengths)
        starts = ends - sizes
        return [torch.from_numpy(starts[sizes == n][:, None] + np.arange(n)).to(device)
                for n in np.unique(sizes)]


class TorchPatchAttention(PatchAttention):
    """Segments of a length at once."""

    def __init__(self, heads: int, qkv: Linear, out: Linear) -> None:
        self.heads, self.qkv, self.out = heads, qkv, out

    def __call__(self, x: Tensor, residual: Tensor, turns: Tensor, segments: Any) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        turned = partial(_turned, turns=turns)
        q, k, y = turned(q), turned(k), torch.empty_like(v)
        for own in segments:
            heads = [rows[own].transpose(1, 2) for rows in (q, k, v)]
            part = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
            y[own.flatten()] = part.transpose(1, 2).flatten(0, 1)
        return self.out.add(y.flatten(1), residual)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Heads [P, H, D], rotated in float32."""
    return apply_rope(x.float(), turns).to(x.dtype)
