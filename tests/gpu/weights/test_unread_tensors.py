"""What is said of tensors of a checkpoint that no part of the model reads: each is named in one
line of the log, but those that models do without."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_configs import shape_of
from helpers_models import load, tiny_config, write_checkpoint
from safetensors.torch import load_file, save_file

from actorium.actors.models.model_files import SINGLE
from actorium.gpu.families.ignored_tensors import (
    IGNORED,
    MOST_NAMED,
    ignored_tensors,
    unread_warning,
)
from actorium.gpu.families.tensor_names import plain_name

LAYER = "model.layers.1"
DROPPED = {
    "tables of rotary embeddings, which are computed": [
        f"{LAYER}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq",
        "transformer.rotary_pos_emb.inv_freq"],
    "causal masks of GPT-2 and GPT-NeoX": [
        "transformer.h.1.attn.bias", "gpt_neox.layers.1.attention.masked_bias"],
    "a head that is the embedding": ["lm_head.weight"],
    "layers that draft": ["mtp.fc.weight", "model.mtp_layers.0.eh_proj.weight", "mtp_head.weight"],
    "scales of a KV cache in FP8": [f"{LAYER}.self_attn.k_scale", f"{LAYER}.self_attn.attn.v_scale",
                                    f"{LAYER}.self_attn.v_proj.output_scale"],
    "what reads images, video and sound": [
        "model.visual.blocks.0.attn.qkv.bias", "vision_tower.patch.weight",
        "multi_modal_projector.linear_1.bias", "model.audio_tower.conv1.weight",
        "model.embed_vision.norm.weight", "model.image_newline"],
    "what speaks and draws": ["talker.model.norm.weight", "model.vqmodel.quant_conv.weight",
                              "model.generation_head.proj_out.bias"],
}
KEPT = [f"{LAYER}.self_attn.q_proj.bias", f"{LAYER}.mlp.down_proj.bias", "lm_head.bias",
        f"{LAYER}.self_attn.q_norm.weight", "score.weight", "model.layers.3.mlp.up_proj.weight",
        f"{LAYER}.mlp.experts.0.up_proj.weight", f"{LAYER}.visual_gate.weight"]


def added(path: Path, *names: str) -> None:
    tensors = load_file(path / SINGLE)
    save_file({**tensors, **{name: torch.ones(2) for name in names}}, path / SINGLE)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [own for own in caplog.messages if "no part of the model" in own]


def ignored(**config: Any) -> re.Pattern[str]:
    raw = {**tiny_config().to_dict(), **config}
    return ignored_tensors(shape_of(tiny_config().to_dict()), raw)


def test_a_bias_that_the_config_does_not_announce_is_named(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path)
    load(tmp_path)
    assert not lines(caplog)
    added(tmp_path, *(f"model.layers.{i}.mlp.down_proj.bias" for i in range(3)), "score.weight",
          f"{LAYER}.self_attn.rotary_emb.inv_freq")
    load(tmp_path)
    [line] = lines(caplog)
    assert line.startswith(f"{tmp_path}: ") and "reads 4 of the tensors" in line
    assert line.endswith(": model.layers.*.mlp.down_proj.bias (3), score.weight")


@pytest.mark.parametrize("kind", IGNORED)
def test_each_kind_that_models_do_without(kind: str) -> None:
    renames = ((r"^(transformer\.h|gpt_neox\.layers)\.", "model.layers."),)
    for name in DROPPED[kind]:
        own = plain_name(name, renames)
        assert re.search(IGNORED[kind], own), own
        assert ignored().search(own), own


@pytest.mark.parametrize("name", KEPT)
def test_others_are_not_among_them(name: str) -> None:
    assert not ignored().search(name)


def test_layers_behind_the_last_are_ignored_where_the_config_says_that_they_draft() -> None:
    behind, of_model = ("model.layers.3.eh_proj.weight", "model.layers.2.eh_proj.weight")
    assert not ignored().search(behind)
    assert not ignored(num_nextn_predict_layers=0).search(behind)
    for said in ({"num_nextn_predict_layers": 1}, {"mtp_num_hidden_layers": 1}):
        assert ignored(**said).search(behind)
        assert not ignored(**said).search(of_model)


def test_keys_of_a_layer_that_attends_to_those_of_another() -> None:
    raw = tiny_config().to_dict()
    own = ignored_tensors(replace(shape_of(raw), kv_sources=(0, 1, 1)), raw)
    assert own.search("model.layers.2.self_attn.k_proj.weight")
    assert own.search("model.layers.2.self_attn.v_norm.weight")
    assert not own.search("model.layers.1.self_attn.k_proj.bias")
    assert not own.search("model.layers.2.self_attn.q_proj.bias")


def test_the_line_is_short_however_many_there_are() -> None:
    names = [f"model.layers.{i}.{kind}.bias" for i in range(90) for kind in "abcdefghijklmnop"]
    line = unread_warning(names)
    assert f"reads {90 * 16} of the tensors" in line and "model.layers.*.a.bias (90)" in line
    assert line.endswith(f" and {16 - MOST_NAMED} more kinds") and len(line) < 600


def test_by_a_class_of_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path)
    added(tmp_path, f"{LAYER}.mlp.down_proj.bias")
    load(tmp_path, model_impl="transformers")
    [line] = lines(caplog)
    assert line.endswith("model.layers.*.mlp.down_proj.bias (1)")
