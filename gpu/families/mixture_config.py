"""Models whose layers have attention and a mixture of experts: Mixtral, Qwen2-MoE and OLMoE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.gpu.families.decoder_config import Fields, completed, decoder_shape, read_experts
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
OLMOE: dict[str, Any] = {
    "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 2048,
    "num_hidden_layers": 16, "num_attention_heads": 16, "rms_norm_eps": 1e-5, "num_experts": 64,
    "num_experts_per_tok": 8,
}
"""The same of OLMoE."""


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


def olmoe(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of OLMoE's config: queries and keys are normed over all heads, and with the values cut
    off where `clip_qkv` says."""
    get = Fields(completed(raw, OLMOE), where)
    shape, bias = decoder_shape(get, dtype), get.flag("attention_bias")
    experts = read_experts(get, "num_experts", shape.intermediate, get.flag("norm_topk_prob"))
    return replace(
        shape, qkv_bias=bias, o_bias=bias, whole_qk_norm=True, experts=experts,
        qkv_clip=0.0 if raw.get("clip_qkv") is None else get.float("clip_qkv"),
        sparse=tuple(range(shape.layers)))
