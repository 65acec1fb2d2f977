"""Tensors of GGUF files: each type as the gguf package reads it, each architecture as transformers
computes it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from helpers_gguf import ARCHITECTURES, KINDS, own_cache, stored, write_model
from helpers_models import Seq, Stepper, assert_greedy, load, oracle_logits, tiny_model
from helpers_pairs import pairs
from helpers_parity import Case, alone
from helpers_worker import Ring, make_runner

from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models.gguf_families import FAMILIES
from actorium.actors.models.gguf_file import OTHER_TYPES, TYPES, read_gguf
from actorium.actors.models.gguf_tensors import checkpoint_tensors
from actorium.actors.models.model_dir import resolve
from actorium.actors.params import ResolvedParams
from actorium.gpu.plan.weight_bytes import bytes_by_format, weight_bytes
from actorium.gpu.weights.gguf_blocks import (
    FORMATS,
    NATIVE,
    NATIVE_ROWS,
    grouped,
    write_numbers,
    write_rows,
)
from actorium.gpu.weights.gguf_reader import PLAIN, read_part
from actorium.kernels.grouped_rows import dequantise_grouped, pack_rows, row_format, unpack_rows

__all__ = ["own_cache"]
GREEDY = ResolvedParams(max_tokens=10, temperature=0.0)
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GRANITE: dict[str, Any] = {"attention_multiplier": 0.1, "residual_multiplier": 0.22,
                           "embedding_multiplier": 12.0, "logits_scaling": 8.0}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3,
    "shared_intermediate_size": 64, "layer_types": ["mamba", "attention", "mamba"]}
STATES: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12,
                          "mamba_d_conv": 3, "mamba_d_head": 16, "mamba_expand": 2}
MULTIPLIERS: dict[str, Any] = {
    "ssm_multipliers": [0.5, 0.7, 1.5, 2.0, 0.3], "mlp_multipliers": [0.6, 1.5],
    "key_multiplier": 0.7, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.8, "lm_head_multiplier": 0.5,
    "embedding_multiplier": 3.0}
NEMOTRON: dict[str, Any] = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
                            "ssm_state_size": 12, "conv_kernel": 3}
LATENTS: dict[str, Any] = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
                           "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
                           "num_key_value_heads": 4}
INDEXER: dict[str, Any] = {"index_topk": 20, "index_head_dim": 16, "index_n_heads": 16}
GEMMAS = {"sliding_window": 24, "num_hidden_layers": 4, "tie_word_embeddings": True,
          "layer_types": ["sliding_attention", "full_attention"] * 2,
          "vocab_size_per_layer_input": 199}
GEMMA4 = {**GEMMAS, "global_head_dim": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "gemma2": ("Gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16,
                          "tie_word_embeddings": True,
                          "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"sliding_window": 24, "num_hidden_layers": 7,
                          "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": 24}),
    "phi3-longrope": ("Phi3", {
        "original_max_position_embeddings": 256, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + 0.1 * i for i in range(6)],
            "long_factor": [1.0 + 0.1 * i for i in range(6)]}}),
    "olmo2": ("Olmo2", {}), "olmo3": ("Olmo3", {"sliding_window": 24, "num_hidden_layers": 4}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "glm-whole-heads": ("Glm", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}),
    "command-r": ("Cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "command-r-normed": ("Cohere", {"logit_scale": 0.5, "use_qk_norm": True,
                                    "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", {"sliding_window": 24, "num_hidden_layers": 4, "logit_scale": 0.5,
                            "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", {"tie_word_embeddings": True}),
    "nemotron": ("Nemotron", {}), "arcee": ("Arcee", {}),
    "glm": ("Glm", {}), "glm4": ("Glm4", {"head_dim": 32, "tie_word_embeddings": True}),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
    "seed-oss-biases": ("SeedOss", {"attention_out_bias": True, "mlp_bias": True}),
    "exaone4": ("Exaone4", {"sliding_window": 24, "sliding_window_pattern": 3,
                            "num_hidden_layers": 4}),
    "exaone4-no-windows": ("Exaone4", {"sliding_window": None,
                                       "layer_types": ["full_attention"] * 3}),
    "granite": ("Granite", GRANITE),
    "granite-moe": ("GraniteMoe", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "granite-hybrid": ("GraniteMoeHybrid", {**GRANITE, **MAMBA, "num_local_experts": 0}),
    "granite-hybrid-moe": ("GraniteMoeHybrid", {
        **GRANITE, **MAMBA, "num_local_experts": 6, "num_experts_per_tok": 2,
        "position_embedding_type": "rope"}),
    "deepseek-v3": ("DeepseekV3", {
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "n_group": 3, "topk_group": 2, "n_shared_experts": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "num_key_value_heads": 4, "routed_scaling_factor": 1.5,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                            "original_max_position_embeddings": 128, "mscale": 0.7,
                            "mscale_all_dim": 0.7}}),
    "deepseek-v2": ("DeepseekV2", {
        "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}),
    "ministral3": ("Ministral3", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.3}}),
    "granite-moe-shared": ("GraniteMoeShared", {
        **GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2,
        "shared_intermediate_size": 64}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "glm4-moe": ("Glm4Moe", {**GROUPED, "use_qk_norm": True, "attention_bias": True}),
    "glm4-moe-plain": ("Glm4Moe", {**GROUPED, "tie_word_embeddings": True}),
    "dots1": ("Dots1", GROUPED), "ernie": ("Ernie4_5", {}),
    "ernie-moe": ("Ernie4_5_Moe", {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_interval": 1}),
    "minimax-m2": ("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "hunyuan": ("HunYuanDenseV1", {}),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 6, "moe_topk": [2] * 3}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
                      "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5}),
    "gpt-oss": ("GptOss", {
        "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False,
            "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 128}}),
    "qwen3-next": ("Qwen3Next", {
        **EXPERTS, "shared_expert_intermediate_size": 32, "linear_conv_kernel_dim": 3,
        "norm_topk_prob": True, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "qwen3.5": ("Qwen3_5", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "qwen3.5-whole-heads": ("Qwen3_5", {
        "linear_value_head_dim": 128, "linear_num_value_heads": 6, "linear_num_key_heads": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2}),
    "apertus": ("Apertus", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0}}),
    "bamba": ("Bamba", {**STATES, "attn_layer_indices": [1]}),
    "falcon-7b": ("Falcon", {"tie_word_embeddings": True}),
    "falcon-40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2,
                              "num_ln_in_parallel_attn": 1}),
    "bloom": ("Bloom", {"tie_word_embeddings": True}),
    "mpt": ("Mpt", {"attn_config": {"clip_qkv": 0.7}}),
    "falcon-h1": ("FalconH1", {**STATES, **MULTIPLIERS, "mamba_d_ssm": 96, "mamba_d_head": 12}),
    "falcon-h1-normed": ("FalconH1", {
        **STATES, **MULTIPLIERS, "mamba_d_ssm": 128, "mamba_rms_norm": True,
        "mamba_norm_before_gate": False, "mamba_conv_bias": False}),
    "mamba": ("Mamba", {"state_size": 12, "intermediate_size": 128, "tie_word_embeddings": True}),
    "falcon-mamba": ("FalconMamba", {"state_size": 12, "intermediate_size": 128}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 12,
                          "intermediate_size": None}),
    "jamba": ("Jamba", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 12,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_hidden_layers": 4,
        "mamba_dt_rank": 8}),
    "jamba-dense": ("Jamba", {"attn_layer_period": 3, "attn_layer_offset": 2, "num_experts": 1,
                              "mamba_d_state": 12, "mamba_dt_rank": 8}),
    "nemotron-h": ("NemotronH", {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention"]}),
    "nemotron-h-moe": ("NemotronH", {
        **NEMOTRON, "layers_block_type": ["mamba", "moe", "attention"], "n_routed_experts": 6,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}),
    "gpt2": ("GPT2LMHeadModel", {"tie_word_embeddings": True}),
    "starcoder": ("GPTBigCode", {"tie_word_embeddings": True}),
    "gpt-neox": ("GPTNeoX", {}), "gpt-neox-in-turn": ("GPTNeoX", {"use_parallel_residual": False}),
    "phi2": ("Phi", {"intermediate_size": 256, "num_key_value_heads": 4}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm-12b": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "olmo": ("Olmo", {"clip_qkv": 0.5}), "jais2": ("Jais2", {}),
    "lfm2-moe": ("Lfm2Moe", {
        **EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
        "num_dense_layers": 1, "norm_eps": 1e-5, "tie_word_embeddings": True}),
    "llama4": ("Llama4", {
        "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2, "num_local_experts": 4,
        "attention_chunk_size": 8192, "num_hidden_layers": 4}),
    "mistral4": ("Mistral4", {**LATENTS, **GROUPED, "head_dim": 40, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.0}}),
    "glm4-moe-lite": ("Glm4MoeLite", {**LATENTS, **GROUPED}),
    "deepseek-v3.2": ("DeepseekV32", {**LATENTS, **GROUPED, **INDEXER}),
    "glm-5": ("GlmMoeDsa", {**LATENTS, **GROUPED, **INDEXER}),
    "kimi-linear": ("KimiLinear", {
        **LATENTS, "q_lora_rank": None, "moe_intermediate_size": 32, "num_local_experts": 6,
        "num_experts_per_tok": 2, "linear_head_dim": 16, "linear_num_heads": 4,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "gemma3n": ("Gemma3n", {
        **GEMMAS, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "laurel_rank": 32,
        "altup_num_inputs": 4, "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0]}),
    "gemma4-double-wide": ("Gemma4", {
        **GEMMA4, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0}),
    "gemma4-moe": ("Gemma4", {
        **GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 2, "moe_intermediate_size": 32}),
    "qwen3.5-moe": ("Qwen3_5Moe", {
        **EXPERTS, "shared_expert_intermediate_size": 32, "linear_value_head_dim": 32,
        "linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"] * 2}),
}


def test_every_type_of_the_package_is_served_or_refused_by_name() -> None:
    assert {own.name: (own.numbers, own.bytes) for own in TYPES.values()} == {
        kind: gguf.GGML_QUANT_SIZES[Type[kind]] for kind in KINDS}
    assert {*FORMATS, *PLAIN} == set(KINDS) and set(FORMATS) > NATIVE
    names = {number: own.name for number, own in TYPES.items()} | OTHER_TYPES
    assert names == {own.value: own.name for own in Type}


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_worth_what_the_package_says_to_the_bit(kind: str) -> None:
    raw, want = stored(torch.randn(7, 768), kind)
    own = grouped(kind, torch.from_numpy(raw))
    again = unpack_rows(pack_rows(own))
    for each in (own, again):
        assert torch.equal(dequantise_grouped(each, torch.float32), want)
    assert own.format == FORMATS[kind] == again.format


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_of_any_bytes(kind: str) -> None:
    """Every code and scale, infinite and undefined ones too; but for that of MXFP4 which is none,
    and refused."""
    size = gguf.GGML_QUANT_SIZES[Type[kind]][1]
    raw = np.random.default_rng(1).integers(0, 256, (64, 3 * size), np.uint8)
    if kind == "MXFP4":
        raw[:, ::size] %= 255
    with np.errstate(all="ignore"):
        want = torch.from_numpy(gguf.dequantize(raw, Type[kind]))
    found = dequantise_grouped(grouped(kind, torch.from_numpy(raw)), torch.float32)
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", sorted(NATIVE_ROWS))
def test_rows_are_made_in_c_as_in_torch(kind: str) -> None:
    """To the bit, but for the sign of a zero, and which number that is none a scale is."""
    blocks = torch.from_numpy(np.random.default_rng(2).integers(
        0, 256, (37, 2 * gguf.GGML_QUANT_SIZES[Type[kind]][1]), np.uint8))
    want = pack_rows(grouped(kind, blocks))
    found = torch.full_like(want, 99)
    write_rows(kind, blocks, found)
    assert row_format(found) == FORMATS[kind]
    for a, b in zip(unpack_rows(found)[:3], unpack_rows(want)[:3], strict=True):
        assert a is None and b is None or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "dtype"), pairs(sorted(NATIVE), [torch.bfloat16, torch.float32]))
def test_numbers_are_made_in_c_as_in_torch(kind: str, dtype: torch.dtype) -> None:
    """Every code and scale, infinite and undefined ones too; rows longer than a strip."""
    numbers, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    blocks = torch.from_numpy(np.random.default_rng(3).integers(
        0, 256, (9, 1280 // numbers * size), np.uint8))
    if kind == "MXFP4":  # of which one is refused
        blocks[:, ::size] %= 255
    want = dequantise_grouped(grouped(kind, blocks), dtype)
    found = torch.full((9, 1280), 99, dtype=dtype)
    write_numbers(kind, blocks, found)
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


def _check(path: Path, oracle: Any, quantizations: Sequence[str] = ("none", "auto")) -> None:
    """Greedy tokens of several prompts together are those of transformers, and so is every logit of
    the longest. auto: weights are held in codes, which products by reference dequantise; none:
    they are dequantised when they are read."""
    rng = random.Random(7)
    prompts = [[rng.randrange(199) for _ in range(n)] for n in (1, 5, 33, 60)]
    for quantization in quantizations:
        model = load(resolve(str(path)), native=False, dtype="float32", quantization=quantization)
        if model.shape.recurrent:
            Case(model, oracle, path).check(alone(model, 64, 60))
            continue
        ring = Ring(make_runner(model))
        for prompt in prompts:
            ring.submit(prompt, GREEDY)
        for prompt, out in zip(prompts, ring.run(), strict=True):
            assert_greedy(oracle, prompt, out.tokens, GREEDY.max_tokens)
        _check_logits(model, oracle, prompts[-1])


def _check_logits(model: Any, oracle: Any, ids: list[int]) -> None:
    want = oracle_logits(oracle, ids)
    found = Stepper(model).step([(Seq(ids), len(ids))], every_row=True)
    torch.testing.assert_close(found, want, atol=1e-4 * float(want.abs().max()), rtol=0)


KIN: dict[str, tuple[str, dict[str, Any]]] = {
    "internlm2": ("Llama", {}), "xverse": ("Llama", {}), "baichuan": ("Llama", {}),
    "exaone": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "pangu-embedded": ("Llama", {"attention_bias": True}), "qwen": ("Qwen2", {}),
    "minicpm": ("Granite", {**GRANITE, "attention_multiplier": 0.25}),
    "codeshell": ("Starcoder2", {"num_key_value_heads": 1}),
    "orion": ("StableLm", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}),
}
"""Of other architectures of GGUF the classes of which a model of theirs is one."""
ALIASES = {"qwen2vl": "Qwen2ForCausalLM", "qwen3vl": "Qwen3ForCausalLM",
           "qwen3vlmoe": "Qwen3MoeForCausalLM", "nemotron_h_moe": "NemotronHForCausalLM"}
"""Language models of models with images, which are those of text."""
ENCODERS = ("bert", "nomic-bert", "modern-bert")
"""See `test_gguf_encoders.py`."""


RARER = ("gemma4-moe", "falcon-11b", "falcon-h1", "jamba-dense", "gpt-neox-in-turn", "stablelm")


@pytest.mark.parametrize(("name", "quantization"), [
    pytest.param(name, quantization, marks=[pytest.mark.slow] * (name in RARER or (i + j) % 2))
    for i, name in enumerate(CASES) for j, quantization in enumerate(("none", "auto"))])
def test_greedy_tokens_equal_transformers(
    name: str, quantization: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    path, (architecture, options) = tmp_path / "tiny.gguf", CASES[name]
    record_property("gguf", class_of(architecture))
    _check(path, write_model(path, class_of(architecture), "Q4_0", 3, **options), [quantization])


def class_of(name: str) -> str:
    return name if name.endswith("Model") else f"{name}ForCausalLM"


@pytest.mark.parametrize("at", [
    at if at in ("internlm2", "minicpm") else pytest.param(at, marks=pytest.mark.slow)
    for at in KIN])
def test_kin_of_other_classes(at: str, tmp_path: Path) -> None:
    path, (architecture, options) = tmp_path / "tiny.gguf", KIN[at]

    def more(writer: gguf.GGUFWriter) -> None:
        if at == "qwen":
            writer.kv_data[0].pop("qwen.feed_forward_length")
            writer.add_feed_forward_length(2 * 96)

    _check(path, write_model(path, class_of(architecture), "Q4_0", 3, more, at=at, **options))


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "granite-hybrid"])
def test_scales_of_whole_weights_in_nvfp4(name: str, tmp_path: Path) -> None:
    """One of a weight, or of each expert, beside it; that of its inputs is passed over."""
    path, (architecture, options) = tmp_path / "tiny.gguf", CASES[name]
    scales = {"attn_q": [0.5], "ffn_down_exps": [0.5 + 0.25 * e for e in range(6)]}
    if name != "qwen3-moe":
        scales = {"ffn_down": [0.5], "ffn_up": [1.5], "output": [2.0]}
    tied = options.get("tie_word_embeddings")

    def more(writer: gguf.GGUFWriter) -> None:
        for own, numbers in scales.items():
            at = "" if own == "output" else "blk.1."
            if at or not tied:
                writer.add_tensor(f"{at}{own}.scale", np.array(numbers, np.float32))
                writer.add_tensor(f"{at}{own}.input_scale", np.array(numbers, np.float32))

    wide = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
            "shared_intermediate_size": 128, "mamba_n_heads": 8}
    options = {**options, **{key: own for key, own in wide.items()
                             if key in options or key in ("hidden_size", "intermediate_size")}}
    oracle = write_model(path, f"{architecture}ForCausalLM", "NVFP4", 3, more=more, **options)
    layer = oracle.model.layers[1]
    with torch.no_grad():
        if name == "qwen3-moe":
            layer.self_attn.q_proj.weight *= 0.5
            layer.mlp.experts.down_proj *= torch.tensor(scales["ffn_down_exps"]).view(-1, 1, 1)
        elif name == "llama":
            layer.mlp.down_proj.weight *= 0.5
            layer.mlp.up_proj.weight *= 1.5
        else:
            layer.shared_mlp.output_linear.weight *= 0.5
            layer.shared_mlp.input_linear.weight.chunk(2)[1].mul_(1.5)
            oracle.lm_head.weight *= 2.0
    _check(path, oracle)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "gemma2",
                                  "gemma3", "phi3"])
def test_transformers_reads_the_same_tensors(name: str, tmp_path: Path) -> None:
    """By its own tables of GGUF's names, where it has the architecture."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path, (architecture, options) = tmp_path / "tiny.gguf", CASES[name]
    oracle = write_model(path, f"{architecture}ForCausalLM", "Q8_0", 3, **options)
    other = tiny_model(f"{architecture}ForCausalLM", 4, **options)
    found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=other)["tensors"]
    for own, weight in oracle.named_parameters():
        assert torch.allclose(found[own].float(), weight, rtol=0, atol=1e-6), own


