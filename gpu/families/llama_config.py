"""Llama, Mistral, Ministral, Qwen2, Qwen3 and Gemma 3: decoders with attention in all layers. Gemma
3 has windows in all layers but every sixth, a rope for each kind, and sandwich norms."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import Fields, decoder_shape, read_rope, shared_rope
from actorium.gpu.families.layer_shapes import GATED, LayerNorms, RopeShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import (
    ATTENTION,
    TensorSpec,
    attention_tensors,
    dense_tensors,
    norm_tensors,
)

SLIDING, FULL = "sliding_attention", "full_attention"
SANDWICH_NORMS = LayerNorms("input_layernorm", "pre_feedforward_layernorm",
                            "post_attention_layernorm", "post_feedforward_layernorm")
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131_072, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""What a config leaves out (transformers' `Gemma3TextConfig`)."""
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
GEMMA2_DEFAULTS: dict[str, Any] = {
    **GEMMA3_DEFAULTS, "vocab_size": 256_000, "max_position_embeddings": 8192,
    "sliding_window_pattern": 2, CAPS[0]: 50.0, CAPS[1]: 30.0,
}
"""The same of Gemma 2."""


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


def causal_layer(s: ModelShape, i: int, at: str) -> list[TensorSpec]:
    """Tensors of a layer with attention and a dense MLP."""
    alphas = [TensorSpec(f"{at}mlp.act_fn.alpha_{kind}", (1,)) for kind in "pn"]
    last = [TensorSpec(f"{at}mlp.{GATED[-1]}.bias", (s.hidden,))]
    return [*attention_tensors(f"{at}{ATTENTION}", s), *(alphas * (s.activation == "xielu")),
            *dense_tensors(f"{at}mlp.", s.hidden, s.intermediate, s.mlp_bias,
                           GATED if s.gated else GATED[1:]), *(last * s.down_bias),
            *norm_tensors(at, s, s.layer_norms.names[0 if i or s.first_norm else 1:])]


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


# --- Gemma 2 and 3 -------------------------------------------------------------------------------

def gemma2(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Gemma 2's config."""
    get = _checked({**GEMMA2_DEFAULTS, **raw}, where)
    attention, final = (0.0 if get.raw[name] is None else get.float(name) for name in CAPS)
    return replace(_gemma(get, dtype, (shared_rope(get),)), attention_cap=attention,
                   logit_cap=final)


def vault_gemma(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of VaultGemma's config: Gemma 2 without norms of what attention and MLP give."""
    return replace(gemma2(raw, where, dtype),
                   layer_norms=LayerNorms(mlp="pre_feedforward_layernorm"))


def gemma3(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Gemma 3's config, of which the text part is served."""
    get = _text(raw, where)
    ropes = ropes_by_type(get, get.float("rope_theta", 1e6), get.float("rope_local_base_freq", 1e4))
    return replace(_gemma(get, dtype, ropes), qk_norm=True)


def _gemma(get: Fields, dtype: str, ropes: tuple[RopeShape, ...]) -> ModelShape:
    shape = decoder_shape(get, dtype, ropes=ropes, activation="gelu")
    bias = get.flag("attention_bias")
    return replace(
        shape, windows=_windows(get, shape.layers), qkv_bias=bias, o_bias=bias,
        attention_scale=get.float("query_pre_attn_scalar") ** -0.5,
        embed_scale=rounded(shape.hidden**0.5, shape.dtype), norm_plus_one=True,
        layer_norms=SANDWICH_NORMS)


def _text(raw: dict[str, Any], where: Path) -> Fields:
    """The config of the text part, complete. Raises `BadModel` on what is not served."""
    nested, prefix = raw.get("text_config"), ""
    if isinstance(nested, dict):
        kept = {key: raw[key] for key in ("dtype", "torch_dtype") if raw.get(key)}
        raw, prefix = {**kept, **nested, "architectures": raw["architectures"]}, "text_config."
    return _checked({**GEMMA3_DEFAULTS, **raw}, where, prefix, CAPS)


def _checked(raw: dict[str, Any], where: Path, prefix: str = "",
             refused: tuple[str, ...] = ()) -> Fields:
    bad = Fields(raw, where, prefix).bad
    for name in refused:
        if raw.get(name):
            raise bad(name, f"is not supported, got {shown(raw[name])}")
    name = "hidden_activation"
    if raw.get(name, "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise bad(name, f"only gelu_pytorch_tanh is supported, got {shown(raw[name])}")
    return Fields(raw, where)


def _windows(get: Fields, layers: int) -> tuple[int, ...]:
    if get.raw.get("sliding_window") is None:
        return (0,) * layers
    window, every = get.int("sliding_window"), get.int("sliding_window_pattern", 6)
    return layer_windows(get, layers, window) or tuple(
        window if (i + 1) % every else 0 for i in range(layers))


def ropes_by_type(get: Fields, full: float, windowed: float) -> tuple[RopeShape, RopeShape]:
    """Of the full and of the windowed layers: `rope_parameters` by layer type, or, in old configs,
    `rope_scaling` of the full ones alone; with the theta that each has where it names none."""
    by_type = get.raw.get("rope_parameters") or {}
    if not isinstance(by_type, dict):
        raise get.bad("rope_parameters", "must be an object")
    wide = by_type.get("full_attention") or get.raw.get("rope_scaling") or {}
    near = by_type.get("sliding_attention") or {}
    return (read_rope(get, "rope_parameters.full_attention", wide, full),
            read_rope(get, "rope_parameters.sliding_attention", near, windowed))


def rounded(value: float, dtype: str) -> float:
    """The nearest number of this dtype to a float32 (ties to even), as torch rounds."""
    bits, = struct.unpack("<I", struct.pack("<f", value))
    if dtype == "bfloat16":
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    wide, = struct.unpack("<f", struct.pack("<I", bits))
    if dtype == "float16":
        wide, = struct.unpack("<e", struct.pack("<e", wide))
    return float(wide)
