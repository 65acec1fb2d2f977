"""The forward pass against transformers: fp32, random tiny checkpoints, ragged mixed batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import (
    Seq,
    Stepper,
    generate,
    load,
    oracle_logits,
    why_refused,
    write_checkpoint,
)

from actorium.gpu.families.architectures import shape_from_config

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 128}
LONGROPE = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + 0.1 * i for i in range(6)],
            "long_factor": [1.0 + 0.1 * i for i in range(6)]}
QWEN2_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
             "shared_expert_intermediate_size": 48}
GRANITE_MOE = {"attention_multiplier": 0.1, "residual_multiplier": 0.22,
               "embedding_multiplier": 12.0, "logits_scaling": 8.0}
MINISTRAL3 = {**YARN, "original_max_position_embeddings": 8, "mscale": 1.3, "mscale_all_dim": 1.3,
              "llama_4_scaling_beta": 0.3}
GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
           "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
           "routed_scaling_factor": 1.5}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
          "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8}
LLAMA4 = {"intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "num_local_experts": 5,
          "attention_chunk_size": 64, "floor_scale": 7, "no_rope_layer_interval": 3}
INDEXER = {"index_topk": 9, "index_head_dim": 12, "index_n_heads": 16}
MINIMAX = {"num_local_experts": 5, "num_experts_per_tok": 2}
ERNIE = {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24}
OLMOE = {"num_experts": 5, "num_experts_per_tok": 2}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2}
GEMMA4 = {"sliding_window": 9, "num_hidden_layers": 5, "global_head_dim": 24,
          "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199,
          "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}
GEMMA3N = {**{name: own for name, own in GEMMA4.items() if name != "global_head_dim"},
           "num_kv_shared_layers": 2, "laurel_rank": 6,
           "activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0, 0.8]}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "LlamaForCausalLM", {}),
    ("llama-mha-tied", "LlamaForCausalLM",
     {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("llama-bias-mqa", "LlamaForCausalLM",
     {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("llama3-rope", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    ("llama-linear", "LlamaForCausalLM",
     {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    ("llama-yarn", "LlamaForCausalLM", {"rope_parameters": YARN}),
    ("llama-odd-head", "LlamaForCausalLM", {"head_dim": 10}),
    ("mistral", "MistralForCausalLM", {"num_attention_heads": 8, "head_dim": 8}),
    ("mistral-window", "MistralForCausalLM", {"sliding_window": 9}),
    ("ministral", "MinistralForCausalLM", {"sliding_window": 9}),
    ("ministral-mixed", "MinistralForCausalLM",
     {"sliding_window": 9,
      "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("qwen2", "Qwen2ForCausalLM", {}),
    ("qwen2-tied", "Qwen2ForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("qwen2-window", "Qwen2ForCausalLM",
     {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen2-all-windowed", "Qwen2ForCausalLM",
     {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    ("qwen3-layer-types", "Qwen3ForCausalLM",
     {"use_sliding_window": True, "sliding_window": 8,
      "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("gemma3", "Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}),
    ("gemma3-scaled", "Gemma3ForCausalLM",
     {"sliding_window": 5, "query_pre_attn_scalar": 24, "hidden_size": 72, "rope_theta": 5e5,
      "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
      "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    ("qwen3", "Qwen3ForCausalLM", {}),
    ("qwen3-tied-bias", "Qwen3ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
    ("granite", "GraniteForCausalLM",
     {"attention_multiplier": 0.1, "residual_multiplier": 0.22, "embedding_multiplier": 12.0,
      "logits_scaling": 8.0}),
    ("granite-bias-tied", "GraniteForCausalLM",
     {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
      "attention_multiplier": 0.3, "residual_multiplier": 1.5}),
    ("qwen3-yarn", "Qwen3ForCausalLM", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    ("phi3", "Phi3ForCausalLM", {"sliding_window": 9}),
    ("phi3-longrope", "Phi3ForCausalLM", {"rope_parameters": LONGROPE, "tie_word_embeddings": True,
                                          "original_max_position_embeddings": 256}),
    ("olmo2", "Olmo2ForCausalLM", {}),
    ("olmo2-bias-tied-mqa", "Olmo2ForCausalLM",
     {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
      "head_dim": 10}),
    ("olmo3", "Olmo3ForCausalLM", {"sliding_window": 9, "num_hidden_layers": 5}),
    ("olmo3-yarn", "Olmo3ForCausalLM",
     {"sliding_window": 9, "rope_parameters": {"full_attention": YARN, "sliding_attention": {
         "rope_type": "default", "rope_theta": 500.0}},
      "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("smollm3", "SmolLM3ForCausalLM", {"num_hidden_layers": 5}),
    ("smollm3-bias-windows", "SmolLM3ForCausalLM",
     {"attention_bias": True, "mlp_bias": True, "no_rope_layers": [0, 1, 0],
      "use_sliding_window": True, "sliding_window": 9, "tie_word_embeddings": True}),
    ("glm", "GlmForCausalLM", {}),
    ("glm-whole-heads-mqa", "GlmForCausalLM",
     {"num_key_value_heads": 1, "attention_bias": False, "tie_word_embeddings": True,
      "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                          "partial_rotary_factor": 1.0}}),
    ("glm4", "Glm4ForCausalLM", {"head_dim": 24}),
    ("mixtral", "MixtralForCausalLM", {}),
    ("mixtral-window-tied", "MixtralForCausalLM",
     {"sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 1,
      "tie_word_embeddings": True, "intermediate_size": 40}),
    ("mixtral-all-experts", "MixtralForCausalLM",
     {"num_local_experts": 3, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    ("gemma2", "Gemma2ForCausalLM",
     {"sliding_window": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0,
      "query_pre_attn_scalar": 16}),
    ("gemma2-odd", "Gemma2ForCausalLM",
     {"sliding_window": 5, "query_pre_attn_scalar": 24, "hidden_size": 72, "head_dim": 10,
      "attention_bias": True, "tie_word_embeddings": True, "attn_logit_softcapping": 2.0,
      "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    ("gemma2-no-caps", "Gemma2ForCausalLM",
     {"sliding_window": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("qwen2-moe", "Qwen2MoeForCausalLM", QWEN2_MOE),
    ("qwen2-moe-odd", "Qwen2MoeForCausalLM",
     {**QWEN2_MOE, "norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True,
      "decoder_sparse_step": 2, "num_experts_per_tok": 5, "num_key_value_heads": 4}),
    ("qwen2-moe-windows", "Qwen2MoeForCausalLM",
     {**QWEN2_MOE, "use_sliding_window": True, "sliding_window": 8, "mlp_only_layers": [1]}),
    ("granite-moe", "GraniteMoeForCausalLM", GRANITE_MOE),
    ("granite-moe-odd", "GraniteMoeForCausalLM",
     {**GRANITE_MOE, "attention_bias": True, "tie_word_embeddings": True, "num_local_experts": 5,
      "num_experts_per_tok": 1, "residual_multiplier": 1.5, "intermediate_size": 32}),
    ("seed-oss", "SeedOssForCausalLM", {"attention_out_bias": True, "mlp_bias": True}),
    ("exaone4", "Exaone4ForCausalLM",
     {"sliding_window": 9, "sliding_window_pattern": 3, "num_hidden_layers": 4}),
    ("exaone4-no-windows", "Exaone4ForCausalLM", {"sliding_window": None, "layer_types":
                                                  ["full_attention"] * 3}),
    ("olmoe", "OlmoeForCausalLM", {**OLMOE, "clip_qkv": 0.9}),
    ("olmoe-odd", "OlmoeForCausalLM",
     {**OLMOE, "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True,
      "num_key_value_heads": 1, "intermediate_size": 40}),
    ("granite-moe-shared", "GraniteMoeSharedForCausalLM",
     {**GRANITE_MOE, "shared_intermediate_size": 40, "attention_bias": True}),
    ("granite-moe-not-shared", "GraniteMoeSharedForCausalLM", GRANITE_MOE),
    ("ministral3", "Ministral3ForCausalLM", {"rope_parameters": MINISTRAL3}),
    ("ministral3-window-tied", "Ministral3ForCausalLM",
     {"rope_parameters": {**MINISTRAL3, "mscale_all_dim": 0.6, "llama_4_scaling_beta": 0.7},
      "sliding_window": 9, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("glm4-moe", "Glm4MoeForCausalLM", {**GROUPED, "use_qk_norm": True}),
    ("glm4-moe-odd", "Glm4MoeForCausalLM",
     {**GROUPED, "attention_bias": True, "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
      "first_k_dense_replace": 0, "n_shared_experts": 2, "tie_word_embeddings": True,
      "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                          "partial_rotary_factor": 0.25}}),
    ("minimax-m2", "MiniMaxM2ForCausalLM", {**MINIMAX, "rotary_dim": 8}),
    ("minimax-m2-odd", "MiniMaxM2ForCausalLM",
     {**MINIMAX, "num_experts_per_tok": 1, "num_key_value_heads": 1, "head_dim": 24,
      "tie_word_embeddings": True}),
    ("ernie4.5", "Ernie4_5ForCausalLM", {"head_dim": 24}),
    ("ernie4.5-bias-tied", "Ernie4_5ForCausalLM",
     {"use_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None}),
    ("ernie4.5-moe", "Ernie4_5_MoeForCausalLM", {**ERNIE, "moe_norm_min": 0.5}),
    ("ernie4.5-moe-odd", "Ernie4_5_MoeForCausalLM",
     {**ERNIE, "moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_end_index": 3,
      "moe_layer_interval": 2, "num_hidden_layers": 5, "tie_word_embeddings": True}),
    ("hunyuan", "HunYuanDenseV1ForCausalLM", {}),
    ("hunyuan-alpha-bias", "HunYuanDenseV1ForCausalLM",
     {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 40.0,
                          "factor": 1.0}, "attention_bias": True, "tie_word_embeddings": True,
      "num_key_value_heads": 1}),
    ("hunyuan-yarn", "HunYuanDenseV1ForCausalLM", {"rope_parameters": YARN}),
    ("hunyuan-moe", "HunYuanMoEV1ForCausalLM", {"num_experts": 5, "moe_topk": [2, 2, 2]}),
    ("dots1", "Dots1ForCausalLM", {**GROUPED, "sliding_window": 9, "max_window_layers": 1}),
    ("dots1-no-windows", "Dots1ForCausalLM",
     {**GROUPED, "sliding_window": None, "norm_topk_prob": True, "attention_bias": True}),
    ("deepseek-v2", "DeepseekV2ForCausalLM",
     {**LATENT, **GROUPED, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5}),
    ("deepseek-v2-lite", "DeepseekV2ForCausalLM",
     {**LATENT, **GROUPED, "q_lora_rank": None, "first_k_dense_replace": 0, "attention_bias": True,
      "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    ("mistral4", "Mistral4ForCausalLM",
     {**LATENT, **GROUPED, "head_dim": 24, "rope_parameters": MINISTRAL3}),
    ("mistral4-odd", "Mistral4ForCausalLM",
     {**LATENT, **GROUPED, "head_dim": 24, "q_lora_rank": None, "first_k_dense_replace": 0,
      "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False,
      "attention_bias": True,
      "rope_parameters": {**MINISTRAL3, "mscale": 0.7, "llama_4_scaling_beta": 0.7}}),
    ("deepseek-v3.2", "DeepseekV32ForCausalLM", {**LATENT, **GROUPED, **INDEXER}),
    ("glm-5", "GlmMoeDsaForCausalLM",
     {**LATENT, **GROUPED, **INDEXER, "mlp_layer_types": ["sparse", "dense", "sparse"],
      "indexer_types": ["full", "shared", "full"]}),
    ("glm-5-shares-last", "GlmMoeDsaForCausalLM",
     {**LATENT, **GROUPED, **INDEXER, "index_head_dim": 8, "index_topk_freq": 3,
      "index_skip_topk_offset": 1, "attention_bias": True, "rope_parameters": YARN}),
    ("glm4-moe-lite", "Glm4MoeLiteForCausalLM",
     {**LATENT, **GROUPED, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("llama4", "Llama4ForCausalLM", LLAMA4),
    ("llama4-odd", "Llama4ForCausalLM",
     {**LLAMA4, "use_qk_norm": False, "num_experts_per_tok": 3, "attention_bias": True,
      "no_rope_layers": [0, 1, 1], "moe_layers": [0, 2], "attn_scale": 0.5,
      "rope_parameters": LLAMA3, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("flex-olmo", "FlexOlmoForCausalLM", OLMOE),
    ("flex-olmo-bias", "FlexOlmoForCausalLM",
     {**OLMOE, "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True}),
    ("starcoder2", "Starcoder2ForCausalLM", {"sliding_window": 9}),
    ("starcoder2-odd", "Starcoder2ForCausalLM",
     {"use_bias": False, "hidden_act": "gelu", "num_key_value_heads": 1, "norm_epsilon": 0.1,
      "tie_word_embeddings": True, "head_dim": 10}),
    ("cohere", "CohereForCausalLM", {"logit_scale": 0.5}),
    ("cohere-normed", "CohereForCausalLM",
     {"use_qk_norm": True, "attention_bias": True, "layer_norm_eps": 0.1, "head_dim": 10,
      "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("cohere2", "Cohere2ForCausalLM",
     {"sliding_window": 9, "sliding_window_pattern": 2, "logit_scale": 2.0}),
    ("cohere2-types", "Cohere2ForCausalLM",
     {"sliding_window": 5, "attention_bias": True, "tie_word_embeddings": True, "layer_types":
      ["full_attention", "sliding_attention", "sliding_attention"]}),
    ("gpt-neox", "GPTNeoXForCausalLM", {}),
    ("gpt-neox-odd", "GPTNeoXForCausalLM",
     {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
      "layer_norm_eps": 0.1, "tie_word_embeddings": True, "rope_parameters": {
          "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}),
    ("gpt2", "GPT2LMHeadModel", {"n_inner": 80}),
    ("gpt2-odd", "GPT2LMHeadModel",
     {"activation_function": "relu", "scale_attn_weights": False, "layer_norm_epsilon": 0.1,
      "n_head": 2, "tie_word_embeddings": True}),
    ("phi", "PhiForCausalLM", {}),
    ("phi-normed", "PhiForCausalLM",
     {"qk_layernorm": True, "hidden_act": "gelu", "layer_norm_eps": 0.1, "num_key_value_heads": 1,
      "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                          "partial_rotary_factor": 0.25}}),
    ("stablelm", "StableLmForCausalLM", {"use_qkv_bias": True}),
    ("stablelm-parallel", "StableLmForCausalLM",
     {"use_parallel_residual": True, "qk_layernorm": True, "layer_norm_eps": 0.1,
      "tie_word_embeddings": True, "rope_parameters": {
          "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    ("nemotron", "NemotronForCausalLM", {}),
    ("nemotron-odd", "NemotronForCausalLM",
     {"attention_bias": True, "mlp_bias": True, "norm_eps": 0.1, "tie_word_embeddings": True,
      "head_dim": 24, "hidden_act": "gelu"}),
    ("olmo", "OlmoForCausalLM", {}),
    ("olmo-clipped", "OlmoForCausalLM",
     {"clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True, "head_dim": 10}),
    ("helium", "HeliumForCausalLM", {}),
    ("helium-bias", "HeliumForCausalLM",
     {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("arcee", "ArceeForCausalLM", {"mlp_bias": True}),
    ("arcee-odd", "ArceeForCausalLM",
     {"hidden_act": "silu", "attention_bias": True, "tie_word_embeddings": True, "head_dim": 10,
      "rope_parameters": YARN}),
    ("apertus", "ApertusForCausalLM", {}),
    ("apertus-odd", "ApertusForCausalLM",
     {"hidden_act": "relu2", "attention_bias": True, "tie_word_embeddings": True, "head_dim": 10,
      "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("gptj", "GPTJForCausalLM", {"rotary_dim": 8}),
    ("gptj-whole-heads", "GPTJForCausalLM", {"rotary_dim": 16, "n_inner": 80}),
    ("gpt-bigcode", "GPTBigCodeForCausalLM", {"activation_function": "gelu"}),
    ("gpt-bigcode-mha", "GPTBigCodeForCausalLM", {"multi_query": False, "n_inner": 80}),
    ("falcon-7b", "FalconForCausalLM", {}),
    ("falcon-40b", "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon-11b", "FalconForCausalLM",
     {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("falcon-in-turn", "FalconForCausalLM",
     {"parallel_attn": False, "multi_query": False, "bias": True, "ffn_hidden_size": 80,
      "layer_norm_epsilon": 0.1, "activation": "relu"}),
    ("falcon-alibi", "FalconForCausalLM", {"alibi": True, "num_attention_heads": 8}),
    ("falcon-alibi-odd", "FalconForCausalLM",
     {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True,
      "num_attention_heads": 3, "hidden_size": 60}),
    ("bloom", "BloomForCausalLM", {}),
    ("bloom-odd", "BloomForCausalLM",
     {"num_attention_heads": 6, "hidden_size": 60, "layer_norm_epsilon": 0.1,
      "tie_word_embeddings": True}),
    ("mpt", "MptForCausalLM", {}),
    ("mpt-odd", "MptForCausalLM",
     {"num_attention_heads": 5, "hidden_size": 60, "layer_norm_epsilon": 0.1,
      "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4}, "tie_word_embeddings": True}),
    ("persimmon", "PersimmonForCausalLM", {}),
    ("persimmon-plain", "PersimmonForCausalLM",
     {"qk_layernorm": False, "hidden_act": "gelu", "layer_norm_eps": 0.1,
      "tie_word_embeddings": True, "rope_parameters": {
          "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}}),
    ("jais2", "Jais2ForCausalLM", {}),
    ("jais2-odd", "Jais2ForCausalLM",
     {"attention_bias": False, "mlp_bias": False, "hidden_act": "gelu", "layer_norm_eps": 0.1,
      "num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True}),
    ("vaultgemma", "VaultGemmaForCausalLM",
     {"sliding_window": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0,
      "query_pre_attn_scalar": 24, "attention_bias": True}),
    ("opt", "OPTForCausalLM", {"ffn_dim": 96}),
    ("opt-odd", "OPTForCausalLM",
     {"ffn_dim": 80, "enable_bias": False, "layer_norm_elementwise_affine": False,
      "activation_function": "gelu", "tie_word_embeddings": True}),
    ("gpt-oss", "GptOssForCausalLM", {**GPT_OSS, "sliding_window": 9}),
    ("gpt-oss-odd", "GptOssForCausalLM",
     {**GPT_OSS, "sliding_window": 5, "attention_bias": False, "hidden_size": 72, "head_dim": 10,
      "num_key_value_heads": 1, "tie_word_embeddings": True, "num_local_experts": 3,
      "num_experts_per_tok": 3, "swiglu_alpha": 2.5, "swiglu_limit": 0.2,
      "rope_parameters": {**YARN, "truncate": False, "rope_theta": 500.0},
      "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    ("gpt-oss-no-windows", "GptOssForCausalLM",
     {**GPT_OSS, "layer_types": ["full_attention"] * 3, "hidden_size": 96,
      "num_experts_per_tok": 1}),
    ("gemma4", "Gemma4ForCausalLM",
     {**GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    ("gemma4-odd", "Gemma4ForCausalLM",
     {**GEMMA4, "num_kv_shared_layers": 1, "hidden_size": 72, "hidden_size_per_layer_input": 10,
      "vocab_size_per_layer_input": 230, "global_head_dim": 10, "num_key_value_heads": 1,
      "final_logit_softcapping": 3.0, "attention_bias": True, "tie_word_embeddings": True,
      "layer_types": ["sliding_attention", "full_attention", "full_attention",
                      "sliding_attention", "full_attention"],
      "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                          "full_attention": {"rope_type": "proportional", "rope_theta": 800.0,
                                             "partial_rotary_factor": 0.7, "factor": 2.0}}}),
    ("gemma4-moe", "Gemma4ForCausalLM",
     {**GEMMA4, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
      "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24, "attention_k_eq_v": True,
      "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}),
    ("gemma3n", "Gemma3nForCausalLM", GEMMA3N),
    ("gemma3n-odd", "Gemma3nForCausalLM",
     {**GEMMA3N, "altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False,
      "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 10, "attention_bias": True,
      "vocab_size_per_layer_input": 120, "final_logit_softcapping": 3.0,
      "tie_word_embeddings": True, "num_key_value_heads": 1, "rope_parameters": {
          "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
          "full_attention": {"rope_type": "linear", "rope_theta": 800.0, "factor": 2.0}}}),
]
RARER = frozenset({
    "llama-mha-tied", "llama-bias-mqa", "llama3-rope", "llama-yarn", "llama-odd-head",
    "mistral-window", "ministral-mixed", "qwen2-tied", "qwen2-all-windowed", "qwen3",
    "qwen3-tied-bias", "granite-bias-tied", "qwen3-yarn", "olmo2-bias-tied-mqa",
    "smollm3-bias-windows", "glm-whole-heads-mqa", "mixtral-all-experts", "gemma2-odd",
    "granite-moe-odd", "olmoe-odd", "granite-moe-not-shared", "ministral3-window-tied",
    "glm4-moe-odd", "minimax-m2-odd", "hunyuan-yarn", "dots1-no-windows", "flex-olmo-bias",
    "cohere-normed", "cohere2-types", "phi-normed", "olmo-clipped", "helium-bias",
    "gptj-whole-heads", "gpt-bigcode-mha", "falcon-alibi-odd", "bloom-odd", "gpt-oss-no-windows"})
"""Of classes that another case shows, with no field that no other case has."""
LENGTHS = (1, 33, 5, 18, 18, 7)


def fields_of(options: dict[str, Any], of: str = "") -> set[str]:
    """What a case says of its config: names of its fields, with the value where that is a word."""
    found: set[str] = set()
    for name, value in options.items():
        if isinstance(value, dict):
            found |= fields_of(value, f"{of}{name}.")
        else:
            plain = value is None or isinstance(value, (bool, str))
            found.add(f"{of}{name}={value}" if plain else of + name)
    return found


def test_cases_of_every_day_have_every_class_and_field() -> None:
    def said(cases: list[tuple[str, str, dict[str, Any]]]) -> set[str]:
        return {one for _, architecture, options in cases
                for one in (architecture, *fields_of(options))}

    assert {name for name, _, _ in CASES} > RARER
    assert said(CASES) == said([case for case in CASES if case[0] not in RARER])


def prompts(vocab: int = 199) -> list[list[int]]:
    gen = torch.Generator().manual_seed(5)
    return [torch.randint(2, vocab, (n,), generator=gen).tolist() for n in LENGTHS]


def every_logit(stepper: Stepper, texts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """Logits of every position of each text, extended chunk by chunk, all of them in each step."""
    seqs = [Seq(tokens) for tokens in texts]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    while left := [at for at, seq in enumerate(seqs) if seq.done < len(seq.tokens)]:
        counts = [min(chunk, len(seqs[at].tokens) - seqs[at].done) for at in left]
        out = stepper.step([(seqs[at], count) for at, count in zip(left, counts, strict=True)],
                           every_row=True)
        for at, part in zip(left, out.split(counts), strict=True):
            rows[at].append(part)
    return [torch.cat(parts) for parts in rows]


@pytest.mark.parametrize(("name", "architecture", "options"), [
    pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in RARER)) for case in CASES],
    ids=[c[0] for c in CASES])
def test_parity_with_transformers(
    tmp_path: Path, name: str, architecture: str, options: dict[str, Any]
) -> None:
    theirs = write_checkpoint(tmp_path, architecture, **options)
    ours = load(tmp_path)
    steppers = [(Stepper(ours, 4000 // size, size), chunk) for size, chunk in ((16, 512), (1, 7))]
    runs = [generate(stepper, prompts(), 8, chunk, budget=40) for stepper, chunk in steppers]
    assert runs[0] == runs[1]
    texts = [prompt + new for prompt, new in zip(prompts(), runs[0], strict=True)]
    wanted = [oracle_logits(theirs, text) for text in texts]
    for want, prompt, new in zip(wanted, prompts(), runs[0], strict=True):
        assert want[len(prompt) - 1:-1].argmax(-1).tolist() == new
    for stepper, chunk in steppers:
        for got, want in zip(every_logit(stepper, texts, chunk), wanted, strict=True):
            assert torch.allclose(got, want, atol=1e-4, rtol=0)


def test_internlm3_is_llama_with_names_of_its_own(tmp_path: Path) -> None:
    """transformers serves it by Llama's class; its checkpoints name another."""
    theirs = write_checkpoint(tmp_path, attention_bias=True, mlp_bias=True,
                              architecture="LlamaForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": True,
           "bias": True}
    (tmp_path / "config.json").write_text(json.dumps(
        {name: value for name, value in config.items() if not name.endswith("_bias")} | own))
    [got] = every_logit(Stepper(load(tmp_path), 64), prompts()[1:2], 7)
    assert torch.allclose(got, oracle_logits(theirs, prompts()[1]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "GPTBigCodeForCausalLM",
                                          "GPTJForCausalLM"])
