"""Llama 4, of which the text part is served: attention in chunks in the layers that rotate queries
and keys, over everything in the others, and experts whose weights multiply their input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import Fields, completed, decoder_shape, read_experts
from actorium.gpu.families.dense_config import rotated_layers
from actorium.gpu.families.layer_shapes import NOPE, MixtureNames, QueryScaling, Routing
from actorium.gpu.families.llama_config import FULL
from actorium.gpu.families.mistral_config import text_part
from actorium.gpu.families.model_shape import ModelShape

CHUNKED = "chunked_attention"
LLAMA4: dict[str, Any] = {
    "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "num_experts_per_tok": 1,
    "num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True,
    "no_rope_layer_interval": 4, "attn_temperature_tuning": True, "floor_scale": 8192,
    "attn_scale": 0.1, "rope_theta": 5e5,
}
"""What a config leaves out, as in transformers."""
NAMES = MixtureNames("feed_forward.", "router", turned=True)


def llama4(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Llama 4's config."""
    text = text_part(raw) if isinstance(raw.get("text_config"), dict) else raw
    get = Fields(completed(text, LLAMA4), where)
    get.raw["no_rope_layers"] = get.raw.get("no_rope_layers") or None
    shape = decoder_shape(get, dtype)
    turns, bias = rotated_layers(get, shape.layers), get.flag("attention_bias")
    size, sparse = shape.intermediate, _sparse_layers(get, shape.layers)
    experts = read_experts(get, "num_local_experts", size, False, size, names=NAMES)
    # What is normed behind the rope takes no notice of a factor on what is rotated.
    rope = replace(shape.ropes[0], attention_factor=1.0) if get.flag("use_qk_norm") \
        else shape.ropes[0]
    windows = _windows(get, turns, text)
    scaling = QueryScaling(get.float("attn_scale"), get.int("floor_scale"), 1, still_alone=True)
    return replace(
        shape, intermediate=get.int("intermediate_size_mlp"), mlp_name=NAMES.at, qkv_bias=bias,
        o_bias=bias, interleaved=True, qk_norm=get.flag("use_qk_norm"), head_norms=("", ""),
        norms_still=False, ropes=(rope, NOPE), layer_ropes=tuple(1 - turn for turn in turns),
        windows=windows, chunked=any(windows), sparse=sparse, experts=experts,
        routing=Routing(on_input=True),
        query_scaling=scaling if get.flag("attn_temperature_tuning") else None)


def _windows(get: Fields, turns: tuple[int, ...], text: dict[str, Any]) -> tuple[int, ...]:
    """Of each layer, the size of its chunks, 0 = all; by default those that rotate have some."""
    kinds = [CHUNKED if turn else FULL for turn in turns]
    if get.raw.get("layer_types") is not None:
        kinds = get.kinds("layer_types", (CHUNKED, FULL), len(turns))
    if text.get("attention_chunk_size", 0) is None:
        return (0,) * len(turns)
    size = get.int("attention_chunk_size", 8192)
    return tuple(size if kind == CHUNKED else 0 for kind in kinds)


def _sparse_layers(get: Fields, layers: int) -> tuple[int, ...]:
    """Those of `moe_layers`, by default every `interleave_moe_layer_step`-th."""
    named, every = get.raw.get("moe_layers"), get.int("interleave_moe_layer_step")
    if named is None:
        return tuple(range(every - 1, layers, every))
    if not isinstance(named, list) or not all(isinstance(i, int) for i in named):
        raise get.bad("moe_layers", f"must be a list of layers, got {shown(named)}")
    return tuple(i for i in range(layers) if i in named)
