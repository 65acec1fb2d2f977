"""Families with recurrent layers against transformers: fp32, tiny checkpoints at random, states
and pages poisoned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import load, oracle_logits, why_refused
from helpers_parity import ATOL, Case, alone, tokens
from helpers_recurrent import FAMILIES, write_recurrent
from helpers_speculation import Work, tokens_of

from actorium.actors.params import ResolvedParams

BAMBA, FALCON, LFM2 = "BambaForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM"
NEMOTRON = "NemotronHForCausalLM"
KIMI = "KimiLinearForCausalLM"
LFM_MOE = "Lfm2MoeForCausalLM"
MAMBA2, MAMBA, JAMBA = "Mamba2ForCausalLM", "MambaForCausalLM", "JambaForCausalLM"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (BAMBA, {}),
    "bamba-odd": (BAMBA, {
        "attn_layer_indices": [0, 2], "num_hidden_layers": 3, "mamba_n_groups": 2,
        "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 3, "mamba_d_head": 16,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                            "partial_rotary_factor": 1.0}}),
    "falcon": (FALCON, {}),
    "falcon-norm": (FALCON, {
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2,
        "attention_bias": True, "mlp_bias": True, "projectors_bias": True,
        "mamba_proj_bias": True, "tie_word_embeddings": True}),
    "falcon-norm-before": (FALCON, {
        "mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_d_ssm": None, "mamba_d_head": 16,
        "ssm_multipliers": None, "mlp_multipliers": None, "ssm_in_multiplier": 1.0,
        "attention_in_multiplier": 1.0, "key_multiplier": 1.0, "num_key_value_heads": 4}),
    "lfm2": (LFM2, {}),
    "lfm2-odd": (LFM2, {
        "layer_types": None, "full_attn_idxs": [0, 2], "num_hidden_layers": 3, "conv_bias": True,
        "conv_L_cache": 4, "block_ffn_dim_multiplier": 1.3, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "lfm2-own-width": (LFM2, {"block_auto_adjust_ff_dim": False, "conv_L_cache": 2}),
    "lfmmoe": (LFM_MOE, {}),
    "lfmmoe-odd": (LFM_MOE, {
        "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False,
        "routed_scaling_factor": 1.7, "num_experts_per_tok": 6, "conv_bias": True,
        "tie_word_embeddings": True}),
    "lfmmoe-dense": (LFM_MOE, {"num_dense_layers": 9, "intermediate_size": 88}),
    "mamba2": (MAMBA2, {}),
    "mamba2-odd": (MAMBA2, {"n_groups": 1, "use_bias": True, "use_conv_bias": False,
                            "tie_word_embeddings": True, "conv_kernel": 3, "expand": 1,
                            "head_dim": 8}),
    "mamba": (MAMBA, {}),
    "mamba-odd": (MAMBA, {"use_bias": True, "use_conv_bias": False, "state_size": 10, "expand": 3,
                          "tie_word_embeddings": True, "conv_kernel": 3, "time_step_rank": 7}),
    "falconmamba": ("FalconMambaForCausalLM", {"mixer_rms_eps": 1e-3}),
    "falconmamba-size": ("FalconMambaForCausalLM", {"expand": 16, "intermediate_size": 96}),
    "jamba": (JAMBA, {}),
    "jamba-odd": (JAMBA, {
        "num_experts_per_tok": 1, "expert_layer_period": 3, "expert_layer_offset": 0,
        "attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_conv": 2, "mamba_d_state": 20,
        "mamba_dt_rank": 9, "mamba_conv_bias": False, "mamba_proj_bias": True,
        "tie_word_embeddings": True}),
    "jamba-dense": (JAMBA, {"num_experts": 1, "num_experts_per_tok": 1}),
    "nemotron": (NEMOTRON, {}),
    "nemotron-dense": (NEMOTRON, {
        "hybrid_override_pattern": "M-M-*-MM-", "use_bias": True, "use_conv_bias": False,
        "mlp_bias": True, "conv_kernel": 3, "n_groups": 1}),
    "nemotron-latent": (NEMOTRON, {
        "hybrid_override_pattern": "MEM*E", "moe_latent_size": 24, "n_group": 3, "topk_group": 2,
        "norm_topk_prob": False, "routed_scaling_factor": 1.5, "num_experts_per_tok": 3}),
    "kimi": (KIMI, {}),
    "kimi-odd": (KIMI, {
        "layer_types": None, "num_hidden_layers": 5, "mlp_layer_types": [
            "sparse", "dense", "sparse", "sparse", "dense"], "linear_conv_kernel_dim": 3,
        "linear_num_heads": 2, "n_group": 3, "topk_group": 2, "norm_topk_prob": False,
        "q_lora_rank": 24, "n_shared_experts": 2}),
    "kimi-nested": (KIMI, {"layer_types": None, "linear_attn_config": {
        "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 2, "full_attn_layers": [2],
        "kda_layers": [1, 3, 4]}}),
}
PLAIN = [name for name in CASES if "-" not in name]
"""One of each family."""
LAYERS = ("falcon", "lfm2", "jamba", "kimi")
"""One of each kind of recurrent layer, whose states all families keep alike."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each kind once, in whatever order tests ask for them."""
    @functools.cache
    def cached(kind: str) -> Case:
        path = tmp_path_factory.mktemp("model")
        architecture, options = CASES[kind]
        oracle = write_recurrent(path, architecture, seed=3, **options)
        return Case(load(path), oracle, path)

    return cached


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    return make(request.param)


