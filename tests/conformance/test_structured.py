"""Structured output, by every name that clients know for it; alone and many at once."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from wire import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    Json,
    Server,
    chat,
    completion,
    deltas,
    generate,
    pieces,
)

pytestmark = pytest.mark.conformance
ADDRESS = r"((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
LANGUAGES = ["Python", "Rust", "C++", "Ada"]
DIGIT: Json = {"type": "integer", "minimum": 0, "maximum": 9}
PERSON: Json = {
    "type": "object", "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{1,7}$"},
                                     "age": DIGIT}, "required": ["name", "age"]}
GBNF = 'root ::= "a"{5,5} " " word\nword ::= [b-d]{2,3}'
LARK = 'start: "a"~5 " " WORD\nWORD: /[b-d]{2,3}/'
GRAMMAR_TEXT = r"a{5} [b-d]{2,3}"
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "constant": {"const": "42"},
    "enum": {"enum": ["red", 5, None, True]},
    "integer": DIGIT,
    "negative": {"type": "integer", "minimum": -20, "maximum": -10},
    "number": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "text": {"type": "string", "maxLength": 12},
    "least text": {"type": "string", "minLength": 3, "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "list": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [DIGIT, {"type": "boolean"}], "minItems": 2,
              "items": False},
    "nested": {"type": "object", "properties": {"people": {
        "type": "array", "items": PERSON, "minItems": 1, "maxItems": 2}}, "required": ["people"]},
    "optional": {"type": "object", "properties": {"a": DIGIT, "b": {"type": "boolean"}}},
    "nullable": {"type": "object", "properties": {"a": {"type": ["integer", "null"], "minimum": 0,
                                                        "maximum": 9}}, "required": ["a"]},
    "union": {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"x": DIGIT},
                                              "required": ["x"]}]},
    "reference": {"$defs": {"digit": DIGIT}, "type": "object",
                  "properties": {"d": {"$ref": "#/$defs/digit"}}, "required": ["d"]},
    "closed": PERSON | {"additionalProperties": False},
    "no properties": {"type": "object", "properties": {}},
    "letters": {"type": "string", "enum": ["日本", "é", "\U0001f600", "a\"b"]},
}


def content(server: Server, **more: Any) -> str:
    """What a chat says, to its end."""
    found = server.chat("Give me an example.", **({"max_tokens": 160} | more))["choices"][0]
    assert found["finish_reason"] == "stop", found
    text: str = found["message"]["content"]
    return text


def pairs(given: list[tuple[str, Any]]) -> Json:
    """An object's members; a key that comes twice fails."""
    assert len(dict(given)) == len(given), given
    return dict(given)


def valid(text: str, schema: Any) -> Any:
    """The value, which holds to the schema."""
    value = json.loads(text, object_pairs_hook=pairs)
    jsonschema.validate(value, schema)
    return value


def wrapped(schema: Any, **more: Any) -> Json:
    """OpenAI's wrapping."""
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema} | more}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_schemas(server: Server, name: str, temperature: float) -> None:
    schema = SCHEMAS[name]
    text = content(server, response_format=wrapped(schema), temperature=temperature, seed=1)
    valid(text, schema)


CHAIN: Json = {"$defs": {"node": {"type": "object", "properties": {
    "v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"]}}, "$ref": "#/$defs/node"}


def test_a_schema_that_holds_itself(server: Server) -> None:
    """It may go on for ever: as far as it comes."""
    found = server.chat("An example.", response_format=wrapped(CHAIN), max_tokens=60)["choices"][0]
    text = found["message"]["content"]
    if found["finish_reason"] == "stop":
        valid(text, CHAIN)
    else:
        assert re.match(r'\{\s*"v"\s*:\s*(true|false)\s*,\s*"next"', text)


@pytest.mark.parametrize("name", ["person", "nested", "letters"])
def test_a_streamed_schema(server: Server, name: str) -> None:
    body = chat("Give me an example.", response_format=wrapped(SCHEMAS[name]), max_tokens=160)
    text = deltas(server.stream(CHAT, body))
    assert text == server.post(CHAT, body).ok()["choices"][0]["message"]["content"]
    valid(text, SCHEMAS[name])


@pytest.mark.parametrize("strict", [True, False, None])
def test_strict_or_not(server: Server, strict: bool | None) -> None:
    valid(content(server, response_format=wrapped(PERSON, strict=strict)), PERSON)


@pytest.mark.parametrize("seed", range(3))
def test_schemas_are_closed(server: Server, seed: int) -> None:
    schema = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}}
    text = content(server, response_format=wrapped(schema), temperature=1.5, seed=seed)
    assert set(valid(text, schema)) <= {"a", "b"}


