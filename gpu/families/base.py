"""What the readers of all families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from actorium.actors.errors import BadModel, shown
from actorium.gpu.families.config_fields import Fields
from actorium.gpu.families.model_shape import DTYPES, ModelShape, RopeShape
from actorium.gpu.families.rope import one_rope

Reader = Callable[[dict[str, Any], Path, str], ModelShape]
"""(parsed config.json, its path, dtype or "auto") -> the shape, at the model's own longest length.
Raises `BadModel` naming the field that is missing or wrong."""

Ropes = tuple[tuple[RopeShape, ...], int]
"""The model's ropes, and the longest sequence with them."""


def base_shape(
    get: Fields, dtype: str, *, head_dim: int | None = None, ropes: Ropes | None = None,
    activation: str = "silu",
) -> ModelShape:
    """A decoder with full attention, no biases and dense MLPs: families replace what differs.

    head_dim: where the config names none (None: hidden / heads). ropes: None reads the one that
    all layers share. Raises `BadModel`.
    """
    heads, hidden = get.int("num_attention_heads"), get.int("hidden_size")
    layers = get.layers()
    own, limit = ropes or one_for_all(get)
    kv_heads = get.int("num_key_value_heads", heads)
    width = get.int("head_dim", head_dim or max(1, hidden // heads))
    if heads % kv_heads:
        raise get.bad("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if width % 2:
        raise get.bad("head_dim", f"must be even, got {width}")
    if activation == "silu" and get.raw.get("hidden_act", "silu") != "silu":
        raise get.bad("hidden_act", f"only silu is supported, "
                      f"got {shown(get.raw['hidden_act'])}")
    return ModelShape(
        architecture=str(get.raw["architectures"][0]), vocab_size=get.int("vocab_size"),
        hidden=hidden, intermediate=get.int("intermediate_size"), layers=layers, heads=heads,
        kv_heads=kv_heads, head_dim=width, norm_eps=get.float("rms_norm_eps", 1e-6),
        tied=get.flag("tie_word_embeddings"), ropes=own, windows=(0,) * layers,
        max_model_len=limit, dtype=_dtype(get, dtype), attention_scale=width**-0.5,
        activation=activation)


def one_for_all(get: Fields, partial: bool = False) -> Ropes:
    """Rope of old (`rope_scaling`) and new (`rope_parameters`) configs. partial: a part of each
    head may be rotated alone."""
    name = "rope_parameters" if get.raw.get("rope_parameters") else "rope_scaling"
    rope, limit = one_rope(get, name, get.raw.get(name) or {}, get.float("rope_theta", 10000.0),
                           positions(get), partial)
    return (rope,), limit


def positions(get: Fields) -> int:
    """The config's own limit on a sequence's length."""
    return get.int("max_position_embeddings", 2048)


def limited(shape: ModelShape, wanted: int | None) -> ModelShape:
    """With sequences of `wanted` tokens at most (None: the model's limit). Raises `BadModel`."""
    if wanted is None:
        return shape
    if wanted > shape.max_model_len:
        raise BadModel(
            f"max_model_len: {wanted} is more than the {shape.max_model_len} positions "
            "the model has", "model.max_model_len")
    return replace(shape, max_model_len=wanted)


def _dtype(get: Fields, wanted: str) -> torch.dtype:
    name = wanted
    if wanted == "auto":
        name = get.raw.get("dtype") or get.raw.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise get.bad("dtype", f"must be one of {', '.join(DTYPES)}, got {shown(name)}")
    return DTYPES[name]