def test_fields_of_the_gpts_have_two_names(tmp_path: Path, architecture: str) -> None:
    """Theirs, and those of all others; the last layer's width follows from the first alone."""
    common = {"architectures": [architecture], "intermediate_size": 7, "rotary_dim": 8}
    theirs = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 99}
    others = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
              "max_position_embeddings": 99}
    one, other = (shape_from_config({**common, **own}, tmp_path / "config.json")
                  for own in (theirs, others))
    assert one == other and one.hidden == 64 and one.intermediate == 256
    assert one.max_model_len == 99


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "OPTForCausalLM"])
def test_a_checkpoint_without_head_and_prefix(tmp_path: Path, architecture: str) -> None:
    """As most of GPT-2's and OPT's are."""
    theirs = write_checkpoint(tmp_path, architecture, tie_word_embeddings=True)
    theirs.base_model.save_pretrained(str(tmp_path))
    assert "For" not in json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    [got] = every_logit(Stepper(load(tmp_path), 64), prompts()[1:2], 7)
    assert torch.allclose(got, oracle_logits(theirs, prompts()[1]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("architecture", "fields", "named"), [
    ("Starcoder2ForCausalLM", {"hidden_act": "tanh"}, "hidden_act"),
    ("CohereForCausalLM", {"logit_scale": "much"}, "logit_scale"),
    ("Cohere2ForCausalLM", {"sliding_window": None}, "sliding_window"),
    ("GPTNeoXForCausalLM", {"rotary_pct": 2.0}, "rotary_pct"),
    ("GPT2LMHeadModel", {"n_embd": -1}, "n_embd"),
    ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True},
     "scale_attn_by_inverse_layer_idx"),
    ("PhiForCausalLM", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("OlmoForCausalLM", {"clip_qkv": -1.0}, "clip_qkv"),
    ("InternLM3ForCausalLM", {"qkv_bias": True, "bias": False}, "bias"),
    ("GPTJForCausalLM", {"rotary_dim": 7}, "rotary_dim"),
    ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True},
     "apply_residual_connection_post_layernorm"),
    ("BloomForCausalLM", {"n_head": 0}, "n_head"),
    ("MptForCausalLM", {"attn_config": {"alibi": False}}, "attn_config.alibi"),
    ("MptForCausalLM", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln"),
    ("MptForCausalLM", {"attn_config": {"clip_qkv": -1}}, "attn_config.clip_qkv"),
    ("MptForCausalLM", {"attn_config": {"alibi_bias_max": 16}}, "attn_config.alibi_bias_max"),
    ("MptForCausalLM", {"attn_config": 3}, "attn_config"),
    ("MptForCausalLM", {"no_bias": False}, "no_bias"),
    ("MptForCausalLM", {"d_model": "wide"}, "d_model"),
    ("FalconForCausalLM", {"parallel_attn": False, "new_decoder_architecture": True},
     "parallel_attn"),
    ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ("OPTForCausalLM", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
])
def test_what_is_not_served_is_named(tmp_path: Path, architecture: str, fields: dict[str, Any],
                                     named: str) -> None:
    """The field, as the file calls it."""
    line = why_refused(tmp_path, {"architectures": [architecture], **fields})
    assert f"config.json: {named}: " in line


