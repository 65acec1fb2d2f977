"""FP8 checkpoints in the format of compressed-tensors: served as those that are made at load, or
refused with the field at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_fp8 import PROJECTION, SINGLE, in_blocks
from helpers_hybrid import MOE, write_hybrid
from helpers_models import Seq, Stepper, load, why_refused, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from actorium.gpu.families.architectures import shape_from_config
from actorium.gpu.families.fp8_config import Fp8Shape, fp8_shape
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.kernels.scaled_linear import FP8, quantise_rows
from actorium.tools.cli import main

PROMPT = [5, 9, 30, 2, 77, 140, 8, 8, 61, 17, 120, 4]
WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False,
                           "strategy": "channel", "group_size": None, "block_structure": None}
TOKENS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True,
                          "strategy": "token"}


def scheme(ignore: list[str] | None = None, weights: dict[str, Any] | None = None,
           inputs: Any = TOKENS, targets: Any = ("Linear",), **fields: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {"targets": list(targets), "weights": {**WEIGHTS, **(weights or {})},
             "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized",
            "quantization_status": "compressed", "config_groups": {"group_0": group},
            "kv_cache_scheme": None, "ignore": ignore or ["lm_head"], **fields}


def compress(path: Path, found: dict[str, Any]) -> None:
    """Weights of the checkpoint in FP8, with what its config then says of them."""
    tensors = load_file(path / SINGLE)
    shape = fp8_shape({"quantization_config": found}, path)
    assert shape is not None
    for name in [name for name in tensors if PROJECTION.search(name)]:
        if not shape.covers(name.removesuffix(".weight")):
            continue
        q, scales = in_blocks(tensors[name])[:2] if shape.block else quantise_rows(tensors[name])
        tensors |= {name: q, f"{name}_scale": scales}
    save_file(tensors, path / SINGLE, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": found}))


def logits(model: Decoder) -> Tensor:
    return Stepper(model, pages=8).step([(Seq(list(PROMPT)), len(PROMPT))], every_row=True)


@pytest.mark.parametrize("moe", [False, True])
def test_the_same_as_made_at_load(tmp_path: Path, moe: bool) -> None:
    """Bit for bit: the scales are the same."""
    if moe:
        write_hybrid(tmp_path, MOE)
    else:
        write_checkpoint(tmp_path)
    want = logits(load(tmp_path, quantization="fp8"))
    plain = logits(load(tmp_path))
    compress(tmp_path, scheme(["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(4))]))
    model = load(tmp_path, quantization="fp8")
    assert model.layers[0].mixer.qkv.weight.dtype is FP8
    assert torch.equal(logits(model), want) and not torch.equal(want, plain)
    auto = load(tmp_path)
    assert auto.layers[0].mixer.qkv.weight.dtype is torch.float32, "no products in FP8 on a CPU"
    assert float((logits(auto) - plain).norm() / plain.norm()) < 0.2


def test_blocks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden_size=256, intermediate_size=384)
    plain = logits(load(tmp_path))
    compress(tmp_path, scheme(weights={"strategy": "block", "block_structure": [128, 128]}))
    model = load(tmp_path, quantization="fp8")
    assert model.layers[0].mixer.qkv.scaled.scales.shape[1] == 2
    assert float((logits(model) - plain).norm() / plain.norm()) < 0.3


def test_modules_that_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    found = scheme(["re:.*lm_head", "re:.*down_proj$", "model.layers.1.self_attn.q_proj"])
    compress(tmp_path, found)
    model = load(tmp_path, quantization="fp8")
    assert [layer.mlp.down.weight.dtype for layer in model.layers] == [torch.float32] * 3
    assert [layer.mixer.qkv.weight.dtype for layer in model.layers] == [FP8, torch.float32, FP8]
    raw = json.loads((tmp_path / "config.json").read_text())
    assert main(["plan", str(tmp_path), "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["outside"][0]
    assert counted["bytes"] == weight_bytes(shape_from_config(raw, tmp_path))
    assert counted["bytes"] < weight_bytes(shape_from_config(raw, tmp_path, quantization="none"))


def test_patterns_select_layers() -> None:
    found = fp8_shape({"quantization_config": scheme(
        ["re:.*mlp\\.gate$", "re:.*visual", "re:.*shared_expert"])}, Path("config.json"))
    assert found == Fp8Shape(0, ("*mlp.gate$", "*visual", "*shared_expert"))
    at = "model.layers.0.mlp."
    assert not found.covers(f"{at}gate") and found.covers(f"{at}gate_proj")
    assert not found.covers(f"{at}shared_expert.up_proj") and found.covers(f"{at}experts.0.up_proj")


@pytest.mark.parametrize(("found", "words"), [
    (scheme(format="marlin-24"), "format: must be float-quantized, pack-quantized"),
    (scheme(quantization_status="frozen"), "quantization_status: must be compressed"),
    (scheme(weights={"num_bits": 4}), "'group_0'.weights: must be float with 8 bits"),
    (scheme(weights={"type": "int"}), "'group_0'.weights: must be float with 8 bits"),
    (scheme(weights={"strategy": "group"}), "weights.strategy: must be tensor, channel, or block"),
    (scheme(weights={"strategy": "block", "block_structure": [64, 64]}), "block of [128, 128]"),
    (scheme(inputs=None), "'group_0'.input_activations: must be float with 8 bits"),
    (scheme(targets=["re:.*mlp.*"]), "targets: must be Linear alone"),
    (scheme(config_groups={}), "config_groups: must be one group"),
    (scheme(config_groups={"a": 3}), "targets: must be Linear alone, got 3"),
    (scheme(["re:(a+)+$"]), "ignore: must be names, or re:.*NAME"),
    (scheme(["re:.*layers.0.mlp"]), "ignore: must be names"), (scheme(ignore=[3]), "ignore: must"),
])
def test_unsupported_quantizations_are_refused(tmp_path: Path, found: dict[str, Any],
                                               words: str) -> None:
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    told = why_refused(tmp_path, {**config, "quantization_config": found})
    assert "quantization_config" in told and words in told
