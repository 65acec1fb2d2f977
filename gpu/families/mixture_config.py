"""Models whose layers have attention and a mixture of experts: Mixtral, Qwen2-MoE, OLMoE,
FlexOlmo and GPT-OSS; and those whose router works in float32: GLM-4.5, dots1, MiniMax-M2, ERNIE
4.5, whose routers add a bias to their scores, and Hunyuan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import (
    Fields,
    completed,
    decoder_shape,
    mtp_layers,
    read_experts,
)
from actorium.gpu.families.deepseek_config import grouped_experts, layers_behind
from actorium.gpu.families.dense_config import NORMS_AFTER, hunyuan
from actorium.gpu.families.layer_shapes import MixtureNames, Routing
from actorium.gpu.families.llama_config import layer_windows, mistral
from actorium.gpu.families.model_shape import ModelShape
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
FLEX_OLMO: dict[str, Any] = {
    **OLMOE, "vocab_size": 100_352, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6, "num_experts": 7,
    "num_experts_per_tok": 5, "rope_theta": 5e5,
}
"""The same of FlexOlmo."""
GLM4_MOE: dict[str, Any] = {
    "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944,
    "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
}
"""The same of GLM-4.5."""
DOTS1: dict[str, Any] = {
    "vocab_size": 152_064, "hidden_size": 4608, "intermediate_size": 10_944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0, "sliding_window": 4096, "max_window_layers": 62,
}
"""The same of dots1."""
MINIMAX_M2: dict[str, Any] = {
    "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536,
    "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "num_experts_per_tok": 8, "num_local_experts": 256, "rope_theta": 5e6,
}
"""The same of MiniMax-M2."""
ERNIE4_5_MOE: dict[str, Any] = {
    "vocab_size": 103_424, "hidden_size": 2560, "intermediate_size": 12_288,
    "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12, "rope_theta": 5e5,
}
"""The same of ERNIE 4.5 with experts."""
W1_W3_W2 = MixtureNames("block_sparse_moe.", expert=("w1", "w3", "w2"), stacked=())
"""What checkpoints of Mixtral call the tensors of its experts."""
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
        names=W1_W3_W2)
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
        names=MixtureNames(router="router", alternating=True), bias=True,
        clamp=(get.float("swiglu_alpha"), get.float("swiglu_limit")))
    return replace(shape, qkv_bias=bias, o_bias=bias, sinks=True, experts=experts,
                   sparse=tuple(range(shape.layers)))


def olmoe(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of OLMoE's config: queries and keys are normed over all heads, and with the values cut
    off where `clip_qkv` says."""
    get = Fields(completed(raw, OLMOE), where)
    return replace(_olmo(get, dtype), clip_qkv=0.0 if raw.get("clip_qkv") is None
                   else get.float("clip_qkv"))


