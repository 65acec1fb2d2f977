"""Adapters against transformers' models with the adapter merged into their weights, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_adapters import AdapterDriver, merged, open_with_adapters, toy_adapter
from helpers_models import assert_greedy, write_checkpoint

from actorium.actors.runtime.beat_gauges import eager_key

PROMPTS = [[5, 9, 100, 3, 77, 20], [8, 9, 10], [5, 9, 100, 3, 77, 20, 11, 12], [64, 2, 31, 7, 90]]
NEW = 6


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_two_adapters_and_the_base_in_one_batch(tmp_path: Path, architecture: str) -> None:
    oracle = write_checkpoint(tmp_path / "model", architecture)
    small = toy_adapter(oracle, tmp_path / "small", rank=4, seed=1)
    large = toy_adapter(oracle, tmp_path / "large", rank=16, seed=2, use_rslora=True)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model"))
    driver.load(1, tmp_path / "small")
    driver.load(2, tmp_path / "large")
    found = driver.generate(PROMPTS, [1, 0, 2, 1], NEW)
    models: dict[int, Any] = {0: oracle, 1: merged(oracle, small), 2: merged(oracle, large)}
    for prompt, adapter, tokens in zip(PROMPTS, [1, 0, 2, 1], found, strict=True):
        assert_greedy(models[adapter], prompt, tokens, NEW)
    assert driver.runner.served[eager_key("adapters")] == NEW
