"""The shape of a model: plain numbers of its `config.json` (`gpu/families` reads them)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from actorium.actors.errors import SHOWN, BadModel
from actorium.gpu.families.hybrid_shape import DeltaShape, ExpertShape, StateShape
from actorium.gpu.families.mamba_shape import MambaShape
from actorium.gpu.families.mla_shape import LatentShape, Routing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RecurrentShape = DeltaShape | MambaShape
"""Of the layers with a recurrent state: every kind has a `width`, of its convolution, and a
`state`, what a layer keeps of a sequence."""


@dataclass(frozen=True, slots=True)
class RopeShape:
    """Rotary embedding: base frequency and scaling, names as in transformers' `rope_parameters`."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max: int = 0
    """Positions the model was trained on before scaling (llama3, yarn, dynamic)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


class LayerGroup(NamedTuple):
    """The layers of one attention window: they share a page pool and a page table."""

    window: int
    """Tokens a query sees, itself included; 0 = all."""
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a decoder that arithmetic needs (memory plan, forward pass, loader)."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    ropes: tuple[RopeShape, ...]
    """One for all layers; or that of the layers with full attention, and of the windowed ones; none
    where nothing is rotated."""
    windows: tuple[int, ...]
    """Per layer: tokens a query sees, itself included; 0 = all."""
    max_model_len: int
    """Longest sequence the model serves."""
    dtype: torch.dtype
    attention_scale: float
    """On the product of query and key."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normed, head by head."""
    embed_scale: float = 1.0
    """On the embeddings."""
    logit_scale: float = 1.0
    activation: str = "silu"
    """silu or gelu (its tanh form): what gates the MLP."""
    norm_plus_one: bool = False
    """Norms multiply by 1 + weight."""
    sandwich_norms: bool = False
    """What attention and the MLP give is normed, too."""
    rotary_dim: int = 0
    """Leading dimensions of a head that are rotated; 0 = all."""
    output_gate: bool = False
    """What attention gives is gated by a sigmoid, projected with the queries."""
    recurrent: tuple[int, ...] = ()
    """Layers with a recurrent state instead of attention; their windows mean nothing."""
    recurrence: RecurrentShape | None = None
    """Of the recurrent layers."""
    sparse: tuple[int, ...] = ()
    """Layers whose MLP is a mixture of experts."""
    experts: ExpertShape | None = None
    """Of the sparse layers."""
    routing: Routing | None = None
    """How they are chosen; None: by the highest probabilities."""
    latent: LatentShape | None = None
    """Attention over latents instead of keys and values."""
    mtp_layers: int = 0
    """1 where a layer of the checkpoint, beside all others, predicts further tokens (MTP)."""

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The attention layers by window, in the order in which the windows first appear."""
        by_window: dict[int, list[int]] = {}
        for i, window in enumerate(self.windows):
            if i not in self.recurrent:
                by_window.setdefault(window, []).append(i)
        return tuple(LayerGroup(window, tuple(own)) for window, own in by_window.items())

    def has_experts(self, i: int) -> bool:
        """Whether the i-th layer's MLP is a mixture; that of a layer that drafts, behind all
        others, is one where the model has any."""
        return i in self.sparse or (i >= self.layers and self.experts is not None)

    def place(self, i: int) -> tuple[int, int]:
        """Of the i-th layer, which has attention: its place in `groups`, and in that group. A layer
        that drafts, behind all others, has a pool of its own, and so both are 0."""
        for g, group in enumerate(self.groups):
            if i in group.layers:
                return g, group.layers.index(i)
        return 0, 0

    @property
    def state(self) -> StateShape | None:
        """What a recurrent layer keeps of a sequence; None where no layer is recurrent."""
        return self.recurrence.state if self.recurrence else None

    @property
    def kv_row(self) -> tuple[int, int]:
        """What a token leaves in the pages of an attention layer: (parts, width of each). The keys
        of all heads and then their values; or one part, its latent."""
        if self.latent is not None:
            return 1, self.latent.row
        return 2 * self.kv_heads, self.head_dim

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (values have the same)."""
        return self.kv_heads * self.head_dim


def architecture_of(raw: dict[str, Any], where: Path) -> str:
    """Name of the model class in a `config.json`. Raises `BadModel`."""
    names = raw.get("architectures")
    if (not isinstance(names, list) or not names or not isinstance(names[0], str)
            or not names[0].isidentifier() or len(names[0]) > SHOWN):
        raise BadModel(f"{where}: architectures: must name the model class")
    return str(names[0])