def flex_olmo(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of FlexOlmo's config: OLMoE with the norms of OLMo 2."""
    return replace(_olmo(Fields(completed(raw, FLEX_OLMO), where), dtype),
                   layer_norms=NORMS_AFTER)


def _olmo(get: Fields, dtype: str) -> ModelShape:
    shape, bias = decoder_shape(get, dtype), get.flag("attention_bias")
    experts = read_experts(get, "num_experts", shape.intermediate, get.flag("norm_topk_prob"))
    return replace(shape, qkv_bias=bias, o_bias=bias, whole_qk_norm=True, experts=experts,
                   sparse=tuple(range(shape.layers)))


# --- routers in float32 --------------------------------------------------------------------------

def glm4_moe(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of GLM-4.5, 4.6 and 4.7: DeepSeek-V3's experts and layer that drafts,
    which there is unless the config says 0."""
    drafts = {"num_nextn_predict_layers": raw.get("num_mtp_layers", 1)}
    get = Fields(completed(raw, {**GLM4_MOE, **drafts}), where)
    shape = _grouped(get, decoder_shape(get, dtype, partial=True))
    return replace(shape, qkv_bias=get.flag("attention_bias"), qk_norm=get.flag("use_qk_norm"),
                   mtp_layers=mtp_layers(get))


def dots1(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of dots1's config: DeepSeek-V3's experts; windows in the layers that `layer_types`
    name, by default from `max_window_layers` on, and in none where `sliding_window` is null."""
    get = Fields(completed(raw, DOTS1), where)
    shape, bias = _grouped(get, decoder_shape(get, dtype)), get.flag("attention_bias")
    shape = replace(shape, qkv_bias=bias, o_bias=bias, qk_norm=True)
    if raw.get("sliding_window", 0) is None:
        return shape
    window, first = get.int("sliding_window"), get.int("max_window_layers")
    return replace(shape, windows=layer_windows(get, shape.layers, window) or tuple(
        window if i >= first else 0 for i in range(shape.layers)))


def _grouped(get: Fields, shape: ModelShape) -> ModelShape:
    experts, routing = grouped_experts(get)
    return replace(shape, experts=experts, routing=routing,
                   sparse=layers_behind(get, shape.layers))


def minimax_m2(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of MiniMax-M2's config: queries and keys are normed over all heads, of which
    `rotary_dim` dimensions are rotated."""
    get = Fields(completed(raw, MINIMAX_M2), where)
    get.only(scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer",
             use_routing_bias=True, shared_intermediate_size=0)
    if 0 in (kinds := raw.get("attn_type_list") or []):
        raise get.bad("attn_type_list", f"only 1 (full attention) is supported, got {shown(kinds)}")
    if raw.get("rotary_dim") is not None and raw.get("partial_rotary_factor") is None:
        get.raw["partial_rotary_factor"] = get.int("rotary_dim") / get.int("head_dim")
    shape = decoder_shape(get, dtype, partial=True)
    experts = read_experts(get, "num_local_experts", shape.intermediate, True,
                           names=W1_W3_W2._replace(bias="e_score_correction_bias"))
    return replace(shape, whole_qk_norm=True, experts=experts, routing=Routing(),
                   sparse=tuple(range(shape.layers)))


def ernie4_5_moe(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of ERNIE 4.5 with experts: in every `moe_layer_interval`-th layer of
    those from `moe_layer_start_index` to `moe_layer_end_index`. Probabilities are the scores."""
    get = Fields(completed(raw, ERNIE4_5_MOE), where)
    get.only(use_bias=False)
    shape, size = decoder_shape(get, dtype), get.int("moe_intermediate_size")
    first, last, shared = (get.number(f"moe_{name}") for name in (
        "layer_start_index", "layer_end_index", "num_shared_experts"))
    every = get.int("moe_layer_interval")
    experts = read_experts(
        get, "moe_num_experts", size, True, shared * size, "moe_k", names=MixtureNames(
            shared="shared_experts.", bias="moe_statics.e_score_correction_bias", bias_row=True))
    return replace(
        shape, interleaved=True, experts=experts,
        routing=Routing(softmax=True, least=get.float("moe_norm_min")),
        sparse=tuple(i for i in range(max(first, 0), shape.layers)
                     if (i + 1) % every == 0 and (last < 0 or i <= last)))


def hunyuan_moe(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of Hunyuan with experts, the same number in every layer."""
    raw = {"num_experts": 1, "moe_topk": 1,
           **{name: _common(value) for name, value in raw.items()}}
    shape = hunyuan(raw, where, dtype)
    get = Fields(raw, where)
    get.only(moe_layer_num_skipped=0, num_shared_expert=1)
    experts = read_experts(
        get, "num_experts", shape.intermediate, True, shape.intermediate, "moe_topk",
        names=MixtureNames(router="gate.wg", shared="shared_mlp."))
    return replace(shape, experts=experts, routing=Routing(softmax=True),
                   sparse=tuple(range(shape.layers)))


def _common(value: Any) -> Any:
    """What a list of equal numbers, one of each layer, says of all."""
    if isinstance(value, list) and value and isinstance(value[0], int) \
            and all(each == value[0] for each in value):
        return value[0]
    return value