@pytest.fixture(scope="module", params=[
    name if name in LAYERS else pytest.param(name, marks=pytest.mark.slow) for name in PLAIN])
def family(request: pytest.FixtureRequest, make: Callable[[str], Case]) -> Case:
    return make(request.param)


@pytest.mark.parametrize(("chunk", "prompt"), [
    (7, 40), pytest.param(1, 9, marks=pytest.mark.slow),
    pytest.param(513, 600, marks=pytest.mark.slow)])
def test_greedy_with_chunks(case: Case, chunk: int, prompt: int) -> None:
    case.check(alone(case.model, chunk, prompt))


def test_the_checkpoint_can_fail_us(case: Case) -> None:
    """Logits differ by much more than what is let pass, and so do the tokens chosen."""
    logits = case.logits(tokens(100))
    assert float(logits.std()) > 1000 * ATOL
    assert len(set(logits.argmax(-1).tolist())) > 20


def test_greedy_equals_generate(family: Case) -> None:
    family.check_against_generate()


@pytest.mark.slow
def test_batched_with_admissions_in_the_middle(case: Case) -> None:
    case.check_admissions_in_the_middle(7, (17, 64, 2))


def test_preemption(family: Case) -> None:
    family.check_preemption()


def test_a_prefix_through_a_checkpoint(family: Case) -> None:
    family.check_a_prefix(40, ((193, 192), (49, 48)))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_weights_in_bf16(name: str, native: bool, tmp_path: Path) -> None:
    """As near to the same weights in fp32 as transformers is in bf16."""
    architecture, options = CASES[name]
    narrow = write_recurrent(tmp_path, architecture, 4, torch.bfloat16, **options)
    s = alone(load(tmp_path, native), 60, 90, 20)
    theirs = oracle_logits(narrow, s.tokens).float()
    want = oracle_logits(narrow.float(), s.tokens)
    ours = torch.stack([(logits - want[n - 1]).abs().mean() for n, logits in s.logits.items()])
    peers = torch.stack([(theirs[n - 1] - want[n - 1]).abs().mean() for n in s.logits])
    assert float(ours.median()) < 1.5 * float(peers.median())


@pytest.mark.parametrize("name", [
    name if name in ("lfm2", "falcon") else pytest.param(name, marks=pytest.mark.slow)
    for name in PLAIN])
