"""Checkpoints in AWQ, GPTQ, HQQ, torchao's and compressed-tensors' integer formats: as their
dequantised twins in transformers, in models of several families."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_deepseek import write_deepseek
from helpers_fp8 import SINGLE
from helpers_hybrid import NEXT, write_hybrid
from helpers_models import CPU, generated, load, oracle_logits, write_checkpoint
from helpers_pairs import pairs
from helpers_quantised import PROMPT, logits, off, told_of
from helpers_speculation import Work
from helpers_stored import Kind, stored, tensors_of, write_stored, write_twin
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models.model_files import INDEX
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import model_tensors
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.kernels.cpu.grouped_native import NativeGrouped, NativeGroupedGated
from actorium.kernels.grouped_rows import GroupedLinear
from actorium.kernels.linear import Reordered
from actorium.tools.cli import main

WRITERS: dict[str, Callable[..., Any]] = {
    "llama": partial(write_checkpoint, architecture="LlamaForCausalLM", mlp_bias=True),
    "mistral": partial(write_checkpoint, architecture="MistralForCausalLM"),
    "qwen2": partial(write_checkpoint, architecture="Qwen2ForCausalLM"),
    "qwen3": write_checkpoint,
}
KINDS = {
    "awq": Kind("awq"), "awq, symmetric": Kind("awq", 4, 16, True),
    "gptq": Kind("gptq"), "gptq, symmetric": Kind("gptq", 4, -1, True),
    "gptq, 8 bits": Kind("gptq", 8), "gptq, v2": Kind("gptq_v2", 8, 16),
    "gptq, act-order": Kind("gptq", 4, 32, True, True),
    "gptq, 8 bits, act-order": Kind("gptq_v2", 8, 16, False, True),
    "w8a8": Kind("int-quantized", 8, -1, True), "w8a8, zeros": Kind("int-quantized", 8, -1),
    "w4a16": Kind("pack-quantized", 4, 32, True), "w4a16, zeros": Kind("pack-quantized"),
    "w8a16": Kind("pack-quantized", 8, -1, True),
    "torchao": Kind("torchao"), "hqq": Kind("hqq"), "auto-round": Kind("auto-round", 8, -1, True),
    "w4a16, act-order": Kind("pack-quantized", 4, 16, True, True, apart=True),
}


def served(path: Path, quantization: str = "auto", kernels: str = "torch", **model: Any) -> Decoder:
    """The model whose products leave their inputs as they are."""
    config = Config(model=ModelConfig(quantization=quantization, **model),
                    device=DeviceConfig(kernels=kernels, native_kernels=False))
    return load_model(path, config, CPU, lambda *_: None)


def greedy(model: Decoder, count: int) -> list[int]:
    (out,) = Work([list(PROMPT)], [ResolvedParams(max_tokens=count, temperature=0.0)]).plain(model)
    return [int(token) for token in out.tokens]


@pytest.mark.parametrize(("kind", "family"), pairs(KINDS, WRITERS))
def test_as_transformers_with_dequantised_weights(tmp_path: Path, family: str, kind: str) -> None:
    WRITERS[family](tmp_path / "plain")
    write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS[kind])
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.float32)
    model, want = served(tmp_path / "own"), oracle_logits(oracle, PROMPT)
    assert off(logits(model), want) < 1e-4 < off(logits(load(tmp_path / "plain")), want)
    assert greedy(model, 12) == generated(oracle, PROMPT, 12)
    own = model.layers[1].mixer.qkv
    own = own.parts[0] if hasattr(own, "parts") else own
    assert isinstance(own, Reordered if KINDS[kind].ordered else GroupedLinear)
    dense = served(tmp_path / "own", "none")
    assert off(logits(dense), want) < 1e-4 and dense.shape.grouped is None


@pytest.mark.parametrize(("kind", "family"), pairs(
    ["awq", "gptq, act-order", "w8a8", "w4a16, zeros"], ["next", "deepseek"]))
def test_mixtures_whose_experts_lie_apart(tmp_path: Path, family: str, kind: str) -> None:
    """Weights that are cut out of others, and those that no product takes (`kv_b_proj`), too."""
    if family == "next":
        write_hybrid(tmp_path / "plain", NEXT)
    else:
        write_deepseek(tmp_path / "plain")
    write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS[kind])
    own, twin, plain = (told_of(served(tmp_path / name)) for name in ("own", "twin", "plain"))
    assert float((own - twin).abs().max()) < 1e-4 < float((plain - twin).abs().mean())


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_integers_are_near(tmp_path: Path, kind: str) -> None:
    """In bf16, as they are served on this processor."""
    write_checkpoint(tmp_path / "plain", hidden_size=128, intermediate_size=256)
    write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS[kind])
    got, want = (logits(load(tmp_path / own, dtype="bfloat16")) for own in ("own", "twin"))
    assert off(got, want) < 0.05


def test_tensors_in_any_order_and_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain")
    held = write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin",
                        KINDS["gptq, act-order"])
    want = logits(served(tmp_path / "own"))
    for cut in ("qweight", "scales"):
        placed = {}
        for file, own in (("2", {n: t for n, t in held.items() if cut in n}),
                          ("1", {n: t for n, t in held.items() if cut not in n})):
            file = file if cut == "scales" else str(3 - int(file))
            save_file(own, tmp_path / "own" / f"{file}.safetensors")
            placed |= dict.fromkeys(own, f"{file}.safetensors")
        (tmp_path / "own" / INDEX).write_text(json.dumps({"weight_map": placed}))
        assert torch.equal(logits(served(tmp_path / "own")), want)


def test_groups_of_several_formats(tmp_path: Path) -> None:
    """Attention in 8 bits, MLPs in 4, and one that is left out."""
    write_checkpoint(tmp_path / "plain")
    four, eight = Kind("pack-quantized"), Kind("int-quantized", 8, -1, True)
    tensors = load_file(tmp_path / "plain" / SINGLE)
    held, wide = dict(tensors), dict(tensors)
    for i, name in enumerate(name for name in tensors if name.endswith("_proj.weight")):
        if "layers.2.self_attn.q_proj" in name:
            continue
        kind = four if "mlp" in name else eight
        own = stored(tensors[name], kind, i)
        del held[name]
        held |= {f"{name.removesuffix('weight')}{end}": each
                 for end, each in tensors_of(own, kind).items()}
        wide[name] = own.meant
    write_twin(tmp_path / "plain", tmp_path / "twin", wide)
    write_twin(tmp_path / "plain", tmp_path / "own", held, {
        **four.config, "format": "mixed-precision", "ignore": [
            "lm_head", "re:.*layers\\.2\\.self_attn\\.q_proj$"],
        "config_groups": {"a": four.scheme("re:.*mlp\\.(gate|up|down)_proj$"),
                          "b": eight.scheme()}})
    model = served(tmp_path / "own")
    assert torch.allclose(logits(model), logits(served(tmp_path / "twin")), rtol=0, atol=1e-4)
    bits = {module: form.bits if form else None for module, form in model.shape.grouped.modules}
    assert {bits.get(f"model.layers.{i}.self_attn.q_proj", model.shape.grouped.default.bits)
            for i in range(2)} == {8}
    assert bits["model.layers.2.self_attn.q_proj"] is None


def test_a_head_in_codes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain")
    kind = KINDS["gptq, symmetric"]
    write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", kind)
    for at, held in (("own", True), ("twin", False)):
        tensors = load_file(tmp_path / at / SINGLE)
        own = stored(tensors.pop("lm_head.weight"), kind)
        tensors |= ({f"lm_head.{end}": each for end, each in tensors_of(own, kind).items()}
                    if held else {"lm_head.weight": own.meant})
        save_file(tensors, tmp_path / at / SINGLE, {"format": "pt"})
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config["quantization_config"]["lm_head"] = True
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    model = served(tmp_path / "own")
    assert isinstance(model.head, GroupedLinear) and model.head.own.format.bits == 4
    assert torch.allclose(logits(model), logits(served(tmp_path / "twin")), rtol=0, atol=1e-4)


def test_columns_that_are_no_whole_groups(tmp_path: Path) -> None:
    """Are dequantised when they are read: as the plan counts them."""
    write_checkpoint(tmp_path / "plain", intermediate_size=104)
    write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS["gptq"])
    model = served(tmp_path / "own")
    assert model.layers[0].mlp.down.weight.dtype is torch.float32
    assert model.shape.grouped.format("model.layers.0.mlp.down_proj") is None
    assert torch.allclose(logits(model), logits(served(tmp_path / "twin")), rtol=0, atol=1e-4)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain")
    held = write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS["awq"])
    for end in ("scales", "qzeros", "qweight"):
        name = f"model.layers.1.mlp.up_proj.{end}"
        save_file({n: t for n, t in held.items() if n != name}, tmp_path / "own" / SINGLE)
        with pytest.raises(BadModel) as caught:
            served(tmp_path / "own")
        missing = name if end != "qweight" else "model.layers.1.mlp.up_proj.weight"
        assert f"tensor {missing} is missing" in str(caught.value)
        assert str(tmp_path / "own") in str(caught.value)


def test_weights_that_are_not_quantised_stay(tmp_path: Path,
                                             caplog: pytest.LogCaptureFixture) -> None:
    """Where the config does not say so; one line of the log counts them."""
    write_checkpoint(tmp_path / "plain")
    write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS["w8a8"],
                 left=("layers.0.mlp",))
    with caplog.at_level("WARNING", logger="actorium.model"):
        model = served(tmp_path / "own")
    assert torch.allclose(logits(model), logits(served(tmp_path / "twin")), rtol=0, atol=1e-4)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "3 weights are not quantised" in line


def test_static_scales_of_inputs_are_reported(tmp_path: Path,
                                             caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path / "plain")
    held = write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS["w8a8"])
    want = logits(served(tmp_path / "own"))
    save_file({**held, "model.layers.0.mlp.up_proj.input_scale": torch.tensor(0.1)},
              tmp_path / "own" / SINGLE)
    with caplog.at_level("WARNING", logger="actorium.model"):
        assert torch.equal(logits(served(tmp_path / "own")), want)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "1 static scales of inputs are not used" in line and "its own largest" in line


def test_weights_in_codes_are_not_made_anew(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain")
    write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS["awq"])
    for asked in ("int4", "int8", "fp8"):
        with pytest.raises(BadConfig, match="has its weights in awq already: take auto"):
            served(tmp_path / "own", asked)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].apart])
def test_the_plan_counts_them(tmp_path: Path, kind: str,
                              capsys: pytest.CaptureFixture[str]) -> None:
    """To the byte: what its products hold, and what is in bf16."""
    write_checkpoint(tmp_path / "plain", dtype=torch.bfloat16, hidden_size=128,
                     intermediate_size=256)
    write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS[kind])
    assert main(["plan", str(tmp_path / "own"), "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["outside"][0]["bytes"]
    model = load(tmp_path / "own")
    products = [own for layer in model.layers for own in (
        layer.mixer.qkv, layer.mixer.o, layer.mlp.gate_up, layer.mlp.down)]
    plain = 2 * sum(spec.size for spec in model_tensors(model.shape) if not spec.projection)
    assert counted == plain + sum(map(held_by, products))


@pytest.mark.parametrize(("kind", "orders"), [("gptq, act-order", 0), ("w4a16, act-order", 6)])
def test_orders_that_the_plan_does_not_count_are_reported(
        tmp_path: Path, kind: str, orders: int, caplog: pytest.LogCaptureFixture) -> None:
    """Queries, keys and values in three orders, gate and up in two, of two layers: right to compute
    (`test_as_transformers_with_dequantised_weights`), and more to hold."""
    write_checkpoint(tmp_path / "plain", num_hidden_layers=2)
    write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS[kind])
    with caplog.at_level("WARNING", "actorium.model"):
        served(tmp_path / "own")
    told = [line for line in caplog.messages if "different orders (g_idx)" in line]
    assert len(told) == bool(orders) and all(f": {orders} are held" in line for line in told)


def held_by(product: Any) -> int:
    """Bytes of a product's weight."""
    if isinstance(product, Reordered):
        return product.order.nbytes + held_by(product.linear)
    if isinstance(product, GroupedLinear):
        pytest.skip("no kernels in C here")
    if isinstance(product, NativeGrouped):
        return product.held.nbytes
    return held_by(product.product if isinstance(product, NativeGroupedGated) else product.linear)


@pytest.mark.parametrize("kind", ["w4a16", "w8a16", "w8a8", "w8a8, zeros"])
def test_as_transformers_reads_the_same_files(tmp_path: Path, kind: str) -> None:
    """Where compressed-tensors is installed, which transformers asks."""
    pytest.importorskip("compressed_tensors")
    write_checkpoint(tmp_path / "plain")
    write_stored(tmp_path / "plain", tmp_path / "own", tmp_path / "twin", KINDS[kind])
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32)
    want = oracle_logits(oracle, PROMPT)
    # Of W8A8 transformers rounds inputs, too.
    assert off(logits(served(tmp_path / "own")), want) < (0.05 if "w8a8" in kind else 1e-4)
