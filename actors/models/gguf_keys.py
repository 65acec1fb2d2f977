"""Keys of GGUF files' metadata as fields of config.json, architecture by architecture. What files
leave out is as llama.cpp has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from actorium.actors.models.gguf_file import GgufFile

Config = dict[str, Any]
REQUIRED = object()


class Key(NamedTuple):
    """A key of the metadata, and its field in config.json."""

    key: str
    """Behind the architecture's name."""
    field: str
    read: Callable[[GgufFile, str], Any] = GgufFile.number
    default: Any = REQUIRED
    """None: the field is left out."""


def of_layers(file: GgufFile, key: str) -> int:
    """0 where layers may differ in it, and the family's own fields have what it is."""
    return 0 if file.is_array(key) else file.number(key)


NUMBER, REAL, FLAG, SAME = GgufFile.number, GgufFile.real, GgufFile.flag, GgufFile.same
COMMON = (
    Key("embedding_length", "hidden_size"),
    Key("attention.head_count", "num_attention_heads", SAME),
    Key("feed_forward_length", "intermediate_size", SAME, None),
    Key("context_length", "max_position_embeddings"),
    Key("rope.freq_base", "rope_theta", REAL, 10_000.0),
)
RMS = Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", REAL)
"""The epsilon of most norms."""
LOGIT_SCALE = (Key("logit_scale", "logit_scale", REAL),)
CAPS = (Key("attn_logit_softcapping", "attn_logit_softcapping", REAL, None),
        Key("final_logit_softcapping", "final_logit_softcapping", REAL, None))
TOKEN_INPUTS = (CAPS[1], Key("embedding_length_per_layer_input", "hidden_size_per_layer_input"))
GEMMA3N_KEYS = (*TOKEN_INPUTS, Key("altup.num_inputs", "altup_num_inputs"),
                Key("altup.active_idx", "altup_active_idx"))
GEMMA4_KEYS = (
    *TOKEN_INPUTS, Key("attention.shared_kv_layers", "num_kv_shared_layers", NUMBER, 0),
    Key("feed_forward_length", "intermediate_size", of_layers),
    Key("attention.head_count_kv", "num_key_value_heads", of_layers),
    Key("expert_count", "num_experts", NUMBER, None),
    Key("expert_used_count", "top_k_experts", NUMBER, None),
    Key("expert_feed_forward_length", "moe_intermediate_size", NUMBER, None),
)
USED = Key("expert_used_count", "num_experts_per_tok")
LOCAL_EXPERTS = (Key("expert_count", "num_local_experts"), USED)
QWEN_EXPERTS = (Key("expert_count", "num_experts"), USED,
                Key("expert_feed_forward_length", "moe_intermediate_size", NUMBER, None))
GRANITE_KEYS = (
    Key("attention.scale", "attention_multiplier", REAL, None),
    Key("embedding_scale", "embedding_multiplier", REAL, 1.0),
    Key("residual_scale", "residual_multiplier", REAL, 1.0),
    Key("logit_scale", "logits_scaling", REAL, 1.0),
)
HYBRID_KEYS = (
    *GRANITE_KEYS, Key("expert_count", "num_local_experts", NUMBER, 0),
    USED._replace(default=None), Key("ssm.conv_kernel", "mamba_d_conv"),
    Key("ssm.state_size", "mamba_d_state"), Key("ssm.group_count", "mamba_n_groups"),
    Key("ssm.time_step_rank", "mamba_n_heads"),
)
DELTA_KEYS = (
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"), Key("ssm.state_size", "linear_key_head_dim"),
    Key("ssm.group_count", "linear_num_key_heads"),
    Key("ssm.time_step_rank", "linear_num_value_heads"),
    Key("full_attention_interval", "full_attention_interval", NUMBER, 4),
)
DELTA_EXPERTS = (
    *QWEN_EXPERTS, Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)
