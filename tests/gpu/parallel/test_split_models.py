"""Ranks of every family against the model alone: logits, and the tokens of whole requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers_deepseek import write_deepseek
from helpers_eagle import follow_tokens_by_head, write_eagle
from helpers_kinds import write_kind
from helpers_mamba import write_granite
from helpers_models import assert_greedy, write_checkpoint
from helpers_mxfp4 import write_mxfp4
from helpers_nemotron import write_nemotron
from helpers_ranks import GREEDY, asked, near, opened_config, run_ranks, serve, whole
from helpers_recurrent import write_recurrent
from transformers import AutoModelForCausalLM

from actorium.actors.config.tree import SpeculationConfig
from actorium.gpu.parallel.rank_group import LoneRank

CASES: dict[str, Callable[[Path], Any]] = {
    "llama": lambda path: write_kind(path, "llama"),
    "llama-bias-tied": lambda path: write_checkpoint(
        path, "LlamaForCausalLM", attention_bias=True, mlp_bias=True, num_key_value_heads=1,
        tie_word_embeddings=True, intermediate_size=90),
    "qwen2": lambda path: write_checkpoint(path, "Qwen2ForCausalLM", vocab_size=201),
    "qwen3": lambda path: write_checkpoint(path, "Qwen3ForCausalLM"),
    "mistral": lambda path: write_checkpoint(path, "MistralForCausalLM", sliding_window=9),
    "gemma3": lambda path: write_kind(path, "windows"),
    "deepseek": lambda path: write_kind(path, "deepseek"),
    "latent-no-query-rank": lambda path: write_deepseek(path, 5, q_lora_rank=None),
    "bloom": lambda path: write_checkpoint(
        path, "BloomForCausalLM", num_attention_heads=12, hidden_size=96),
    "mpt": lambda path: write_checkpoint(
        path, "MptForCausalLM", attn_config={"clip_qkv": 0.7}),
    "deepseek-v3.2": lambda path: write_checkpoint(
        path, "DeepseekV32ForCausalLM", n_routed_experts=8, num_experts_per_tok=3, n_group=4,
        topk_group=2, moe_intermediate_size=24, kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, num_key_value_heads=4, head_dim=8, index_topk=9,
        index_head_dim=12, index_n_heads=16, attention_bias=True),
    "qwen3.5": lambda path: write_kind(path, "hybrid"),
    "qwen3-moe": lambda path: write_kind(path, "experts"),
    "qwen3.5-moe": lambda path: write_kind(path, "sparse"),
    "granite-3": lambda path: write_checkpoint(
        path, "GraniteForCausalLM", attention_bias=True, mlp_bias=True, residual_multiplier=0.4,
        attention_multiplier=0.2, embedding_multiplier=3.0, logits_scaling=2.0),
    "granite": lambda path: write_granite(path, seed=5),
    "granite-experts": lambda path: write_granite(path, seed=5, num_local_experts=6),
    "granite-groups": lambda path: write_granite(path, seed=5, mamba_n_groups=2),
    "olmo2": lambda path: write_checkpoint(path, "Olmo2ForCausalLM", attention_bias=True),
    "smollm3": lambda path: write_checkpoint(path, "SmolLM3ForCausalLM", no_rope_layers=[0, 1, 0]),
    "glm4": lambda path: write_checkpoint(path, "Glm4ForCausalLM", num_key_value_heads=1),
    "exaone4": lambda path: write_checkpoint(path, "Exaone4ForCausalLM", sliding_window=9,
                                             sliding_window_pattern=2),
    "phi3": lambda path: write_checkpoint(path, "Phi3ForCausalLM", intermediate_size=90),
    "mixtral": lambda path: write_checkpoint(
        path, "MixtralForCausalLM", intermediate_size=92, num_local_experts=6),
    "gemma2": lambda path: write_checkpoint(
        path, "Gemma2ForCausalLM", sliding_window=9, attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0, query_pre_attn_scalar=16),
    "qwen2-moe": lambda path: write_checkpoint(
        path, "Qwen2MoeForCausalLM", num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=36, shared_expert_intermediate_size=50, mlp_only_layers=[1]),
    "granite-moe": lambda path: write_checkpoint(
        path, "GraniteMoeForCausalLM", attention_bias=True, intermediate_size=92,
        residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=2.0),
    "olmoe": lambda path: write_checkpoint(
        path, "OlmoeForCausalLM", num_experts=6, num_experts_per_tok=2, intermediate_size=36,
        clip_qkv=0.9),
    "granite-moe-shared": lambda path: write_checkpoint(
        path, "GraniteMoeSharedForCausalLM", intermediate_size=92, residual_multiplier=0.4,
        attention_multiplier=0.2, shared_intermediate_size=50),
    "ministral3": lambda path: write_checkpoint(
        path, "Ministral3ForCausalLM", intermediate_size=90, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 8}),
    "glm4-moe": lambda path: write_checkpoint(
        path, "Glm4MoeForCausalLM", n_routed_experts=8, num_experts_per_tok=3, n_group=4,
        topk_group=2, moe_intermediate_size=36, routed_scaling_factor=1.5, use_qk_norm=True,
        num_nextn_predict_layers=0),
    "minimax-m2": lambda path: write_checkpoint(
        path, "MiniMaxM2ForCausalLM", num_local_experts=6, num_experts_per_tok=2,
        intermediate_size=36, rotary_dim=8),
    "ernie4.5-moe": lambda path: write_checkpoint(
        path, "Ernie4_5_MoeForCausalLM", moe_num_experts=6, moe_k=2, moe_intermediate_size=36),
    "hunyuan-moe": lambda path: write_checkpoint(
        path, "HunYuanMoEV1ForCausalLM", num_experts=6, moe_topk=2, intermediate_size=52),
    "deepseek-v2": lambda path: write_checkpoint(
        path, "DeepseekV2ForCausalLM", kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, num_key_value_heads=4, head_dim=8, n_routed_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=36, first_k_dense_replace=1),
    "llama4": lambda path: write_checkpoint(
        path, "Llama4ForCausalLM", intermediate_size_mlp=90, interleave_moe_layer_step=2,
        num_local_experts=6, attention_chunk_size=32, floor_scale=7, no_rope_layer_interval=3),
    "flex-olmo": lambda path: write_checkpoint(
        path, "FlexOlmoForCausalLM", num_experts=6, num_experts_per_tok=2, intermediate_size=36),
    "bamba": lambda path: write_recurrent(path, "BambaForCausalLM", attention_bias=True,
                                          mlp_bias=True, mamba_proj_bias=True),
    "falcon-h1": lambda path: write_recurrent(path, "FalconH1ForCausalLM", mamba_n_groups=2,
                                              mlp_bias=True, projectors_bias=True),
    "mamba2": lambda path: write_recurrent(path, "Mamba2ForCausalLM"),
    "falcon-mamba": lambda path: write_recurrent(path, "FalconMambaForCausalLM", use_bias=True),
    "jamba": lambda path: write_recurrent(path, "JambaForCausalLM", mamba_proj_bias=True),
    "kimi-linear": lambda path: write_recurrent(path, "KimiLinearForCausalLM"),
    "nemotron-h": write_nemotron,
    "lfm2-moe": lambda path: write_recurrent(path, "Lfm2MoeForCausalLM"),
    "lfm2": lambda path: write_recurrent(path, "Lfm2ForCausalLM", conv_bias=True),
    "starcoder2": lambda path: write_checkpoint(path, "Starcoder2ForCausalLM",
                                                intermediate_size=90),
    "cohere": lambda path: write_checkpoint(path, "CohereForCausalLM", use_qk_norm=True,
                                            num_key_value_heads=1, logit_scale=0.5),
    "apertus": lambda path: write_checkpoint(path, "ApertusForCausalLM"),
    "gpt2": lambda path: write_checkpoint(path, "GPT2LMHeadModel", n_inner=90),
    "phi": lambda path: write_checkpoint(path, "PhiForCausalLM", qk_layernorm=True,
                                         vocab_size=201),
    "stablelm": lambda path: write_checkpoint(
        path, "StableLmForCausalLM", qk_layernorm=True, use_parallel_residual=True),
    "gpt-neox": lambda path: write_checkpoint(path, "GPTNeoXForCausalLM"),
    "nemotron": lambda path: write_checkpoint(path, "NemotronForCausalLM", mlp_bias=True),
    "olmo": lambda path: write_checkpoint(path, "OlmoForCausalLM", clip_qkv=0.5),
    "falcon": lambda path: write_checkpoint(
        path, "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2),
    "persimmon": lambda path: write_checkpoint(path, "PersimmonForCausalLM"),
    "opt": lambda path: write_checkpoint(path, "OPTForCausalLM", ffn_dim=90),
    "gpt-oss": lambda path: write_checkpoint(
        path, "GptOssForCausalLM", num_local_experts=6, num_experts_per_tok=2, sliding_window=9,
        intermediate_size=92),
    "gemma4": lambda path: write_kind(path, "shared-pages"),
    "gemma4-moe": lambda path: write_checkpoint(
        path, "Gemma4ForCausalLM", sliding_window=9, global_head_dim=24, enable_moe_block=True,
        num_experts=6, top_k_experts=2, moe_intermediate_size=36, intermediate_size=90,
        hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4),
    "gemma3n": lambda path: write_checkpoint(
        path, "Gemma3nForCausalLM", sliding_window=9, intermediate_size=90, num_kv_shared_layers=1,
        laurel_rank=6, num_hidden_layers=3, activation_sparsity_pattern=[0.9, 0.0, 0.6],
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=199,
        layer_types=["sliding_attention", "full_attention", "full_attention"]),
    "gpt-oss-mxfp4": lambda path: write_mxfp4(path, num_hidden_layers=2),
}
BY_FOUR = ("llama-bias-tied", "gemma3", "deepseek", "qwen3.5", "qwen3-moe", "granite-groups")
"""More ranks than heads of keys and values, and what each kind of layer makes of that."""
LIKE_OTHERS = ("qwen2", "mistral", "latent-no-query-rank", "granite", "granite-moe-shared",
               "ministral3", "minimax-m2", "hunyuan-moe", "flex-olmo", "deepseek-v2", "starcoder2",
               "apertus", "gpt-neox", "nemotron", "olmo", "falcon", "persimmon", "opt",
               "gpt-oss-mxfp4", "granite-3", "smollm3", "glm4", "exaone4", "phi3", "mixtral",
               "qwen2-moe", "granite-moe", "olmoe", "ernie4.5-moe", "bamba", "mamba2",
               "falcon-mamba", "lfm2-moe", "gpt2", "stablelm", "gemma4-moe")
"""Of families whose layers are split as those of another one here; `make parity` has all."""


@pytest.mark.parametrize(("name", "size"), [
    pytest.param(name, size, marks=[pytest.mark.slow] * (
        name in LIKE_OTHERS or (size == 4) != (name in BY_FOUR)))
    for name in CASES for size in (2, 4)])
def test_ranks_give_what_the_model_alone_gives(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / "model"
    path.mkdir()
    CASES[name](path)
    config = opened_config(path)
    alone = serve(config, LoneRank())
    ranks = whole(run_ranks(tmp_path / "group", size, lambda group: serve(config, group)))
    assert len({str(own.outputs) for own in ranks}) == 1, "all ranks sample alike"
    for own in ranks:
        assert all(torch.equal(a, b) for a, b in zip(own.logits, ranks[0].logits, strict=True))
    assert near(ranks[0].logits, alone.logits)
    assert [out.tokens for out in ranks[0].outputs] == [out.tokens for out in alone.outputs]
    assert [out.cached for out in ranks[0].outputs] == [out.cached for out in alone.outputs]
    if size == 2:
        oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for prompt, out in zip(asked(), ranks[0].outputs, strict=False):
            assert_greedy(oracle, prompt, out.tokens, GREEDY.max_tokens)


FEW = ("llama-bias-tied", "qwen3.5")


@pytest.mark.parametrize("name", [
    name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_preempted_sequences_and_drafts_give_the_same_tokens(tmp_path: Path, name: str) -> None:
    """Every third step somebody gives up pages and states, to come back by prefix or checkpoint;
    where there is an MTP layer, each step verifies two drafts."""
    path = tmp_path / "model"
    path.mkdir()
    CASES[name](path)
    config = opened_config(path)
    alone = serve(config, LoneRank(), speculative="off")
    one, other = whole(run_ranks(tmp_path / "group", 2, lambda group: serve(
        config, group, force_preempt_every=3, speculative="mtp:2,fixed")))
    assert str(one.outputs) == str(other.outputs) and one.preemptions > 2
    assert [out.tokens for out in one.outputs] == [out.tokens for out in alone.outputs]


@pytest.mark.parametrize(("kind", "size", "dtype"), [
    ("llama", 2, "bfloat16"), pytest.param("hybrid", 2, "float32", marks=pytest.mark.slow),
    pytest.param("hybrid", 2, "bfloat16", marks=pytest.mark.slow),
    pytest.param("experts", 4, "float32", marks=pytest.mark.slow),
    pytest.param("latent", 2, "float32", marks=pytest.mark.slow)])
def test_every_rank_drafts_what_a_head_of_the_whole_model_does(
        tmp_path: Path, kind: str, size: int, dtype: str) -> None:
    """An EAGLE-3 head is whole on each of them, as the hidden states are that it takes: in bf16
    layers leave their sums over the ranks to others, but not where a head takes them."""
    write_kind(tmp_path / "model", kind)
    write_eagle(tmp_path / "head", tmp_path / "model", seed=5,
                eagle_aux_hidden_state_layer_ids=[0, 1, 1])
    follow_tokens_by_head(tmp_path / "model", tmp_path / "head")
    config = msgspec.structs.replace(
        opened_config(tmp_path / "model", dtype=dtype), speculation=SpeculationConfig(
            speculative="eagle3:3,fixed", speculative_model=str(tmp_path / "head")))
    alone = serve(config, LoneRank(), speculative="eagle3:3,fixed")
    ranks = whole(run_ranks(tmp_path / "group", size, lambda group: serve(
        config, group, speculative="eagle3:3,fixed")))
    for own in ranks:
        assert str(own.outputs) == str(ranks[0].outputs)
        assert all(torch.equal(a, b) for a, b in zip(own.logits, ranks[0].logits, strict=True))
    if dtype == "float32":
        plain = serve(opened_config(tmp_path / "model"), LoneRank(), speculative="off")
        assert near(ranks[0].logits, alone.logits)
        assert [out.tokens for out in ranks[0].outputs] == [out.tokens for out in plain.outputs]
    # Later steps have other inputs where two tokens are nearly as likely.
    for one, other in zip(ranks[0].logits[:4], alone.logits[:4], strict=True):
        assert float((one - other).abs().max()) <= 0.05 * float(other.abs().max())


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_ranks_in_bf16_stay_near_and_agree(tmp_path: Path, kind: str) -> None:
    """With the C kernels; partial sums are rounded once."""
    path = tmp_path / "model"
    path.mkdir()
    write_kind(path, kind)
    config = opened_config(path, dtype="bfloat16")
    alone = serve(config, LoneRank())
    one, other = whole(run_ranks(tmp_path / "group", 2, lambda group: serve(config, group)))
    assert str(one.outputs) == str(other.outputs)
    assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))
    # Later steps have other inputs where two tokens are nearly as likely.
    first, want = one.logits[0], alone.logits[0]
    assert float((first - want).abs().max()) <= 0.05 * float(want.abs().max())