def test_several_new_tokens_per_decode_row(tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, "MistralForCausalLM", sliding_window=9)
    stepper = Stepper(load(tmp_path), 64)
    seqs = [Seq(p) for p in prompts() if len(p) > 4]
    stepper.step([(s, len(s.tokens) - 3) for s in seqs])
    got = stepper.step([], seqs, q_len=3)
    for i, seq in enumerate(seqs):
        with torch.no_grad():
            want = theirs(torch.tensor([seq.tokens])).logits[0, -3:]
        assert torch.allclose(got[3 * i:3 * i + 3], want, atol=1e-4, rtol=0)


def test_nan_stays_in_its_own_sequence(tmp_path: Path) -> None:
    """A sequence full of NaN neither spoils its batch nor who gets its pages next."""
    write_checkpoint(tmp_path)
    model = load(tmp_path)
    healthy = [Seq(list(range(2, 12))), Seq(list(range(20, 43)))]
    alone = Stepper(model, 32)
    alone.step([(s, len(s.tokens) - 1) for s in healthy])
    want = alone.step([], healthy)
    shared = Stepper(model, 32)
    for layer in shared.pools[0].layers:
        layer.fill_(float("nan"))
    sick, again = Seq([5] * 30, done=29, pages=[30, 31]), [Seq(s.tokens) for s in healthy]
    shared.free = [p for p in shared.free if p not in (30, 31)]
    shared.step([(s, len(s.tokens) - 1) for s in again])
    got = shared.step([], [again[0], sick, again[1]])
    assert torch.allclose(got[[0, 2]], want, atol=1e-5)
    assert got[1].isnan().all()


@pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"head_dim": 64, "num_key_value_heads": 1},
                                     {"attention_bias": True, "tie_word_embeddings": True},
                                     {"architecture": "Gemma3ForCausalLM", "head_dim": 32,
                                      "sliding_window": 8, "sliding_window_pattern": 2},
                                     {"architecture": "GraniteForCausalLM",
                                      "attention_multiplier": 0.1, "residual_multiplier": 0.22,
                                      "embedding_multiplier": 12.0, "logits_scaling": 8.0},
                                     {"architecture": "Phi3ForCausalLM", "sliding_window": 9},
                                     {"architecture": "Olmo3ForCausalLM", "sliding_window": 9},
                                     {"architecture": "SmolLM3ForCausalLM",
                                      "no_rope_layer_interval": 2},
                                     {"architecture": "Glm4ForCausalLM", "head_dim": 32},
                                     {"architecture": "MixtralForCausalLM", "head_dim": 32,
                                      "num_experts_per_tok": 8},
                                     {"architecture": "Gemma2ForCausalLM", "head_dim": 32,
                                      "sliding_window": 8, "attn_logit_softcapping": 2.0,
                                      "final_logit_softcapping": 4.0},
                                     {**QWEN2_MOE, "architecture": "Qwen2MoeForCausalLM",
                                      "num_experts_per_tok": 5, "head_dim": 32},
                                     {**GRANITE_MOE, "architecture": "GraniteMoeForCausalLM",
                                      "num_experts_per_tok": 8},
                                     {"architecture": "Exaone4ForCausalLM", "sliding_window": 9},
                                     {"architecture": "OlmoeForCausalLM", "num_experts": 4,
                                      "num_experts_per_tok": 4, "clip_qkv": 0.9},
                                     {**GRANITE_MOE, "architecture":
                                      "GraniteMoeSharedForCausalLM", "num_experts_per_tok": 8,
                                      "shared_intermediate_size": 64},
                                     {"architecture": "Ministral3ForCausalLM", "head_dim": 32,
                                      "rope_parameters": MINISTRAL3},
                                     {**GROUPED, "architecture": "Glm4MoeForCausalLM",
                                      "use_qk_norm": True, "head_dim": 32, "topk_group": 4,
                                      "num_experts_per_tok": 8},
                                     {**LLAMA4, "architecture": "Llama4ForCausalLM",
                                      "attention_chunk_size": 32, "num_experts_per_tok": 5,
                                      "head_dim": 32},
                                     {**LATENT, **GROUPED, "topk_group": 4, "n_routed_experts": 4,
                                      "architecture": "DeepseekV2ForCausalLM",
                                      "num_experts_per_tok": 4},
                                     {**LATENT, **GROUPED, **INDEXER, "topk_group": 4,
                                      "architecture": "DeepseekV32ForCausalLM",
                                      "num_experts_per_tok": 8, "index_topk": 31},
                                     {"architecture": "HunYuanDenseV1ForCausalLM",
                                      "head_dim": 32},
                                     {"architecture": "Starcoder2ForCausalLM", "head_dim": 32},
                                     {"architecture": "CohereForCausalLM", "use_qk_norm": True,
                                      "head_dim": 32},
                                     {"architecture": "GPT2LMHeadModel"},
                                     {"architecture": "ApertusForCausalLM"},
                                     {"architecture": "PhiForCausalLM", "qk_layernorm": True},
                                     {"architecture": "StableLmForCausalLM"},
                                     {"architecture": "OlmoForCausalLM", "clip_qkv": 2.0},
                                     {"architecture": "BloomForCausalLM", "hidden_size": 128},
                                     {**GPT_OSS, "architecture": "GptOssForCausalLM",
                                      "num_experts_per_tok": 5, "head_dim": 32,
                                      "sliding_window": 9},
                                     {**GEMMA4, "architecture": "Gemma4ForCausalLM",
                                      "head_dim": 32, "global_head_dim": 64,
                                      "num_kv_shared_layers": 2},
                                     {**GEMMA3N, "architecture": "Gemma3nForCausalLM",
                                      "head_dim": 32}])
