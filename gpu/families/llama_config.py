"""Llama, Mistral, Ministral, Qwen2 and Qwen3: decoders with attention in all layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.gpu.families.config_fields import Fields
from actorium.gpu.families.decoder_config import decoder_shape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import (
    ATTENTION,
    NORMS,
    TensorSpec,
    attention_tensors,
    dense_tensors,
    norm_tensors,
)

SLIDING, FULL = "sliding_attention", "full_attention"
SANDWICH_NORMS = ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm",
                  "post_feedforward_layernorm")
"""Norms before attention and before the MLP, and of what these two give."""


def llama(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Llama's config."""
    get = Fields(raw, where)
    bias = get.flag("attention_bias")
    return replace(decoder_shape(get, dtype, partial=True), qkv_bias=bias, o_bias=bias,
                   mlp_bias=get.flag("mlp_bias"))


def mistral(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Mistral's config: a window, if there is one, is that of all layers. Its
    `layer_types` mean nothing, as in transformers, which has Ministral for models with both kinds.
    """
    get = Fields(raw, where)
    shape = decoder_shape(get, dtype, partial=True)
    if raw.get("sliding_window") is None:
        return shape
    return replace(shape, windows=(get.int("sliding_window"),) * shape.layers)


def ministral(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Ministral's config: windows in the layers that `layer_types` name, in all of them
    where it is absent; by default of 4,096 tokens, and none where `sliding_window` is null."""
    get = Fields(raw, where)
    shape = decoder_shape(get, dtype, partial=True)
    if raw.get("sliding_window", 0) is None:
        return shape
    window = get.int("sliding_window", 4096)
    return replace(shape, windows=layer_windows(get, shape.layers, window)
                   or (window,) * shape.layers)


def qwen2(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Qwen2's config."""
    get = Fields(raw, where)
    return replace(_windowed(get, decoder_shape(get, dtype, partial=True)), qkv_bias=True)


def qwen3(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Qwen3's config."""
    get = Fields(raw, where)
    bias = get.flag("attention_bias")
    shape = decoder_shape(get, dtype, head_dim=128, partial=True)
    return replace(_windowed(get, shape), qkv_bias=bias, o_bias=bias, qk_norm=True)


def causal_layer(s: ModelShape, _: int, at: str) -> list[TensorSpec]:
    """Tensors of a layer with attention and a dense MLP, Gemma 3's too."""
    return [*attention_tensors(f"{at}{ATTENTION}", s),
            *dense_tensors(f"{at}mlp.", s.hidden, s.intermediate, s.mlp_bias),
            *norm_tensors(at, s, SANDWICH_NORMS if s.sandwich_norms else NORMS)]


def layer_windows(get: Fields, layers: int, window: int) -> tuple[int, ...] | None:
    """Of each layer, as `layer_types` say; None where there are none. Raises `BadModel`."""
    if get.raw.get("layer_types") is None:
        return None
    return tuple(window if kind == SLIDING else 0
                 for kind in get.kinds("layer_types", (SLIDING, FULL), layers))


def _windowed(get: Fields, shape: ModelShape) -> ModelShape:
    """Qwen's windows, where they are switched on: by default from a layer on."""
    if get.raw.get("sliding_window") is None or not get.flag("use_sliding_window"):
        return shape
    window = get.int("sliding_window")
    first = get.raw.get("max_window_layers", 28) and get.int("max_window_layers", 28)
    return replace(shape, windows=layer_windows(get, shape.layers, window) or tuple(
        window if i >= first else 0 for i in range(shape.layers)))
