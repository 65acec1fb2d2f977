"""config.json of every architecture that is served, at toy sizes, and their shapes as read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorium.gpu.families.architectures import shape_from_config
from actorium.gpu.families.model_shape import ModelShape

HERE = Path("config.json")
BIG = Path(__file__).parents[1] / "data" / "qwen3.5-27b" / "config.json"
SMALL: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "head_dim": 16, "dtype": "bfloat16",
}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 40}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
          "v_head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3,
          "topk_group": 2, "n_shared_experts": 2, "moe_intermediate_size": 24,
          "first_k_dense_replace": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3,
         "shared_intermediate_size": 56, "layer_types": ["mamba", "attention", "mamba", "mamba"]}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3]}
VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
          "out_hidden_size": 64}
TOWER_25 = {**VISION, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}
TOWER_3 = {**VISION, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
CONFIGS: list[dict[str, Any]] = [
    {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "dtype": "float32"},
    {"architectures": ["MistralForCausalLM"], "sliding_window": 48},
    {"architectures": ["MinistralForCausalLM"], "sliding_window": 48, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32,
     "max_window_layers": 1},
    {"architectures": ["Qwen3ForCausalLM"]},
    {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32, "sliding_window_pattern": 2,
     "query_pre_attn_scalar": 16},
    {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
        **SMALL, "sliding_window": 32, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]}},
    {"architectures": ["Qwen3_5ForCausalLM"], **DELTA},
    {"architectures": ["Qwen3_5ForConditionalGeneration"], "dtype": "float32",
     "text_config": {**SMALL, **DELTA, "dtype": "float32", "full_attention_interval": 2}},
    {"architectures": ["Qwen3NextForCausalLM"], **DELTA, **EXPERTS, "mlp_only_layers": [1]},
    {"architectures": ["Qwen3_5MoeForCausalLM"], **DELTA, **EXPERTS, "layer_types": [
        "full_attention", "linear_attention", "linear_attention", "linear_attention"]},
    {"architectures": ["Qwen3_5MoeForConditionalGeneration"],
     "text_config": {**SMALL, **DELTA, **EXPERTS, "attention_bias": True}},
    {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "decoder_sparse_step": 2},
    {"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.1,
     "residual_multiplier": 0.25, "embedding_multiplier": 8.0, "logits_scaling": 4.0},
    {"architectures": ["GraniteMoeHybridForCausalLM"], **MAMBA, "num_local_experts": 0,
     "position_embedding_type": "rope", "dtype": "float32", "tie_word_embeddings": True},
    {"architectures": ["GraniteMoeHybridForCausalLM"], **MAMBA, "num_local_experts": 6,
     "mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True},
    {"architectures": ["DeepseekV3ForCausalLM"], **LATENT},
    {"architectures": ["DeepseekV3ForCausalLM"], **LATENT, "q_lora_rank": None,
     "attention_bias": True, "first_k_dense_replace": 0, "dtype": "float32"},
    {"architectures": ["DeepseekV3ForCausalLM"], **LATENT, "attention_bias": True},
    {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": TOWER_25,
     "rope_scaling": {**SECTIONS, "type": "mrope"}},
    {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": TOWER_3,
     "tie_word_embeddings": True, "text_config": {**SMALL, "rope_parameters": SECTIONS}},
    {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "vision_config": TOWER_3,
     "text_config": {**SMALL, **EXPERTS, "mlp_only_layers": [1], "rope_parameters": SECTIONS}},
    {"architectures": ["Phi3ForCausalLM"], "sliding_window": 32},
    {"architectures": ["Olmo2ForCausalLM"], "attention_bias": True},
    {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 32},
    {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2},
    {"architectures": ["GlmForCausalLM"], "tie_word_embeddings": True},
    {"architectures": ["Glm4ForCausalLM"], "attention_bias": False},
    {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6},
    {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 32, "attn_logit_softcapping": 2.0,
     "query_pre_attn_scalar": 16},
    {"architectures": ["Qwen2MoeForCausalLM"], **EXPERTS, "mlp_only_layers": [1],
     "use_sliding_window": True, "sliding_window": 32},
    {"architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 6,
     "attention_multiplier": 0.1, "residual_multiplier": 0.25, "embedding_multiplier": 8.0,
     "logits_scaling": 4.0},
    {"architectures": ["SeedOssForCausalLM"], "attention_out_bias": True},
    {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 32, "sliding_window_pattern": 2},
    {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "sliding_window": 32},
]


def shape_of(config: dict[str, Any]) -> ModelShape:
    return shape_from_config({**SMALL, **config}, HERE)


def name_of(config: dict[str, Any]) -> str:
    return str(config["architectures"][0])