def test_every_architecture_has_a_case() -> None:
    assert {class_of(own) for own, _ in CASES.values()} == set(ARCHITECTURES)
    assert {*ARCHITECTURES.values(), *ALIASES, *KIN, *ENCODERS} == set(FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_served(kind: str, tmp_path: Path) -> None:
    """As most files have them: the embedding in another type than the rest."""
    path = tmp_path / "tiny.gguf"
    oracle = write_model(path, "LlamaForCausalLM", kind, 5, embedding="Q8_0", num_hidden_layers=2,
                         **WIDE)
    for quantization in ("none", "auto"):
        model = load(resolve(str(path)), native=False, dtype="float32", quantization=quantization)
        _check_logits(model, oracle, list(range(2, 62)))
    assert model.shape.grouped is not None and model.shape.grouped.source == "gguf"


@pytest.mark.parametrize("kind", ["BF16", "Q4_0"])
def test_a_model_in_several_files(kind: str, tmp_path: Path) -> None:
    """As the package splits it: a file's parts say what the whole does, by the name of any of them,
    codes side by side in one weight out of two files too."""
    write_model(tmp_path / "whole.gguf", "Qwen3ForCausalLM", kind, 3, head_dim=32)
    write_model(tmp_path / "m.gguf", "Qwen3ForCausalLM", kind, 3, tensors_each=3,
                head_dim=32)
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) > 5
    ids = list(range(2, 60))
    want, *found = (Stepper(load(resolve(str(path)), dtype="bfloat16")).step(
        [(Seq(ids), len(ids))], every_row=True)
        for path in (tmp_path / "whole.gguf", parts[0], parts[-1]))
    assert all(torch.equal(own, want) for own in found)