def test_bf16_stays_near_fp32(tmp_path: Path, native: bool, options: dict[str, Any]) -> None:
    """Mixed steps in bf16, with the C kernels and without, against the same weights in fp32."""
    write_checkpoint(tmp_path, dtype=torch.bfloat16, **options)
    full, short = load(tmp_path, dtype="float32"), load(tmp_path, native)
    if native and short.ops.name != "native":
        pytest.skip("no C compiler, or torch with another OpenMP")
    results = []
    for model in (full, short):
        stepper, seqs = Stepper(model, 64), [Seq(p) for p in prompts() if len(p) > 4]
        out = [stepper.step([(s, len(s.tokens) - 3) for s in seqs[1:]])]
        out.append(stepper.step([(seqs[0], 30)], seqs[1:]))
        out.append(stepper.step([], seqs))
        results.append(torch.cat(out))
    spread = results[0].std()
    assert (results[1] - results[0]).abs().max() < 0.15 * spread
    assert (results[1] - results[0]).abs().mean() < 0.02 * spread


def test_last_layer_on_wanted_rows_alone(tmp_path: Path) -> None:
    """A long chunk of which one row is wanted takes another way through the last layer."""
    write_checkpoint(tmp_path)
    model = load(tmp_path)
    tokens = torch.randint(2, 199, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    some, every = Stepper(model, 32), Stepper(model, 32)
    for start, count in ((0, 50), (50, 40)):
        one, other = Seq(tokens[:start + count], start), Seq(tokens[:start + count], start)
        one.pages = other.pages = list(range(1, 9))
        got = some.step([(one, count), (Seq(tokens[:30]), 30)])
        want = every.step([(other, count)], every_row=True)
        assert torch.allclose(got[0], want[-1], atol=1e-5)
