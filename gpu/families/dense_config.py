"""Readers of decoders that differ from Llama in a few points.

- Phi-3 and Phi-4: fused projections, longrope.
- OLMo 2 and 3: norms of what attention and MLP give and none before them, queries and keys normed
  over all heads; windows in OLMo 3.
- SmolLM3: layers without rope.
- GLM-4: the rotated pairs lie side by side, in a part of a head; `Glm4` norms what attention and
  MLP give as well.
- Seed-OSS: biases.
- InternLM3: biases by names of its own.
- EXAONE 4: norms as OLMo's, but of each head; layers with full attention have no rope.
- ERNIE 4.5: the rotated pairs lie side by side.
- Hunyuan: each head is normed once it is rotated.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import (
    Fields,
    completed,
    decoder_shape,
    rope_field,
    shared_rope,
)
from actorium.gpu.families.layer_shapes import NOPE, LayerNorms, RopeShape
from actorium.gpu.families.llama_config import layer_windows, llama, mistral, ropes_by_type
from actorium.gpu.families.model_shape import ModelShape

PHI3: dict[str, Any] = {
    "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}
"""What a config of Phi-3 leaves out, as in transformers."""
OLMO: dict[str, Any] = {
    "vocab_size": 50_304, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5,
}
"""What one of OLMo leaves out."""
SMOLLM3: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
    "rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True,
}
"""What one of SmolLM3 leaves out."""
GLM: dict[str, Any] = {
    "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5,
}
"""What one of GLM leaves out."""
SEED_OSS: dict[str, Any] = {
    "vocab_size": 155_136, "hidden_size": 4096, "intermediate_size": 27_648,
    "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8,
    "attention_bias": True,
}
"""What one of Seed-OSS leaves out."""
EXAONE4: dict[str, Any] = {
    "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
}
"""What one of EXAONE 4 leaves out."""
ERNIE4_5: dict[str, Any] = {
    "vocab_size": 103_424, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "head_dim": 128, "rope_theta": 5e5,
}
"""What one of ERNIE 4.5 leaves out; null is a value of some."""
HUNYUAN: dict[str, Any] = {
    "vocab_size": 290_943, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5,
}
"""What one of Hunyuan leaves out."""
INTERNLM3: dict[str, Any] = {
    "vocab_size": 128_512, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
}
"""What one of InternLM3 leaves out."""
NORMS_AFTER = LayerNorms("", "", "post_attention_layernorm", "post_feedforward_layernorm")


def phi3(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of Phi-3, Phi-3.5 and Phi-4: a window, if there is one, is that of all
    layers, and the one scaling of ropes is longrope."""
    get = Fields(completed(raw, PHI3), where)
    shape = mistral(get.raw, where, dtype)
    kind = shape.ropes[0].kind
    if kind not in ("default", "longrope"):
        raise get.bad("rope_scaling", f"must be longrope, got {shown(kind)}")
    return shape


