"""Qwen2.5-VL and Qwen3-VL (dense and sparse): a Qwen decoder whose positions have three axes, and a
vision tower."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import MAX_LAYERS, Fields
from actorium.gpu.families.llama_config import qwen2, qwen3
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.qwen_hybrid_config import qwen_hybrid
from actorium.gpu.families.vision_shape import VisionShape

TEXT_25: dict[str, Any] = {
    "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "sliding_window": 4096, "max_window_layers": 80,
}
TEXT_3: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 128_000,
    "rope_theta": 5e5,
}
TEXT_3_MOE: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 128_000,
    "rope_theta": 5e5, "moe_intermediate_size": 1408, "num_experts_per_tok": 4,
    "num_local_experts": 60,
}
_VISION: dict[str, Any] = {
    "in_channels": 3, "num_heads": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}
VISION_25: dict[str, Any] = {
    **_VISION, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14,
    "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 4,
}
VISION_3: dict[str, Any] = {
    **_VISION, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
}
"""What a config leaves out (transformers' config classes)."""
TOKENS = {"image_token_id": 151_655, "video_token_id": 151_656}


def qwen25_vl(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Qwen2.5-VL's config; the text part lies flat in those of old."""
    text = _text_part(raw, TEXT_25, inner_tie=True)
    shape = _three_axes(qwen2(text, where, dtype), text, where, (16, 24, 24), mixed=False)
    get = _vision_part(raw, where, VISION_25, "silu")
    side = get.int("spatial_merge_size") * get.int("patch_size")
    if get.int("window_size") < side:
        raise get.bad("window_size", f"must be at least {side}, patches that are merged")
    blocks = _indexes(get, "fullatt_block_indexes", get.int("depth", maximum=MAX_LAYERS))
    return replace(shape, vision=replace(
        _tower(get, raw, where, shape), gated=True, full=blocks,
        window=get.int("window_size") // side * get.int("spatial_merge_size"),
        tokens_per_second=get.int("tokens_per_second")))


def qwen3_vl(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Qwen3-VL's config."""
    text = _text_part(raw, TEXT_3)
    return _with_deepstack(qwen3(text, where, dtype), text, raw, where)


def qwen3_vl_moe(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Qwen3-VL-MoE's config."""
    text = _text_part(raw, TEXT_3_MOE)
    return _with_deepstack(qwen_hybrid(text, where, dtype), text, raw, where)


def _with_deepstack(shape: ModelShape, text: dict[str, Any], raw: dict[str, Any],
                    where: Path) -> ModelShape:
    shape = _three_axes(shape, text, where, (24, 20, 20), mixed=True)
    get = _vision_part(raw, where, VISION_3, "gelu_pytorch_tanh")
    side = math.isqrt(get.int("num_position_embeddings"))
    if side**2 != get.int("num_position_embeddings"):
        raise get.bad("num_position_embeddings", f"must be a square, got "
                      f"{shown(get.raw['num_position_embeddings'])}")
    name = "deepstack_visual_indexes"
    blocks = _indexes(get, name, get.int("depth", maximum=MAX_LAYERS))
    if len(blocks) >= shape.layers:
        raise get.bad(name, f"{len(blocks)} are too many for {shape.layers} layers of text")
    return replace(shape, vision=replace(
        _tower(get, raw, where, shape), positions=side, deepstack=blocks))


# --- text ----------------------------------------------------------------------------------------

def _text_part(raw: dict[str, Any], defaults: dict[str, Any],
               inner_tie: bool = False) -> dict[str, Any]:
    """The config of the language model, complete. inner_tie: whether embedding and head are one
    may be said there, too."""
    nested = raw.get("text_config")
    own = nested if isinstance(nested, dict) else raw
    kept = {key: raw[key] for key in ("dtype", "torch_dtype") if raw.get(key)}
    given = {key: value for key, value in own.items()
             if value is not None and key not in ("vision_config", "text_config")}
    for name in ("rope_scaling", "rope_parameters"):
        rope = given.get(name)
        if isinstance(rope, dict) and "mrope" in (rope.get("rope_type"), rope.get("type")):
            given[name] = {**rope, "rope_type": "default"}  # as it was called at first
    tied = raw.get("tie_word_embeddings") or (inner_tie and own.get("tie_word_embeddings"))
    return {**defaults, **kept, **given, "architectures": raw["architectures"],
            "tie_word_embeddings": bool(tied)}


def _three_axes(shape: ModelShape, text: dict[str, Any], where: Path,
                default: tuple[int, int, int], mixed: bool) -> ModelShape:
    """The same whose rope has axes, by the sections of `mrope_section`: pairs that time, height and
    width turn. mixed: in turn, as far as those of height and width go; else one section after the
    other. Raises `BadModel`."""
    name = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    get, pairs = Fields(text.get(name) or {}, where, f"{name}."), shape.head_dim // 2
    if shape.rotary_dim:
        raise get.bad("partial_rotary_factor", "only 1.0 is supported")
    found = get.raw.get("mrope_section", default)
    if (not isinstance(found, list | tuple) or len(found) != 3 or sum(map(_count, found)) != pairs
            or min(map(_count, found)) < 0):
        raise get.bad("mrope_section", f"must be three numbers, {pairs} together, "
                      f"got {shown(found)}")
    if mixed:
        axes = [i % 3 if i % 3 and i < 3 * found[i % 3] else 0 for i in range(pairs)]
    else:
        axes = [axis for axis, count in enumerate(found) for _ in range(count)]
    return replace(shape, ropes=tuple(replace(rope, axes=tuple(axes)) for rope in shape.ropes))


def _count(value: Any) -> int:
    """An integer as it is; what is none, below all counts."""
    return value if isinstance(value, int) and not isinstance(value, bool) else -1 << 32


# --- vision --------------------------------------------------------------------------------------

def _vision_part(raw: dict[str, Any], where: Path, defaults: dict[str, Any],
                 activation: str) -> Fields:
    """The config of the tower, complete. Raises `BadModel`."""
    nested = raw.get("vision_config")
    if not isinstance(nested, dict):
        raise Fields(raw, where).bad("vision_config", f"must be an object, got {shown(nested)}")
    given = {key: value for key, value in nested.items() if value is not None}
    get = Fields({"hidden_act": activation, **defaults, **given}, where, "vision_config.")
    if get.raw["hidden_act"] != activation:
        raise get.bad("hidden_act", f"only {activation} is supported, "
                      f"got {shown(get.raw['hidden_act'])}")
    return get


def _tower(get: Fields, raw: dict[str, Any], where: Path, text: ModelShape) -> VisionShape:
    """What both kinds have. Raises `BadModel`."""
    hidden, heads, out = get.int("hidden_size"), get.int("num_heads"), get.int("out_hidden_size")
    if hidden % (4 * heads):
        raise get.bad("num_heads", f"{heads} heads of {hidden} dimensions: each must have a "
                      "multiple of 4")
    if out != text.hidden:
        raise get.bad("out_hidden_size", f"{out} is not the decoder's hidden_size, {text.hidden}")
    rope = get.raw.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "axial") not in ("axial", "default"):
        raise get.bad("rope_parameters", f"only axial is supported, got {shown(rope)}")
    tokens = Fields({**TOKENS, **{key: raw[key] for key in TOKENS if raw.get(key)}}, where)
    return VisionShape(
        depth=get.int("depth", maximum=MAX_LAYERS), hidden=hidden,
        intermediate=get.int("intermediate_size"), heads=heads, patch=get.int("patch_size"),
        frames=get.int("temporal_patch_size"), merge=get.int("spatial_merge_size"), out_hidden=out,
        image_token=tokens.int("image_token_id"), video_token=tokens.int("video_token_id"),
        channels=get.int("in_channels"),
        theta=Fields(rope, where, "vision_config.rope_parameters.").float("rope_theta", 10000.0))


def _indexes(get: Fields, name: str, depth: int) -> tuple[int, ...]:
    """Blocks that a field lists. Raises `BadModel`."""
    found = get.raw[name]
    if (not isinstance(found, list | tuple) or len(set(map(_count, found))) != len(found)
            or not all(0 <= _count(i) < depth for i in found)):
        raise get.bad(name, f"must list blocks below {depth}, got {shown(found)}")
    return tuple(found)
