"""Tensors of GGUF files: each type as the gguf package reads it, each architecture as transformers
computes it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from helpers_gguf import ARCHITECTURES, KINDS, own_cache, stored, write_model
from helpers_models import Seq, Stepper, generated, load, oracle_logits
from helpers_pairs import pairs
from helpers_worker import Ring, make_runner

from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models.gguf_config import checkpoint_tensors
from actorium.actors.models.gguf_file import OTHER_TYPES, TYPES, read_gguf
from actorium.actors.models.model_dir import resolve
from actorium.actors.params import ResolvedParams
from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.gpu.weights.gguf_blocks import FORMATS, NATIVE, grouped, write_numbers, write_rows
from actorium.gpu.weights.gguf_reader import PLAIN, read_part
from actorium.kernels.grouped_rows import dequantise_grouped, pack_rows, row_format, unpack_rows

__all__ = ["own_cache"]
GREEDY = ResolvedParams(max_tokens=10, temperature=0.0)
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
OPTIONS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "Qwen2ForCausalLM": {}, "Qwen3ForCausalLM": {"head_dim": 32},
    "Qwen3MoeForCausalLM": {"num_experts": 6, "num_experts_per_tok": 2,
                            "moe_intermediate_size": 32, "norm_topk_prob": True},
    "Gemma3ForCausalLM": {"sliding_window": 24, "num_hidden_layers": 7,
                          "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
}


def test_every_type_of_the_package_is_served_or_refused_by_name() -> None:
    assert {own.name: (own.numbers, own.bytes) for own in TYPES.values()} == {
        kind: gguf.GGML_QUANT_SIZES[Type[kind]] for kind in KINDS}
    assert {*FORMATS, *PLAIN} == set(KINDS) and set(FORMATS) > NATIVE
    names = {number: own.name for number, own in TYPES.items()} | OTHER_TYPES
    assert names == {own.value: own.name for own in Type}


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_worth_what_the_package_says_to_the_bit(kind: str) -> None:
    raw, want = stored(torch.randn(7, 768), kind)
    own = grouped(kind, torch.from_numpy(raw))
    again = unpack_rows(pack_rows(own))
    for each in (own, again):
        assert torch.equal(dequantise_grouped(each, torch.float32), want)
    assert own.format == FORMATS[kind] == again.format


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_of_any_bytes(kind: str) -> None:
    """Every code and scale, infinite and undefined ones too."""
    size = gguf.GGML_QUANT_SIZES[Type[kind]][1]
    raw = np.random.default_rng(1).integers(0, 256, (64, 3 * size), np.uint8)
    with np.errstate(all="ignore"):
        want = torch.from_numpy(gguf.dequantize(raw, Type[kind]))
    found = dequantise_grouped(grouped(kind, torch.from_numpy(raw)), torch.float32)
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", sorted(NATIVE))
def test_rows_are_made_in_c_as_in_torch(kind: str) -> None:
    """To the bit, but for the sign of a zero, and which number that is none a scale is."""
    blocks = torch.from_numpy(np.random.default_rng(2).integers(
        0, 256, (37, 2 * gguf.GGML_QUANT_SIZES[Type[kind]][1]), np.uint8))
    want = pack_rows(grouped(kind, blocks))
    found = torch.full_like(want, 99)
    write_rows(kind, blocks, found)
    assert row_format(found) == FORMATS[kind]
    for a, b in zip(unpack_rows(found)[:3], unpack_rows(want)[:3], strict=True):
        assert a is None and b is None or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "dtype"), pairs(sorted(NATIVE), [torch.bfloat16, torch.float32]))
def test_numbers_are_made_in_c_as_in_torch(kind: str, dtype: torch.dtype) -> None:
    """Every code and scale, infinite and undefined ones too; rows longer than a strip."""
    blocks = torch.from_numpy(np.random.default_rng(3).integers(
        0, 256, (9, 1280 // gguf.GGML_QUANT_SIZES[Type[kind]][0]
                 * gguf.GGML_QUANT_SIZES[Type[kind]][1]), np.uint8))
    want = dequantise_grouped(grouped(kind, blocks), dtype)
    found = torch.full((9, 1280), 99, dtype=dtype)
    write_numbers(kind, blocks, found)
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


def _check(path: Path, oracle: Any) -> None:
    """Greedy tokens of several prompts together are those of transformers. auto: weights are held
    in codes, which products by reference dequantise."""
    rng = random.Random(7)
    prompts = [[rng.randrange(199) for _ in range(n)] for n in (1, 5, 33, 60)]
    want = [generated(oracle, p, GREEDY.max_tokens) for p in prompts]
    for quantization in ("none", "auto"):
        model = load(resolve(str(path)), native=False, dtype="float32", quantization=quantization)
        ring = Ring(make_runner(model))
        for prompt in prompts:
            ring.submit(prompt, GREEDY)
        assert [o.tokens for o in ring.run()] == want, quantization


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    _check(path, write_model(path, architecture, "Q4_0", 3, **OPTIONS[architecture]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_served(kind: str, tmp_path: Path) -> None:
    """As most files have them: the embedding in another type than the rest."""
    path = tmp_path / "tiny.gguf"
    oracle = write_model(path, "LlamaForCausalLM", kind, 5, embedding="Q8_0", num_hidden_layers=2,
                         **WIDE)
    _check(path, oracle)
    shape = load(resolve(str(path))).shape
    assert shape.grouped is not None and shape.grouped.source == "gguf"


@pytest.mark.parametrize("kind", ["BF16", "Q4_0"])
def test_a_model_in_several_files(kind: str, tmp_path: Path) -> None:
    """As the package splits it: a file's parts say what the whole does, by the name of any of them,
    codes side by side in one weight out of two files too."""
    write_model(tmp_path / "whole.gguf", "Qwen3ForCausalLM", kind, 3, **OPTIONS["Qwen3ForCausalLM"])
    write_model(tmp_path / "m.gguf", "Qwen3ForCausalLM", kind, 3, tensors_each=3,
                **OPTIONS["Qwen3ForCausalLM"])
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) > 5
    ids = list(range(2, 60))
    want, *found = (Stepper(load(resolve(str(path)), dtype="bfloat16")).step(
        [(Seq(ids), len(ids))], every_row=True)
        for path in (tmp_path / "whole.gguf", parts[0], parts[-1]))
    assert all(torch.equal(own, want) for own in found)


@pytest.mark.parametrize("kind", FORMATS)
def test_products_in_codes_are_near_those_of_what_they_are_worth(kind: str,
                                                                 tmp_path: Path) -> None:
    path, ids = tmp_path / "tiny.gguf", list(range(2, 90))
    oracle = write_model(path, "LlamaForCausalLM", kind, 5, num_hidden_layers=2,
                         tie_word_embeddings=True, **WIDE)
    want = oracle_logits(oracle, ids)
    errors = []
    for quantization in ("none", "auto"):
        stepper = Stepper(load(resolve(str(path)), dtype="bfloat16", quantization=quantization))
        found = stepper.step([(Seq(ids), len(ids))], every_row=True)
        errors.append(float((found.float() - want).norm() / want.norm()))
    assert errors[0] < 0.05 and errors[1] < 3 * errors[0], errors


def test_the_plan_counts_what_is_held(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, "LlamaForCausalLM", "Q4_0", 5, embedding="Q8_0", num_hidden_layers=1,
                vocab_size=208, **WIDE)
    kept, plain = (weight_bytes(load(resolve(str(path)), quantization=own).shape)
                   for own in ("auto", "none"))
    layer, outer = (2 * 4 + 2 * 2) * 64 * 256 + 3 * 256 * 512, 2 * 208 * 256
    assert plain - kept == 2 * (layer + outer) - layer * 18 // 32 - outer * 34 // 32


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_what_is_in_codes_is_not_rounded_twice(quantization: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    oracle = write_model(path, "LlamaForCausalLM", "Q8_0", 5)
    with pytest.raises(BadConfig, match="in gguf already"):
        load(resolve(str(path)), quantization=quantization)
    oracle = write_model(path, "LlamaForCausalLM", "BF16", 5)
    model = load(resolve(str(path)), quantization=quantization)
    ids = list(range(2, 60))
    found = Stepper(model).step([(Seq(ids), len(ids))], every_row=True)
    want = oracle_logits(oracle, ids)
    assert 0.01 < float((found.float() - want).norm() / want.norm()) < 0.5


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    """Nothing is mapped: a read that finds no more is an error with one line."""
    path = tmp_path / "tiny.gguf"
    write_model(path, "Qwen2ForCausalLM", "Q8_0")
    parts = list(checkpoint_tensors(read_gguf(path)))
    last = next(part for part in reversed(parts) if len(part.shape) == 2)
    os.truncate(path, last.stored.start + 5)
    read_part(parts[0], torch.bfloat16, False, torch.device("cpu"))
    for rows in (False, True):
        with pytest.raises(BadModel, match="it ends early"):
            read_part(last, torch.bfloat16, rows, torch.device("cpu"))