@pytest.mark.parametrize("kind", FORMATS)
def test_products_in_codes_are_near_those_of_what_they_are_worth(kind: str,
                                                                 tmp_path: Path) -> None:
    path, ids = tmp_path / "tiny.gguf", list(range(2, 90))
    oracle = write_model(path, "LlamaForCausalLM", kind, 5, num_hidden_layers=2,
                         tie_word_embeddings=True, **WIDE)
    want = oracle_logits(oracle, ids)
    errors = []
    for quantization in ("none", "auto"):
        stepper = Stepper(load(resolve(str(path)), dtype="bfloat16", quantization=quantization))
        found = stepper.step([(Seq(ids), len(ids))], every_row=True)
        errors.append(float((found.float() - want).norm() / want.norm()))
    assert errors[0] < 0.05 and errors[1] < 3 * errors[0], errors


def test_the_plan_counts_what_is_held(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, "LlamaForCausalLM", "Q4_0", 5, embedding="Q8_0", num_hidden_layers=1,
                vocab_size=208, **WIDE)
    kept, plain = (weight_bytes(load(resolve(str(path)), quantization=own).shape)
                   for own in ("auto", "none"))
    layer, outer = (2 * 4 + 2 * 2) * 64 * 256 + 3 * 256 * 512, 2 * 208 * 256
    assert plain - kept == 2 * (layer + outer) - layer * 18 // 32 - outer * 34 // 32


