"""GPT-OSS whose experts are in MXFP4: what its codes mean, as transformers dequantises them; whole
models; what is held; and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_attention import INTERPRETED
from helpers_fp8 import SINGLE
from helpers_models import CPU, generated, load, oracle_logits, why_refused
from helpers_mxfp4 import CONFIG, drawn, write_mxfp4
from helpers_quantised import PROMPT, logits, off
from helpers_speculation import Work, tokens_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.params import ResolvedParams
from actorium.gpu.families.architectures import model_tensors, read_shape
from actorium.gpu.families.tensor_specs import held_format
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model
from actorium.gpu.plan.weight_bytes import bytes_by_format
from actorium.gpu.weights.lazy_tensors import materialised
from actorium.gpu.weights.mxfp4 import StackedExperts4
from actorium.kernels.cpu.grouped_native import NativeGrouped
from actorium.kernels.fp4_weights import Fp4Linear, dequantise_fp4, is_fp4, pack_fp4
from actorium.kernels.grouped_rows import FP4, dequantise_grouped, pack_rows, quantise_grouped


def served(path: Path, quantization: str = "auto", **device: Any) -> Decoder:
    config = Config(model=ModelConfig(quantization=quantization), device=DeviceConfig(**device))
    return load_model(path, config, CPU, lambda *_: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_mean_what_transformers_makes_of_them(dtype: torch.dtype) -> None:
    """All of them, at all exponents that are finite in f32, to the bit; rows are dealt out."""
    blocks, scales = drawn(3, 20, 96, low=0, high=253)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT  # [E, N, K]
    stack = StackedExperts4("m", {"blocks": blocks, "scales": scales}, (3, 96, 20), CPU, False)
    own = list(stack.experts([f"{e}.{part}" for e in range(3) for part in ("gate", "up")]))
    assert [name for name, _, _ in own[:3]] == ["0.gate", "0.up", "1.gate"]
    for i, (_, lazy, wide) in enumerate(own):
        rows, (expert, part) = materialised(lazy), divmod(i, 2)
        assert is_fp4(rows)
        held = pack_fp4(rows)
        assert held.nbytes == 10 * 96 * 17 // 32
        for got in (dequantise_fp4(held, dtype), materialised(wide).to(dtype)):
            assert torch.equal(got, want[expert, part::2])


def test_quantised_by_the_specification() -> None:
    """For random weights (`--load-format dummy`)."""
    weight = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    weight[0, :32] = 0
    weight[1, :4] = torch.tensor([6.0, -6.0, 0.5, -0.24])
    weight[1, 4:32] = 0
    got = dequantise_grouped(quantise_grouped(weight, FP4), torch.float32)
    assert torch.equal(got[1, :4], torch.tensor([6.0, -6.0, 0.5, 0.0])) and not got[0, :32].any()
    largest = weight.abs().unflatten(1, (2, 32)).amax(2, keepdim=True)
    assert ((got - weight).unflatten(1, (2, 32)).abs() <= largest / 3.9).all()
    again = quantise_grouped(got, FP4)
    assert torch.equal(dequantise_grouped(again, torch.float32), got)


def test_as_transformers_with_dequantised_experts(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "own", tmp_path / "twin")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.float32)
    want, model = oracle_logits(oracle, PROMPT), served(tmp_path / "own")
    assert off(logits(model), want) < 1e-5
    (out,) = Work([list(PROMPT)], [ResolvedParams(max_tokens=12, temperature=0.0)]).plain(model)
    assert list(out.tokens) == generated(oracle, PROMPT, 12)
    expert = model.layers[1].mlp.experts._run[2]
    assert isinstance(expert.gate_up.linear, Fp4Linear) and isinstance(expert.down, Fp4Linear)
    dense = served(tmp_path / "own", "none")
    assert off(logits(dense), want) < 1e-5 and dense.shape.grouped is None


def test_in_bf16(tmp_path: Path) -> None:
    """All experts are chosen: none is for another's sake."""
    write_mxfp4(tmp_path, num_experts_per_tok=4)
    want, short = logits(load(tmp_path)), load(tmp_path, dtype="bfloat16")
    assert off(logits(short), want) < 0.05
    experts, shape = short.layers[0].mlp.experts, short.shape
    if short.ops.name == "native":
        own = [products._held[0] for products in (experts._into, experts._out_of)]
        assert all(isinstance(product, NativeGrouped) for product in own)
        held = sum(product.held.nbytes for product in own)
        assert held * 4 * shape.layers == bytes_by_format(shape)["mxfp4 (groups of 32)"]


