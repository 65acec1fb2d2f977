"""Grammars: what they let through, and what is refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import actorium
from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import ThoughtRule
from actorium.actors.params import SamplingParams, Structured
from actorium.actors.structured import grammar
from actorium.actors.structured.grammar import GrammarMatcher, GrammarVocabulary, grammar_of
from actorium.actors.structured.grammar_validator import GrammarValidator
from actorium.actors.structured.guides import ThoughtGuide
from actorium.actors.structured.text_state import limits_of
from actorium.actors.tokenizer.defaults import ModelFacts

MODEL = Path(actorium.__file__).parent / "tools" / "demo" / "demo_model"
SIZE, EOS = 1920, 2


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(MODEL / "tokenizer.json", SIZE, [EOS])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def allowed(bits: Any) -> list[int]:
    found = np.unpackbits(bits.view(np.uint8), bitorder="little")[:SIZE]
    return [int(token) for token in np.flatnonzero(found)]


def walk(matcher: GrammarMatcher, seed: int, most: int = 300) -> list[int]:
    """Tokens drawn at random among those allowed; the end as soon as it may come after 30."""
    draw, tokens = random.Random(seed), list[int]()
    while len(tokens) < most:
        ids = allowed(matcher.masks([])[0])
        token = EOS if EOS in ids and (len(ids) == 1 or len(tokens) > 30) else draw.choice(ids)
        tokens.append(token)
        assert matcher.accept([token]), matcher.error
        if token == EOS:
            break
    return tokens


SCHEMA = {"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0,
                                                       "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
    "required": ["name", "age"], "additionalProperties": False}


@pytest.mark.parametrize("seed", range(5))
def test_accepted_texts_match_their_schema(vocabulary: GrammarVocabulary,
                                           tokenizer: Tokenizer, seed: int) -> None:
    wanted = Structured(json_schema=json.dumps(SCHEMA))
    matcher = vocabulary.matcher(grammar_of(wanted))
    tokens = walk(matcher, seed)
    assert tokens[-1] == EOS and matcher.over and not matcher.error
    value = json.loads(tokenizer.decode(tokens))
    assert set(value) <= {"name", "age", "tags"} and {"name", "age"} <= set(value)
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 120 and len(value["name"]) <= 8
    assert set(value.get("tags", [])) <= {"a", "b"}


@pytest.mark.parametrize(("wanted", "pattern"), [
    (Structured(regex="[a-c]{3}-[0-9]{2}"), r"[a-c]{3}-[0-9]{2}"),
    (Structured(choice=["yes", 'no "\n', "m\u00fcsli"]), 'yes|no "\n|m\u00fcsli'),
    (Structured(grammar='root ::= "a" b+ "."\nb ::= "x" | "y"'), r"a[xy]+\."),
    (Structured(grammar='start: "v" DIGITS\nDIGITS: /[0-9]{4}/'), r"v[0-9]{4}"),
])
def test_the_other_kinds(vocabulary: GrammarVocabulary, tokenizer: Tokenizer, wanted: Structured,
                         pattern: str) -> None:
    for seed in range(3):
        tokens = walk(vocabulary.matcher(grammar_of(wanted)), seed)
        assert tokens[-1] == EOS
        assert re.fullmatch(pattern, tokenizer.decode(tokens)), tokenizer.decode(tokens)


def test_any_object(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    matcher = vocabulary.matcher(grammar_of(Structured(json_object=True)))
    assert matcher.accept(tokenizer.encode('{"a": [1, {"b": null}]}').ids)
    assert EOS in allowed(matcher.masks([])[0])


def test_masks_of_drafts_are_those_of_the_tokens(vocabulary: GrammarVocabulary,
                                                 tokenizer: Tokenizer) -> None:
    grammar = grammar_of(Structured(json_schema=json.dumps(SCHEMA)))
    tokens = walk(vocabulary.matcher(grammar), 3)
    for k in (1, 2, 4):
        ahead, step = vocabulary.matcher(grammar), vocabulary.matcher(grammar)
        for at in range(0, len(tokens) - 1, k):
            drafts = tokens[at:at + k]
            found = ahead.masks(drafts)
            for bits, token in zip(found, drafts, strict=False):
                assert np.array_equal(bits, step.masks([])[0])
                assert step.accept([token])
            assert ahead.accept(drafts)
            assert ahead.consumed == step.consumed


def test_a_draft_that_is_forbidden_ends_the_window(vocabulary: GrammarVocabulary,
                                                   tokenizer: Tokenizer) -> None:
    matcher = vocabulary.matcher(grammar_of(Structured(regex="abc")))
    ids = tokenizer.encode("abc").ids
    wrong = tokenizer.encode("z").ids
    assert len(matcher.masks([*wrong, *ids])) == 1
    assert len(matcher.masks([ids[0], *wrong])) == 2
    assert matcher.accept(ids) and matcher.over
    assert allowed(matcher.masks([])[0]) == [EOS]
    assert matcher.accept([EOS, EOS]) and not matcher.error


def test_a_token_that_is_forbidden_is_an_error(vocabulary: GrammarVocabulary,
                                               tokenizer: Tokenizer) -> None:
    matcher = vocabulary.matcher(grammar_of(Structured(regex="abc")))
    assert not matcher.accept(tokenizer.encode("z").ids)
    assert matcher.error


@pytest.mark.parametrize("wanted", [
    Structured(json_schema="{"), Structured(json_schema='{"type": "foo"}'),
    Structured(json_schema="[]"), Structured(regex="("), Structured(regex="a(?=b)"),
    Structured(grammar="start: nothing"), Structured(grammar="root ::= ("),
    Structured(json_schema='{"$ref": "#/$defs/x"}'),
    Structured(json_schema='{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    Structured(json_schema='{"properties": {"a": ' * 150 + "{}" + "}}" * 150),
])
def test_invalid_grammars_are_refused(wanted: Structured) -> None:
    facts = ModelFacts(SIZE, 4096, (EOS,), {}, True)
    with pytest.raises(InvalidRequest) as caught:
        GrammarValidator(MODEL, facts).grammar(wanted)
    assert caught.value.param == "structured" and caught.value.message.startswith("structured: ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("wanted", [
    Structured(), Structured(regex="a", json_object=True), Structured(regex="a" * 70_000),
    Structured(choice=["a", ""]), Structured(choice=["a"] * 1025),
])
def test_a_request_asks_for_exactly_one_thing_of_some_size(wanted: Structured) -> None:
    with pytest.raises(ValueError, match="^structured: "):
        SamplingParams(structured=wanted).check()
    with pytest.raises(ValueError, match="^min_tokens: "):
        SamplingParams(structured=Structured(regex="a"), min_tokens=2).check()


def test_an_engine_without_tokenizer_or_end_has_none() -> None:
    for facts, why in ((ModelFacts(SIZE, 4096, (EOS,), {}, False), "tokenizer"),
                       (ModelFacts(SIZE, 4096, (), {}, True), "end-of-sequence")):
        with pytest.raises(InvalidRequest, match=why):
            GrammarValidator(MODEL, facts).grammar(Structured(regex="a"))


def test_marks_that_are_tokens_are_text(tmp_path: Path) -> None:
    """As most models have `</think>` and `<tool_call>`; those that are special are no text."""
    given = json.loads((MODEL / "tokenizer.json").read_text())
    marks = {"</think>": False, "<tool_call>": False, "<|stop|>": True}
    given["added_tokens"] += [
        {"id": 1899 + at, "content": mark, "special": special, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
        for at, (mark, special) in enumerate(marks.items())]
    (tmp_path / "tokenizer.json").write_text(json.dumps(given))
    words = GrammarVocabulary(tmp_path / "tokenizer.json", SIZE, [EOS])
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [
        {"type": "thought", "open": True}, {"type": "const_string", "value": "<tool_call>"}]}}
    matcher = words.matcher(grammar_of(Structured(structural_tag=json.dumps(tag))))
    assert {1899, 1900} <= set(allowed(matcher.masks([])[0])) and \
        1901 not in allowed(matcher.masks([])[0])
    assert matcher.accept([1899])
    assert 1900 in allowed(matcher.masks([])[0])
    assert matcher.accept([1900]) and allowed(matcher.masks([])[0]) == [EOS]
    assert words.bytes_of(1899) == b"</think>"
    tag["format"]["elements"][0]["max_tokens"] = 1
    limits = limits_of(grammar_of(Structured(structural_tag=json.dumps(tag))))
    assert limits is not None and limits.budget == 1
    guide = ThoughtGuide(ThoughtRule(limits.thought, 1, limits.opened), words)
    bits = guide.forced(guide.after(guide.start, 80))
    assert bits is not None and allowed(bits) == [1899], "its end is forced"


def test_compiled_grammars_are_kept_by_bytes_and_use(monkeypatch: pytest.MonkeyPatch) -> None:
    words = GrammarVocabulary(MODEL / "tokenizer.json", SIZE, [EOS])
    texts = [grammar_of(Structured(regex=f"[a-z]{{{n},{n + 5}}}")) for n in range(1, 30)]
    monkeypatch.setattr(grammar, "GRAMMAR_BYTES", 6 * grammar.memory_of(texts[0]))
    for text in texts:
        words.matcher(texts[0])
        words.matcher(text)
        assert 0 < words.kept_bytes <= grammar.GRAMMAR_BYTES
    assert words.knows(texts[0]) and words.knows(texts[-1]) and not words.knows(texts[1])
    large = grammar_of(Structured(json_schema=json.dumps({"enum": [str(n) for n in range(3000)]})))
    words.matcher(large)
    assert words.knows(large), "one is always kept"
    words.matcher(texts[1])
    assert not words.knows(large) and words.kept_bytes == grammar.memory_of(texts[1])
