"""Gemma 2 and 3: configs old and new, checkpoints of text and images, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import (
    CPU,
    Seq,
    Stepper,
    load,
    tiny_config,
    tiny_model,
    why_refused,
    write_checkpoint,
)

from actorium.actors.config.tree import Config, DeviceConfig
from actorium.actors.errors import BadConfig
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.families.layer_shapes import RopeShape
from actorium.gpu.models.registry import load_model

GEMMA = "Gemma3ForCausalLM"
OPTIONS: dict[str, Any] = {
    "sliding_window": 6, "sliding_window_pattern": 3, "rope_theta": 2e4,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_local_base_freq": 300.0}


def _edit(path: Path, **change: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(change)
    (path / "config.json").write_text(json.dumps(config))


def _logits(path: Path) -> torch.Tensor:
    seq = Seq([(7 * i) % 199 for i in range(30)])
    return Stepper(load(path), 16).step([(seq, 30)], every_row=True)


def test_configs_of_both_ages_mean_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GEMMA, **OPTIONS)
    new = read_shape(tmp_path, Config())
    assert new.windows == (6, 6, 0)
    assert [group.layers for group in new.groups] == [(0, 1), (2,)]
    assert new.ropes == (RopeShape("linear", 2e4, 4.0, 512), RopeShape(theta=300.0))
    assert (new.attention_scale, new.embed_scale, new.tied) == (256**-0.5, 8.0, False)
    _edit(tmp_path, rope_parameters=None, layer_types=None, **OPTIONS)
    assert read_shape(tmp_path, Config()) == new


def test_fields_missing_in_a_config_have_their_defaults(tmp_path: Path) -> None:
    """As in the published checkpoints, whose text_config names hardly anything."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
              "text_config": text, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path, Config())
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab_size) == (8, 4, 256, 262_208)
    assert (shape.tied, shape.dtype, shape.max_model_len) == (True, "bfloat16", 131_072)
    assert [group.window for group in shape.groups] == [1024, 0]
    assert shape.groups[1].layers == (5, 11, 17, 23, 29)
    assert [(rope.theta, rope.factor) for rope in shape.ropes] == [(1e6, 8.0), (1e4, 1.0)]


def test_the_text_part_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    import transformers

    text = tiny_config(GEMMA, **{**OPTIONS, "tie_word_embeddings": True})
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision,
                                       mm_tokens_per_image=4)
    whole: Any = transformers.Gemma3ForConditionalGeneration(config).eval()
    alone = tiny_model(GEMMA, **{**OPTIONS, "tie_word_embeddings": True})
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.save_pretrained(str(tmp_path / "whole"))
    alone.save_pretrained(str(tmp_path / "alone"))
    names = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert names["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert torch.equal(_logits(tmp_path / "whole"), _logits(tmp_path / "alone"))


@pytest.mark.parametrize(("change", "message"), [
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: is not supported, got 30.0"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"hidden_activation": "silu"}, "hidden_activation: only gelu_pytorch_tanh"),
    ({"layer_types": ["full_attention"]}, "layer_types: must be 3 times"),
    ({"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, "layer_types"),
    ({"rope_parameters": [1]}, "rope_parameters: must be an object"),
    ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention: must be"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
])
def test_unsupported_fields_are_named(tmp_path: Path, change: dict[str, Any],
                                      message: str) -> None:
    write_checkpoint(tmp_path, GEMMA)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert message in why_refused(tmp_path, fields | change)


@pytest.mark.parametrize("caps", [{}, {"final_logit_softcapping": None}, {
    "attn_logit_softcapping": None, "final_logit_softcapping": 7}])
def test_caps_of_gemma2(tmp_path: Path, caps: dict[str, Any]) -> None:
    """Left out they are the usual ones, null means none."""
    (tmp_path / "config.json").write_text(json.dumps(
        {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 3} | caps))
    shape = read_shape(tmp_path, Config())
    want = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | caps
    assert [shape.attention_cap, shape.logit_cap] == [cap or 0 for cap in want.values()]
    assert (shape.windows, shape.vocab_size, len(shape.ropes)) == ((4096, 0, 4096), 256_000, 1)


@pytest.mark.parametrize(("change", "message"), [
    ({"attn_logit_softcapping": 0}, "attn_logit_softcapping: must be a positive number, got 0"),
    ({"final_logit_softcapping": "30"}, "final_logit_softcapping"),
    ({"hidden_activation": "silu"}, "hidden_activation: only gelu_pytorch_tanh"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention")])
def test_unsupported_fields_of_gemma2_are_named(tmp_path: Path, change: dict[str, Any],
                                                message: str) -> None:
    assert message in why_refused(tmp_path, {"architectures": ["Gemma2ForCausalLM"]} | change)


@pytest.mark.parametrize(("architecture", "message"), [
    ("Gemma2ForCausalLM", "it does not cap scores"),
    ("GptOssForCausalLM", "it has no attention sinks")])
def test_a_backend_without_caps_or_sinks_is_refused(tmp_path: Path, architecture: str,
                                                    message: str) -> None:
    more = {"num_local_experts": 4} if "Oss" in architecture else {}
    write_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, head_dim=32, **more)
    config = Config(device=DeviceConfig(attention_backend="sage"))
    with pytest.raises(BadConfig, match=f"{message}.*torch.* could"):
        load_model(tmp_path, config, CPU, lambda *_: None)
    model = load(tmp_path)
    assert model.attention.decode.name == ("native" if model.ops.name == "native" else "torch")
