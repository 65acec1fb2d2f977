"""Qwen2.5-VL and Qwen3-VL: configs of all ages, text alone against transformers, and what is
refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_configs import EXPERTS, HERE, SECTIONS, SMALL, TOWER_3, TOWER_25, shape_of
from helpers_models import Seq, Stepper, generate, generated, load, oracle_logits, why_refused
from helpers_vision import KINDS, write_vl
from safetensors.torch import load_file, save_file

from actorium.actors.config.tree import Config
from actorium.gpu.families.architectures import read_shape, shape_from_config
from actorium.gpu.families.vision_shape import VisionShape

PROMPTS = [[(7 * i + n) % 189 for i in range(n)] for n in (1, 33, 18)]
OLD = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_act": "silu",
    "hidden_size": 2048, "image_token_id": 151655, "intermediate_size": 11008,
    "max_position_embeddings": 128000, "max_window_layers": 70, "model_type": "qwen2_5_vl",
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "video_token_id": 151656, "vocab_size": 151936,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "vision_config": {
        "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
        "hidden_size": 1280, "in_chans": 3, "intermediate_size": 3420, "model_type": "qwen2_5_vl",
        "num_heads": 16, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": 2,
        "window_size": 112}}
"""As Qwen2.5-VL-3B was published."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_text_alone_as_transformers_has_it(tmp_path: Path, kind: str, tied: bool) -> None:
    theirs = write_vl(tmp_path, kind, tie_word_embeddings=tied)
    ours = load(tmp_path)
    assert ours.shape.tied == tied
    found = generate(Stepper(ours), PROMPTS, 10, chunk=7)
    assert found == [generated(theirs, prompt, 10) for prompt in PROMPTS]
    seq = Seq(PROMPTS[1])
    got = Stepper(ours).step([(seq, 33)], every_row=True)
    assert torch.allclose(got, oracle_logits(theirs, PROMPTS[1]), atol=1e-4, rtol=0)


def test_experts_that_lie_on_their_side(tmp_path: Path) -> None:
    """As they are published: [E, hidden, 2 * size] and [E, size, hidden]."""
    write_vl(tmp_path, "3-moe")
    seq = Seq(PROMPTS[1])
    want = Stepper(load(tmp_path)).step([(seq, 33)])
    file, turned = tmp_path / "model.safetensors", 0
    tensors = load_file(file)
    for name in [name for name in tensors if "experts." in name]:
        tensors[name], turned = tensors[name].transpose(1, 2).contiguous(), turned + 1
    save_file(tensors, file)
    assert turned == 4
    # Some processors' products with a weight that lies on its side round otherwise.
    torch.testing.assert_close(want, Stepper(load(tmp_path)).step([(Seq(PROMPTS[1]), 33)]),
                               atol=1e-5, rtol=1e-5)


def test_a_config_as_it_was_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    shape = read_shape(tmp_path, Config())
    assert (shape.layers, shape.head_dim, shape.tied, shape.dtype) == (36, 128, True, "bfloat16")
    assert shape.qkv_bias and not shape.o_bias and set(shape.windows) == {0}
    rope, = shape.ropes
    assert (rope.kind, rope.theta) == ("default", 1e6)
    assert rope.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert shape.vision == VisionShape(
        32, 1280, 3420, 16, 14, 2, 2, 2048, 151655, 151656, gated=True, window=8,
        full=(7, 15, 23, 31), tokens_per_second=2)
    assert shape.vision.pixels == 1176 and shape.vision.head_dim == 80


@pytest.mark.parametrize("kind", KINDS)
def test_flat_and_nested_mean_the_same(tmp_path: Path, kind: str) -> None:
    """What lies in `text_config` by transformers 5, flat, and with the names of old."""
    write_vl(tmp_path, kind)
    new = read_shape(tmp_path, Config())
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **raw, "rope_theta": rope.pop("rope_theta"),
            "rope_scaling": {**rope, "rope_type": "mrope", "type": "mrope"}}
    assert shape_from_config(flat, HERE) == replace(new, pooling=None)


def test_pairs_are_shared_out_to_axes() -> None:
    """In turn until one has its number: what is left is turned by time."""
    text = {**SMALL, "rope_parameters": {"mrope_section": [3, 3, 2]}}
    shape = shape_of({"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text,
                      "vision_config": TOWER_3})
    assert shape.ropes[0].axes == (0, 1, 2, 0, 1, 2, 0, 1)


V25: dict[str, Any] = {**SMALL, "architectures": ["Qwen2_5_VLForConditionalGeneration"],
                       "rope_scaling": SECTIONS}
V3: dict[str, Any] = {**SMALL, **EXPERTS, "architectures": ["Qwen3VLMoeForConditionalGeneration"],
                      "rope_scaling": SECTIONS}


@pytest.mark.parametrize(("whole", "message"), [
    ({**V25, "vision_config": None}, "vision_config: must be an object"),
    ({**V25, "rope_scaling": {"mrope_section": [2, 3, 4]}}, "rope_scaling.mrope_section: must be "
     "three numbers, 8 together"),
    ({**V25, "rope_scaling": {"mrope_section": [9, -1, 0]}}, "rope_scaling.mrope_section"),
    ({**V25, "rope_scaling": {"mrope_section": "abc"}}, "rope_scaling.mrope_section"),
    ({**V25, "rope_scaling": {"mrope_section": [2, 3.0, 3]}}, "rope_scaling.mrope_section"),
    ({**V25, "rope_scaling": 7}, "rope_scaling: must be an object"),
    ({**V25, "rope_scaling": None}, "mrope_section: must be three numbers, 8 together"),
    ({**V25, "image_token_id": -1}, "image_token_id: must be a positive integer"),
    ({**V25, "vision_config": {**TOWER_25, "window_size": 7}}, "vision_config.window_size"),
    ({**V25, "vision_config": {**TOWER_25, "out_hidden_size": 32}}, "vision_config.out_hidden_size"
     ": 32 is not the decoder's hidden_size, 64"),
    ({**V25, "vision_config": {**TOWER_25, "num_heads": 3}}, "vision_config.num_heads"),
    ({**V25, "vision_config": {**TOWER_25, "hidden_act": "gelu"}}, "vision_config.hidden_act: only "
     "silu"),
    ({**V25, "vision_config": {**TOWER_25, "patch_size": [4, 4]}}, "vision_config.patch_size"),
    ({**V25, "vision_config": {**TOWER_25, "fullatt_block_indexes": [3]}},
     "vision_config.fullatt_block_indexes: must list blocks below 3"),
    ({**V25, "vision_config": {**TOWER_25, "rope_parameters": {"rope_type": "yarn"}}},
     "vision_config.rope_parameters"),
    ({**V3, "vision_config": {**TOWER_3, "num_position_embeddings": 24}},
     "vision_config.num_position_embeddings: must be a square, got 24"),
    ({**V3, "vision_config": {**TOWER_3, "deepstack_visual_indexes": [1, 1]}},
     "vision_config.deepstack_visual_indexes"),
    ({**V3, "num_hidden_layers": 2, "vision_config": TOWER_3},
     "vision_config.deepstack_visual_indexes: 2 are too many for 2 layers of text"),
])
def test_what_cannot_be_served_is_named(tmp_path: Path, whole: dict[str, Any],
                                        message: str) -> None:
    assert message in why_refused(tmp_path, {"vision_config": TOWER_25, **whole})
