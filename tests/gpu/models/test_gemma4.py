"""Gemma 3n and 4: layers of two shapes, layers that read others' pages, checkpoints, what is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import Seq, Stepper, load, tiny_config, tiny_model, why_refused
from safetensors.torch import load_file, save_file

from actorium.actors.config.tree import Config, MemoryConfig, ModelConfig
from actorium.gpu.families.architectures import model_tensors, shape_from_config
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.gemma import SharedAttention
from actorium.gpu.models.registry import load_model
from actorium.gpu.plan.memory_plan import Demand, make_plan, token_bytes
from actorium.gpu.plan.weight_bytes import parameters

HERE, CPU = Path("config.json"), torch.device("cpu")
GEMMA = "Gemma4ForCausalLM"
FULL, SLIDING = "full_attention", "sliding_attention"
OPTIONS: dict[str, Any] = {
    "sliding_window": 9, "num_hidden_layers": 4, "global_head_dim": 24,
    "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199,
    "tie_word_embeddings": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "E2B": {"hidden_size": 1536, "num_hidden_layers": 35, "num_key_value_heads": 1,
            "intermediate_size": 6144, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
            "layer_types": ([SLIDING] * 4 + [FULL]) * 7, "final_logit_softcapping": 30.0},
    "E4B": {"hidden_size": 2560, "num_hidden_layers": 42, "num_key_value_heads": 2,
            "intermediate_size": 10_240, "num_kv_shared_layers": 18,
            "final_logit_softcapping": 30.0},
    "26B-A4B": {"hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16,
                "num_key_value_heads": 8, "num_global_key_value_heads": 2,
                "attention_k_eq_v": True, "intermediate_size": 2112, "sliding_window": 1024,
                "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
                "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0,
                "max_position_embeddings": 262_144, "use_bidirectional_attention": "vision",
                "final_logit_softcapping": 30.0}}
"""What the configs of google/gemma-4-* say of their text part, but for transformers' defaults."""


def published(name: str) -> ModelShape:
    return shape_from_config({"architectures": ["Gemma4ForConditionalGeneration"],
                              "model_type": "gemma4", "torch_dtype": "bfloat16",
                              "text_config": {"model_type": "gemma4_text", **PUBLISHED[name]}},
                             HERE)


@pytest.mark.parametrize(("name", "windowed", "full", "window_bytes", "full_bytes"), [
    ("E2B", 12, 3, 12 * 2 * 1 * 256 * 2, 3 * 2 * 1 * 512 * 2),
    ("E4B", 20, 4, 20 * 2 * 2 * 256 * 2, 4 * 2 * 2 * 512 * 2),
    ("26B-A4B", 25, 5, 25 * 2 * 8 * 256 * 2, 5 * 2 * 2 * 512 * 2)])
def test_pages_of_published_models(name: str, windowed: int, full: int, window_bytes: int,
                                   full_bytes: int) -> None:
    """Each kind of layer has a pool of its own rows; layers that read others' have no pages."""
    shape = published(name)
    assert [(group.window, len(group.layers)) for group in shape.groups] == [
        (1024 if name == "26B-A4B" else 512, windowed), (0, full)]
    plan = make_plan(shape, Demand(4, checkpoints=0), 8 << 30)
    assert [pool.page_bytes for pool in plan.pools] == [16 * window_bytes, 16 * full_bytes]
    assert plan.token_bytes == full_bytes
    assert token_bytes(shape, plan.demand) == window_bytes + full_bytes


def test_weights_of_published_models() -> None:
    """In billions, tables of what tokens give every layer among them."""
    whole = {name: parameters(published(name)) / 1e9 for name in PUBLISHED}
    tables = {name: shape.token_width * 262_144 / 1e9 for name, shape in (
        (name, published(name)) for name in PUBLISHED)}
    assert 4.6 < whole["E2B"] < 4.7 and tables["E2B"] == pytest.approx(2.35, abs=0.01)
    assert 7.4 < whole["E4B"] < 7.5 and tables["E4B"] == pytest.approx(2.82, abs=0.01)
    assert 25.2 < whole["26B-A4B"] < 25.3 and tables["26B-A4B"] == 0


def test_the_last_layers_have_neither_pages_nor_projections_for_them(tmp_path: Path) -> None:
    tiny_model(GEMMA, **OPTIONS).save_pretrained(str(tmp_path))
    model = load(tmp_path)
    names = {spec.name for spec in model_tensors(model.shape)}
    assert "model.layers.1.self_attn.k_proj.weight" in names
    assert not any(f"model.layers.{i}.self_attn.{name}_proj.weight" in names
                   for i in (2, 3) for name in "kv")
    assert [len(pool.layers) for pool in Stepper(model, 8).pools] == [1, 1]
    assert [isinstance(layer.mixer, SharedAttention) for layer in model.layers] == [
        False, False, True, True]


def logits(path: Path) -> torch.Tensor:
    return Stepper(load(path), 16).step([(Seq(list(range(2, 40))), 38)], every_row=True)


def test_the_text_part_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    """Published ones have projections of keys and values in layers that have no use for them."""
    import transformers

    text = tiny_config(GEMMA, **OPTIONS)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
              "position_embedding_size": 16}
    config = transformers.Gemma4Config(text_config=text.to_dict(), vision_config=vision)
    whole: Any = transformers.Gemma4ForConditionalGeneration(config).eval()
    alone = tiny_model(GEMMA, **OPTIONS)
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.save_pretrained(str(tmp_path / "whole"))
    alone.save_pretrained(str(tmp_path / "alone"))
    file = str(tmp_path / "whole" / "model.safetensors")
    more = {f"model.language_model.layers.3.self_attn.{name}_proj.weight": torch.ones(48, 64)
            for name in "kv"}
    save_file(load_file(file) | more, file, {"format": "pt"})
    assert torch.equal(logits(tmp_path / "whole"), logits(tmp_path / "alone"))


