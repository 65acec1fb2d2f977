"""Encoders against transformers: fp32, random tiny checkpoints, prompts of several lengths in one
step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_encoders import VOCABULARY, encoded, write_encoder
from helpers_models import load, write_checkpoint
from torch import Tensor

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "BertModel", {}),
    ("bert-tanh", "BertForMaskedLM", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    ("roberta", "RobertaModel", {"type_vocab_size": 1}),
    ("camembert", "CamembertModel", {"type_vocab_size": 1}),
    ("xlm-roberta", "XLMRobertaModel", {"type_vocab_size": 1}),
    ("distilbert", "DistilBertModel", {}),
    ("nomic", "NomicBertModel", {}),
    ("gte", "GteModel", {}),
    ("modernbert", "ModernBertModel", {"local_attention": 10, "num_hidden_layers": 4}),
    ("modernbert-biased", "ModernBertForMaskedLM",
     {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    ("eurobert", "EuroBertModel", {"num_key_value_heads": 2}),
]
DECODERS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2", "Qwen2ForCausalLM", {"is_causal": False}),
    ("qwen3", "Qwen3ForCausalLM", {"is_causal": False}),
    ("llama", "LlamaForCausalLM", {"is_causal": False, "tie_word_embeddings": True}),
    ("gemma3", "Gemma3ForCausalLM", {"use_bidirectional_attention": True, "sliding_window": 12,
                                     "sliding_window_pattern": 2}),
]
"""Decoders whose configs say that tokens attend to both sides."""
LENGTHS = (23, 1, 7, 23, 40)


def drawn(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    """Prompts of these lengths, without the tokens that stand for padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def wanted(oracle: Any, prompt: list[int], types: list[int] | None = None) -> Tensor:
    """[len(prompt), hidden] by transformers."""
    own = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        hidden: Tensor = oracle.base_model(torch.tensor([prompt]), **own).last_hidden_state[0]
    return hidden


def assert_near(got: Tensor, want: Tensor) -> None:
    assert float((got - want).abs().max()) < 1e-4 * float(want.abs().max())
    assert float(F.cosine_similarity(got, want).min()) > 0.9999


@pytest.mark.parametrize(("architecture", "options"), [case[1:] for case in CASES],
                         ids=[case[0] for case in CASES])
def test_hidden_states_are_those_of_transformers(
        tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    oracle = write_encoder(tmp_path, architecture, **options)
    prompts, model = drawn(), load(tmp_path)
    for got, prompt in zip(encoded(model, prompts), prompts, strict=True):
        assert_near(got, wanted(oracle, prompt))


@pytest.mark.parametrize(("architecture", "options"), [case[1:] for case in DECODERS],
                         ids=[case[0] for case in DECODERS])
def test_decoders_that_attend_to_both_sides(
        tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    oracle = write_checkpoint(tmp_path, architecture, **options)
    prompts, model = drawn(), load(tmp_path)
    assert model.shape.bidirectional
    for got, prompt in zip(encoded(model, prompts), prompts, strict=True):
        assert_near(got, wanted(oracle, prompt))


@pytest.mark.parametrize("architecture", ["BertModel", "NomicBertModel", "GteModel"])
def test_rows_of_a_second_text_have_its_type(tmp_path: Path, architecture: str) -> None:
    oracle = write_encoder(tmp_path, architecture, type_vocab_size=2)
    prompts, model = drawn((9, 12)), load(tmp_path)
    types = [[0] * 4 + [1] * 5, [0] * 12]
    for got, prompt, own in zip(encoded(model, prompts, types), prompts, types, strict=True):
        assert_near(got, wanted(oracle, prompt, own))
