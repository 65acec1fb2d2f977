"""FP8 checkpoints: as their dequantised twins, kept in FP8 where that is served, or refused with
one clear line."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_configs import CONFIGS, DELTA, LATENT, SMALL
from helpers_deepseek import deepseek_model
from helpers_fp8 import FP8, SINGLE, exact_fp8, in_blocks, write_twins
from helpers_hybrid import DENSE, MOE, NEXT, SPARSE, write_hybrid
from helpers_models import CPU, Seq, Stepper, load, same_logits, write_checkpoint
from helpers_speculation import Work, tokens_of
from safetensors.torch import load_file, save_file

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig, SpeculationConfig
from actorium.actors.errors import BadModel
from actorium.actors.models.model_files import INDEX
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import model_tensors, read_shape, shape_from_config
from actorium.gpu.families.fp8_config import Fp8Shape, fp8_shape
from actorium.gpu.families.layer_shapes import ExpertShape
from actorium.gpu.families.tensor_specs import mixture_tensors
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.mlp import mixture_fused
from actorium.gpu.models.registry import load_model
from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.gpu.weights.loader import Fp8, read_tensors
from actorium.kernels.backends import triton_fault
from actorium.kernels.scaled_linear import ScaledLinear, dequantise_rows, is_packed
from actorium.tools.cli import main

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}
PROMPT = [5, 9, 30, 2, 77, 140, 8]
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")


def write_calm(path: Path, **options: Any) -> None:
    """A checkpoint whose weights are so small that what is rounded stays a small part."""
    write_checkpoint(path, **{**WIDE, **options})
    tensors = load_file(path / SINGLE)
    save_file({name: t * 0.3 if name.endswith("_proj.weight") else t for name, t in
               tensors.items()}, path / SINGLE, {"format": "pt"})


@pytest.fixture(params=[True, False], ids=["blocks", "whole"])
def twins(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    write_calm(tmp_path / "source")
    write_twins(tmp_path / "source", tmp_path / "fp8", tmp_path / "twin", request.param)
    return tmp_path / "fp8", tmp_path / "twin"


def kept(path: Path, kernels: str = "torch") -> Decoder:
    """The model with its weights in FP8."""
    config = Config(model=ModelConfig(quantization="fp8"), device=DeviceConfig(kernels=kernels))
    return load_model(path, config, CPU, lambda *_: None)


def logits(model: Decoder) -> torch.Tensor:
    return Stepper(model, pages=8).step([(Seq(list(PROMPT)), len(PROMPT))])


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Share of the wanted numbers' size that the found ones are off."""
    return float((got - want).norm() / want.norm())


def retensor(path: Path, **change: torch.Tensor | None) -> None:
    """Change the tensors of this name's end; None: take them out."""
    tensors = load_file(path / SINGLE)
    for end, tensor in change.items():
        name = next(name for name in tensors if name.endswith(end))
        del tensors[name]
        tensors |= {name: tensor} if tensor is not None else {}
    save_file(tensors, path / SINGLE)


def test_as_the_dequantised_twin(twins: tuple[Path, Path]) -> None:
    fp8, twin = twins
    assert same_logits(logits(load(fp8)), logits(load(twin)))
    assert same_logits(logits(load(fp8, dtype="bfloat16")), logits(load(twin, dtype="bfloat16")),
                       bf16=True)


@pytest.mark.parametrize("block", [True, False])
def test_projections_that_lie_in_one(tmp_path: Path, block: bool) -> None:
    """Phi-3's: as the dequantised twin, and near it where they stay in FP8."""
    write_calm(tmp_path / "source", architecture="Phi3ForCausalLM")
    write_twins(tmp_path / "source", tmp_path / "fp8", tmp_path / "twin", block)
    want = logits(load(tmp_path / "twin"))
    assert same_logits(logits(load(tmp_path / "fp8")), want)
    model = kept(tmp_path / "fp8")
    assert model.shape.fp8 is not None and off(logits(model), want) < 0.1


def test_as_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(transformers, "Fp8Dequantize"):
        pytest.skip("this transformers dequantises elsewhere")
    write_checkpoint(tmp_path / "source", **WIDE)
    stored = write_twins(tmp_path / "source", tmp_path / "fp8", tmp_path / "twin", True)
    twin, oracle = load_file(tmp_path / "twin" / SINGLE), transformers.Fp8Dequantize(None)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        assert torch.equal(oracle._dequantize_one(stored[weight], stored[name]), twin[weight])


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    write_checkpoint(tmp_path / "source", **WIDE)
    write_twins(tmp_path / "source", tmp_path / "fp8", tmp_path / "twin", True, (), scale_dtype)
    assert same_logits(logits(load(tmp_path / "fp8")), logits(load(tmp_path / "twin")))