def test_an_open_schema_says_so(server: Server) -> None:
    """Another key than the named one may come: here it must, and then ever more may."""
    schema = {"type": "object", "properties": {"a": DIGIT}, "required": ["a", "b"],
              "additionalProperties": DIGIT}
    text = server.chat("An example.", response_format=wrapped(schema),
                       max_tokens=40)["choices"][0]["message"]["content"]
    assert re.match(r'\{\s*"a"\s*:\s*\d\s*,\s*"b"\s*:\s*\d\b', text), text


AS_JSON: dict[str, Json] = {
    "structured_outputs": {"structured_outputs": {"json": PERSON}},
    "structured_outputs text": {"structured_outputs": {"json": json.dumps(PERSON)}},
    "guided_json": {"guided_json": PERSON},
    "json_schema": {"json_schema": PERSON},
    "json_schema text": {"json_schema": json.dumps(PERSON)},
    "json_object.schema": {"response_format": {"type": "json_object", "schema": PERSON}},
    "response_format": {"response_format": wrapped(PERSON)},
}
BY_NAME: dict[str, tuple[Json, str]] = {
    "structured_outputs.regex": ({"structured_outputs": {"regex": ADDRESS}}, ADDRESS),
    "guided_regex": ({"guided_regex": ADDRESS}, ADDRESS),
    "regex": ({"regex": ADDRESS}, ADDRESS),
    "regex of letters": ({"regex": "[é日\U0001f600]{3}"}, "[é日\U0001f600]{3}"),
    "structured_outputs.choice": ({"structured_outputs": {"choice": LANGUAGES}},
                                  r"Python|Rust|C\+\+|Ada"),
    "guided_choice": ({"guided_choice": LANGUAGES}, r"Python|Rust|C\+\+|Ada"),
    "grammar": ({"grammar": GBNF}, GRAMMAR_TEXT),
    "ebnf": ({"ebnf": GBNF}, GRAMMAR_TEXT),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": GBNF}}, GRAMMAR_TEXT),
    "guided_grammar": ({"guided_grammar": GBNF}, GRAMMAR_TEXT),
    "structured_outputs.grammar in Lark": ({"structured_outputs": {"grammar": LARK}},
                                           GRAMMAR_TEXT),
}


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("name", AS_JSON)
def test_names_of_a_schema(server: Server, name: str, route: str) -> None:
    if route == "chat":
        valid(content(server, **AS_JSON[name]), PERSON)
    else:
        found = server.complete("An example: ", max_tokens=80, **AS_JSON[name])["choices"][0]
        valid(found["text"], PERSON)


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("name", BY_NAME)
def test_names_of_a_text(server: Server, name: str, route: str) -> None:
    more, pattern = BY_NAME[name]
    text = (content(server, **more) if route == "chat" else
            server.complete("An example: ", max_tokens=60, **more)["choices"][0]["text"])
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("name", ["regex", "ebnf", "json_schema"])
def test_in_the_native_api(server: Server, name: str) -> None:
    given = {"regex": ADDRESS, "ebnf": GBNF, "json_schema": json.dumps(PERSON)}[name]
    found = server.post(GENERATE, generate(text="An example: ", sampling_params={
        name: given, "max_new_tokens": 80})).ok()["text"]
    if name == "json_schema":
        valid(found, PERSON)
    else:
        assert re.fullmatch(ADDRESS if name == "regex" else GRAMMAR_TEXT, found)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_any_object(server: Server, temperature: float) -> None:
    found = server.chat("Describe a cat as a small JSON object.", max_tokens=300,
                        temperature=temperature, seed=2,
                        response_format={"type": "json_object"})["choices"][0]
    text = found["message"]["content"]
    assert text.lstrip().startswith("{")
    if found["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_plain_text_is_a_format_too(server: Server) -> None:
    assert (server.chat(response_format={"type": "text"})["choices"][0]["message"]["content"]
            == server.chat()["choices"][0]["message"]["content"])


TAG: Json = {"begin": "<call>", "schema": PERSON, "end": "</call>"}
TAGGED = re.compile(r"<call>(.*)</call>", re.DOTALL)


def test_a_tag_by_format(server: Server) -> None:
    text = content(server, response_format={"type": "structural_tag", "format": {
        "type": "tag", "begin": "<call>", "end": "</call>",
        "content": {"type": "json_schema", "json_schema": PERSON}}})
    found = TAGGED.fullmatch(text)
    assert found is not None
    valid(found[1], PERSON)


@pytest.mark.models("smollm2")
@pytest.mark.parametrize("way", ["response_format", "structured_outputs"])
def test_tags_that_a_trigger_begins(server: Server, way: str) -> None:
    """Free text until the trigger; the schema holds inside."""
    tag = {"structures": [TAG], "triggers": ["<call>"]}
    more: Json = ({"response_format": {"type": "structural_tag"} | tag}
                  if way == "response_format" else
                  {"structured_outputs": {"structural_tag": json.dumps(
                      {"type": "structural_tag"} | tag)}})
    shown = "".join(f'Call {i}:<call>{{"name": "Anna", "age": {i}}}</call>\n' for i in range(1, 5))
    found = server.complete(f"{shown}Call 5:", max_tokens=60, **more)["choices"][0]["text"]
    inside = re.search(r"<call>(.*?)</call>", found, re.DOTALL)
    assert inside is not None, found
    valid(inside[1], PERSON)


@pytest.mark.parametrize("name", ["json", "regex"])
@pytest.mark.parametrize("n", [2, 4])
def test_several_choices(server: Server, name: str, n: int) -> None:
    more = {"json": {"response_format": wrapped(PERSON)},
            "regex": {"structured_outputs": {"regex": ADDRESS}}}[name]
    found = server.chat("An example.", n=n, temperature=1.0, seed=4, max_tokens=160, **more)
    for one in found["choices"]:
        text = one["message"]["content"]
        if name == "json":
            valid(text, PERSON)
        else:
            assert re.fullmatch(ADDRESS, text)


def test_several_choices_in_a_stream(server: Server) -> None:
    chunks = server.stream(COMPLETIONS, completion("An example: ", n=3, temperature=1.0, seed=4,
                                                   max_tokens=100, guided_json=PERSON))
    for index in range(3):
        valid(pieces(chunks, index), PERSON)


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_many_at_once(server: Server, count: int) -> None:
    """Different grammars in one step, and plain requests between them."""
    kinds: list[tuple[Json, str]] = list(BY_NAME.values())[:2] + [
        (AS_JSON["guided_json"], "json"), ({}, ".*"), ({"guided_choice": LANGUAGES}, r"\S+")]
    asks = [kinds[i % len(kinds)] for i in range(count)]
    answers = server.together([(CHAT, chat("An example.", max_tokens=120, seed=i, temperature=0.8,
                                           **more)) for i, (more, _) in enumerate(asks)])
    for answer, (_, pattern) in zip(answers, asks, strict=True):
        found = answer.ok()["choices"][0]
        text = found["message"]["content"]
        if pattern == "json":
            valid(text, PERSON)
        else:
            assert re.fullmatch(pattern, text, re.DOTALL), text


CUT: Json = {"response_format": wrapped(PERSON), "max_tokens": 2}


def test_cut_short_by_its_length(server: Server) -> None:
    found = server.chat(**CUT)["choices"][0]
    assert found["finish_reason"] == "length"


def test_it_ends_although_ends_are_ignored(server: Server) -> None:
    found = server.chat(guided_choice=["ok"], ignore_eos=True, max_tokens=20)["choices"][0]
    assert found["message"]["content"].startswith("ok")


REFUSED: dict[str, tuple[Json, str]] = {
    "unknown type": ({"response_format": {"type": "sound"}}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
                  "response_format"),
    "nothing": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "schema is a number": ({"response_format": {"type": "json_object", "schema": 123}},
                           "response_format"),
    "type is a number": ({"response_format": wrapped({"type": 123})}, "response_format"),
    "type is unknown": ({"response_format": wrapped({"type": "hiccup"})}, "response_format"),
    "property is a text": ({"structured_outputs": {"json": {
        "type": "object", "properties": {"foo": "bar"}}}}, "structured_outputs"),
    "dangling reference": ({"guided_json": {"$ref": "#/$defs/none"}}, "guided_json"),
    "schema is no JSON": ({"guided_json": "{"}, "guided_json"),
    "pattern": ({"structured_outputs": {"regex": "[.*"}}, "structured_outputs"),
    "pattern is an object": ({"structured_outputs": {"regex": {"a": "b"}}}, "structured_outputs"),
    "look-ahead": ({"regex": "(?=a)b"}, "regex"),
    "grammar": ({"structured_outputs": {"grammar": "root ::= undefined_rule"}},
                "structured_outputs"),
    "GBNF": ({"grammar": "root = ???"}, "grammar"),
    "no choices": ({"guided_choice": []}, "guided_choice"),
    "choices of numbers": ({"structured_outputs": {"choice": [1, 2]}}, "structured_outputs"),
    "two kinds": ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs"),
    "two names": ({"guided_regex": "a", "response_format": {"type": "json_object"}}, ""),
    "impossible": ({"guided_json": {"type": "string", "minLength": 5, "maxLength": 2}},
                   "guided_json"),
    "tag without its end": ({"response_format": {"type": "structural_tag", "structures": [
        {"begin": "<a>", "schema": PERSON}], "triggers": ["<a>"]}}, "response_format"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(server: Server, name: str) -> None:
    more, param = REFUSED[name]
    server.post(CHAT, chat(**more)).error(400, param or None)
    assert server.chat(max_tokens=1)["choices"]
