"""Weights in every format, read by ranks: the model is the one that a rank alone has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_fp8 import write_twins
from helpers_gguf import own_cache, write_model
from helpers_models import CPU, Seq, Stepper, generate, write_checkpoint
from helpers_ranks import run_ranks, whole
from helpers_stored import Kind, write_stored
from helpers_tables import write_tables
from safetensors.torch import load_file, save_file
from torch import Tensor

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.errors import BadConfig
from actorium.actors.models.model_dir import resolve
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.models.registry import load_model
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup, RankPlace
from actorium.gpu.parallel.rank_slices import Span, TensorSlice
from actorium.gpu.weights.sliced_tensors import own_heads, sliced
from actorium.kernels.grouped_rows import (
    RowFormat,
    dequantise_grouped,
    pack_rows,
    quantise_grouped,
    unpack_rows,
)
from actorium.kernels.scaled_linear import dequantise_rows, pack, quantise_rows

PROMPTS = [[5, 9, 30, 2, 77, 140, 8, 8, 61], [3, 17, 120, 4], list(range(20, 61))]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def stored(kind: Kind) -> Callable[[Path], dict[str, Any]]:
    def write(path: Path) -> dict[str, Any]:
        write_checkpoint(path / "plain", "LlamaForCausalLM", mlp_bias=True, **WIDE)
        write_stored(path / "plain", path / "m", path / "twin", kind)
        return {"model": str(path / "m")}
    return write


def tables(kind: str) -> Callable[[Path], dict[str, Any]]:
    def write(path: Path) -> dict[str, Any]:
        write_checkpoint(path / "plain", "LlamaForCausalLM", mlp_bias=True, **WIDE)
        write_tables(path / "plain", path / "m", path / "twin", kind)
        return {"model": str(path / "m")}
    return write


def fp8(block: bool) -> Callable[[Path], dict[str, Any]]:
    def write(path: Path) -> dict[str, Any]:
        write_checkpoint(path / "plain", "LlamaForCausalLM", **WIDE)
        write_twins(path / "plain", path / "m", path / "twin", block)
        return {"model": str(path / "m"), "quantization": "none"}
    return write


def online(quantization: str) -> Callable[[Path], dict[str, Any]]:
    def write(path: Path) -> dict[str, Any]:
        write_checkpoint(path / "m", "Qwen3ForCausalLM", tie_word_embeddings=True, **WIDE)
        return {"model": str(path / "m"), "quantization": quantization, "quantization_group": 32,
                "quantization_head": quantization}
    return write


def padded(path: Path) -> dict[str, Any]:
    """Embedding and head have rows beyond the vocabulary."""
    write_checkpoint(path / "m", "LlamaForCausalLM", **WIDE)
    file = path / "m" / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat((tensors[name], torch.full((9, 128), torch.nan)))
    save_file(tensors, file)
    return {"model": str(path / "m")}


def gguf(kind: str, quantization: str = "auto", architecture: str = "LlamaForCausalLM",
         **options: Any) -> Callable[[Path], dict[str, Any]]:
    def write(path: Path) -> dict[str, Any]:
        write_model(path / "m.gguf", architecture, kind, 5, num_hidden_layers=2,
                    **{**WIDE, **options})
        return {"model": str(resolve(str(path / "m.gguf"))), "dtype": "float32",
                "quantization": quantization}
    return write


FORMATS = {
    "awq": stored(Kind("awq")), "gptq": stored(Kind("gptq")),
    "gptq, a scale a row": stored(Kind("gptq", 4, -1, True)),
    "w4a16": stored(Kind("pack-quantized", 4, 32, True)),
    "w8a8": stored(Kind("int-quantized", 8, -1)),
    **{kind: tables(kind) for kind in ("nf4, nested", "nvfp4", "mxfp4")},
    "LLM.int8": tables("int8"),
    "fp8": fp8(False), "fp8, in blocks": fp8(True), "int8": online("int8"), "int4": online("int4"),
    "Q4_0": gguf("Q4_0"), "Q8_0": gguf("Q8_0"), "Q5_1": gguf("Q5_1"),
    "rows of one tensor": gguf("IQ4_NL", architecture="Phi3ForCausalLM"),
    "what tokens give every layer": gguf(
        "Q4_0", architecture="Gemma4ForCausalLM", vocab_size_per_layer_input=199,
        hidden_size_per_layer_input=32, num_kv_shared_layers=0, global_head_dim=64,
        layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True),
    "latents": gguf("MXFP4", architecture="DeepseekV3ForCausalLM", num_key_value_heads=4,
                    q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=8,
                    head_dim=8, v_head_dim=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
                    topk_group=1, moe_intermediate_size=64, first_k_dense_replace=1),
    "Q4_0, dense": gguf("Q4_0", "none"), "rows beyond the vocabulary": padded,
}
__all__ = ["own_cache"]


def answers(model: dict[str, Any], group: RankGroup) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens, and the logits of a prompt's last token."""
    config = Config(model=ModelConfig(**model),
                    device=DeviceConfig(kernels="torch", native_kernels=False))
    own = load_model(Path(model["model"]), config, CPU, lambda *_: None, group)
    tokens = generate(Stepper(own, 128), PROMPTS, 6)
    return tokens, Stepper(own, 64).step([(Seq(list(PROMPTS[2])), len(PROMPTS[2]))])


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_read_every_format(tmp_path: Path, name: str) -> None:
    model = FORMATS[name](tmp_path)
    tokens, logits = answers(model, LoneRank())
    for own, got in whole(run_ranks(tmp_path / "group", 2, lambda group: answers(model, group))):
        assert own == tokens
        assert float((got - logits).abs().max()) <= 2e-5 * float(logits.abs().max())