def olmo2(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of OLMo 2's config."""
    get = Fields(completed(raw, OLMO), where)
    return _olmo(get, decoder_shape(get, dtype))


def olmo3(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of OLMo 3's config: windows in the layers that `layer_types` name, by default in three
    of four; ropes are scaled in the others alone."""
    get = Fields(completed(raw, {**OLMO, "sliding_window": 4096}), where)
    theta = get.float("rope_theta", 5e5)
    shape = _olmo(get, decoder_shape(get, dtype, ropes=ropes_by_type(get, theta, theta)))
    window = get.int("sliding_window")
    return replace(shape, windows=layer_windows(get, shape.layers, window) or tuple(
        window if (i + 1) % 4 else 0 for i in range(shape.layers)))


def _olmo(get: Fields, shape: ModelShape) -> ModelShape:
    bias = get.flag("attention_bias")
    return replace(shape, qkv_bias=bias, o_bias=bias, whole_qk_norm=True,
                   layer_norms=NORMS_AFTER)


def smollm3(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of SmolLM3's config: layers of which `no_rope_layers` say 0 rotate nothing, by default
    every `no_rope_layer_interval`-th; those have the windows, where windows are switched on."""
    get = Fields(completed(raw, SMOLLM3), where)
    shape = llama(get.raw, where, dtype)
    turns = rotated_layers(get, shape.layers)
    shape = replace(shape, ropes=(*shape.ropes, NOPE), layer_ropes=tuple(1 - own for own in turns))
    if raw.get("sliding_window") is None or not get.flag("use_sliding_window"):
        return shape
    window = get.int("sliding_window")
    return replace(shape, windows=layer_windows(get, shape.layers, window)
                   or tuple(0 if own else window for own in turns))


def rotated_layers(get: Fields, layers: int) -> tuple[int, ...]:
    """1 for each layer that rotates queries and keys, 0 for those that do not. Raises `BadModel`.
    """
    rotated, every = get.raw.get("no_rope_layers"), get.int("no_rope_layer_interval")
    if rotated is None:
        return tuple(int((i + 1) % every != 0) for i in range(layers))
    if (not isinstance(rotated, list) or len(rotated) < layers
            or not all(own in (0, 1) for own in rotated)):
        raise get.bad("no_rope_layers", f"must be {layers} times 0 or 1, got {shown(rotated)}")
    return tuple(map(int, rotated[:layers]))


def glm(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of GLM-4-9B."""
    get = Fields(completed(raw, GLM), where)
    return replace(decoder_shape(get, dtype, partial=True), qkv_bias=get.flag("attention_bias"),
                   interleaved=True)


def glm4(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of GLM-4-0414."""
    return replace(glm(raw, where, dtype), layer_norms=LayerNorms(
        mixer_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"))


def seed_oss(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Seed-OSS's config."""
    get = Fields(completed(raw, SEED_OSS), where)
    shape = decoder_shape(get, dtype, head_dim=None if "head_dim" in raw else 128)
    return replace(shape, qkv_bias=get.flag("attention_bias"),
                   o_bias=get.flag("attention_out_bias"), mlp_bias=get.flag("mlp_bias"))


def exaone4(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of EXAONE 4's config: windows in the layers that `layer_types` name, by default in all
    but every `sliding_window_pattern`-th, and in none where `sliding_window` is null; where there
    are some, only those layers rotate queries and keys."""
    get = Fields(completed(raw, EXAONE4), where)
    shape = replace(decoder_shape(get, dtype), qk_norm=True, layer_norms=NORMS_AFTER)
    if raw.get("sliding_window", 0) is None:
        return shape
    window = get.int("sliding_window")
    windows = layer_windows(get, shape.layers, window)
    if windows is None:
        every = get.int("sliding_window_pattern")
        windows = tuple(window if (i + 1) % every else 0 for i in range(shape.layers))
    return replace(shape, windows=windows, ropes=(NOPE, *shape.ropes))


def ernie4_5(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of ERNIE 4.5's config."""
    get = Fields({**ERNIE4_5, **raw}, where)
    bias = get.flag("use_bias")
    return replace(decoder_shape(get, dtype), qkv_bias=bias, o_bias=bias, mlp_bias=bias,
                   interleaved=True)


def hunyuan(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Hunyuan's config."""
    get = Fields(completed(raw, HUNYUAN), where)
    get.only(use_cla=False, use_qk_norm=True, mlp_bias=False)
    shape, bias = decoder_shape(get, dtype, ropes=(_alpha_rope(get),)), get.flag("attention_bias")
    return replace(shape, qkv_bias=bias, o_bias=bias, qk_norm=True, norm_after_rope=True,
                   head_norms=("query_layernorm", "key_layernorm"))


def _alpha_rope(get: Fields) -> RopeShape:
    """That of a config: "dynamic" with an `alpha` means a larger theta, at any length. What is
    normed behind it takes no notice of a factor on what is rotated."""
    name = rope_field(get)
    fields = get.raw.get(name) or {}
    kind = isinstance(fields, dict) and (fields.get("rope_type") or fields.get("type"))
    if kind != "dynamic" or not fields.get("alpha"):
        return replace(shared_rope(get), attention_factor=1.0)
    r, heads = Fields(fields, get.where, f"{name}."), get.int("num_attention_heads")
    width = get.int("head_dim", max(1, get.int("hidden_size") // heads))
    theta = r.float("rope_theta", get.float("rope_theta", 10000.0))
    return RopeShape(theta=theta * r.float("alpha") ** (width / max(1, width - 2)))
def internlm3(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of InternLM3's config, whose biases transformers has all, or none."""
    get = Fields(completed(raw, INTERNLM3), where)
    bias = get.flag("qkv_bias", get.flag("attention_bias"))
    if get.flag("bias", get.flag("mlp_bias")) != bias:
        raise get.bad("bias", f"must be as qkv_bias is, {str(bias).lower()}")
    return replace(decoder_shape(get, dtype), qkv_bias=bias, o_bias=bias, mlp_bias=bias)