@pytest.mark.parametrize("name, kind, dtype", [
    ("gemma3n", "Q5_1", "bfloat16"), ("gemma4-double-wide", "Q8_0", "bfloat16"),
    ("gemma4-double-wide", "Q4_0", "float32")])
def test_what_tokens_give_every_layer_stays_in_codes(name: str, kind: str, dtype: str,
                                                     tmp_path: Path) -> None:
    """The table is held as the file has it, and the rows of ids are worth what the file's are."""
    path, (architecture, options) = tmp_path / "tiny.gguf", CASES[name]
    write_model(path, class_of(architecture), kind, 3, **options)
    table = next(part for part in checkpoint_tensors(read_gguf(path))
                 if part.name == "model.embed_tokens_per_layer.weight")
    model, plain = (load(resolve(str(path)), dtype=dtype, quantization=own)
                    for own in ("auto", "none"))
    ids = torch.tensor([0, 198, 7, 7, 100])
    want = read_part(table, model.dtype, False, torch.device("cpu"))[ids]
    assert torch.equal(plain.token_table[ids], want)
    assert not isinstance(model.token_table, torch.Tensor)
    assert torch.equal(model.token_table.rows(ids, model.dtype), want)
    counted = [bytes_by_format(own.shape).get(dtype, 0) for own in (plain, model)]
    assert counted[0] - counted[1] > want[0].nbytes * len(plain.token_table)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_what_is_in_codes_is_not_rounded_twice(quantization: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    oracle = write_model(path, "LlamaForCausalLM", "Q8_0", 5)
    with pytest.raises(BadConfig, match="in gguf already"):
        load(resolve(str(path)), quantization=quantization)
    oracle = write_model(path, "LlamaForCausalLM", "BF16", 5)
    model = load(resolve(str(path)), quantization=quantization)
    ids = list(range(2, 60))
    found = Stepper(model).step([(Seq(ids), len(ids))], every_row=True)
    want = oracle_logits(oracle, ids)
    assert 0.01 < float((found.float() - want).norm() / want.norm()) < 0.5


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Of GPT-OSS: codes of 4 bits, as out of safetensors, in which all experts are two products."""
    path, (_, options) = tmp_path / "tiny.gguf", CASES["gpt-oss"]
    _check(path, write_model(path, "GptOssForCausalLM", "MXFP4", 3, **options))
    formats = bytes_by_format(load(resolve(str(path))).shape)
    assert "mxfp4 (groups of 32)" in formats and not any("int" in own for own in formats)


def test_scales_of_mxfp4_that_are_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, "LlamaForCausalLM", "MXFP4", 5, num_hidden_layers=1)
    stored_at = read_gguf(path).tensors["blk.0.ffn_up.weight"].start
    with path.open("r+b") as file:
        file.seek(stored_at + 17)
        file.write(b"\xff")
    for quantization in ("auto", "none"):
        with pytest.raises(BadModel, match="tensor blk.0.ffn_up.weight holds a scale that is not"):
            model = load(resolve(str(path)), quantization=quantization)
            Stepper(model).step([(Seq([1, 2]), 2)])


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    """Nothing is mapped: a read that finds no more is an error with one line."""
    path = tmp_path / "tiny.gguf"
    write_model(path, "Qwen2ForCausalLM", "Q8_0")
    parts = list(checkpoint_tensors(read_gguf(path)))
    last = next(part for part in reversed(parts) if len(part.shape) == 2)
    os.truncate(path, last.stored.start + 5)
    read_part(parts[0], torch.bfloat16, False, torch.device("cpu"))
    for rows in (False, True):
        with pytest.raises(BadModel, match="it ends early"):
            read_part(last, torch.bfloat16, rows, torch.device("cpu"))
