"""Structural tags: what may be said, and which descriptions are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from helpers_masking import MODEL, says, vocabulary
from test_grammar import walk
from tokenizers import Tokenizer

from actorium.actors.errors import InvalidRequest
from actorium.actors.params import Structured
from actorium.actors.structured.grammar import grammar_of

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
OLD = {"triggers": ["<fn="], "structures": [
    {"begin": "<fn=weather>", "schema": CITY, "end": "</fn>"},
    {"begin": "<fn=count>", "schema": NUMBER, "end": "</fn>"}]}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def schema(given: Any = CITY) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": given}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY = {"type": "any_text"}
TAGS = [tag("<a>", schema(), "</a>"), tag("<b>", ANY, "</b>")]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": TAGS}


def sequence(*parts: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(parts)}


def structured(given: Any) -> Structured:
    if "structures" not in given:
        given = {"type": "structural_tag", "format": given}
    return Structured(structural_tag=json.dumps(given))


ROME, COUNT = '<fn=weather>{"city": "Rome"}</fn>', '<fn=count>{"n":12}</fn>'
CASES: list[tuple[Any, list[str], list[str]]] = [
    (OLD, ["", "just text < with <f", f"Look: {ROME} and {COUNT}, done.", ROME, ROME + COUNT],
     ["<fn=other>", '<fn=weather>{"city": "Bonn"}', f"x {ROME[:-5]}", '<fn=weather>{"n":1}</fn>',
      '<fn=count>{"n":12,"n":13}</fn>', "<fn="]),
    (schema(), ['{"city": "Oslo"}'], ['{"city": "Oslo"} ', "{}"]),
    (const('say "hi"\n'), ['say "hi"\n'], ["say", ""]),
    (sequence(const("A: "), schema(), const("."), ANY), ['A: {"city": "Oslo"}. And so\non'],
     ['{"city": "Oslo"}.', 'A: {"city": "Oslo"}']),
    (sequence(tag("<think>", ANY, "</think>"), schema()),
     ['<think>well < </thin\n</think>{"city": "Rome"}', '<think></think>{"city": "Rome"}'],
     ['{"city": "Rome"}', '<think>{"city": "Rome"}', '<think></think>, {"city": "Rome"}']),
    ({"type": "or", "elements": [const("yes"), tag("<a>", schema(), "</a>"), sequence(
        const("no, "), ANY)]}, ["yes", '<a>{"city": "Rome"}</a>', "no, since"], ["maybe", "yes!"]),
    (TRIGGERED, ["", "text", 'x<a>{"city": "Rome"}</a>y<b>free <a </b>z'],
     ["<a>x", "<ab", "x<b>y"]),
    ({**TRIGGERED, "at_least_one": True}, ["x<b></b>", "<b></b><b></b>y"], ["", "text"]),
    ({**TRIGGERED, "stop_after_first": True}, ["x<b></b>", "text"], ["<b></b>y", "<b></b><b></b>"]),
    (sequence(TRIGGERED, const("END"), schema()),
     ['text<b>x</b>more END{"city": "Rome"}', 'END{"city": "Rome"}'], ["text<b>x</b>", "END"]),
    (sequence(ANY, {"type": "or", "elements": TAGS}, const("!")),
     ['x<a>{"city": "Rome"}</a>!', "<b>y</b>!"], ["x", "x<b>y</b>"]),
    (tag("[", {"type": "regex", "pattern": "[0-9/]{2}"}, ["]", "}"]), ["[1/]", "[12}"], ["[1]"]),
    ({"type": "tags_with_separator", "separator": ", ", "tags": TAGS},
     ["", "<b>x</b>", '<b>x</b>, <a>{"city": "Rome"}</a>'], ["<b>x</b>, ", "x"]),
    ({"type": "tags_with_separator", "separator": ";", "tags": TAGS, "at_least_one": True,
      "stop_after_first": True}, ["<b>x</b>"], ["", "<b>x</b>;<b>x</b>"]),
    (sequence({"type": "plus", "content": {"type": "or", "elements": TAGS}}, const("!")),
     ["<b>x</b>!", '<b>x</b><a>{"city": "Rome"}</a><b></b>!'],
     ["!", "<b>x</b>", "<b>x</b>;<b></b>"]),
]


@pytest.mark.parametrize("given, good, bad", CASES, ids=range(len(CASES)))
def test_what_may_be_said(given: Any, good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(structured(given))
    for text in good:
        assert says(grammar, text), text
    for text in bad:
        assert not says(grammar, text), text


def test_random_walks_keep_to_it() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    grammar = grammar_of(structured({**TRIGGERED, "tags": TAGS[:1], "triggers": ["a"],
                                     "at_least_one": True} | {"tags": [tag("a>", schema(), "</")]}))
    called = 0
    for seed in range(20):
        text = tokenizer.decode(walk(vocabulary().matcher(grammar), seed))
        found = re.findall(r"a>(.*?)</", text, re.DOTALL)
        called += len(found)
        assert all(json.loads(call)["city"] in ("Rome", "Oslo") for call in found), text
    assert called > 20


@pytest.mark.parametrize("given, why", [
    ({"type": "qwen_xml_parameter", "json_schema": CITY}, "structural_tag.format: type must be"),
    (sequence(const("a"), {"type": "x"}), r'format\.elements\[1\]: type must be .* got "x"'),
    (sequence(ANY, schema()), r"format\.elements\[0\]: any_text must be the last part"),
    ({**TRIGGERED, "triggers": ["<c"]}, r"format\.tags\[0\]\.begin: must begin with one of"),
    ({**TRIGGERED, "excludes": ["x"]}, r"format\.excludes: is not supported"),
    ({**ANY, "excludes": ["x"]}, r"format\.excludes: is not supported"),
    ({**const("a"), "more": 1}, r"format\.more: is not supported"),
    ({**schema(), "style": "qwen_xml"}, r"format\.style: 'qwen_xml' is not supported"),
    (tag("<a>", schema(), None), r"format\.end: must be a string"),
    (sequence(), r"format\.elements: must be a list, not empty"),
    ({**ANY, "tokens": ["x"]}, r"format\.tokens: must be a special token's text"),
    ({**ANY, "tokens": []}, r"format\.tokens: must be a list, not empty"),
    (sequence({**ANY, "tokens": ["<|x|>"]}, const("a")), r"elements\[0\]: any_text with tokens"),
    ({"type": "token", "text": "<a>"}, r"format\.text: must be a special token's text"),
    ({"type": "thought", "marks": "x"}, r"format\.marks: must be one of harmony, gemma4"),
    ({"type": "plus"}, r"format\.content: type must be"),
    ({"type": "const_string"}, r"format\.value: must be a string"),
    (schema(5), r"format\.json_schema: must be a JSON schema"),
    ({"structures": [{"begin": "<a>", "schema": {}, "end": "", "x": 1}], "triggers": ["<"]},
     r"structures\[0\]\.x: is not supported"),
    (sequence(*[const("a")] * 2001), "more than 2000 parts")])
def test_what_it_does_not_know_is_refused_by_name(given: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        grammar_of(structured(given))
    assert refused.value.message.startswith("structured: structural_tag")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": {}}', "[" * 60_000])
def test_invalid_descriptions_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="structured: structural_tag: "):
        grammar_of(Structured(structural_tag=text))
