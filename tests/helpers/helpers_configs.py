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
GROUPED = {name: LATENT[name] for name in (
    "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "n_shared_experts",
    "moe_intermediate_size", "first_k_dense_replace")}
INDEXER = {"index_topk": 20, "index_head_dim": 12, "index_n_heads": 16}
LLAMA4 = {"intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "num_local_experts": 6,
          "attention_chunk_size": 32, "no_rope_layer_interval": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3,
         "shared_intermediate_size": 56, "layer_types": ["mamba", "attention", "mamba", "mamba"]}
MAMBA_ALONE = {name: value for name, value in MAMBA.items() if name.startswith("mamba_")}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3]}
VISION = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
          "out_hidden_size": 64}
TOWER_25 = {**VISION, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}
TOWER_3 = {**VISION, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
GEMMA4 = {"sliding_window": 32, "global_head_dim": 24, "hidden_size_per_layer_input": 8,
          "vocab_size_per_layer_input": 199, "layer_types": [
              "sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
GEMMA3N = {**{name: own for name, own in GEMMA4.items() if name != "global_head_dim"},
           "num_kv_shared_layers": 2, "laurel_rank": 16, "altup_num_inputs": 3,
           "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0]}
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
    {"architectures": ["OlmoeForCausalLM"], **EXPERTS, "clip_qkv": 8.0},
    {"architectures": ["GraniteMoeSharedForCausalLM"], "num_local_experts": 6,
     "shared_intermediate_size": 40, "attention_multiplier": 0.1},
    {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {
        **SMALL, "model_type": "mistral", "sliding_window": 48}},
    {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.1}},
    {"architectures": ["Mistral4ForCausalLM"], **LATENT, "rope_parameters": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32,
        "llama_4_scaling_beta": 0.1}},
    {"architectures": ["Glm4MoeForCausalLM"], **GROUPED, "use_qk_norm": True},
    {"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2,
     "rotary_dim": 8},
    {"architectures": ["Ernie4_5ForCausalLM"], "use_bias": True},
    {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 6, "moe_k": 2,
     "moe_intermediate_size": 24},
    {"architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": True},
    {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 6, "moe_topk": [2, 2, 2, 2]},
    {"architectures": ["Dots1ForCausalLM"], **GROUPED, "sliding_window": 32,
     "max_window_layers": 2},
    {"architectures": ["FlexOlmoForCausalLM"], **EXPERTS},
    {"architectures": ["DeepseekV2ForCausalLM"], **LATENT, "topk_method": "group_limited_greedy"},
    {"architectures": ["Glm4MoeLiteForCausalLM"], **LATENT},
    {"architectures": ["DeepseekV32ForCausalLM"], **LATENT, **INDEXER},
    {"architectures": ["GlmMoeDsaForCausalLM"], **LATENT, **INDEXER,
     "indexer_types": ["full", "shared", "full", "shared"]},
    {"architectures": ["Llama4ForCausalLM"], **LLAMA4},
    {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {**SMALL, **LLAMA4}},
    {"architectures": ["BambaForCausalLM"], **MAMBA_ALONE, "attn_layer_indices": [1]},
    {"architectures": ["FalconH1ForCausalLM"], **MAMBA_ALONE, "mamba_d_ssm": 96,
     "ssm_multipliers": [0.5, 0.7, 1.5, 2.0, 0.3], "mlp_multipliers": [0.6, 1.5]},
    {"architectures": ["Lfm2ForCausalLM"], "block_multiple_of": 16, "layer_types": [
        "conv", "full_attention", "conv", "conv"]},
    {"architectures": ["Lfm2MoeForCausalLM"], **EXPERTS, "num_dense_layers": 1, "layer_types": [
        "conv", "full_attention", "conv", "conv"]},
    {"architectures": ["Mamba2ForCausalLM"], "num_heads": 8, "head_dim": 16, "n_groups": 2,
     "state_size": 12},
    {"architectures": ["MambaForCausalLM"], "state_size": 12},
    {"architectures": ["FalconMambaForCausalLM"], "use_bias": True},
    {"architectures": ["JambaForCausalLM"], "attn_layer_period": 2, "attn_layer_offset": 0,
     "num_experts": 6},
    {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "MEM*-M-",
     "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12,
     "n_routed_experts": 6, "moe_intermediate_size": 24,
     "moe_shared_expert_intermediate_size": 40},
    {"architectures": ["KimiLinearForCausalLM"], "q_lora_rank": None, "kv_lora_rank": 20,
     "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 24,
     "num_local_experts": 6, "num_experts_per_tok": 2, "linear_head_dim": 16,
     "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention",
                                            "linear_attention", "linear_attention"]},
    {"architectures": ["Starcoder2ForCausalLM"], "sliding_window": 32},
    {"architectures": ["CohereForCausalLM"], "use_qk_norm": True, "attention_bias": True},
    {"architectures": ["Cohere2ForCausalLM"], "sliding_window": 32, "sliding_window_pattern": 2},
    {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5},
    {"architectures": ["GPT2LMHeadModel"], "n_inner": 80},
    {"architectures": ["PhiForCausalLM"], "qk_layernorm": True},
    {"architectures": ["StableLmForCausalLM"], "qk_layernorm": True, "use_qkv_bias": True,
     "use_parallel_residual": True},
    {"architectures": ["NemotronForCausalLM"], "mlp_bias": True},
    {"architectures": ["OlmoForCausalLM"], "clip_qkv": 2.0},
    {"architectures": ["HeliumForCausalLM"], "attention_bias": True},
    {"architectures": ["ArceeForCausalLM"], "mlp_bias": True},
    {"architectures": ["ApertusForCausalLM"]},
    {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True},
    {"architectures": ["GPTJForCausalLM"], "rotary_dim": 8, "n_inner": 96},
    {"architectures": ["GPTBigCodeForCausalLM"]},
    {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True, "num_kv_heads": 2},
    {"architectures": ["BloomForCausalLM"]},
    {"architectures": ["MptForCausalLM"], "attn_config": {"clip_qkv": 3.0}},
    {"architectures": ["PersimmonForCausalLM"]},
    {"architectures": ["Jais2ForCausalLM"]},
    {"architectures": ["VaultGemmaForCausalLM"], "sliding_window": 32},
    {"architectures": ["OPTForCausalLM"], "ffn_dim": 96},
    {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "sliding_window": 32},
    {"architectures": ["Gemma4ForCausalLM"], **GEMMA4, "attention_k_eq_v": True,
     "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6,
     "top_k_experts": 2, "moe_intermediate_size": 24, "hidden_size_per_layer_input": 0},
    {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {
        **SMALL, **GEMMA4, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True}},
    {"architectures": ["Gemma3nForCausalLM"], **GEMMA3N, "activation_sparsity_pattern": None},
    {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {**SMALL, **GEMMA3N}},
    *({"architectures": [f"{family}Model"], "dtype": "float32"} for family in (
        "Bert", "Roberta", "Camembert", "XLMRoberta", "MPNet", "NomicBert", "Gte", "New",
        "EuroBert")),
    {"architectures": ["ModernBertModel"], "local_attention": 32, "attention_bias": True},
    {"architectures": ["DistilBertModel"], "dim": 64, "n_layers": 4, "n_heads": 4,
     "hidden_dim": 96},
]


def shape_of(config: dict[str, Any]) -> ModelShape:
    return shape_from_config({**SMALL, **config}, HERE)


def name_of(config: dict[str, Any]) -> str:
    return str(config["architectures"][0])
