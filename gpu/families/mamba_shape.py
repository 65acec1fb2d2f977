"""What Granite-4 hybrid configs say of Mamba-2 layers and experts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from actorium.actors.errors import shown
from actorium.gpu.families.config_fields import Fields
from actorium.gpu.families.hybrid_shape import ExpertShape, StateShape

GRANITE: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
    "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_conv_bias": True, "mamba_proj_bias": False,
}
"""What a config leaves out (transformers' `GraniteMoeHybridConfig`)."""
RECURRENT, FULL = ("mamba", "linear_attention"), ("attention", "full_attention")
"""Names of the two kinds of layers: the checkpoints' own, and transformers'."""


class MambaShape(NamedTuple):
    """A Mamba-2 layer."""

    heads: int
    groups: int
    """Of B and C: each is shared by heads in a row."""
    head_dim: int
    state_dim: int
    width: int
    """Of the convolution."""
    conv_bias: bool
    proj_bias: bool
    time_limit: tuple[float, float]
    """Least and largest time step."""
    norm_eps: float
    """Of the layer's own norm."""

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def state(self) -> StateShape:
        """What the layer keeps: [H, P, N], and columns; its inputs are those and dt."""
        return StateShape((self.heads, self.head_dim, self.state_dim),
                          (self.width - 1, self.channels), self.channels + self.heads)


def granite_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with all it leaves out."""
    return {**GRANITE, **{key: value for key, value in raw.items() if value is not None}}


def mamba_layers(get: Fields, layers: int) -> tuple[int, ...]:
    """The recurrent ones, as `layer_types` (once `layers_block_type`) say. Raises `BadModel`."""
    name = "layer_types" if "layer_types" in get.raw else "layers_block_type"
    kinds = get.kinds(name, (RECURRENT[0], FULL[0], *RECURRENT, *FULL), layers)
    if not set(kinds) & set(FULL):
        raise get.bad(name, f"a model without {FULL[0]} layers is not supported")
    return tuple(i for i, kind in enumerate(kinds) if kind in RECURRENT)


def mamba_shape(get: Fields) -> MambaShape:
    """Raises `BadModel` naming the field that is wrong."""
    heads, groups = get.int("mamba_n_heads"), get.int("mamba_n_groups")
    inner = get.int("mamba_expand") * get.int("hidden_size")
    auto = get.raw.get("mamba_d_head") == "auto"
    head_dim = max(1, inner // heads) if auto else get.int("mamba_d_head")
    if heads * head_dim != inner:
        raise get.bad("mamba_n_heads", f"{heads} heads of {head_dim} are not mamba_expand * "
                      f"hidden_size, {inner}")
    if heads % groups:
        raise get.bad("mamba_n_groups", f"{groups} does not divide {heads} heads")
    width = get.int("mamba_d_conv")
    if width < 2:
        raise get.bad("mamba_d_conv", f"must be at least 2, got {width}")
    return MambaShape(heads, groups, head_dim, get.int("mamba_d_state"), width,
                      get.flag("mamba_conv_bias"), get.flag("mamba_proj_bias"), _limit(get),
                      get.float("rms_norm_eps", 1e-6))


def _limit(get: Fields) -> tuple[float, float]:
    """`time_step_limit`; JSON has no infinity, so that transformers writes it as an object."""
    found = get.raw.get("time_step_limit", (0.0, math.inf))
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise get.bad("time_step_limit", f"must be two numbers, got {shown(found)}")
    low, high = (_number(value) for value in found)
    if low is None or high is None or not 0 <= low <= high or high == 0:
        raise get.bad("time_step_limit", "must be two numbers, the least "
                      f"first, got {shown(found)}")
    return low, high


def _number(value: Any) -> float | None:
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def granite_experts(get: Fields) -> ExpertShape | None:
    """None where `num_local_experts` is 0. Raises `BadModel` naming the field that is wrong."""
    if get.raw["num_local_experts"] == 0:
        return None
    count, chosen = get.int("num_local_experts"), get.int("num_experts_per_tok")
    if chosen > count:
        raise get.bad("num_experts_per_tok", f"{chosen} is more than {count} experts")
    return ExpertShape(count, chosen, get.int("intermediate_size"),
                       get.int("shared_intermediate_size"), True, shared_gate=False)
