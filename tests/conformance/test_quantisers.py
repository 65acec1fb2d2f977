"""Checkpoints that torchao, HQQ and auto-round write, as these libraries dequantise them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import CPU, generated, oracle_logits, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadModel
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.stored_weights import HQQ, StoredWeight
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.weights.stored_codes import StoredModule
from actorium.kernels.grouped_rows import GroupedLinear, dequantise_grouped, unpack_rows

pytestmark = pytest.mark.conformance
FILE = "model.safetensors"
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
PROMPT = [5, 9, 30, 2, 77, 140, 8, 8, 61, 17, 120, 4]


def served(path: Path, quantization: str = "auto") -> Decoder:
    """The model whose products leave their inputs as they are."""
    config = Config(model=ModelConfig(quantization=quantization, dtype="float32"),
                    device=DeviceConfig(kernels="torch", native_kernels=False))
    return load_model(path, config, CPU, lambda *_: None)


def compare(path: Path, oracle: Any, bits: int | None) -> Decoder:
    """Logits and greedy tokens of the checkpoint by our class as the oracle has them, whose weights
    are dequantised: in codes, and dequantised when they are read."""
    helpers: Any = importlib.import_module("helpers_quantised")
    work: Any = importlib.import_module("helpers_speculation").Work
    want = oracle_logits(oracle, PROMPT)
    for quantization in ("auto", "none"):
        model = served(path, quantization)
        assert helpers.off(helpers.logits(model), want) < 1e-4
        (out,) = work([list(PROMPT)], [ResolvedParams(max_tokens=12, temperature=0.0)]).plain(model)
        assert [int(token) for token in out.tokens] == generated(oracle, PROMPT, 12)
    model = served(path)
    own = model.layers[0].mlp.down
    if bits:
        assert isinstance(own, GroupedLinear) and own.own.format.bits == bits
    return model


def plain(path: Path) -> Any:
    return write_checkpoint(path, "LlamaForCausalLM", dtype=torch.bfloat16, mlp_bias=True,
                            hidden_size=128, head_dim=64, intermediate_size=256)


def dequantised(path: Path, model: Any, weight: Callable[[nn.Module], Tensor | None]) -> Any:
    """The plain model at `path` with the weights of the other; weight: what a module's means."""
    own = importlib.import_module("transformers").LlamaForCausalLM.from_pretrained(
        path, dtype=torch.float32)
    changed = {name: wide for name, layer in model.named_modules()
               if (wide := weight(layer)) is not None}
    assert len(changed) >= 20  # of three layers all projections, or but one
    for name, wide in changed.items():
        own.get_submodule(name).weight.data = wide.detach().float()
    return own


# --- torchao -------------------------------------------------------------------------------------

def torchao_types() -> dict[str, tuple[Callable[[Any], Any], int | None]]:
    """By name: a config of torchao's, and the bits of a code in memory."""
    four, two, five = torch.int4, torch.int2, torch.int5
    return {
        "int8": (lambda q: q.Int8WeightOnlyConfig(), 8),
        "int8, groups": (lambda q: q.Int8WeightOnlyConfig(granularity=q.PerGroup(32)), 8),
        "int8, one scale": (lambda q: q.Int8WeightOnlyConfig(granularity=q.PerTensor()), 8),
        "int8, inputs too": (lambda q: q.Int8DynamicActivationInt8WeightConfig(), 8),
        "int4 in bytes": (lambda q: q.IntxWeightOnlyConfig(four, q.PerGroup(32)), 4),
        "int4, zeros": (lambda q: q.IntxWeightOnlyConfig(
            four, q.PerGroup(64), q.MappingType.ASYMMETRIC), 4),
        "int2": (lambda q: q.IntxWeightOnlyConfig(two, q.PerAxis(0)), 4),
        "int5": (lambda q: q.IntxWeightOnlyConfig(five, q.PerGroup(128)), 8),
        "int4, inputs in int8": (lambda q: q.Int8DynamicActivationIntxWeightConfig(
            four, q.PerGroup(32)), 4),
        "by module": (lambda q: q.FqnToConfig({
            Q: None, "re:.*mlp\\.down_proj\\.weight": q.Int8WeightOnlyConfig(),
            "re:.*(q|k|v|o|gate|up)_proj\\.weight": q.IntxWeightOnlyConfig(
                four, q.PerGroup(32))}), 8),
        "fp8": (lambda q: q.Float8WeightOnlyConfig(), None),
        "fp8, one scale": (lambda q: q.Float8WeightOnlyConfig(granularity=q.PerTensor()), None),
        "fp8, inputs too": (lambda q: q.Float8DynamicActivationFloat8WeightConfig(
            granularity=q.PerRow()), None),
        "fp8, blocks": (lambda q: q.Float8DynamicActivationFloat8WeightConfig(
            granularity=[q.PerBlock([1, 128]), q.PerBlock([128, 128])]), None),
    }


