"""What few models of a family have (ropes, windows), against transformers in fp32.

Phi-3's matrices, cut apart, are Llama's: it shows heads that are rotated in part, and longrope.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_configs import CONFIGS, HERE, SMALL
from helpers_hybrid import MOE, write_hybrid
from helpers_models import (
    Seq,
    Stepper,
    load,
    oracle_logits,
    tiny_config,
    why_refused,
    write_checkpoint,
)
from safetensors.torch import save_file

from actorium.actors.models.model_classes import MODEL_TYPES
from actorium.actors.models.model_dir import max_model_len
from actorium.gpu.families.architectures import ARCHITECTURES, shape_from_config

PAIRS = 8
SHORT = [1.0 + 0.1 * i for i in range(PAIRS)]
LONG = [1.5 + 0.7 * i for i in range(PAIRS)]
ATOL = 3e-5


def phi3_as_llama(path: Path, rope: dict[str, Any], architecture: str = "LlamaForCausalLM",
                  **options: Any) -> Any:
    """Save a tiny random Phi-3 as a checkpoint of Llama's; returns the transformers model."""
    import transformers

    fields = tiny_config("LlamaForCausalLM").to_dict()
    fields = {name: fields[name] for name in (*SMALL, "rms_norm_eps") if name in fields}
    fields |= {"head_dim": 16, "num_hidden_layers": 2, "dtype": "float32", **options}
    torch.manual_seed(0)
    # Phi-3's config has no head_dim: hidden_size / heads.
    config = transformers.Phi3Config(
        **{name: value for name, value in fields.items() if name != "head_dim"}, pad_token_id=None,
        rope_parameters=dict(rope), eos_token_id=1, bos_token_id=None)
    model = transformers.Phi3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.15)
    tensors = {}
    for name, own in model.state_dict().items():
        parts = {"qkv_proj": (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)),
                 "gate_up_proj": (("gate_proj", 96), ("up_proj", 96))}
        fused = next((one for one in parts if one in name), None)
        if fused is None:
            tensors[name] = own.contiguous()
            continue
        cut = own.split([rows for _, rows in parts[fused]])
        for (part, _), rows in zip(parts[fused], cut, strict=True):
            tensors[name.replace(fused, part)] = rows.contiguous()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(
        {**fields, "architectures": [architecture], "rope_parameters": rope,
         "tie_word_embeddings": False}))
    return model


def check(path: Path, oracle: Any, length: int, **model: Any) -> None:
    """Every logit of a sequence of so many tokens, extended in two chunks."""
    ids = torch.randint(2, 199, (length,), generator=torch.Generator().manual_seed(4)).tolist()
    stepper, seq = Stepper(load(path, **model), 64), Seq(ids)
    rows = [stepper.step([(seq, count)], every_row=True)
            for count in (length // 2, length - length // 2)]
    got, want = torch.cat(rows), oracle_logits(oracle, ids)
    assert (got - want).abs().max() < ATOL


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_part_of_each_head_is_rotated(tmp_path: Path, share: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": share}
    check(tmp_path, phi3_as_llama(tmp_path, rope), 40)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
@pytest.mark.parametrize(("length", "served", "more"), [
    (40, 64, {}), (100, None, {}), (100, None, {"factor": 4.0}),
    (100, None, {"attention_factor": 1.25}),
])
def test_longrope(tmp_path: Path, architecture: str, length: int, served: int | None,
                  more: dict[str, Any]) -> None:
    """Which factors hold is decided by the longest sequence that is served."""
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": SHORT,
            "long_factor": LONG, **more}
    oracle = phi3_as_llama(tmp_path, rope, architecture, original_max_position_embeddings=64)
    check(tmp_path, oracle, length, max_model_len=served)


def test_longrope_by_its_old_name_and_of_a_part(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
            "short_factor": SHORT[:4], "long_factor": LONG[:4]}
    oracle = phi3_as_llama(tmp_path, rope, original_max_position_embeddings=64)
    own = json.loads((tmp_path / "config.json").read_text())
    own["rope_scaling"] = {**own.pop("rope_parameters"), "type": "su"}
    del own["rope_scaling"]["rope_type"]
    (tmp_path / "config.json").write_text(json.dumps({**own, "rope_theta": 500.0}))
    check(tmp_path, oracle, 100)


@pytest.mark.parametrize(("length", "served"), [(33, 64), (64, 64), (128, None)])
def test_dynamic_scaling(tmp_path: Path, length: int, served: int | None) -> None:
    """Up to the trained length nothing is scaled; beyond it as for the longest sequence."""
    oracle = write_checkpoint(
        tmp_path, "LlamaForCausalLM", max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0})
    model = load(tmp_path, max_model_len=served)
    assert model.shape.max_model_len == (served or 128)
    check(tmp_path, oracle, length, max_model_len=served)


def test_linear_scaling_serves_what_it_was_made_for(tmp_path: Path) -> None:
    oracle = write_checkpoint(
        tmp_path, "LlamaForCausalLM", max_position_embeddings=32,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})
    assert load(tmp_path).shape.max_model_len == 128
    check(tmp_path, oracle, 128)


def test_windows_of_a_mixture(tmp_path: Path) -> None:
    oracle = write_hybrid(tmp_path, MOE, use_sliding_window=True, sliding_window=9,
                          num_hidden_layers=2)
    assert load(tmp_path).shape.windows == (9, 9)
    check(tmp_path, oracle, 40)


def test_swish_is_silu(tmp_path: Path) -> None:
    check(tmp_path, write_checkpoint(tmp_path, "LlamaForCausalLM", hidden_act="swish"), 20)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda own: str(own["architectures"][0]))
def test_worker_and_tokenizer_assume_the_same_longest_sequence(config: dict[str, Any]) -> None:
    raw = {**SMALL, **config, "max_position_embeddings": None}
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"] = {**raw["text_config"], "max_position_embeddings": None}
    assert shape_from_config(raw, HERE).max_model_len == max_model_len(raw)


@pytest.mark.parametrize(("name", "fields"), [
    ("Phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
    ("Phi3", {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": [1.0]}}),
    ("SmolLM3", {"no_rope_layers": [1, 0]}), ("SmolLM3", {"no_rope_layers": [1, 0, 2, 1]}),
    ("SmolLM3", {"no_rope_layers": [1] * 3 + [None]}), ("Olmo3", {"layer_types": ["full"] * 4}),
    ("Olmo3", {"rope_parameters": ["yarn"]}), ("Glm4", {"partial_rotary_factor": 1.5}),
    ("Glm", {"hidden_act": "gelu"}), ("SeedOss", {"head_dim": 7}),
    ("Exaone4", {"sliding_window_pattern": "LLLG"}), ("Exaone4", {"sliding_window": -1})])
def test_wrong_fields_are_named(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    line = why_refused(tmp_path, {**SMALL, "architectures": [f"{name}ForCausalLM"], **fields})
    assert next(iter(fields)) in line


def test_every_class_has_its_model_type() -> None:
    assert {own.name for own in MODEL_TYPES.values()} == set(ARCHITECTURES)