GROUPED_KEYS = (
    Key("expert_count", "n_routed_experts"), USED,
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_count", "n_shared_experts"),
    Key("expert_weights_scale", "routed_scaling_factor", REAL, 1.0),
    Key("expert_weights_norm", "norm_topk_prob", FLAG, False),
    Key("leading_dense_block_count", "first_k_dense_replace", NUMBER, 0),
    Key("expert_group_count", "n_group", NUMBER, 1),
    Key("expert_group_used_count", "topk_group", NUMBER, 1),
)
DEEPSEEK_KEYS = (
    Key("attention.q_lora_rank", "q_lora_rank", NUMBER, None),
    Key("attention.kv_lora_rank", "kv_lora_rank"),
    Key("rope.dimension_count", "qk_rope_head_dim"), *GROUPED_KEYS,
)
ERNIE_KEYS = (
    Key("expert_count", "moe_num_experts"), Key("expert_used_count", "moe_k"),
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_count", "moe_num_shared_experts", NUMBER, 0),
    Key("leading_dense_block_count", "moe_layer_start_index", NUMBER, 0),
    Key("interleave_moe_layer_step", "moe_layer_interval", NUMBER, 1),
)
HUNYUAN_KEYS = (
    Key("expert_count", "num_experts"), Key("expert_used_count", "moe_topk"),
    Key("expert_shared_count", "num_shared_expert", NUMBER, 1),
)
GPT_OSS_KEYS = (
    *LOCAL_EXPERTS, Key("expert_feed_forward_length", "intermediate_size"),
)
LFM_KEYS = (Key("shortconv.l_cache", "conv_L_cache"),)
LFM_MOE_KEYS = (
    *LFM_KEYS, Key("expert_count", "num_experts"), USED,
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("leading_dense_block_count", "num_dense_layers", NUMBER, 0),
)
CLIP = (Key("attention.clamp_kqv", "clip_qkv", REAL, None),)
LLAMA4_KEYS = (
    *LOCAL_EXPERTS, Key("expert_feed_forward_length", "intermediate_size"),
    Key("feed_forward_length", "intermediate_size_mlp"),
    Key("interleave_moe_layer_step", "interleave_moe_layer_step"),
)
INDEXED_KEYS = (
    *DEEPSEEK_KEYS, Key("attention.indexer.head_count", "index_n_heads"),
    Key("attention.indexer.key_length", "index_head_dim"),
    Key("attention.indexer.top_k", "index_topk"),
)
MODERNBERT_KEYS = (
    Key("rope.freq_base", "global_rope_theta", REAL, 160_000.0),
    Key("rope.freq_base_swa", "local_rope_theta", REAL, 10_000.0),
    Key("attention.sliding_window", "local_attention", NUMBER, 128),
)
KIMI_KEYS = (*(key for key in DEEPSEEK_KEYS if key.field != "norm_topk_prob"),)
MAMBA_KEYS = (
    Key("ssm.conv_kernel", "conv_kernel"), Key("ssm.state_size", "state_size"),
    Key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", REAL),
)
MAMBA2_KEYS = (
    Key("ssm.conv_kernel", "mamba_d_conv"), Key("ssm.state_size", "mamba_d_state"),
    Key("ssm.group_count", "mamba_n_groups"), Key("ssm.time_step_rank", "mamba_n_heads"),
)
JAMBA_KEYS = (
    Key("ssm.conv_kernel", "mamba_d_conv"), Key("ssm.state_size", "mamba_d_state"),
    Key("ssm.time_step_rank", "mamba_dt_rank"), Key("expert_count", "num_experts", NUMBER, 0),
    USED._replace(default=None),
)
NEMOTRON_H_KEYS = (
    Key("ssm.conv_kernel", "conv_kernel"), Key("ssm.state_size", "ssm_state_size"),
    Key("ssm.group_count", "n_groups"), Key("ssm.time_step_rank", "mamba_num_heads"),
    Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size", NUMBER, None),
    Key("moe_latent_size", "moe_latent_size", NUMBER, None),
)


def read_keys(file: GgufFile, at: str, keys: tuple[Key, ...]) -> Config:
    """The fields of config.json. Raises `BadModel` naming a key that is missing or wrong."""
    config: Config = {}
    for key, field, read, default in keys:
        if f"{at}.{key}" in file or default is REQUIRED:
            config[field] = read(file, f"{at}.{key}")
        elif default is not None:
            config[field] = default
    return config


def layer_norm_epsilon(field: str) -> Key:
    """That of a model with LayerNorms, whose config calls it so."""
    return Key("attention.layer_norm_epsilon", field, REAL)
