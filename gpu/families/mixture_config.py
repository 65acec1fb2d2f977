"""Models whose layers have attention and a mixture of experts: Mixtral, Qwen2-MoE and GPT-OSS."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.gpu.families.decoder_config import Fields, decoder_shape, read_experts
from actorium.gpu.families.llama_config import layer_windows, mistral
from actorium.gpu.families.model_shape import MixtureNames, ModelShape
from actorium.gpu.families.qwen_hybrid_config import sparse_layers

MIXTRAL: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
}
"""What a config of Mixtral leaves out, as in transformers."""
QWEN2_MOE: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "sliding_window": 4096, "max_window_layers": 28,
}
"""The same of Qwen2-MoE."""
GPT_OSS: dict[str, Any] = {
    "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "num_local_experts": 128,
    "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
    "max_position_embeddings": 131_072, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
}
"""The same of GPT-OSS."""
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 4096}
"""Its rope, where a config names none."""


def mixtral(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Mixtral's config: Mistral's, with experts in every layer."""
    raw = {**MIXTRAL, **raw}
    experts = read_experts(
        get := Fields(raw, where), "num_local_experts", get.int("intermediate_size"), True,
        names=MixtureNames("block_sparse_moe.", expert=("w1", "w3", "w2"), stacked=()))
    shape = mistral(raw, where, dtype)
    return replace(shape, experts=experts, sparse=tuple(range(shape.layers)))


def qwen2_moe(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Qwen2-MoE's config. Windows are switched on; where `layer_types` are left out, they
    are those of every other layer, of the first `max_window_layers`."""
    get = Fields({**QWEN2_MOE, **{key: own for key, own in raw.items() if own is not None}}, where)
    shape = decoder_shape(get, dtype)
    if get.flag("use_sliding_window"):
        window, last = get.int("sliding_window"), get.int("max_window_layers")
        shape = replace(shape, windows=layer_windows(get, shape.layers, window) or tuple(
            0 if i % 2 or i >= last else window for i in range(shape.layers)))
    sparse = sparse_layers(get, shape.layers)
    experts = read_experts(
        get, "num_experts", get.int("moe_intermediate_size"), get.flag("norm_topk_prob"),
        get.int("shared_expert_intermediate_size")) if sparse else None
    return replace(shape, qkv_bias=get.flag("qkv_bias", True), sparse=sparse, experts=experts)


def gpt_oss(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of GPT-OSS's config: experts in every layer, attention sinks, and windows in the
    layers that `layer_types` name, by default in every other one from the first on."""
    get = Fields({**GPT_OSS, **raw}, where)
    if not (raw.get("dtype") or raw.get("torch_dtype")):
        get.raw["dtype"] = "bfloat16"  # of the tensors in its checkpoints, whose config names none
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        get.raw["rope_scaling"] = GPT_OSS_ROPE
    shape, bias = decoder_shape(get, dtype), get.flag("attention_bias")
    if get.raw["sliding_window"] is not None:
        window = get.int("sliding_window")
        shape = replace(shape, windows=layer_windows(get, shape.layers, window) or tuple(
            0 if i % 2 else window for i in range(shape.layers)))
    experts = read_experts(
        get, "num_local_experts", shape.intermediate, True,
        names=MixtureNames(router="router", turned=True), bias=True,
        clamp=(get.float("swiglu_alpha"), get.float("swiglu_limit")))
    return replace(shape, qkv_bias=bias, o_bias=bias, sinks=True, experts=experts,
                   sparse=tuple(range(shape.layers)))