@INTERPRETED[0]
@INTERPRETED[1]
def test_grouped_on_a_device(tmp_path: Path) -> None:
    """Tokens of several requests, whose experts' rows are grouped."""
    write_mxfp4(tmp_path / "own", tmp_path / "twin", num_hidden_layers=2)
    prompts = [[5, 9, 30], list(range(40, 52))]
    params = [ResolvedParams(max_tokens=3, temperature=0.0)] * 2
    want = Work(prompts, params).plain(load(tmp_path / "twin"))
    model = served(tmp_path / "own", kernels="triton")
    assert type(model.layers[0].mlp.experts).__name__ == "Fp4Experts" and not model.waits
    assert tokens_of(Work(prompts, params).plain(model)) == tokens_of(want)


def test_what_is_held_is_what_the_plan_counts_and_the_file_has(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    shape = read_shape(tmp_path, Config())
    own = [spec for spec in model_tensors(shape) if held_format(shape.grouped, spec)]
    assert {spec.name.split(".")[4] for spec in own} == {"experts"}
    planned = bytes_by_format(shape)["mxfp4 (groups of 32)"]
    in_file = sum(tensor.nbytes for tensor in load_file(tmp_path / SINGLE).values()
                  if tensor.dtype is torch.uint8)
    held = sum(linear.own.nbytes for layer in served(tmp_path).layers
               for expert in layer.mlp.experts._run
               for linear in (expert.gate_up.linear, expert.down))
    assert planned == in_file == held


def test_ranks_share_whole_groups(tmp_path: Path) -> None:
    """96 columns are three: the second of two ranks has one, and zeros."""
    write_mxfp4(tmp_path)
    shape = read_shape(tmp_path, Config())
    for tp, size in ((1, 96), (2, 64), (4, 32)):
        part = replace(shape, heads=4, kv_heads=4).split(tp)
        assert part.experts is not None and part.experts.size == size
        experts = [spec for spec in model_tensors(part) if ".experts." in spec.name
                   and spec.projection]
        assert all(held_format(part.grouped, spec) for spec in experts)


def test_random_weights(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    config = Config(model=ModelConfig(load_format="dummy"))
    model = load_model(tmp_path, config, CPU, lambda *_: None)
    assert isinstance(model.layers[0].mlp.experts._run[0].down, Fp4Linear)
    assert logits(model).isfinite().all()


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    raw, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / SINGLE)
    name = "model.layers.1.mlp.experts.down_proj_scales"

    def refused(scales: torch.Tensor | None) -> str:
        others = {key: own for key, own in tensors.items() if key != name}
        save_file(others if scales is None else {**others, name: scales}, tmp_path / SINGLE,
                  {"format": "pt"})
        with pytest.raises(BadModel) as caught:
            served(tmp_path)
        return str(caught.value)

    assert f"tensor {name} is missing" in refused(scales=None)
    assert f"tensor {name} is torch.uint8 of shape [4, 64, 2]" in refused(
        scales=tensors[name][..., :2].contiguous())
    spoilt = tensors[name].clone()
    spoilt[3, 1, 2] = 255
    assert f"tensor {name} holds a scale that is not a number" in refused(scales=spoilt)
    for asked in ("fp8", "int4", "awq"):
        with pytest.raises(BadConfig, match=f"--quantization {asked}: .* in mxfp4"):
            read_shape(tmp_path, Config(model=ModelConfig(quantization=asked)))
    other = {**raw, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    assert "quant_method: mxfp4 is supported of GptOssForCausalLM alone" in why_refused(
        tmp_path, {**other, "quantization_config": CONFIG})


def test_rows_of_codes_that_ranks_share_stay_fp4() -> None:
    from actorium.gpu.parallel.rank_slices import Span, TensorSlice
    from actorium.gpu.weights.sliced_tensors import sliced

    own = quantise_grouped(torch.randn(9, 128), FP4)
    rows = pack_rows(own)
    part = sliced("m", rows, TensorSlice(1, (Span(64, 128, 96),)))
    got = dequantise_fp4(pack_fp4(part), torch.float32)
    whole = dequantise_grouped(own, torch.float32)
    assert torch.equal(got[:, :64], whole[:, 64:]) and not got[:, 64:].any()
    more = sliced("m", rows, TensorSlice(0, (Span(5, 9, 6),)))
    got = dequantise_fp4(pack_fp4(more), torch.float32)
    assert torch.equal(got[:4], whole[5:]) and not got[4:].any()
