"""Slots of adapters: filled as sequences come, and again when others need them; and what becomes of
plans and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_adapters import EPOCH, LINEAR, AdapterDriver, merged, open_with_adapters, toy_adapter
from helpers_models import assert_greedy, write_checkpoint
from safetensors.torch import load_file, save_file

from actorium.actors.config.adapter_settings import AdapterConfig
from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.messages import StepPlan
from actorium.gpu.adapters.adapter_setup import check_adapters
from actorium.gpu.families.architectures import read_shape

PROMPT = [5, 9, 100, 3, 77, 20]


def test_slots_are_filled_again_when_other_adapters_come(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=2)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model", slots=2))
    models = {0: oracle}
    for number, targets in ((1, LINEAR), (2, ("q_proj", "down_proj")), (3, ("up_proj",))):
        own = toy_adapter(oracle, tmp_path / f"{number}", seed=number, rank=2 * number,
                          targets=targets)
        models[number] = merged(oracle, own)
        driver.load(number, tmp_path / f"{number}")
    held = driver.slots._held
    digests = {own.digest: number for (_, number), own in driver.slots.known.items()}
    for adapters, kept in (([1, 2], {1, 2}), ([1, 0], {1, 2}), ([3, 3], {1, 3}), ([2, 1], {2, 1}),
                           ([3, 2], {2, 3})):
        found = driver.generate([PROMPT] * 2, adapters, 4)
        assert {digests[digest] for digest in held} == kept
        for adapter, tokens in zip(adapters, found, strict=True):
            assert_greedy(models[adapter], PROMPT, tokens, 4)
    with pytest.raises(ValueError, match="more than 2 adapters at once"):
        driver.generate([PROMPT] * 3, [1, 2, 3], 2)
    driver.runner.reset()
    with pytest.raises(ValueError, match="adapter 9 was not loaded"):
        driver.generate([PROMPT], [9], 2)
    driver.runner.reset()
    # Numbers of another scheduler mean nothing.
    with pytest.raises(ValueError, match="adapter 1 was not loaded"):
        driver.slots.apply(StepPlan(EPOCH + 1, 1, admit=[driver.admit(1, PROMPT, 1, 2)]))


def test_a_slot_is_free_when_its_last_sequence_has_ended(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=1)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model", slots=1))
    for number in (1, 2):
        toy_adapter(oracle, tmp_path / f"{number}", seed=number)
        driver.load(number, tmp_path / f"{number}")
    driver.slots.apply(StepPlan(EPOCH, 1, admit=[driver.admit(slot, PROMPT, 1, 2)
                                                 for slot in (1, 2)]))
    other = [driver.admit(3, PROMPT, 2, 2)]
    one = np.array([1], np.int32).tobytes()
    with pytest.raises(ValueError, match="more than 1 adapters"):
        driver.slots.apply(StepPlan(EPOCH, 2, release=one, admit=other))
    driver.slots.apply(StepPlan(EPOCH, 2, release=np.array([2], np.int32).tobytes(), admit=other))


def test_broken_and_foreign_adapters_are_refused(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=1)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model"))
    path, file = tmp_path / "adapter", tmp_path / "adapter" / "adapter_model.safetensors"
    toy_adapter(oracle, path)
    tensors = load_file(file)
    query = "base_model.model.model.layers.0.self_attn.q_proj.lora_"

    def refused(change: dict[str, torch.Tensor | None]) -> str:
        save_file({name: own for name, own in {**tensors, **change}.items() if own is not None},
                  file)
        with pytest.raises(BadModel) as caught:
            driver.load(1, path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    def pair(module: str, outs: int, ins: int) -> dict[str, torch.Tensor | None]:
        return {f"base_model.model.{module}.lora_A.weight": torch.zeros(4, ins),
                f"base_model.model.{module}.lora_B.weight": torch.zeros(outs, 4)}

    assert "takes 65 numbers and gives 64, in the model it takes 64 and gives 64" in refused(
        {f"{query}A.weight": torch.zeros(4, 65)})
    assert "has no matrix B" in refused({f"{query}B.weight": None})
    other = "model.layers.7.self_attn.q_proj"
    assert f"'{other}' is no linear module of the model" in refused(pair(other, 64, 64))
    for module in ("lm_head", "model.embed_tokens"):
        assert f"'{module}' cannot have an adapter" in refused(pair(module, 199, 64))
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(BadModel, match="not a readable safetensors file"):
        driver.load(1, path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_matrices_of_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=1)
    own = toy_adapter(oracle, tmp_path / "adapter", dtype=dtype)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model"))
    driver.load(1, tmp_path / "adapter")
    [tokens] = driver.generate([PROMPT], [1], 4)
    assert_greedy(merged(oracle, own), PROMPT, tokens, 4)


def test_ranks_and_scales_of_modules(tmp_path: Path) -> None:
    """PEFT's patterns: other ranks and alphas for some modules."""
    oracle = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=1)
    path = tmp_path / "adapter"
    first = toy_adapter(oracle, path, rank=4, alpha=4.0, targets=("q_proj", "down_proj"))
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    second = toy_adapter(oracle, path, rank=8, alpha=24.0, targets=("k_proj",))
    save_file({**tensors, **load_file(path / "adapter_model.safetensors")},
              path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(
        {**config, "rank_pattern": {"k_proj": 8}, "alpha_pattern": {"k_proj": 24}}))
    driver = AdapterDriver(open_with_adapters(tmp_path / "model", rank=8))
    driver.load(1, path)
    [tokens] = driver.generate([PROMPT], [1], 4)
    assert_greedy(merged(merged(oracle, first), second), PROMPT, tokens, 4)


def test_what_cannot_have_adapters_is_refused_before_it_loads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "LlamaForCausalLM", num_hidden_layers=1)
    for model, device, why in (
            (ModelConfig(model_impl="transformers"), DeviceConfig(), "transformers' classes"),
            (ModelConfig(), DeviceConfig(exact_ranks=2), "--exact-ranks")):
        config = Config(model=model, device=device, adapters=AdapterConfig(enable_lora=True))
        with pytest.raises(BadConfig, match=f"enable_lora: .*{why}"):
            check_adapters(config, read_shape(tmp_path, config))
