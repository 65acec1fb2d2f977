"""What a model that drafts is, and whether it has the tokens of the model it drafts for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.config.tree import Config, ModelConfig, SpeculationConfig
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.models.obtain import with_model_path
from actorium.actors.models.speculative_model import speculative_model_kind

WORDS = {"a": 0, "b": 1, "c": 2}


def write(path: Path, vocab: Any = WORDS, **config: Any) -> Path:
    """A model's directory without weights. vocab: None = it has no tokenizer."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"architectures": ["LlamaForCausalLM"]}))
    if vocab is not None:
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    return path


def asked(target: Path, draft: Path | str, speculative: str = "auto", skip: bool = False) -> str:
    """The setting `speculative` as the engine gets it."""
    return with_model_path(Config(
        model=ModelConfig(model=str(target), skip_tokenizer=skip),
        speculation=SpeculationConfig(speculative=speculative, speculative_model=str(draft)),
    )).speculation.speculative


@pytest.mark.parametrize(("config", "kind"), [
    ({"architectures": ["LlamaForCausalLM"]}, "draft"), ({"model_type": "qwen3"}, "draft"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
    ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
    ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
    ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3")])
def test_its_config_says_by_what_it_drafts(config: dict[str, Any], kind: str,
                                           tmp_path: Path) -> None:
    assert speculative_model_kind(write(tmp_path, **config)) == kind


def test_auto_is_what_the_model_is(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "target"), write(tmp_path / "draft")
    head = write(tmp_path / "head", None, architectures=["LlamaForCausalLMEagle3"])
    assert asked(target, draft) == "auto+draft:4" and asked(target, head) == "auto+eagle3:3"
    assert asked(target, draft, "auto+draft:2") == "auto+draft:2"
    assert asked(target, head, "auto+ngram:4") == "auto+ngram:4+eagle3:3"
    assert asked(target, draft, "off") == "off" and asked(target, "") == "auto"
    assert asked(target, draft, "draft:7,fixed") == "draft:7,fixed"
    assert asked(target, draft, "ngram+draft:2") == "ngram+draft:2"
    with pytest.raises(BadConfig, match="speculative_model: .*/head drafts by eagle3, and spec"):
        asked(target, head, "draft:2")


@pytest.mark.parametrize(("theirs", "why"), [
    ({"a": 0, "b": 1, "d": 2}, "number 2 is 'd', not 'c'"), ({"a": 0, "b": 1}, "number 2 is none"),
    ([["a", 0.0], ["c", -1.0]], "number 1 is 'c', not 'b'")])
def test_other_tokens_are_refused(theirs: Any, why: str, tmp_path: Path) -> None:
    target, draft = write(tmp_path / "target"), write(tmp_path / "draft", theirs)
    with pytest.raises(BadConfig, match="^speculative_model: .*/draft has other tokens") as caught:
        asked(target, draft)
    assert why in caught.value.message
    assert asked(target, draft, skip=True) == "auto+draft:4"


def test_the_same_tokens_in_another_form(tmp_path: Path) -> None:
    """Scores, merges and added tokens may differ."""
    target = write(tmp_path / "target", [["a", 0.0], ["b", -1.0], ["c", -2.0]])
    assert asked(target, write(tmp_path / "draft")) == "auto+draft:4"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "target"), write(tmp_path / "draft", None)
    with pytest.raises(BadModel, match="^speculative_model: .*/draft/tokenizer.json is missing"):
        asked(target, draft)
    with pytest.raises(BadModel, match="^speculative_model: no such directory: .*/none "):
        asked(target, tmp_path / "none")
    (draft / "tokenizer.json").write_text("{")
    with pytest.raises(BadModel, match="cannot read .*/draft/tokenizer.json"):
        asked(target, draft)
