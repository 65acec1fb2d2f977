"""Adapters against transformers' models with the adapter merged into their weights, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_adapters import (
    PROMPTS,
    UNSERVED,
    AdapterDriver,
    check_adapted,
    merged,
    open_with_adapters,
    toy_adapter,
)
from helpers_hybrid import DENSE, NEXT, write_hybrid
from helpers_models import assert_greedy, write_checkpoint
from helpers_recurrent import write_recurrent

from actorium.actors.runtime.beat_gauges import eager_key
from actorium.gpu.families.adapted_modules import adapter_bytes

NEW = 6
FALCON_H1 = "FalconH1ForCausalLM"
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", DENSE])
def test_two_adapters_and_the_base_in_one_batch(tmp_path: Path, architecture: str) -> None:
    write = write_hybrid if architecture == DENSE else write_checkpoint
    oracle = write(tmp_path / "model", architecture)
    small = toy_adapter(oracle, tmp_path / "small", rank=4, seed=1)
    large = toy_adapter(oracle, tmp_path / "large", rank=16, seed=2, use_rslora=True,
                        targets=("proj", "in_proj_qkv", "in_proj_a"))
    driver = AdapterDriver(open_with_adapters(tmp_path / "model"))
    driver.load(1, tmp_path / "small")
    driver.load(2, tmp_path / "large")
    found = driver.generate(PROMPTS, [1, 0, 2, 1], NEW)
    models: dict[int, Any] = {0: oracle, 1: merged(oracle, small), 2: merged(oracle, large)}
    for prompt, adapter, tokens in zip(PROMPTS, [1, 0, 2, 1], found, strict=True):
        assert_greedy(models[adapter], prompt, tokens, NEW)
    assert driver.runner.served[eager_key("adapters")] == NEW
    driver.generate(PROMPTS, [0] * 4, NEW)
    assert driver.runner.served[eager_key("adapters")] == NEW


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, without groups": ("LlamaForCausalLM", {
        "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "joined in the checkpoint": ("Phi3ForCausalLM", {}),
    "heads in another order": ("GlmForCausalLM", {}),
    "on their side": ("GPT2LMHeadModel", {"n_inner": 80}),
    "joined by head": ("GPTNeoXForCausalLM", {}),
    "sandwich norms": ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "shared expert": ("Qwen2MoeForCausalLM", {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48}),
    "latents": ("DeepseekV2ForCausalLM", {
        "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 12, "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy"}),
    "gated deltas": (NEXT, {}),
    "Mamba-2 beside attention": (FALCON_H1, {}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_that_can_have_an_adapter(tmp_path: Path, family: str) -> None:
    architecture, options = FAMILIES[family]
    write = {NEXT: write_hybrid, FALCON_H1: write_recurrent}.get(architecture, write_checkpoint)
    oracle = write(tmp_path / "model", architecture, **options)
    adapter = toy_adapter(oracle, tmp_path / "adapter", targets=("",), skip=UNSERVED)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model", seqs=2))
    driver.load(1, tmp_path / "adapter")
    layers = driver.slots.layers
    assert layers.nbytes == adapter_bytes(driver.runner.model.shape, layers.slots, layers.rank)
    check_adapted(driver, oracle, adapter)