@pytest.mark.parametrize("keep", [False, True])
def test_static_input_scales_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                          keep: bool) -> None:
    """A checkpoint whose inputs were to be divided by what it holds is served without, and says
    so; one without such scales says nothing."""
    source = tmp_path / "source"
    write_checkpoint(source, **WIDE)
    for block, said in ((False, 1), (True, 0)):
        at = tmp_path / f"fp8-{block}"
        stored = write_twins(source, at, tmp_path / f"twin-{block}", block)
        caplog.clear()
        with caplog.at_level("WARNING", logger="actorium.model"):
            load(at, quantization="fp8" if keep else "auto")
        lines = [r.getMessage() for r in caplog.records if "static scales" in r.getMessage()]
        assert len(lines) == said
        count = sum(name.endswith("input_scale") for name in stored)
        why = "its own largest" if keep else "nothing is multiplied in FP8"
        assert not said or (f"{count} static" in lines[0] and why in lines[0])


def test_scales_in_another_file_than_their_weights(twins: tuple[Path, Path]) -> None:
    fp8, twin = twins
    tensors = load_file(fp8 / SINGLE)
    scales = {name: t for name, t in tensors.items() if "_scale" in name}
    rest = {name: t for name, t in tensors.items() if name not in scales}
    for files in (("1", "2"), ("2", "1")):
        placed = {}
        for file, own in zip(files, (scales, rest), strict=True):
            save_file(own, fp8 / f"{file}.safetensors")
            placed |= dict.fromkeys(own, f"{file}.safetensors")
        (fp8 / INDEX).write_text(json.dumps({"weight_map": placed}))
        assert same_logits(logits(load(fp8)), logits(load(twin)))


