"""Vectors and scores against transformers: fp32, random tiny checkpoints, prompts in chunks, beside
completions and through preemptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import load
from helpers_pooling import (
    assert_near,
    hidden_rows,
    logits,
    pool_all,
    resolved,
    write_classifier,
    write_embedder,
)
from helpers_pooling_files import write_modules
from helpers_worker import make_runner
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from actorium.actors.errors import BadModel
from actorium.actors.params import PoolingTask, ResolvedPooling

PROMPTS = [[5, 9, 100, 33], list(range(3, 80)), [7] * 33, [198]]
WAYS: list[dict[str, Any]] = [{}, {"budget": 17, "force_preempt_every": 3}]


def normalized(rows: list[Tensor]) -> list[Tensor]:
    return [functional.normalize(row, dim=-1) for row in rows]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM",
                                          "Gemma3ForCausalLM"])
def test_a_decoder_that_generates_has_vectors_too(tmp_path: Path, architecture: str) -> None:
    body = write_embedder(tmp_path, architecture)
    rows = [hidden_rows(body, ids) for ids in PROMPTS]
    for way in WAYS:
        runner = make_runner(load(tmp_path, dtype="float32"))
        assert_near(pool_all(runner, PROMPTS, resolved("embed"), sampled=2, **way),
                    normalized([own[-1] for own in rows]))
        assert_near(pool_all(runner, PROMPTS, resolved("token_embed"), **way), normalized(rows))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken"])
def test_modules_of_sentence_transformers(tmp_path: Path, mode: str, way: dict[str, Any]) -> None:
    body = write_embedder(tmp_path)
    write_modules(tmp_path, mode)
    runner = make_runner(load(tmp_path, dtype="float32"))
    rows = [hidden_rows(body, ids) for ids in PROMPTS]
    pick = {"cls_token": lambda own: own[0], "mean_tokens": lambda own: own.mean(0),
            "lasttoken": lambda own: own[-1]}[mode]
    every = mode != "lasttoken"
    assert_near(pool_all(runner, PROMPTS, resolved("embed", every), **way),
                normalized([pick(own) for own in rows]))
    short = normalized([pick(own)[:10] for own in rows])
    assert_near(pool_all(runner, PROMPTS, resolved("embed", every, dimensions=10), **way), short)
    assert_near(pool_all(runner, PROMPTS, resolved("embed", every, activation=False), **way),
                [pick(own) for own in rows])


def test_dense_layers_lie_in_folders_of_their_own(tmp_path: Path) -> None:
    body = write_embedder(tmp_path)
    want = [hidden_rows(body, ids).mean(0) for ids in PROMPTS]
    for weight, bias in write_modules(tmp_path, "mean_tokens", dense=(96, 24)):
        want = [torch.tanh(functional.linear(row, weight, bias)) for row in want]
    runner = make_runner(load(tmp_path, dtype="float32"))
    assert_near(pool_all(runner, PROMPTS, resolved("embed", True)), normalized(want))


@pytest.mark.parametrize("way", WAYS)
def test_a_mean_leaves_the_instruction_out(tmp_path: Path, way: dict[str, Any]) -> None:
    body = write_embedder(tmp_path)
    write_modules(tmp_path, "mean_tokens", include_prompt=False)
    for skipped in (0, 3, 30):
        prompts = [ids for ids in PROMPTS if len(ids) > skipped]
        runner = make_runner(load(tmp_path, dtype="float32"))
        want = [hidden_rows(body, ids)[skipped:].mean(0) for ids in prompts]
        assert_near(pool_all(runner, prompts, resolved("embed", True, skipped=skipped), **way),
                    normalized(want))


@pytest.mark.parametrize("name", ["GritLM", "MistralForCausalLM", "MixtralForCausalLM"])
def test_a_gritlm_attends_to_both_sides_where_it_embeds(tmp_path: Path, name: str) -> None:
    """And without its window; where it generates, it is the decoder that it is made of."""
    body = write_embedder(tmp_path, name.replace("GritLM", "MistralForCausalLM"),
                          is_causal=False, sliding_window=None)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({
        **json.loads(file.read_text()), "architectures": [name], "is_causal": True,
        "sliding_window": 8, "auto_map": {"AutoModel": "modeling_gritlm7b.MistralModel"}}))
    causal = load(tmp_path, dtype="float32", runner="generate").shape
    assert not causal.bidirectional and any(causal.windows) and causal.pooling is None
    runner = make_runner(load(tmp_path, dtype="float32", runner="pooling"))
    want = [hidden_rows(body, ids)[2:].mean(0) for ids in PROMPTS[:3]]
    assert_near(pool_all(runner, PROMPTS[:3], resolved("embed", True, skipped=2)),
                normalized(want))


@pytest.mark.parametrize(("architecture", "options"), [
    ("LlamaForSequenceClassification", {"num_labels": 3}),
    ("LlamaForSequenceClassification", {"num_labels": 1}),
    ("Qwen2ForSequenceClassification", {"num_labels": 2}),
    ("Qwen3ForSequenceClassification", {"num_labels": 4,
                                        "problem_type": "multi_label_classification"}),
    ("MistralForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    ("Gemma2ForSequenceClassification", {"num_labels": 5, "head_dim": 32}),
    ("Gemma3TextForSequenceClassification", {"num_labels": 2, "sliding_window": 8})])
def test_scores_of_a_prompt(tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    model = write_classifier(tmp_path, architecture, **options)
    want = [logits(model, ids)[0] for ids in PROMPTS]
    runner = make_runner(load(tmp_path, dtype="float32"))
    for way in WAYS:
        assert_near(pool_all(runner, PROMPTS, resolved("classify", activation=False), **way), want)
        assert_near(pool_all(runner, PROMPTS, resolved("classify"), **way),
                    [activated(row, options) for row in want])


def activated(row: Tensor, options: dict[str, Any]) -> Tensor:
    problem = options.get("problem_type")
    if problem == "regression":
        return row
    several = options["num_labels"] > 1 and problem is None
    return row.softmax(-1) if several else row.sigmoid()


@pytest.mark.parametrize("architecture", ["Qwen3ForTokenClassification",
                                          "LlamaForTokenClassification"])
def test_scores_of_each_token(tmp_path: Path, architecture: str) -> None:
    model = write_classifier(tmp_path, architecture, num_labels=5)
    want = [logits(model, ids)[0] for ids in PROMPTS]
    runner = make_runner(load(tmp_path, dtype="float32"))
    for way in WAYS:
        found = pool_all(runner, PROMPTS, resolved("token_classify"), **way)
        assert_near(found, [rows.softmax(-1) for rows in want])


@pytest.mark.parametrize(("name", "labels", "tasks"), [
    ("Qwen2ForRewardModel", 1, ["classify", "token_classify"]),
    ("Qwen2ForProcessRewardModel", 2, ["token_classify"])])
def test_reward_models_have_two_layers_behind_their_rows(
        tmp_path: Path, name: str, labels: int, tasks: list[PoolingTask]) -> None:
    body = write_embedder(tmp_path, "Qwen2ForCausalLM")
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    torch.manual_seed(1)
    first, last = torch.nn.Linear(64, 64), torch.nn.Linear(64, labels)
    kept = {key: own for key, own in load_file(file).items() if not key.startswith("lm_head")}
    save_file({**kept, "score.0.weight": first.weight.data, "score.0.bias": first.bias.data,
               "score.2.weight": last.weight.data, "score.2.bias": last.bias.data}, file,
              {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": [name]}))
    runner = make_runner(load(tmp_path, dtype="float32"))
    assert runner.model.shape.pooling is not None
    assert list(runner.model.shape.pooling.tasks) == tasks
    with torch.no_grad():
        want = [last(first(hidden_rows(body, ids)).relu()) for ids in PROMPTS]
    assert_near(pool_all(runner, PROMPTS, resolved("token_classify")),
                [rows.softmax(-1) if labels == 2 else rows for rows in want])


def test_a_class_of_transformers_has_vectors_too(tmp_path: Path) -> None:
    body = write_embedder(tmp_path, "LlamaForCausalLM")
    runner = make_runner(load(tmp_path, dtype="float32", model_impl="transformers"))
    rows = [hidden_rows(body, ids) for ids in PROMPTS]
    for way in WAYS:
        assert_near(pool_all(runner, PROMPTS, resolved("embed"), sampled=1, **way),
                    normalized([own[-1] for own in rows]))
    model = tmp_path / "scores"
    write_classifier(model, "LlamaForSequenceClassification", num_labels=2)
    with pytest.raises(BadModel, match="heads for scores are served with classes of ours alone"):
        load(model, model_impl="transformers")


@pytest.mark.parametrize(("architecture", "options"), [
    ("Qwen3ForCausalLM", {}), ("Gemma3ForCausalLM", {}), ("CohereForCausalLM", {}),
    ("GraniteForCausalLM", {"residual_multiplier": 0.25, "embedding_multiplier": 8.0})])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, architecture: str,
                                                 options: dict[str, Any]) -> None:
    """Of some layers and of all, beside completions, in chunks and through preemptions. Granite's
    are kept divided by a factor."""
    body = write_embedder(tmp_path, architecture, **options)
    last = body.config.num_hidden_layers
    for layers in ([-1], [0, 1, last, -2], [*range(last + 1)]):
        want = []
        for ids in PROMPTS:
            with torch.no_grad():
                found = body(torch.tensor([ids]), output_hidden_states=True).hidden_states
            want.append(torch.stack([found[layer][0] for layer in layers], 1))
        for way in WAYS:
            runner = make_runner(load(tmp_path, dtype="float32",
                                      enable_return_hidden_states=True))
            got = pool_all(runner, PROMPTS, ResolvedPooling("hidden_states", True,
                                                            layers=tuple(layers)), 2, **way)
            assert_near(got, want)
