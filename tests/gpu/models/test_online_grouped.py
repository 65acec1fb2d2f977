"""`--quantization int8|int4`: weights that are quantised when a checkpoint is read, in models of
all families."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_grouped import write_twin
from helpers_hybrid import DENSE, SPARSE, write_hybrid
from helpers_models import CPU, load, oracle_logits, write_checkpoint
from helpers_pairs import pairs
from helpers_quantised import PROMPT, WRITERS, logits, told_of
from helpers_speculation import Work, tokens_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import shape_from_config
from actorium.gpu.families.quant_config import online_format
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.plan.weight_bytes import bytes_by_format
from actorium.kernels.grouped_rows import GroupedLinear
from actorium.kernels.linear import ConcatLinear
from actorium.tools.cli import main

FAMILIES = {**WRITERS, "tied": partial(write_checkpoint, tie_word_embeddings=True)}
BITS = {"int8": 8, "int4": 4}


def load_quantised(path: Path, quantization: str, kernels: str = "torch", **model: Any) -> Decoder:
    """The model with its weights in so many bits."""
    config = Config(model=ModelConfig(quantization=quantization, **model),
                    device=DeviceConfig(kernels=kernels))
    return load_model(path, config, CPU, lambda *_: None)


@pytest.mark.parametrize(("name", "quantization"), pairs(FAMILIES, BITS))
def test_as_a_checkpoint_of_what_the_codes_stand_for(tmp_path: Path, name: str,
                                                     quantization: str) -> None:
    FAMILIES[name](tmp_path / "plain")
    write_twin(tmp_path / "plain", tmp_path / "twin", online_format(BITS[quantization], None),
               online_format(8, None))
    got = told_of(load_quantised(tmp_path / "plain", quantization))
    want, plain = (told_of(load(tmp_path / own)) for own in ("twin", "plain"))
    off = float((plain - want).abs().mean())
    assert float((got - want).abs().max()) < 1e-4 < off


@pytest.mark.parametrize("name", ["llama", "tied", "qwen3", "gemma3"])
@pytest.mark.parametrize("quantization", BITS)
def test_as_transformers_with_dequantised_weights(tmp_path: Path, name: str,
                                                  quantization: str) -> None:
    FAMILIES[name](tmp_path / "plain")
    write_twin(tmp_path / "plain", tmp_path / "twin", online_format(BITS[quantization], None),
               online_format(8, None))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.float32)
    want = oracle_logits(oracle, PROMPT)
    got = logits(load_quantised(tmp_path / "plain", quantization))
    assert float((got - want).norm() / want.norm()) < 1e-4


def test_layers_that_are_not_quantised(tmp_path: Path) -> None:
    """Embedding, norms, routers and the small gates of recurrent layers."""
    write_hybrid(tmp_path, SPARSE)
    model = load_quantised(tmp_path, "int4")
    assert isinstance(model.embed, Tensor) and model.embed.dtype is torch.float32
    assert isinstance(model.head, GroupedLinear) and model.head.own.format.bits == 8
    gated, mixture = model.layers[0].mixer, model.layers[0].mlp
    assert isinstance(gated.project, ConcatLinear)
    assert [isinstance(part, GroupedLinear) for part in gated.project.parts] == [True, False]
    assert len(gated.project.parts[1].weight) == 2 * 4, "b and a of four heads"
    assert mixture.router.weight.dtype is gated.rule.conv.dtype is torch.float32
    assert gated.o.own.format.bits == mixture.shared.gate_up.linear.own.format.bits == 4
    plain = load_quantised(tmp_path, "int4", quantization_head="none")
    assert plain.head.weight.dtype is torch.float32
    assert load_quantised(tmp_path, "int8", quantization_head="int4").head.own.format.bits == 4


@pytest.mark.parametrize("name", ["qwen3", "moe", "tied"])
@pytest.mark.parametrize("quantization", BITS)
def test_dummy_weights_are_those_of_the_seed_quantised(tmp_path: Path, name: str,
                                                       quantization: str) -> None:
    FAMILIES[name](tmp_path, dtype=torch.bfloat16) if name != "moe" else FAMILIES[name](tmp_path)
    got = load_quantised(tmp_path, quantization, load_format="dummy")
    plain = load(tmp_path, load_format="dummy")
    o, want = got.layers[0].mixer.o, plain.layers[0].mixer.o
    wide = torch.eye(o.ins, dtype=plain.dtype)
    off = (o(wide) - want(wide)).float().norm() / want(wide).float().norm()
    assert 0 < off < 0.15
    assert torch.equal(plain.layers[0].mixer_norm, got.layers[0].mixer_norm)


@pytest.mark.parametrize(("name", "quantization"), pairs(FAMILIES, reversed(BITS)))
def test_in_c_near_the_reference(tmp_path: Path, name: str, quantization: str) -> None:
    """In bfloat16 on a CPU products are of integers, and inputs in 8 bits, too. All experts are
    chosen: which of two nearly alike is, would decide how far apart the answers are."""
    FAMILIES[name](tmp_path, **({"num_experts_per_tok": 8} if name == "mixtral" else {}))
    got, want = (told_of(load_quantised(tmp_path, quantization, kernels, dtype="bfloat16"))
                 for kernels in ("auto", "torch"))
    assert float((got - want).abs().mean()) < 0.1 * float(want.std())


def test_the_plan_says_what_is_held_in_which_format(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hybrid(tmp_path, DENSE)
    argv = ["plan", str(tmp_path), "--kv-cache-bytes", "1m", "--max-num-seqs", "2"]
    assert main([*argv, "--quantization", "int4", "--quantization-group", "64"]) == 0
    told = capsys.readouterr().out
    shape = shape_from_config(json.loads((tmp_path / "config.json").read_text()), tmp_path,
                              quantization="int4", group=64)
    held = bytes_by_format(shape)
    assert len(held) > 2 and any("int4 (groups of 64, with mins)" in name for name in held)
    assert all(f"{name}: {count:,}" in told for name, count in held.items())


def test_a_checkpoint_that_is_in_codes_is_not_rounded_twice(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--quantization", "int8"]) != 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--quantization int8" in line and "awq" in line


def test_mtp_windows(tmp_path: Path) -> None:
    """Drafts are verified against the same weights: tokens are those without drafts."""
    write_hybrid(tmp_path, DENSE)
    model = load_quantised(tmp_path, "int4")
    prompts = [PROMPT, [7, 3, 3], list(range(40, 75))]
    work = Work(prompts, [ResolvedParams(max_tokens=8, temperature=0.0)] * 3)
    want = work.plain(model)
    _, got = work.guessed(model, want, 2, lambda seed, at: (seed + at) % 3 > 0)
    assert tokens_of(got) == tokens_of(want)