@pytest.mark.parametrize("kind", torchao_types())
def test_torchao(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers saves what torchao made of a model."""
    transformers = importlib.import_module("transformers")
    ao, api = map(importlib.import_module, ("torchao.quantization",
                                            "torchao.quantization.quant_api"))
    # It asks for a GPU that could multiply, which quantising does not need.
    monkeypatch.setattr(api, "_check_hardware_support", lambda _: None)
    plain(tmp_path / "plain")
    make, bits = torchao_types()[kind]
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16 if "inputs" in kind else torch.float32,
        quantization_config=transformers.TorchAoConfig(make(ao)))
    model.save_pretrained(tmp_path / "own")

    def weight(module: nn.Module) -> Tensor | None:
        own = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or type(own) in (Tensor, nn.Parameter):
            return None
        if type(own).__name__ == "IntxUnpackedToInt8Tensor":
            own = own.to(torch.float32)
            return own.dequantize()
        found: Tensor = own.dequantize(torch.float32)
        return found

    ours = compare(tmp_path / "own", dequantised(tmp_path / "plain", model, weight), bits)
    if kind == "by module":
        assert ours.shape.grouped is not None and ours.shape.grouped.format(Q) is None


# --- HQQ -----------------------------------------------------------------------------------------

def hqq_linear(weight: Tensor, **params: Any) -> Any:
    quantise = importlib.import_module("hqq.core.quantize")
    layer = nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight.data = weight
    return quantise.HQQLinear(layer, quantise.BaseQuantizeConfig(**params), device="cpu",
                              compute_dtype=torch.float32)


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("group", [16, 64, 128, 24, None])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_hqq_weights(bits: int, group: int | None, axis: int, as_float: bool) -> None:
    """Bit for bit as it dequantises them; rows of whole groups keep their codes."""
    shape = (96, 384)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(bits)) * 0.1
    layer = hqq_linear(weight, nbits=bits, group_size=group, axis=axis, view_as_float=as_float)
    parts = {name: own.detach() for name, own in layer.state_dict().items()
             if name in ("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis")}
    how = StoredWeight(HQQ, bits, group or 0, False, across=axis == 0)
    module, want = StoredModule("m", how, parts, shape, CPU), layer.dequantize()
    assert torch.equal(module.dense(torch.float32), want)
    if how.held_of(shape[1]) is None:
        assert axis == 0 or group == 24
        return
    held = unpack_rows(module.rows())
    assert held.format.bits == (4 if bits <= 4 else 8)
    torch.testing.assert_close(dequantise_grouped(held, torch.float32), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("params", "bits"), [
    ({"nbits": 4}, 4), ({"nbits": 3}, 4), ({"nbits": 8, "group_size": 128}, 8),
    ({"nbits": 2, "group_size": 16}, 4), ({"nbits": 4, "axis": 0}, None),
    ({"nbits": 1, "group_size": 32}, 4)])
def test_hqq(tmp_path: Path, params: dict[str, Any], bits: int | None) -> None:
    """A model's state as the library encodes it for safetensors."""
    quantise, base = map(importlib.import_module, ("hqq.core.quantize", "hqq.models.hf.base"))
    plain(tmp_path / "plain")
    model = plain(tmp_path / "own")
    config = quantise.BaseQuantizeConfig(**params)
    base.AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=torch.float32,
                                       device="cpu")
    save_file({name: own.detach().clone().contiguous() for name, own in model.state_dict().items()
               if isinstance(own, Tensor)}, tmp_path / "own" / FILE, {"format": "pt"})
    described(tmp_path / "own", {"quant_method": "hqq", "quant_config": config,
                                 "skip_modules": ["lm_head"]})
    assert f"{Q}.W_q" in load_file(tmp_path / "own" / FILE)
    oracle = dequantised(tmp_path / "plain", model, lambda module: module.dequantize()
                         if isinstance(module, quantise.HQQLinear) else None)
    compare(tmp_path / "own", oracle, bits)