def test_kept_in_fp8_all_but_the_inputs_rounding(twins: tuple[Path, Path],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, twin = twins
    model = kept(fp8)
    mixer = model.layers[0].mixer
    assert mixer.qkv.weight.dtype is FP8 and mixer.qkv.weight.shape == (512, 256)
    assert off(logits(model), logits(load(twin))) < 0.08
    unrounded(monkeypatch)
    assert off(logits(model), logits(load(twin))) < 1e-5


def exactly(own: ScaledLinear, x: torch.Tensor, dtype: torch.dtype,
            residual: torch.Tensor | None = None) -> torch.Tensor:
    """The product without rounding the input to FP8."""
    weight, scales, rows = own.scaled
    each = 128 if scales.shape[1] > 1 else weight.shape[1]
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(each, 1)[:, :weight.shape[1]]
    y = torch.nn.functional.linear(x, weight.float() * wide, own.bias)
    return (y if residual is None else y + residual).to(dtype)


def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no input is rounded to FP8."""
    monkeypatch.setattr(ScaledLinear, "run", exactly)
    monkeypatch.setattr("actorium.kernels.reference.torch_ops.to_form", lambda x, form: x)


@interpreted
@pytest.mark.parametrize("block", [True, False])
def test_kept_in_fp8_in_triton(tmp_path: Path, block: bool,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    exact_fp8(monkeypatch)
    write_calm(tmp_path / "source", num_hidden_layers=1)
    write_twins(tmp_path / "source", tmp_path / "fp8", tmp_path / "twin", block)
    got = logits(kept(tmp_path / "fp8", "triton"))
    assert off(got, logits(kept(tmp_path / "fp8"))) < 0.02
    assert 0 < off(got, logits(load(tmp_path / "twin"))) < 0.08


@interpreted
def test_experts_in_fp8_are_grouped_in_triton(tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    exact_fp8(monkeypatch)
    write_hybrid(tmp_path / "source", MOE, num_hidden_layers=2)
    write_twins(tmp_path / "source", tmp_path / "fp8", tmp_path / "twin", True)
    one_by_one, grouped = (kept(tmp_path / "fp8", name)
                           for name in ("torch", "triton"))
    assert one_by_one.waits and not grouped.waits
    assert off(logits(grouped), logits(one_by_one)) < 0.02
    assert 0 < off(logits(grouped), logits(load(tmp_path / "twin"))) < 0.08


@pytest.mark.parametrize(("architecture", "ignored"), [
    (DENSE, ("in_proj_a", "in_proj_b")), (SPARSE, ("shared_expert_gate",)), (MOE, ("k_proj",)),
    (NEXT, ("0.mlp.experts.1.gate_proj",))])
def test_other_families(tmp_path: Path, architecture: str, ignored: tuple[str, ...],
                        monkeypatch: pytest.MonkeyPatch) -> None:
    write_hybrid(tmp_path / "source", architecture)
    _same_tokens(tmp_path, ignored, monkeypatch)


@pytest.mark.parametrize("keep", [True, False])
def test_experts_that_are_stacked(tmp_path: Path, keep: bool) -> None:
    shape, at = ExpertShape(3, 2, 96, 0, True), "mlp."
    stacked = {f"{at}experts.gate_up_proj": torch.randn(3, 192, 300),
               f"{at}experts.down_proj": torch.randn(3, 300, 96)}
    stored, want = {}, {}
    for name, whole in stacked.items():
        made = [in_blocks(expert) for expert in whole]
        stored[name] = torch.stack([small for small, _, _ in made])
        stored[f"{name}_scale_inv"] = torch.stack([scales for _, scales, _ in made])
        want[name] = torch.stack([wide for _, _, wide in made])
    save_file(stored, tmp_path / SINGLE)
    wants = [want for want in mixture_tensors("", 300, shape) if "experts" in want.name]
    got = read_tensors(tmp_path, wants, torch.float32, CPU, lambda *_: None,
                       mixture_fused("", 300, shape), Fp8(Fp8Shape(128), keep))
    for e in range(3):
        for part, whole in (("gate_proj", want[f"{at}experts.gate_up_proj"][e, :96]),
                            ("up_proj", want[f"{at}experts.gate_up_proj"][e, 96:]),
                            ("down_proj", want[f"{at}experts.down_proj"][e])):
            own = got[f"{at}experts.{e}.{part}.weight"]
            assert is_packed(own) == keep
            assert torch.equal(dequantise_rows(own, torch.float32) if keep else own, whole)


def test_deepseek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepseek_model(0).save_pretrained(str(tmp_path / "source"))
    _same_tokens(tmp_path, (), monkeypatch)


@pytest.mark.parametrize(("architecture", "ignored"), [
    ("MixtralForCausalLM", ("0.block_sparse_moe.experts.1.w2",)), ("GraniteMoeForCausalLM", ()),
    ("Gemma2ForCausalLM", ("k_proj",))])
def test_names_of_their_own(tmp_path: Path, architecture: str, ignored: tuple[str, ...],
                            monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "source", architecture)
    _same_tokens(tmp_path, ignored, monkeypatch)


def _same_tokens(at: Path, ignored: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    write_twins(at / "source", at / "fp8", at / "twin", True, ignored)
    work = Work([[5, 9, 2, 41, 17] * 4, [7, 3, 3]],
                [ResolvedParams(max_tokens=5, temperature=0.0)] * 2)
    want = tokens_of(work.plain(load(at / "twin")))
    assert tokens_of(work.plain(load(at / "fp8"))) == want
    model = kept(at / "fp8")
    unrounded(monkeypatch)
    assert tokens_of(work.plain(model)) == want


def test_dummy_weights(twins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, _ = twins
    os.unlink(fp8 / SINGLE)
    dense = logits(load(fp8, load_format="dummy"))
    assert dense.isfinite().all() and same_logits(dense, logits(load(fp8, load_format="dummy")))


def refused(path: Path, *words: str) -> None:
    with pytest.raises(BadModel) as failure:
        load(path)
    for word in words:
        assert word in str(failure.value), failure.value
    assert "\n" not in str(failure.value)


def test_scales_that_are_missing_or_wrong(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", **WIDE)
    write_twins(tmp_path / "source", tmp_path / "fp8", tmp_path / "twin", True)
    name = "layers.1.mlp.up_proj.weight_scale_inv"
    for bad, words in ((torch.full((3, 2), torch.nan), ("negative or not a finite",)),
                       (torch.full((3, 2), -1.0), ("negative",)),
                       (torch.ones(2, 3), ("[2, 3]", "[3, 2]")),
                       (torch.ones(3, 2, dtype=torch.int32), ("torch.int32",)),
                       (None, ("missing",))):
        retensor(tmp_path / "fp8", **{name: bad})
        refused(tmp_path / "fp8", f"model.{name}", *words)


@pytest.mark.parametrize(("found", "word"), [
    ({"quant_method": "quanto"}, "quant_method"), ({"bits": 4}, "quant_method"), ("fp8", "object"),
    ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "weight_block_size"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
    ({"quant_method": "fp8", "ignored_layers": [3]}, "ignored_layers")])
def test_configs_that_are_not_served(tmp_path: Path, found: Any, word: str) -> None:
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": found}))
    refused(tmp_path, "config.json", "quantization_config", word)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("block", [True, False])
def test_on_a_device(tmp_path: Path, block: bool) -> None:
    write_calm(tmp_path / "source", dtype=torch.bfloat16)
    write_twins(tmp_path / "source", tmp_path / "fp8", tmp_path / "twin", block)
    want, cuda = logits(load(tmp_path / "twin", dtype="float32")), torch.device("cuda")
    for kernels, most in (("torch", 0.03), ("auto", 0.1)):
        config = Config(device=DeviceConfig(kernels=kernels))
        model = load_model(tmp_path / "fp8", config, cuda, lambda *_: None)
        assert (model.layers[0].mixer.qkv.weight.dtype is FP8) == (kernels == "auto")
        got = logits(model).cpu()
        assert got.isfinite().all() and off(got, want) < most


# --- bytes ---------------------------------------------------------------------------------------

BIGGER: dict[str, Any] = {**SMALL, "hidden_size": 256, "intermediate_size": 384, "head_dim": 128,
                          "num_hidden_layers": 2, "max_position_embeddings": 64}
SHAPES: list[dict[str, Any]] = [
    *({**SMALL, **config} for config in CONFIGS),
    {**BIGGER, "architectures": ["Qwen3ForCausalLM"]},
    {**BIGGER, "architectures": ["LlamaForCausalLM"], "intermediate_size": 200, "head_dim": 80},
    {**BIGGER, **DELTA, "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 256,
     "full_attention_interval": 2, "mtp_num_hidden_layers": 1},
    {**BIGGER, **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 256,
     "num_nextn_predict_layers": 1},
]
SOME = re.compile(r"layers\.0\..*(in_proj_[qz]|q_proj|[^e]\.gate_proj)|in_proj_[ab]|1\.mlp\.down")
"""Modules that are not in FP8."""


FORMS = ("blocks", "whole", "made")


@pytest.mark.parametrize(("at", "form"), [
    pytest.param(at, form, marks=[pytest.mark.slow] * (
        SHAPES[at] in SHAPES[:len(CONFIGS)] and (at + i) % 3 > 0))
    for at in range(len(SHAPES)) for i, form in enumerate(FORMS)])
def test_the_plan_counts_what_is_held(tmp_path: Path, at: int, form: str,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    wants = model_tensors(shape_from_config(SHAPES[at], tmp_path))
    modules = [want.name.removesuffix(".weight") for want in wants if want.projection]
    ignored = [name for name in modules if SOME.search(name) and "experts." not in name]
    found = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", *ignored],
             **({"weight_block_size": [128, 128]} if form == "blocks" else {})}
    raw = {**SHAPES[at], **({} if form == "made" else {"quantization_config": found})}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    linears: list[ScaledLinear] = []
    plain = ScaledLinear.__init__
    monkeypatch.setattr(ScaledLinear, "__init__", lambda own, *args: (
        plain(own, *args), linears.append(own))[0])
    config = Config(model=ModelConfig(load_format="dummy", quantization="fp8"),
                    speculation=SpeculationConfig(speculative="mtp:1"))
    if not read_shape(tmp_path, config).mtp_layers:
        config = Config(model=config.model)
    model = load_model(tmp_path, config, CPU, lambda *_: None)
    plan = model.shape
    assert plan.fp8 == shape_from_config(raw, tmp_path, quantization="fp8").fp8
    covered = sum(linear.weight.numel() for linear in linears)
    scales = sum(linear.scaled.scales.nbytes for linear in linears)
    dense = weight_bytes(replace(plan, fp8=None))
    assert covered and weight_bytes(plan) == (
        dense - covered * (plan.itemsize - 1) + scales)


@pytest.mark.parametrize(("names", "module", "layers"), [
    ((), "mlp.up_proj", [0, 1, 2, 3]), (("mlp.up_proj",), "mlp.up_proj", []),
    (("up_proj",), "mlp.up_proj", []),
    (("model.layers.0.mlp.up_proj", "model.layers.3.mlp"), "mlp.up_proj", [1, 2]),
    (("mtp.layers.0.mlp.up_proj", "lm_head", "proj"), "mlp.up_proj", [0, 1, 2, 3]),
    (("model.layers.1.self_attn.q_proj",), "mlp.up_proj", [0, 1, 2, 3]),
    (("",), "mlp.up_proj", []), (("*up_",), "mlp.up_proj", []), (("*up_$",), "mlp.up_proj",
                                                                 [0, 1, 2, 3])])
def test_which_modules_a_config_leaves_out(names: tuple[str, ...], module: str,
                                           layers: list[int]) -> None:
    fp8 = Fp8Shape(128, names)
    assert [i for i in range(4) if fp8.covers(f"model.layers.{i}.{module}")] == layers


def test_images_checkpoints_name_their_modules_further_in() -> None:
    raw = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": [
        "model.language_model.layers.2.mlp.gate_proj", "language_model.model.layers.3"]}}
    found = fp8_shape(raw, Path("config.json"))
    assert found is not None
    assert [found.covers(f"model.layers.{i}.mlp.gate_proj") for i in range(5)] == [
        True, True, False, False, True]
    assert found.covers("mtp.layers.2.mlp.gate_proj")


def test_the_command_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {**SHAPES[-4], "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert main(["plan", str(tmp_path), "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)["outside"][0]
    assert weights["bytes"] == weight_bytes(shape_from_config(raw, tmp_path))
    assert "float8_e4m3: " in weights["detail"]