def test_scales_of_fp8_pages_are_those_of_the_layer_that_writes_them(tmp_path: Path) -> None:
    tiny_model(GEMMA, **{**OPTIONS, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
               ).save_pretrained(str(tmp_path))
    file = str(tmp_path / "model.safetensors")
    more = {f"model.layers.{i}.self_attn.{name}_scale": torch.tensor(0.5 + i)
            for i in (0, 1) for name in "kv"}
    save_file(load_file(file) | more, file, {"format": "pt"})
    config = Config(model=ModelConfig(), memory=MemoryConfig(kv_cache_dtype="fp8_e4m3"))
    scales = [layer.mixer.kv_scales.tolist()  # type: ignore[union-attr]
              for layer in load_model(tmp_path, config, CPU, lambda *_: None).layers]
    assert scales == [[0.5] * 4, [1.5] * 2, [0.5] * 4, [1.5] * 2]


@pytest.mark.parametrize(("change", "message"), [
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: only null and vision"),
    ({"hidden_activation": "silu"}, "hidden_activation: only 'gelu_pytorch_tanh'"),
    ({"layer_types": [FULL]}, "layer_types: must be 4 times"),
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: must be at most 3"),
    ({"layer_types": [SLIDING, SLIDING, FULL, FULL]}, "num_kv_shared_layers: no layer before"),
    ({"global_head_dim": 7}, "global_head_dim: must be even"),
    ({"attention_k_eq_v": True, "num_global_key_value_heads": 3},
     "num_global_key_value_heads: 3 does not divide 4 heads"),
    ({"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config: only one and the same"),
    ({"per_layer_config": [1]}, "per_layer_config: only one and the same"),
    ({"per_layer_config": {"1": {"sliding_window": 3}, "3": {"sliding_window": 3}}},
     "per_layer_config: sliding_window is not supported"),
    ({"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 2}}},
     "rope_parameters.full_attention.partial_rotary_factor: must be above 0"),
    ({"rope_parameters": {SLIDING: {"rope_type": "proportional"}}},
     "rope_parameters.sliding_attention.rope_type"),
    ({"enable_moe_block": True, "moe_intermediate_size": 8}, "num_experts"),
    ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
    ({"final_logit_softcapping": "30"}, "final_logit_softcapping")])
def test_unsupported_fields_are_named(tmp_path: Path, change: dict[str, Any],
                                      message: str) -> None:
    fields = {"architectures": [GEMMA], "num_attention_heads": 4, "hidden_size": 64, **OPTIONS}
    assert message in why_refused(tmp_path, fields | change)
    nested = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": fields | change}
    assert f"text_config.{message}" in why_refused(tmp_path, nested)


def test_fields_of_transformers_and_of_published_configs_say_the_same(tmp_path: Path) -> None:
    options = {**OPTIONS, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    config = json.loads(tiny_config(GEMMA, **options).to_json_string())
    assert "global_head_dim" not in config
    theirs = {name: own for name, own in config.items() if name != "per_layer_config"}
    own = {"architectures": [GEMMA]}
    assert shape_from_config(config | own, HERE) == shape_from_config(
        theirs | own | {"global_head_dim": 24, "num_global_key_value_heads": 1}, HERE)


def test_pages_and_weights_of_gemma_3n() -> None:
    """As published, E4B, by transformers' defaults; E2B is a part of it."""
    shape = shape_from_config({"architectures": ["Gemma3nForConditionalGeneration"], "text_config":
                               {"model_type": "gemma3n_text", "dtype": "bfloat16"}}, HERE)
    assert [(group.window, len(group.layers)) for group in shape.groups] == [(512, 16), (0, 4)]
    plan = make_plan(shape, Demand(4, checkpoints=0), 8 << 30)
    assert plan.token_bytes == 4 * 2 * 2 * 256 * 2
    assert [pool.page_bytes // plan.token_bytes for pool in plan.pools] == [4 * 16, 16]
    assert 6.8 < parameters(shape) / 1e9 < 6.9
    assert shape.altup is not None and shape.altup.sparsity == (0.95,) * 10 + (0.0,) * 25


@pytest.mark.parametrize(("change", "message"), [
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention: is not supported"),
    ({"hidden_activation": "silu"}, "hidden_activation: only 'gelu_pytorch_tanh'"),
    ({"intermediate_size": [96, 96, 96, 48]}, "intermediate_size: only one width"),
    ({"altup_active_idx": 4}, "altup_active_idx: must be below 4"),
    ({"altup_num_inputs": 99}, "altup_num_inputs: must be at most 64"),
    ({"laurel_rank": 0}, "laurel_rank: must be a positive integer"),
    ({"activation_sparsity_pattern": [0.5] * 3}, "activation_sparsity_pattern: must list 4"),
    ({"activation_sparsity_pattern": [1.0] * 4}, "activation_sparsity_pattern: must list 4"),
    ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
    ({"num_kv_shared_layers": 3}, "num_kv_shared_layers: no layer before")])
def test_unsupported_fields_of_gemma_3n_are_named(tmp_path: Path, change: dict[str, Any],
                                                  message: str) -> None:
    fields = {"architectures": ["Gemma3nForCausalLM"], "num_attention_heads": 4, "hidden_size": 64,
              "head_dim": 16, "intermediate_size": [96] * 4, **OPTIONS}
    assert shape_from_config(fields, HERE).intermediate == 96
    assert message in why_refused(tmp_path, fields | change)