def test_windows_of_drafts(name: str, make: Callable[[str], Case]) -> None:
    """Of which some are right: the tokens are those without drafts."""
    model = make(name).model
    work = Work([[5, 9, 2, 41, 17] * 4, [7, 3, 3]],
                [ResolvedParams(max_tokens=7, temperature=0.0)] * 2)
    want = work.plain(model)
    _, got = work.guessed(model, want, 2, lambda seed, at: at % 3 > 0)
    assert tokens_of(got) == tokens_of(want)


def test_the_worker_reports_its_states(family: Case) -> None:
    family.check_what_the_worker_tells()


@pytest.mark.parametrize(("architecture", "change", "message"), [
    (BAMBA, {"attn_layer_indices": [4]}, "attn_layer_indices: must list layers of 0 to 3"),
    (BAMBA, {"attn_layer_indices": "2"}, "attn_layer_indices: must list layers"),
    (BAMBA, {"mamba_n_groups": 3}, "mamba_n_groups: 3 does not divide 8 heads"),
    (BAMBA, {"mamba_d_head": 5}, "mamba_n_heads: 8 heads of 5 are not mamba_expand * hidden_size"),
    (FALCON, {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers: must list 5 positive numbers"),
    (FALCON, {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers: must be a positive number"),
    (FALCON, {"mamba_d_ssm": 97}, "mamba_n_heads: 8 heads of 12 are not mamba_d_ssm, 97"),
    (LFM2, {"layer_types": ["conv"] * 3}, "layer_types: must be 4 times conv or full_attention"),
    (LFM2, {"layer_types": None, "full_attn_idxs": [9]}, "full_attn_idxs: must list layers"),
    (NEMOTRON, {"hybrid_override_pattern": "-M"}, "block 0: an MLP or experts that follow no"),
    (NEMOTRON, {"hybrid_override_pattern": "M--"}, "block 2: an MLP or experts that follow no"),
    (NEMOTRON, {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern: must be made of M, *"),
    (NEMOTRON, {"layers_block_type": ["mamba", 3]}, "layers_block_type: must be made of"),
    (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act: only 'relu2' is supported"),
    (NEMOTRON, {"mlp_bias": True}, "mlp_bias: only False is supported"),
    (KIMI, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: must be at least 2"),
    (KIMI, {"layer_types": None, "linear_attn_config": {"full_attn_layers": [9]}},
     "linear_attn_config.full_attn_layers: must list layers"),
    (KIMI, {"linear_attn_config": 3}, "linear_attn_config: must be an object"),
    (LFM_MOE, {"num_dense_layers": -1}, "num_dense_layers: must be a number of layers"),
    (LFM_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than 6 experts"),
    (LFM2, {"conv_L_cache": 1}, "conv_L_cache: must be at least 2"),
    (MAMBA2, {"num_heads": 7}, "num_heads: 7 heads of 16 are not expand * hidden_size, 128"),
    (MAMBA2, {"n_groups": 3}, "n_groups: 3 does not divide 8 heads"),
    (MAMBA, {"time_step_rank": 0}, "time_step_rank: must be a positive integer"),
    (MAMBA, {"conv_kernel": 1}, "conv_kernel: must be at least 2"),
    (JAMBA, {"attn_layer_offset": 3}, "attn_layer_offset: must be 0 to 2"),
    (JAMBA, {"num_experts_per_tok": 7}, "num_experts_per_tok: 7 is more than 6 experts"),
    (BAMBA, {"hidden_act": "gelu"}, "hidden_act: only silu is supported"),
    (BAMBA, {"time_step_limit": [1.0, 0.5]}, "time_step_limit: must be two numbers"),
])
def test_unsupported_fields_are_named(tmp_path: Path, architecture: str, change: dict[str, Any],
                                      message: str) -> None:
    assert message in why_refused(
        tmp_path, {"architectures": [architecture], **FAMILIES[architecture], **change})
