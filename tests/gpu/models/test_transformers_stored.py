"""Checkpoints in FP8 and in codes by classes of transformers (`--model-impl`): as their dequantised
twins in transformers; linear layers are held as they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers_fp8 import SINGLE, write_twins
from helpers_models import CPU, Seq, Stepper, generate, oracle_logits
from helpers_quantised import PROMPT, off
from helpers_ranks import near, opened_config, run_ranks, serve, whole
from helpers_stored import Kind, write_stored
from helpers_tables import KINDS as TABLES
from helpers_tables import write_tables
from test_transformers_model import greedy, write

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.models.registry import load_model
from actorium.gpu.models.transformers_model import TransformersModel
from actorium.gpu.parallel.rank_group import LoneRank
from actorium.gpu.plan.weight_bytes import bytes_by_format

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
CLASSES: dict[str, dict[str, Any]] = {
    "ArceeForCausalLM": {"attention_bias": True},
    "Starcoder2ForCausalLM": {"sliding_window": 9, "use_bias": True},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
}
CODES = {
    "awq": Kind("awq"), "gptq": Kind("gptq", 8, 64), "gptq, act-order": Kind("gptq", 4, 32, True,
                                                                             True),
    "gptq_v2": Kind("gptq_v2", 4, -1, True), "w4a16": Kind("pack-quantized"),
    "w8a8": Kind("int-quantized", 8, -1, True), "torchao": Kind("torchao"), "hqq": Kind("hqq"),
    "auto-round": Kind("auto-round", 8, -1, True),
}
FP8 = {"fp8": False, "fp8, blocks": True}
FORMATS = (*CODES, *TABLES, *FP8)
UNSHAPED = ("hqq", "nf4", "fp4")
"""Whose tensors do not say a weight's shape, so that only those of linear layers are read."""
ROUNDED = ("nf4", "fp4")
"""Held in codes of 8 bits, of which a number is off by half a unit."""
DAILY = [("OlmoeForCausalLM", "awq"), ("Starcoder2ForCausalLM", "fp8, blocks")]


def written(path: Path, architecture: str, form: str) -> Any:
    """A checkpoint `own` in this format; returns transformers' model of its dequantised twin."""
    import transformers

    write(path / "plain", architecture, **{**SIZES, **CLASSES[architecture]})
    folders = [path / name for name in ("plain", "own", "twin")]
    if form in CODES:
        write_stored(*folders, CODES[form])
    elif form in TABLES:
        write_tables(*folders, form)
    else:
        write_twins(*folders, FP8[form])
    kind: Any = getattr(transformers, architecture)
    return kind.from_pretrained(path / "twin", dtype=torch.float32).eval()


def served(path: Path, quantization: str = "auto", kernels: str = "torch", **model: Any) -> Any:
    """By transformers' class, whose products leave their inputs as they are."""
    return load_model(path, Config(
        model=ModelConfig(model_impl="transformers", quantization=quantization, **model),
        device=DeviceConfig(kernels=kernels, native_kernels=False)), CPU, lambda *_: None)


def logits(model: Any) -> Any:
    """Of every token of PROMPT."""
    return Stepper(model, 100, 4).step([(Seq(list(PROMPT)), len(PROMPT))], every_row=True)


def products(model: Any) -> set[str]:
    return {type(own.product).__name__ for name, own in model._body.named_modules()
            if hasattr(own, "product") and name.endswith("_proj")}


@pytest.mark.parametrize(("architecture", "form"), [
    pytest.param(name, form, marks=[] if (name, form) in DAILY else [pytest.mark.slow])
    for name in CLASSES for form in FORMATS])
def test_as_the_dequantised_twin(tmp_path: Path, architecture: str, form: str) -> None:
    """Logits and tokens, in codes and dequantised when they are read; linear layers are held as
    they are stored, experts in one tensor are dequantised."""
    oracle = written(tmp_path, architecture, form)
    if architecture == "OlmoeForCausalLM" and form.startswith(UNSHAPED):
        with pytest.raises(BadModel, match="no tensor model.layers.0.mlp.experts.*the shape of"):
            served(tmp_path / "own")
        return
    want, dense = oracle_logits(oracle, PROMPT), served(tmp_path / "own", "none")
    assert isinstance(dense, TransformersModel)
    assert off(logits(dense), want) < 1e-5 < off(logits(served(tmp_path / "plain")), want)
    assert generate(Stepper(dense, 1000, 4), [PROMPT], 6, chunk=7) == [greedy(oracle, PROMPT)]
    model = served(tmp_path / "own", "fp8" if form in FP8 else "auto")
    held = {"ScaledLinear"} if form in FP8 else {"Reordered" if "order" in form else
                                                 "GroupedLinear"}
    assert products(model) == held
    if form not in FP8:
        assert off(logits(model), want) < (0.04 if form.startswith(ROUNDED) else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gptq", "fp8, blocks", "w4a16", "modelopt"])
def test_ranks(tmp_path: Path, form: str) -> None:
    """Two ranks have their parts of the codes, and give the tokens of one."""
    written(tmp_path, "ArceeForCausalLM", form)
    plain = opened_config(tmp_path / "own")
    config = msgspec.structs.replace(plain, model=msgspec.structs.replace(
        plain.model, model_impl="transformers"))
    alone, (one, other) = serve(config, LoneRank()), whole(run_ranks(
        tmp_path / "group", 2, lambda group: serve(config, group)))
    assert str(one.outputs) == str(other.outputs)
    assert near(one.logits, alone.logits)
    assert [out.tokens for out in one.outputs] == [out.tokens for out in alone.outputs]


@pytest.mark.slow
def test_act_order_is_not_shared_out(tmp_path: Path) -> None:
    written(tmp_path, "ArceeForCausalLM", "gptq, act-order")
    plain = opened_config(tmp_path / "own")
    config = msgspec.structs.replace(plain, model=msgspec.structs.replace(
        plain.model, model_impl="transformers"))
    for found in run_ranks(tmp_path / "group", 2, lambda group: serve(config, group)):
        assert isinstance(found, BadConfig) and "act-order" in str(found)


def test_the_plan_knows_the_format(tmp_path: Path) -> None:
    """Weights take what they take in the files, about."""
    written(tmp_path, "ArceeForCausalLM", "awq")
    shape = read_shape(tmp_path / "own", Config(model=ModelConfig(model_impl="transformers")))
    held = bytes_by_format(shape)
    assert any(name.startswith("int4") for name in held)
    assert sum(held.values()) < 1.1 * (tmp_path / "own" / SINGLE).stat().st_size


@pytest.mark.parametrize(("quantization", "found", "why"), [
    ("int8", {}, "has its weights in awq already"), ("gptq", {}, "has its weights in awq"),
    ("auto", {"quant_method": "aqlm"}, "quant_method: must be"),
    ("auto", {"bits": 3}, "bits: must be 4"),
    ("auto", {"quant_method": "mxfp4"}, "mxfp4 is")])
def test_what_is_refused(tmp_path: Path, quantization: str, found: dict[str, Any],
                         why: str) -> None:
    """Before weights are read, of which there are none."""
    import transformers

    raw = transformers.Starcoder2Config(num_hidden_layers=1, hidden_size=64).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({
        **raw, "architectures": ["Starcoder2ForCausalLM"], "dtype": "float32",
        "quantization_config": {**CODES["awq"].config, **found}}))
    with pytest.raises((BadConfig, BadModel), match=why):
        served(tmp_path, quantization)
