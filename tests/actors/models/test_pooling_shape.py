"""What checkpoints say of how they pool, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_pooling_files import write_modules

from actorium.actors.config.tree import ModelConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models.pooling_shape import PoolingShape, generating_class, read_pooling

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
SCORES: dict[str, Any] = {"architectures": ["Qwen3ForSequenceClassification"], "hidden_size": 64}


def shape(path: Path, raw: dict[str, Any], **settings: Any) -> PoolingShape | None:
    return read_pooling(path, raw, ModelConfig(**settings))


def test_a_decoder_generates_and_embeds_unless_settings_say_otherwise(tmp_path: Path) -> None:
    both = shape(tmp_path, LLAMA)
    assert both is not None and both.generates and both.tasks == ("embed", "token_embed")
    assert (both.kind, both.normalize, both.width, both.causal) == ("last", True, 64, True)
    assert shape(tmp_path, LLAMA, runner="generate") is None
    for settings in ({"runner": "pooling"}, {"convert": "embed"}):
        alone = shape(tmp_path, LLAMA, **settings)
        assert alone is not None and not alone.generates
    with pytest.raises(BadConfig, match="convert: .* has no weights for classify, its tasks"):
        shape(tmp_path, LLAMA, convert="classify")


def test_a_class_for_scores_does_not_generate(tmp_path: Path) -> None:
    found = shape(tmp_path, {**SCORES, "id2label": {"0": "bad", "1": "good"}})
    assert found is not None and found.tasks == ("classify",) and not found.generates
    assert (found.labels, found.activation, found.scores) == (("bad", "good"), "softmax", 2)
    with pytest.raises(BadConfig, match="runner: .* does not generate, its tasks are classify"):
        shape(tmp_path, SCORES, runner="generate")
    with pytest.raises(BadModel, match="num_labels: must be a count, got 'two'"):
        shape(tmp_path, {**SCORES, "num_labels": "two"})
    with pytest.raises(BadModel, match="hidden_size: must say how wide rows are"):
        shape(tmp_path, {**SCORES, "hidden_size": None})


@pytest.mark.parametrize(("more", "activation"), [
    ({"num_labels": 1}, "sigmoid"), ({"num_labels": 3}, "softmax"),
    ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
    ({"num_labels": 1, "problem_type": "regression"}, "none"),
    ({"num_labels": 1, "sentence_transformers": {
        "activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
    ({"num_labels": 1, "sbert_ce_default_activation_function":
        "torch.nn.modules.activation.Sigmoid"}, "sigmoid")])
def test_what_scores_go_through(tmp_path: Path, more: dict[str, Any], activation: str) -> None:
    found = shape(tmp_path, {**SCORES, **more})
    assert found is not None and found.activation == activation
    off = shape(tmp_path, {**SCORES, **more}, pooler_config={"use_activation": False})
    assert off is not None and off.activation == "none"


@pytest.mark.parametrize("name", [
    "LlamaForSequenceClassification", "Qwen2ForTokenClassification", "Qwen2ForRewardModel",
    "Gemma3TextForSequenceClassification", "MistralForCausalLM"])
def test_layers_are_those_of_the_class_that_generates(name: str) -> None:
    assert generating_class(name) in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM",
                                      "MistralForCausalLM")


def test_modules_say_how_vectors_are_made(tmp_path: Path) -> None:
    write_modules(tmp_path, "mean_tokens", dense=(24,), normalize=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    (tmp_path / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "Query: ", "document": ""}}')
    found = shape(tmp_path, LLAMA)
    assert found is not None and not found.generates and found.every_row("embed")
    assert (found.kind, found.width, found.normalize, found.longest) == ("mean", 24, False, 128)
    assert dict(found.prompts) == {"query": "Query: ", "document": ""}
    (tmp_path / "sentence_bert_config.json").unlink()
    for length, longest in ((77, 77), (10**30, None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
        newer = shape(tmp_path, LLAMA)
        assert newer is not None and newer.longest == longest
    changed = shape(tmp_path, LLAMA, pooler_config={"pooling_type": "CLS", "normalize": True})
    assert changed is not None and (changed.kind, changed.normalize) == ("cls", True)


def test_without_a_pooling_module_each_token_has_a_vector(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]))
    found = shape(tmp_path, LLAMA)
    assert found is not None and found.tasks == ("token_embed",)


@pytest.mark.parametrize(("mode", "given"), [("mean_tokens", {"include_prompt": False}),
                                             ("mean_tokens", {}), ("lasttoken", {})])
def test_a_mean_may_leave_instructions_out(tmp_path: Path, mode: str, given: dict[str, Any]
                                           ) -> None:
    write_modules(tmp_path, mode, **given)
    found = shape(tmp_path, LLAMA)
    assert found is not None and found.skips_instruction is bool(given)


def write_answers(path: Path, *kinds: str, **settings: Any) -> None:
    """The modules of a reranker that generates."""
    (path / "modules.json").write_text(json.dumps([
        {"path": "" if kind == "Transformer" else "1_LogitScore", "type": f"library.{kind}"}
        for kind in kinds]))
    (path / "1_LogitScore").mkdir()
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(
        {"true_token_id": 7, "false_token_id": 3, **settings}))


def test_a_reranker_that_generates_names_its_answers(tmp_path: Path) -> None:
    write_answers(tmp_path, "Transformer", "LogitScore")
    found = shape(tmp_path, LLAMA)
    assert found is not None and found.generates and found.answers == (7, 3)
    assert shape(tmp_path, LLAMA, runner="generate") is None


@pytest.mark.parametrize(("kinds", "settings", "why"), [
    (["Transformer", "LogitScore"], {"false_token_id": None}, "must be two tokens, got .7, None"),
    (["Transformer", "LogitScore"], {"false_token_id": 7}, "must be two tokens"),
    (["Transformer", "LogitScore"], {"true_token_id": -1}, "must be two tokens"),
    (["Transformer", "Dense", "LogitScore"], {}, "LogitScore is supported behind Transformer alo")])
def test_answers_that_are_not_supported(tmp_path: Path, kinds: list[str],
                                        settings: dict[str, Any], why: str) -> None:
    write_answers(tmp_path, *kinds, **settings)
    with pytest.raises(BadModel, match=why):
        shape(tmp_path, LLAMA)


GRITLM = {"architectures": ["GritLM"], "hidden_size": 64, "sliding_window": 8}
PUBLISHED = {**GRITLM, "architectures": ["MistralForCausalLM"],
             "auto_map": {"AutoModelForCausalLM": "modeling_gritlm7b.MistralForCausalLM"}}


@pytest.mark.parametrize(("raw", "settings", "embeds"), [
    (GRITLM, {}, True), (GRITLM, {"runner": "generate"}, False), (PUBLISHED, {}, False),
    (PUBLISHED, {"runner": "pooling"}, True), (PUBLISHED, {"convert": "embed"}, True),
    (PUBLISHED, {"runner": "generate"}, False)])
def test_a_gritlm_completes_or_embeds(tmp_path: Path, raw: dict[str, Any],
                                      settings: dict[str, Any], embeds: bool) -> None:
    found = shape(tmp_path, raw, **settings)
    assert (found is not None) == embeds and generating_class("GritLM") == "MistralForCausalLM"
    if found is not None:
        assert found.tasks == ("embed", "token_embed") and not (found.generates or found.causal)
        assert found.kind == "mean" and found.normalize and found.skips_instruction
        assert found.instruction_end == "<|embed|>\n"


@pytest.mark.parametrize("code", [7, ["gritlm"], {"AutoModel": None}, {"AutoModel": "x.Mistral"}])
def test_other_code_beside_weights_is_no_gritlm(tmp_path: Path, code: Any) -> None:
    found = shape(tmp_path, {**PUBLISHED, "auto_map": code})
    assert found is not None and found.generates and not found.skips_instruction


MODULE = "sentence_transformers.models."


@pytest.mark.parametrize(("modules", "why"), [
    ([], "names no module"), ("[1, 2]", "is no list of JSON objects"),
    ("{", "is no list of JSON objects"),
    (["Pooling"], "Pooling' at place 0: only Transformer, Pooling, Dense and Normalize"),
    (["Transformer", "CNN"], "CNN' is not supported: only"),
    (["Transformer", "Normalize", "Pooling"], "Pooling' at place 2: only"),
    (["Transformer", "Pooling", "Pooling"], "Pooling' at place 2: only")])
def test_modules_that_are_not_supported(tmp_path: Path, modules: list[str] | str,
                                        why: str) -> None:
    write_modules(tmp_path, "cls_token")
    text = modules if isinstance(modules, str) else json.dumps([
        {"path": "1_Pooling", "type": MODULE + name} for name in modules])
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(BadModel, match=why):
        shape(tmp_path, LLAMA)


@pytest.mark.parametrize("folder", ["../other", "/etc", ".", "a/b", 3])
def test_modules_lie_in_the_model_s_folder(tmp_path: Path, folder: Any) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([
        {"path": "", "type": f"{MODULE}Transformer"},
        {"path": folder, "type": f"{MODULE}Pooling"}]))
    with pytest.raises(BadModel, match="path: must be a folder of the model, got"):
        shape(tmp_path, LLAMA)


@pytest.mark.parametrize(("given", "why"), [
    ({"pooling_mode_max_tokens": True}, "pooling_mode: one of cls, mean and lasttoken"),
    ({"pooling_mode_mean_tokens": False}, "pooling_mode: one of"),
    ({"pooling_mode_cls_token": True}, "pooling_mode: one of"),
    ({"include_prompt": False, "pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True},
     "include_prompt: false is not supported with cls"),
    ({"word_embedding_dimension": 65}, "must be the hidden size 64, got 65")])
def test_pooling_that_is_not_supported(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    write_modules(tmp_path, "mean_tokens", **given)
    with pytest.raises(BadModel, match=why):
        shape(tmp_path, LLAMA)


@pytest.mark.parametrize(("given", "why"), [
    ({"module_input_name": "token_embeddings"}, "must be sentence_embedding and false"),
    ({"use_residual": True}, "must be sentence_embedding and false"),
    ({"in_features": 63}, "must lead from in_features 64"), ({"out_features": 0}, "got 64 and 0"),
    ({"activation_function": "torch.nn.Mish"}, "activation_function: 'torch.nn.Mish' is not supp")])
def test_dense_layers_that_are_not_supported(tmp_path: Path, given: dict[str, Any],
                                             why: str) -> None:
    write_modules(tmp_path, "mean_tokens", dense=(8,))
    file = tmp_path / "2_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **given}))
    with pytest.raises(BadModel, match=why):
        shape(tmp_path, LLAMA)