@pytest.mark.parametrize("kind", [Kind("gptq", 4, 32, True, True)])
def test_an_order_of_columns_cannot_be_shared_out(tmp_path: Path, kind: Kind) -> None:
    model = stored(kind)(tmp_path)
    found = run_ranks(tmp_path / "group", 2, lambda group: answers(model, group))
    assert all(isinstance(own, BadConfig) and "_proj.weight cannot be shared out" in str(own)
               for own in found)


def test_groups_that_are_cut_are_held_wide_and_said_to_be(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path / "plain", "LlamaForCausalLM", mlp_bias=True, hidden_size=128,
                     intermediate_size=192, head_dim=32)
    write_stored(tmp_path / "plain", tmp_path / "m", tmp_path / "twin", Kind("awq", 4, 64))
    model = {"model": str(tmp_path / "m")}
    tokens, logits = answers(model, LoneRank())
    for own, got in whole(run_ranks(tmp_path / "group", 2, lambda group: answers(model, group))):
        assert own == tokens
        assert float((got - logits).abs().max()) <= 2e-5 * float(logits.abs().max())
    assert "a rank has no whole groups of columns" in caplog.text


FORMS = {"plain": lambda weight: weight,
         "fp8": lambda weight: pack(*quantise_rows(weight)),
         "4 bits": lambda weight: pack_rows(quantise_grouped(weight, RowFormat(4, 32, False, 8))),
         "8 bits, mins": lambda weight: pack_rows(
             quantise_grouped(weight, RowFormat(8, 16, True))),
         "a scale a row": lambda weight: pack_rows(
             quantise_grouped(weight, RowFormat(8, 0, False, 128)))}


def wide(name: str, weight: Tensor) -> Tensor:
    """What it stands for."""
    if name == "plain":
        return weight
    if name == "fp8":
        return dequantise_rows(weight, torch.float32)
    return dequantise_grouped(unpack_rows(weight), torch.float32)


@pytest.mark.parametrize("name", FORMS)
def test_slices_of_rows_and_columns(name: str) -> None:
    torch.manual_seed(4)
    weight = FORMS[name](torch.randn(40, 128))
    dense = wide(name, weight)
    rows = sliced("w", weight, TensorSlice(0, (Span(4, 10, 6), Span(30, 40, 10))))
    assert torch.equal(wide(name, rows), torch.cat((dense[4:10], dense[30:40])))
    more = wide(name, sliced("w", weight, TensorSlice(0, (Span(24, 40, 20),))))
    assert torch.equal(more[:16], dense[24:]) and bool((more[16:] == 0).all())
    columns = sliced("w", weight, TensorSlice(1, (Span(64, 128, 64),)))
    assert torch.equal(wide(name, columns), dense[:, 64:])
    more = wide(name, sliced("w", weight, TensorSlice(1, (Span(96, 128, 64),))))
    assert torch.equal(more[:, :32], dense[:, 96:]) and more.shape == (40, 64)


def test_columns_within_a_group_or_block_are_refused() -> None:
    weight = FORMS["4 bits"](torch.randn(8, 128))
    with pytest.raises(BadConfig, match="--tp: tensor w cannot be shared out: columns 16 to 80"):
        sliced("w", weight, TensorSlice(1, (Span(16, 80, 64),)))
    scales = torch.rand(8, 2) + 0.1
    blocks = pack(torch.randn(8, 256).to(torch.float8_e4m3fn), scales)
    whole_block = sliced("w", blocks, TensorSlice(1, (Span(128, 256, 128),)))
    assert torch.equal(wide("fp8", whole_block), wide("fp8", blocks)[:, 128:])
    with pytest.raises(BadConfig, match="columns share scales by 128"):
        sliced("w", blocks, TensorSlice(1, (Span(64, 128, 64),)))


def test_scales_of_keys_and_values_are_those_of_the_ranks_heads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "LlamaForCausalLM", num_attention_heads=8, num_key_value_heads=4)
    shape, scales = read_shape(tmp_path, Config()), torch.arange(8.0)
    assert own_heads(scales, shape, RankPlace(1, 2)).tolist() == [2, 3, 6, 7]
    assert own_heads(scales, shape, RankPlace(5, 8)).tolist() == [2, 6]
    assert own_heads(scales, shape, RankPlace(0, 1)) is scales