def described(path: Path, found: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": found}))


# --- auto-round ----------------------------------------------------------------------------------

MIXED = {Q: {"bits": 8}, "model.layers.1.mlp.up_proj": {"bits": 16},
         DOWN: {"group_size": 64, "sym": False}}
ROUNDED: dict[str, tuple[dict[str, Any], str, int]] = {
    "symmetric": ({"sym": True}, "auto_round", 4),
    "zeros, as AWQ": ({"sym": False}, "auto_round", 4),
    "as GPTQModel": ({"sym": False}, "auto_round:gptqmodel", 4),
    "8 bits, a scale a row": ({"bits": 8, "group_size": -1, "sym": True}, "auto_round", 8),
    "8 bits": ({"bits": 8, "sym": True}, "auto_round", 8),
    "mixed": ({"sym": True, "layer_config": MIXED}, "auto_round", 4),
    "GPTQ, mixed": ({"sym": True, "layer_config": {
        name: {"bits": 16 if "up" in name else 8} for name in MIXED}}, "auto_gptq", 8),
    "GPTQ": ({"sym": False}, "auto_gptq", 4), "AWQ": ({"sym": False}, "auto_awq", 4),
    "compressed-tensors": ({"sym": True, "group_size": 128}, "llm_compressor", 4),
}


@pytest.mark.parametrize("kind", ROUNDED)
def test_auto_round(tmp_path: Path, kind: str) -> None:
    """Rounded to nearest, since packing is what is compared: each weight is, but for rounding to
    bfloat16, what it computed before it packed them."""
    transformers, rounding = map(importlib.import_module, ("transformers", "auto_round"))
    tokenizers = importlib.import_module("tokenizers")
    plain(tmp_path / "plain")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="b")
    options, form, bits = ROUNDED[kind]
    oracle, model = (transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32) for _ in range(2))

    def of(each: Any) -> Any:
        return rounding.AutoRound(each, tokenizer, iters=0, disable_opt_rtn=True, device_map="cpu",
                                  **{"bits": 4, "group_size": 32, **options})

    of(model).quantize_and_save(str(tmp_path / "own"), format=form)
    oracle, _ = of(oracle).quantize()
    (path,) = [file.parent for file in (tmp_path / "own").rglob("config.json")]
    coded, dense = served(path), served(path, "none")
    assert coded.shape.grouped is not None and coded.layers[0].mlp.down.own.format.bits == bits
    for layer, theirs in zip(dense.layers, oracle.model.layers, strict=True):
        for ours, wide in ((layer.mixer.o, theirs.self_attn.o_proj),
                           (layer.mlp.down, theirs.mlp.down_proj)):
            torch.testing.assert_close(ours.weight, wide.weight.float(), rtol=2**-7, atol=1e-5)
    helpers: Any = importlib.import_module("helpers_quantised")
    assert helpers.off(helpers.logits(coded), helpers.logits(dense)) < 1e-4


# --- refused -------------------------------------------------------------------------------------

def test_what_torchao_multiplies_inputs_by_is_refused(tmp_path: Path) -> None:
    plain(tmp_path / "own")
    transformers, ao = map(importlib.import_module, ("transformers", "torchao.quantization"))
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "own", dtype=torch.float32,
        quantization_config=transformers.TorchAoConfig(ao.Int8WeightOnlyConfig()))
    model.model.layers[1].self_attn.q_proj.weight.act_pre_scale = torch.ones(128)
    model.save_pretrained(tmp_path / "own")
    with pytest.raises(BadModel, match=f"{Q}._weight_act_pre_scale: numbers by which an input"):
        served(tmp_path / "own")
