"""Llama 4 against transformers in fp32: sequences over several chunks, text parts, configs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_configs import HERE, LLAMA4, SMALL
from helpers_models import (
    Seq,
    Stepper,
    generate,
    load,
    oracle_logits,
    tiny_config,
    tiny_model,
    why_refused,
    write_checkpoint,
)

from actorium.actors.config.tree import Config, MemoryConfig
from actorium.actors.errors import BadConfig
from actorium.gpu.families.architectures import read_shape, shape_from_config
from actorium.gpu.families.model_shape import ModelShape

NAME = "Llama4ForCausalLM"
OPTIONS: dict[str, Any] = {**LLAMA4, "attention_chunk_size": 16, "floor_scale": 7,
                           "no_rope_layer_interval": 3}
LENGTHS = (1, 15, 16, 17, 33, 40)


def prompts() -> list[list[int]]:
    gen = torch.Generator().manual_seed(5)
    return [torch.randint(2, 199, (n,), generator=gen).tolist() for n in LENGTHS]


def shape(**fields: Any) -> ModelShape:
    return shape_from_config({**SMALL, **LLAMA4, **fields, "architectures": [NAME]}, HERE)


@pytest.mark.parametrize("size", [1, 8, 16])
def test_sequences_over_several_chunks(tmp_path: Path, size: int) -> None:
    oracle = write_checkpoint(tmp_path, NAME, **OPTIONS)
    model = load(tmp_path)
    assert [group.window for group in model.shape.groups] == [16, 0]
    tokens = generate(Stepper(model, 4000 // size, size), prompts(), 20, 7, budget=40)
    for prompt, new in zip(prompts(), tokens, strict=True):
        want = oracle_logits(oracle, prompt + new)
        assert want[len(prompt) - 1:-1].argmax(-1).tolist() == new
        for chunk in (5, 512):
            stepper, seq = Stepper(model, 4000 // size, size), Seq(prompt + new)
            rows = []
            while seq.done < len(seq.tokens):
                count = min(chunk, len(seq.tokens) - seq.done)
                rows.append(stepper.step([(seq, count)], every_row=True))
            assert torch.allclose(torch.cat(rows), want, atol=1e-4, rtol=0)


def test_drafts_that_begin_a_chunk(tmp_path: Path) -> None:
    """A window of rows of which some are in the next chunk, beside an extend that ends in one."""
    oracle = write_checkpoint(tmp_path, NAME, **OPTIONS)
    model = load(tmp_path)
    for length in range(14, 37):
        stepper, tokens = Stepper(model, 64, 8), prompts()[5][:length]
        seq, other = Seq(tokens), Seq(prompts()[4])
        stepper.step([(seq, length - 4)])
        got = stepper.step([(other, 20)], [seq], q_len=4)
        assert torch.allclose(got[0], oracle_logits(oracle, other.tokens[:20])[-1], atol=1e-4)
        assert torch.allclose(got[1:], oracle_logits(oracle, tokens)[-4:], atol=1e-4, rtol=0)


def test_the_text_part_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    import transformers

    text = tiny_config(NAME, **OPTIONS)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
              "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    config = transformers.Llama4Config(text_config=text.to_dict(), vision_config=vision)
    whole: Any = transformers.Llama4ForConditionalGeneration(config).eval()
    alone = tiny_model(NAME, **OPTIONS)
    whole.language_model.load_state_dict(alone.state_dict())
    got = []
    for name, model in (("whole", whole), ("alone", alone)):
        model.save_pretrained(str(tmp_path / name))
        got.append(Stepper(load(tmp_path / name), 16).step([(Seq(prompts()[5]), 40)],
                                                           every_row=True))
    names = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert names["architectures"] == ["Llama4ForConditionalGeneration"]
    assert torch.equal(*got)


def test_experts_as_wide_as_the_model_are_turned_as_others(tmp_path: Path) -> None:
    """The shape of their tensors does not tell rows from columns."""
    oracle = write_checkpoint(tmp_path, NAME, **{**OPTIONS, "intermediate_size": 32})
    got = Stepper(load(tmp_path), 16).step([(Seq(prompts()[5]), 40)], every_row=True)
    assert torch.allclose(got, oracle_logits(oracle, prompts()[5]), atol=1e-4, rtol=0)


def test_chunks_longer_than_all_sequences_are_none() -> None:
    assert shape().chunked and shape().windows == (32, 0, 32, 0)
    for fields in ({"attention_chunk_size": 512}, {"attention_chunk_size": None}):
        whole = shape(**fields)
        assert not whole.chunked and whole.windows == (0,) * 4
    assert replace(shape(), max_model_len=32).simplified().windows == (0,) * 4


def test_published_spellings() -> None:
    """An empty no_rope_layers means that the interval says."""
    assert shape(no_rope_layers=[]).layer_ropes == shape().layer_ropes == (0, 1, 0, 1)
    assert shape(moe_layers=[0, 3]).sparse == (0, 3) and shape().sparse == (1, 3)
    fields = {"layer_types": ["full_attention", "chunked_attention"] * 2}
    assert shape(**fields).windows == (0, 32, 0, 32)


@pytest.mark.parametrize(("fields", "message"), [
    ({"no_rope_layers": [1]}, "no_rope_layers: must be 4 times 0 or 1"),
    ({"moe_layers": 3}, "moe_layers: must be a list of layers"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types: must be 4 times chunked_attention"),
    ({"attention_chunk_size": 0}, "attention_chunk_size: must be a positive integer"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok: 7 is more than 6 experts"),
    ({"floor_scale": -1}, "floor_scale: must be a positive integer")])
def test_fields_that_are_not_served_are_named(tmp_path: Path, fields: dict[str, Any],
                                              message: str) -> None:
    assert message in why_refused(tmp_path, {**SMALL, **LLAMA4, "architectures": [NAME], **fields})


def test_pages_that_do_not_divide_a_chunk_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(
        {**SMALL, **LLAMA4, "architectures": [NAME]}))
    assert read_shape(tmp_path, Config(memory=MemoryConfig(page_size=32))).chunked
    with pytest.raises(BadConfig, match="page_size: must divide the chunks of 32 tokens"):
        read_shape(tmp_path, Config(memory=MemoryConfig(page_size=64)))
