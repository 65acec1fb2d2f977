"""Encoders against transformers: fp32, random tiny checkpoints, prompts of several lengths in one
step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_configs import SMALL
from helpers_encoders import VOCABULARY, encoded, write_encoder
from helpers_models import load, why_refused, write_checkpoint
from helpers_pooling import NOT_SAMPLED, pool_all, resolved
from helpers_pooling import assert_near as assert_all_near
from helpers_pooling_files import write_modules
from helpers_ranks import run_ranks, whole
from helpers_worker import CPU, Ring, make_runner
from safetensors.torch import load_file
from torch import Tensor

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.errors import BadConfig
from actorium.gpu.families.architectures import model_tensors
from actorium.gpu.models.registry import load_model
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.worker.device import open_device

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "BertModel", {}),
    ("bert-tanh", "BertForMaskedLM", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    ("roberta", "RobertaModel", {"type_vocab_size": 1}),
    ("camembert", "CamembertModel", {"type_vocab_size": 1}),
    ("xlm-roberta", "XLMRobertaModel", {"type_vocab_size": 1}),
    ("distilbert", "DistilBertModel", {}),
    ("mpnet", "MPNetModel", {"max_position_embeddings": 182}),
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
BIG = {"hidden_size": 128, "intermediate_size": 256}
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
    lengths = (*LENGTHS, 180) if architecture == "MPNetModel" else LENGTHS  # distances that grow
    prompts, model = drawn(lengths), load(tmp_path)
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


# --- through the scheduler's core ----------------------------------------------------------------

HEADS: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "BertForSequenceClassification", {"num_labels": 3}),
    ("roberta-score", "RobertaForSequenceClassification", {"num_labels": 1}),
    ("xlm-roberta", "XLMRobertaForSequenceClassification", {"num_labels": 2}),
    ("mpnet", "MPNetForSequenceClassification", {"num_labels": 2}),
    ("distilbert", "DistilBertForSequenceClassification", {"num_labels": 2}),
    ("modernbert", "ModernBertForSequenceClassification",
     {"num_labels": 3, "norm_bias": True, "classifier_bias": True}),
    ("modernbert-mean", "ModernBertForSequenceClassification",
     {"num_labels": 1, "classifier_pooling": "mean"}),
    ("eurobert-mean", "EuroBertForSequenceClassification",
     {"num_labels": 2, "classifier_pooling": "mean"}),
    ("gte", "GteForSequenceClassification", {"num_labels": 1}),
]


def scores(oracle: Any, prompt: list[int], types: list[int] | None = None) -> Tensor:
    own = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        found: Tensor = oracle(torch.tensor([prompt]), **own).logits[0]
    return found


@pytest.mark.parametrize(("architecture", "options"), [case[1:] for case in HEADS],
                         ids=[case[0] for case in HEADS])
def test_scores_of_texts(tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    oracle, prompts = write_encoder(tmp_path, architecture, **options), drawn()
    runner = make_runner(load(tmp_path))
    want = [scores(oracle, prompt) for prompt in prompts]
    asked = resolved("classify", True, activation=False)
    # Prompts are computed whole, whatever else a step has room for.
    assert_all_near(pool_all(runner, prompts, asked, budget=41), want)
    one = options["num_labels"] == 1
    assert_all_near(pool_all(runner, prompts, resolved("classify", True)),
                    [row.sigmoid() if one else row.softmax(-1) for row in want])


@pytest.mark.parametrize("architecture", ["BertForTokenClassification",
                                          "ModernBertForTokenClassification"])
def test_scores_of_tokens(tmp_path: Path, architecture: str) -> None:
    oracle, prompts = write_encoder(tmp_path, architecture, num_labels=5), drawn()
    found = pool_all(make_runner(load(tmp_path)), prompts, resolved("token_classify"))
    assert_all_near(found, [scores(oracle, prompt).softmax(-1) for prompt in prompts])


def test_scores_of_pairs_know_the_second_text(tmp_path: Path) -> None:
    oracle = write_encoder(tmp_path, "BertForSequenceClassification", num_labels=1)
    prompts, runner = drawn((9, 9)), make_runner(load(tmp_path))
    asked = resolved("classify", True, activation=False, pair_start=4)
    want = [scores(oracle, prompt, [0] * 4 + [1] * 5) for prompt in prompts]
    assert_all_near(pool_all(runner, prompts, asked), want)
    assert abs(want[0] - scores(oracle, prompts[0])).max() > 1e-3, "types matter here"


@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens"])
def test_vectors_by_modules(tmp_path: Path, mode: str) -> None:
    oracle, prompts = write_encoder(tmp_path, "BertModel"), drawn()
    write_modules(tmp_path, mode)
    rows = [wanted(oracle, prompt) for prompt in prompts]
    want = [F.normalize(own[0] if mode == "cls_token" else own.mean(0), dim=-1) for own in rows]
    assert_all_near(pool_all(make_runner(load(tmp_path)), prompts, resolved("embed", True)), want)


def test_a_prompt_longer_than_a_step_is_refused_by_the_flag(tmp_path: Path) -> None:
    write_encoder(tmp_path, "BertModel")
    ring = Ring(make_runner(load(tmp_path)), budget=16)
    for prompt in drawn((17, 16)):
        ring.submit(prompt, NOT_SAMPLED, pooling=resolved("embed", True))
    refused, served = ring.run()
    assert refused.pooled is None and "--max-num-batched-tokens" in str(refused.error)
    assert served.pooled is not None


@pytest.mark.parametrize(("architecture", "options"), [
    ("BertModel", {}), ("NomicBertModel", {}), ("ModernBertModel", {"local_attention": 128})])
def test_bf16_rows_have_the_same_bits_alone_and_together(
        tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    oracle = write_encoder(tmp_path, architecture, **sizes, **options)
    model, prompts = load(tmp_path, dtype="bfloat16"), drawn()
    if model.ops.name != "native":
        pytest.skip("no compiler for the kernels in C")
    together = encoded(model, prompts)
    for got, prompt in zip(together, prompts, strict=True):
        assert torch.equal(got, encoded(model, [prompt])[0])
        want = wanted(oracle, prompt)
        assert float(F.cosine_similarity(got.float(), want).min()) > 0.99


@pytest.mark.parametrize("architecture", ["BertModel", "ModernBertModel", "MPNetModel"])
def test_two_ranks_share_the_layers(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "model"
    oracle, prompts = write_encoder(path, architecture), drawn()
    config = Config(model=ModelConfig(model=str(path)))

    def rows(group: RankGroup) -> list[Tensor]:
        return encoded(load_model(path, config, CPU, lambda *_: None, group), prompts)

    for own in whole(run_ranks(tmp_path / "group", 2, rows)):
        for got, prompt in zip(own, prompts, strict=True):
            assert_near(got, wanted(oracle, prompt))


@pytest.mark.parametrize(("architecture", "dtype"), [
    ("BertModel", "float32"), ("ModernBertModel", "bfloat16"), ("GteModel", "float32")])
def test_a_worker_holds_what_the_plan_counts(tmp_path: Path, architecture: str, dtype: str) -> None:
    write_encoder(tmp_path, architecture, **BIG)
    config = Config(model=ModelConfig(model=str(tmp_path), dtype=dtype),
                    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
                    device=DeviceConfig(device="cpu", threads=1))
    opened = open_device(config, 1, lambda *_: None, {})
    planned, measured = opened.footprint.planned, opened.footprint.measured
    assert planned["pages"] == measured["pages"] == 0
    assert planned["tables"] == measured["tables"]
    specs = model_tensors(opened.runner.model.shape)
    assert planned["weights"] == sum(spec.size for spec in specs) * (4 if dtype == "float32" else 2)
    assert opened.ready.whole_prompts and opened.ready.pooling == ["embed", "token_embed"]
    assert not opened.info.graphs and "nothing is decoded" in opened.info.no_graphs


@pytest.mark.parametrize("bits", ["int8", "int4", "fp8"])
def test_weights_are_quantised_when_they_are_read(tmp_path: Path, bits: str) -> None:
    oracle, prompts = write_encoder(tmp_path, "BertModel", **BIG), drawn()
    for got, prompt in zip(encoded(load(tmp_path, quantization=bits), prompts), prompts,
                           strict=True):
        near = F.cosine_similarity(got.mean(0), wanted(oracle, prompt).mean(0), dim=0)
        assert float(near) > (0.9 if bits == "int4" else 0.99)


@pytest.mark.parametrize(("memory", "words"), [
    ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype: fp8_e4m3: nothing is kept of prompts"),
    ({"host_cache": 1 << 20}, "host_cache: nothing is kept of prompts")])
def test_flags_of_pages_are_refused(tmp_path: Path, memory: dict[str, Any], words: str) -> None:
    write_encoder(tmp_path, "BertModel")
    config = Config(model=ModelConfig(model=str(tmp_path)), memory=MemoryConfig(**memory),
                    device=DeviceConfig(device="cpu", threads=1))
    with pytest.raises(BadConfig, match=words):
        open_device(config, 1, lambda *_: None, {})


@pytest.mark.parametrize(("fields", "words"), [
    ({"position_embedding_type": "relative_key"}, "position_embedding_type: only 'absolute'"),
    ({"is_decoder": True}, "is_decoder: only False"),
    ({"hidden_act": "mish"}, "hidden_act: must be one of"),
    ({"architectures": ["RobertaModel"], "model_type": "roberta", "pad_token_id": 0},
     "pad_token_id: only 1"),
    ({"architectures": ["EuroBertForSequenceClassification"]}, "classifier_pooling: 'late'"),
    ({"architectures": ["NomicBertModel"], "n_embd": 64, "prenorm": True}, "prenorm: only False"),
    ({"architectures": ["Gemma2ForCausalLM"], "is_causal": False}, "is_causal: False is not "
     "supported with capped scores"),
    ({"architectures": ["BertModel"], "add_cross_attention": True}, "add_cross_attention: only")])
def test_what_is_not_served_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    base = {**SMALL, "architectures": ["BertModel"], "num_key_value_heads": 4}
    assert words in why_refused(tmp_path, {**base, **fields})


def test_fields_and_names_of_nomics_own_code(tmp_path: Path) -> None:
    """Of what transformers reads as well: the same model under both descriptions."""
    oracle = write_encoder(tmp_path, "NomicBertModel")
    ours, prompts = load(tmp_path), drawn()
    want, config = encoded(ours, prompts), oracle.config
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "prenorm": False,
        "n_embd": config.hidden_size, "n_head": 4, "n_layer": 3, "n_inner": 96, "n_positions": 66,
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu", "type_vocab_size": 2, "vocab_size": VOCABULARY}))
    assert any("attn.Wqkv" in name for name in load_file(tmp_path / "model.safetensors"))
    for got, rows in zip(encoded(load(tmp_path), prompts), want, strict=True):
        assert torch.equal(got, rows)
