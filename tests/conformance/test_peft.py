"""Adapters that PEFT writes: tokens and logits are those of PEFT's own model, in float32."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import PROMPTS, AdapterDriver, open_with_adapters
from helpers_models import generated, oracle_logits, write_checkpoint

from actorium.actors.errors import BadModel

pytestmark = pytest.mark.conformance
NEW = 12
MLP, ALL = ["gate_proj", "up_proj", "down_proj"], "all-linear"
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "LlamaForCausalLM": {
        "low": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "high": {"r": 16, "lora_alpha": 16, "target_modules": ALL},
        "scaled by the root": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ALL},
        "some layers": {"r": 4, "target_modules": MLP, "layers_to_transform": [1]}},
    "Qwen3ForCausalLM": {
        "low": {"r": 4, "lora_alpha": 16, "target_modules": ALL},
        "patterns": {"r": 4, "target_modules": ALL, "rank_pattern": {"k_proj": 16},
                     "alpha_pattern": {"down_proj": 24, "model.layers.0.self_attn.o_proj": 2}}},
    "Phi3ForCausalLM": {"high": {"r": 16, "target_modules": ["qkv_proj", "gate_up_proj"]},
                        "low": {"r": 4, "use_rslora": True, "target_modules": ALL}},
    "GPT2LMHeadModel": {"on their side": {"r": 4, "target_modules": ["c_attn", "c_proj"],
                                          "fan_in_fan_out": True}},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora .*DoRA"),
    "biases": ({"bias": "lora_only"}, "bias"),
    "heads": ({"modules_to_save": ["lm_head"]}, "modules_to_save "),
    "PiSSA": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
}


def peft_model(oracle: Any, configs: dict[str, dict[str, Any]], folder: Path) -> Any:
    """PEFT's model with random adapters of these names, which lie in the folder."""
    peft = importlib.import_module("peft")
    torch.manual_seed(3)
    made = None
    for name, fields in configs.items():
        config = peft.LoraConfig(task_type="CAUSAL_LM",
                                 **{"init_lora_weights": False, **fields})
        if made is None:
            made = peft.get_peft_model(oracle, config, adapter_name=name)
        else:
            made.add_adapter(name, config)
    assert made is not None
    made.save_pretrained(folder)
    return made.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_peft(tmp_path: Path, family: str) -> None:
    """All adapters in the same steps, beside the model by itself."""
    oracle = write_checkpoint(tmp_path / "model", family, num_hidden_layers=2)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model", slots=4))
    want = {0: generated(oracle, PROMPTS[0], NEW)}
    model = peft_model(oracle, FAMILIES[family], tmp_path / "adapters")
    for number, name in enumerate(FAMILIES[family], 1):
        driver.load(number, tmp_path / "adapters" / name)
    numbers = [0, *range(1, len(FAMILIES[family]) + 1)]
    found = driver.generate([PROMPTS[0]] * len(numbers), numbers, NEW)
    for number, name in enumerate(FAMILIES[family], 1):
        model.set_adapter(name)
        own = model.get_base_model()
        want[number] = generated(own, PROMPTS[0], NEW)
        logits = oracle_logits(own, PROMPTS[0] + found[number][:-1])[len(PROMPTS[0]) - 1:]
        got = torch.stack([step[number] for step in driver.seen])
        assert float((got - logits).abs().max()) < 2e-5 * float(logits.abs().max()), name
    assert dict(zip(numbers, found, strict=True)) == want
    assert len({tuple(tokens) for tokens in found}) == len(numbers), "each changes tokens"


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, what: str) -> None:
    oracle = write_checkpoint(tmp_path / "model", "LlamaForCausalLM", num_hidden_layers=1)
    driver = AdapterDriver(open_with_adapters(tmp_path / "model"))
    fields, why = REFUSED[what]
    peft_model(oracle, {"own": {"r": 4, "target_modules": MLP, **fields}}, tmp_path / "adapters")
    with pytest.raises(BadModel, match=why):
        driver.load(1, tmp_path / "adapters" / "own")
