"""Checkpoints of bitsandbytes, and in NVFP4 and MXFP4 of compressed-tensors and ModelOpt: as their
dequantised twins in transformers, and as the libraries dequantise them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_deepseek import write_deepseek
from helpers_fp8 import SINGLE, write_twins
from helpers_hybrid import NEXT, write_hybrid
from helpers_models import CPU, assert_greedy, load, oracle_logits, write_checkpoint
from helpers_pairs import pairs
from helpers_quantised import PROMPT, logits, off, told_of
from helpers_tables import KINDS, bnb_4bit, modelopt_config, write_tables
from safetensors.torch import load_file, save_file
from test_stored_checkpoints import greedy, held_by, served
from transformers import AutoModelForCausalLM

from actorium.actors.errors import BadConfig, BadModel
from actorium.gpu.families.architectures import model_tensors
from actorium.gpu.families.stored_weights import StoredWeight
from actorium.gpu.weights.table_codes import UNITS, TableModule
from actorium.kernels.grouped_rows import GroupedLinear, dequantise_grouped, unpack_rows
from actorium.tools.cli import main

WRITERS: dict[str, Callable[..., Any]] = {
    "llama": partial(write_checkpoint, architecture="LlamaForCausalLM", mlp_bias=True),
    "qwen2": partial(write_checkpoint, architecture="Qwen2ForCausalLM"),
    "qwen3": write_checkpoint,
}
ROUNDED = ("nf4", "fp4")
"""Whose table is no ladder: in codes of 8 bits a number is off by half a unit."""


def written(path: Path, kind: str, **shape: Any) -> None:
    """A checkpoint and its twin, of rows of whole groups."""
    write_checkpoint(path / "plain", hidden_size=128, intermediate_size=256, **shape)
    write_tables(path / "plain", path / "own", path / "twin", kind)


@pytest.mark.parametrize(("kind", "family"), pairs(KINDS, WRITERS))
def test_as_transformers_with_dequantised_weights(tmp_path: Path, family: str, kind: str) -> None:
    WRITERS[family](tmp_path / "plain", hidden_size=128, intermediate_size=256)
    write_tables(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", kind)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.float32)
    want = oracle_logits(oracle, PROMPT)
    dense = served(tmp_path / "own", "none")
    assert off(logits(dense), want) < 1e-4 < off(logits(load(tmp_path / "plain")), want)
    assert dense.shape.grouped is None
    assert_greedy(oracle, PROMPT, greedy(dense, 12), 12)
    model = served(tmp_path / "own")
    assert off(logits(model), want) < (0.04 if kind.startswith(ROUNDED) else 1e-4)
    assert isinstance(model.layers[1].mixer.o, GroupedLinear)
    assert model.layers[1].mixer.o.own.format.bits in (5, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_integers_are_near(tmp_path: Path, kind: str) -> None:
    """In bf16, as they are served on this processor."""
    written(tmp_path, kind)
    got, want = (logits(load(tmp_path / own, dtype="bfloat16")) for own in ("own", "twin"))
    assert off(got, want) < 0.06


@pytest.mark.parametrize(("kind", "family"), pairs(KINDS, ["next", "deepseek"]))
def test_mixtures_whose_experts_lie_apart(tmp_path: Path, family: str, kind: str) -> None:
    """Weights whose columns are no whole groups, and those that no product takes, too."""
    if family == "next":
        write_hybrid(tmp_path / "plain", NEXT)
    else:
        write_deepseek(tmp_path / "plain")
    write_tables(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", kind)
    own, twin, plain = (told_of(served(tmp_path / name)) for name in ("own", "twin", "plain"))
    near = float((own - twin).abs().mean()) if kind.startswith(ROUNDED) else float(
        (own - twin).abs().max()) * 1e3
    assert near < float((plain - twin).abs().mean())


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_them(tmp_path: Path, kind: str,
                              capsys: pytest.CaptureFixture[str]) -> None:
    """To the byte: what its products hold, and what is in bf16."""
    written(tmp_path, kind, dtype=torch.bfloat16)
    assert main(["plan", str(tmp_path / "own"), "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["outside"][0]["bytes"]
    model = load(tmp_path / "own")
    products = [own for layer in model.layers for own in (
        layer.mixer.qkv, layer.mixer.o, layer.mlp.gate_up, layer.mlp.down)]
    plain = 2 * sum(spec.size for spec in model_tensors(model.shape) if not spec.projection)
    assert counted == plain + sum(map(held_by, products))


@pytest.mark.parametrize("layout", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_compressed_tensors_itself(layout: str) -> None:
    """As its own compressor dequantises the same tensors."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    parts, meant = KINDS[layout[:5]][0](
        torch.randn(48, 96, generator=torch.Generator().manual_seed(2)))
    scheme = schemes.QuantizationScheme.model_validate(
        KINDS[layout[:5]][1]["config_groups"]["group_0"])
    own = TableModule("m", StoredWeight(layout, 4, 16 if "nv" in layout else 32, True), parts,
                      (48, 96), CPU)
    want = compressors.BaseCompressor.get_value_from_registry(layout).decompress(
        dict(parts), scheme)["weight"].float()
    dense = own.dense(torch.float32)
    assert float((dense - want).abs().max()) < 0.01 * float(want.abs().max())
    assert torch.allclose(dense, meant, rtol=1e-6, atol=1e-7)
    held = dequantise_grouped(unpack_rows(own.rows()), torch.float32)
    assert torch.allclose(held, dense, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_modelopt(tmp_path: Path, algorithm: str, apart: bool) -> None:
    """Its config in config.json, or in a file of its own as its first checkpoints have it."""
    write_checkpoint(tmp_path / "plain", hidden_size=128, intermediate_size=256)
    if algorithm == "FP8":
        write_twins(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", False)
    else:
        write_tables(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", "modelopt")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    fields = modelopt_config(quant_algo=algorithm, ignore=["lm_head", "model.layers.9*"])
    if apart:
        del config["quantization_config"]
        (tmp_path / "own" / "hf_quant_config.json").write_text(json.dumps({
            "producer": {"name": "modelopt"}, "quantization": {
                "quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16,
                "exclude_modules": ["lm_head", "model.layers.9*"]}}))
    else:
        config["quantization_config"] = fields
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    want = logits(served(tmp_path / "twin"))
    for asked in ("auto", "modelopt", "none"):
        assert off(logits(served(tmp_path / "own", asked)), want) < 1e-4
    assert main(["plan", str(tmp_path / "own"), "--json"]) == 0


def test_scales_of_which_the_config_says_nothing(tmp_path: Path) -> None:
    """Weights in FP8 are not served as if they had none."""
    write_checkpoint(tmp_path / "plain")
    held = write_twins(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", False)
    shutil.copy(tmp_path / "plain" / "config.json", tmp_path / "own")
    for asked in ("auto", "none", "int8", "fp8"):
        with pytest.raises(BadModel, match="proj.weight is in FP8 .* no quantization_config"):
            served(tmp_path / "own", asked)
    save_file({name: own for name, own in held.items() if not name.endswith("_scale")},
              tmp_path / "own" / SINGLE)
    assert logits(served(tmp_path / "own")).isfinite().all(), "no scales: numbers as they are"


@pytest.mark.parametrize(("kind", "end", "change", "why"), [
    ("nvfp4", "weight_global_scale", None, "weight_global_scale is missing"),
    ("nvfp4", "weight_scale", torch.zeros(256, 8), r"weight_scale is torch.float32 of shape \[256"),
    ("nvfp4", "weight_packed", torch.zeros(64, 256, dtype=torch.uint8), r"has shape \[64, 256\]"),
    ("nvfp4", "weight_global_scale", torch.zeros(1), "not a finite number"),
    ("mxfp4", "weight_scale", torch.full((256, 4), 255, dtype=torch.uint8), "not a number"),
    ("modelopt", "weight_scale_2", None, "weight_scale_2 is missing")])
def test_what_is_wrong_in_e2m1_is_named(tmp_path: Path, kind: str, end: str, change: Any,
                                        why: str) -> None:
    write_checkpoint(tmp_path / "plain", hidden_size=128, intermediate_size=256)
    held = write_tables(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", kind)
    name = f"model.layers.1.mlp.up_proj.{end}"
    del held[name]
    save_file(held | ({} if change is None else {name: change}), tmp_path / "own" / SINGLE)
    with pytest.raises(BadModel, match=f"model.layers.1.mlp.up_proj.*{why}"):
        served(tmp_path / "own", "none")


@pytest.mark.parametrize(("end", "change", "why"), [
    ("weight.absmax", None, "up_proj.weight has shape"),  # not quantised, then
    ("weight.absmax", torch.zeros(7), r"weight.absmax is torch.float32 of shape \[7\]"),
    ("weight.quant_map", None, "weight.quant_map is missing"),
    ("weight.quant_map", torch.full((16,), 2.0), "numbers from -1 to 1"),
    ("weight", torch.zeros(8, 1, dtype=torch.uint8), r"weight is torch.uint8 of shape \[8, 1\]"),
    ("weight.quant_state.bitsandbytes__nf4", torch.zeros(3, dtype=torch.uint8),
     "is not a JSON object"),
    ("weight.quant_state.bitsandbytes__nf4", None, "quant_state.bitsandbytes__nf4 is missing"),
    ("weight.quant_state.bitsandbytes__nf4", {"blocksize": 128}, "blocksize must be 64, got 128"),
    ("weight.quant_state.bitsandbytes__nf4", {"shape": [1, 2]}, "shape must be "),
    ("weight.quant_state.bitsandbytes__nf4", {"quant_type": "fp4"}, "quant_type must be nf4"),
    ("weight.quant_state.bitsandbytes__nf4", {"nested_offset": "x"}, "nested_offset must be"),
    ("weight.nested_quant_map", None, "weight.nested_quant_map is missing")])
def test_what_is_wrong_is_named(tmp_path: Path, end: str, change: Any, why: str) -> None:
    write_checkpoint(tmp_path / "plain", hidden_size=128, intermediate_size=256)
    held = write_tables(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", "nf4, nested")
    name = f"model.layers.1.mlp.up_proj.{end}"
    if isinstance(change, dict):
        state = {**json.loads(bytes(held[name].tolist())), **change}
        change = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    del held[name]
    save_file(held | ({} if change is None else {name: change}), tmp_path / "own" / SINGLE)
    with pytest.raises(BadModel, match=why) as caught:
        served(tmp_path / "own", "none")
    assert "model.layers.1.mlp.up_proj.weight" in str(caught.value)


def test_rows_that_lie_otherwise_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain")
    held = write_tables(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", "int8")
    name = "model.layers.1.mlp.up_proj.weight_format"
    save_file(held | {name: torch.tensor(1, dtype=torch.uint8)}, tmp_path / "own" / SINGLE)
    with pytest.raises(BadModel, match="up_proj.weight_format must be 0"):
        served(tmp_path / "own")


def test_modules_that_are_skipped(tmp_path: Path) -> None:
    """By whole names and by parts of them, as unsloth's checkpoints list them."""
    write_checkpoint(tmp_path / "plain", hidden_size=128, intermediate_size=256)
    held = write_tables(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", "nf4",
                        llm_int8_skip_modules=["lm_head", "model.layers.1.mlp", "o_proj"])
    plain = load_file(tmp_path / "plain" / SINGLE)
    twin = load_file(tmp_path / "twin" / SINGLE)
    for name in plain:
        if "layers.1.mlp" in name or "o_proj" in name:
            twin[name] = plain[name]
            held = {own: held[own] for own in held if not own.startswith(name)} | {
                name: plain[name]}
    save_file(held, tmp_path / "own" / SINGLE, {"format": "pt"})
    save_file(twin, tmp_path / "twin" / SINGLE, {"format": "pt"})
    model = served(tmp_path / "own")
    assert off(logits(model), logits(served(tmp_path / "twin"))) < 0.04
    assert model.shape.grouped.format("model.layers.0.mlp.up_proj").bits == 8
    assert model.shape.grouped.format("model.layers.1.mlp.up_proj") is None
    assert model.shape.grouped.format("model.layers.0.self_attn.o_proj") is None


def test_units() -> None:
    """Of NF4 and FP4 the table's numbers in units are as near as the module says."""
    for kind, most in (("nf4", 0.0039), ("fp4", 0.0032)):
        table = bnb_4bit(torch.ones(1, 64), kind, False)[0]["weight.quant_map"]
        unit = UNITS[f"bnb-{kind}"]
        assert float(((table * unit).round() / unit - table).abs().max()) < most


def test_they_are_not_made_anew(tmp_path: Path) -> None:
    written(tmp_path, "nf4")
    for asked in ("int4", "int8", "fp8"):
        with pytest.raises(BadConfig, match="has its weights in bitsandbytes already: take auto"):
            served(tmp_path / "own", asked)
    with pytest.raises(BadConfig, match="awq: .* has its weights in bitsandbytes"):
        served(tmp_path / "own", "awq")
    assert served(tmp_path / "own", "bitsandbytes").shape.grouped is not None
