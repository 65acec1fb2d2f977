"""Schemas, expressions and grammars that want to take the scheduler's time: each is refused, or its
masks have a price.

A grammar goes the way of a request: the tokenizer's process says whether it compiles, then the
scheduler follows it token by token, on the same thread that serves everybody.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import pytest
from helpers_speed import slowness

import actorium
from actorium.actors.errors import InvalidRequest
from actorium.actors.params import (
    MAX_WRITTEN_N,
    WRITTEN,
    SamplingParams,
    Structured,
    for_choices,
)
from actorium.actors.structured.grammar import GrammarMatcher, GrammarVocabulary, grammar_of
from actorium.actors.structured.grammar_validator import GrammarProcess

MODEL = Path(actorium.__file__).parent / "tools" / "demo" / "demo_model"
SIZE, EOS = 49_152, 2
BUSY = 0.1 * slowness()
"""Seconds of a mask and the token behind it."""
BUSY_OF_MANY = 2 * BUSY / MAX_WRITTEN_N
"""The same of each of the most choices: two threads make their masks, or more."""


def schema(described: Any) -> Structured:
    return Structured(json_schema=json.dumps(described))


def text(grammar: str) -> Structured:
    return Structured(grammar=grammar)


def regex(expression: str) -> Structured:
    return Structured(regex=expression)


def words(count: int, length: int, letters: str = "abcdef") -> list[str]:
    draw = random.Random(count)
    return sorted({"".join(draw.choices(letters, k=length)) for _ in range(count)})


def nested(depth: int) -> Any:
    made: Any = {}
    for _ in range(depth):
        made = {"type": "object", "properties": {"a": made}, "required": ["a"]}
    return made


def ladder(key: str, steps: int) -> Any:
    """A reference to 2^steps ends."""
    rungs = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"},
                             {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}]}
             for i in range(steps)}
    return {"$defs": rungs | {f"d{steps}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def string(**more: Any) -> Structured:
    return schema({"type": "string"} | more)


UGLY: dict[str, Structured] = {
    # --- schemas
    "enum": schema({"enum": words(5000, 8)}), "names": schema({"enum": words(40, 1500)}),
    "any ladder": schema(ladder("anyOf", 60)), "all ladder": schema(ladder("allOf", 60)),
    "one ladder": schema(ladder("oneOf", 20)),
    "product": schema({"allOf": [{"anyOf": [
        {"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(6)]} for i in range(8)]}),
    "all of many": schema({"allOf": [{"properties": {f"p{i}": {}}} for i in range(1500)]}),
    "some of many": schema({"anyOf": [{"type": "object", "properties": {
        f"k{i}": {"type": "string"} for i in range(j, j + 10)}} for j in range(60)]}),
    "loop": schema({"$ref": "#"}), "two loops": schema({
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "no end": schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "any depth": schema({"type": "array", "items": {"$ref": "#"}}),
    "http": schema({"$ref": "http://127.0.0.1:9/x"}),
    "file": schema({"$ref": "file:///etc/passwd"}),
    "length": string(maxLength=1_000_000), "least length": string(minLength=10**9),
    "both lengths": string(minLength=30_000, maxLength=60_000), "less": string(maxLength=-1),
    "items": schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    "items between": schema({"type": "array", "items": {"type": "integer", "maximum": 123456789},
                             "minItems": 10_000, "maxItems": 20_000}),
    "range": schema({"type": "integer", "minimum": -10**300, "maximum": 10**300}),
    "multiple": schema({"type": "integer", "multipleOf": 99_991}),
    "fraction": schema({"type": "number", "multipleOf": 1e-6, "maximum": 1e9}),
    "zero": schema({"type": "number", "multipleOf": 0}),
    "properties": schema({"type": "object", "properties": {
        f"p{i}": {"type": "string", "maxLength": i} for i in range(1500)}}),
    "optional": schema({"type": "object", "properties": {
        f"p{i}": {"type": ["string", "null"]} for i in range(480)}}),
    "patterns": schema({"type": "object", "patternProperties": {
        f"^[a-z]*{i}$": {"type": "string"} for i in range(300)}}),
    "a pattern": string(pattern="^(a|b)*a(a|b){20}$"),
    "a long pattern": string(pattern="^(a|b)*a(a|b){200}$"),
    "many patterns": schema({"anyOf": [
        {"type": "string", "pattern": f"^[a-z]*{chr(97 + i % 26)}[a-z]{{{i}}}$"}
        for i in range(40)]}),
    "deep": schema(nested(200)), "a long name": schema({"properties": {"x" * 60_000: {}}}),
    "formats": schema({"anyOf": [{"type": "string", "format": name} for name in (
        "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
        "uri", "unknown")]}),
    "no type": schema({"type": {"a": 1}}), "a list": Structured(json_schema="[" * 60_000),
    "twice": Structured(json_schema='{"type": "string", "type": "integer"}'),
    "a huge number": Structured(json_schema='{"maximum": ' + "9" * 5000 + "}"),
    # --- expressions
    "two to the 30": regex("[ab]*a[ab]{30}"), "two to the 100": regex("[ab]*a[ab]{100}"),
    "repeats": regex("(.*x){1,200}"), "of repeats": regex("((a{1,100}){1,100}){1,100}"),
    "of many": regex("((a{1,1000}){1,1000}){1,1000}"), "all letters": regex(
        "(\\p{L}\\p{N}\\p{So}){1,1000}\\p{L}*"), "less some": regex(
        "([\\p{L}&&[^a-z]]|\\p{Lu}){500}"),
    "gaps": regex("(.*a.{30}.*|.*b.{29}.*|.*c.{28})*"), "counts": regex(
        "([a-z]{0,1000}[0-9]{0,1000}){0,50}"), "overlap": regex("(.{0,40}[a-c].{0,40}[b-d])*"),
    "alternatives": regex("|".join(f"[^{chr(97 + i)}]*{chr(97 + i)}.{{{i + 5}}}"
                                   for i in range(26))),
    # --- grammars
    "left": text('start: start start | "a" | "b" | ""\n'),
    "ambiguous": text('start: e\ne: e e | e e e | /[a-z]/ | /[a-z0-9]+/ | " "\n'),
    "nullable": text("start: a b c\na: a a | \nb: a b a | \nc: /./ c | a c b |\n"),
    "nothing": text("start: start\n"), "never": text('start: "a" start\n'),
    "undefined": text("start: nope\n"), "empty": text("\n"), "gbnf loop": text("root ::= root"),
    "many lexemes": text("start: (" + " | ".join(f"t{i}" for i in range(300)) + ")*\n" + "\n".join(
        f"t{i}: /[a-z]*{i}[a-z]*x{{{i}}}/" for i in range(300))),
    "lexemes": text("start: (" + " | ".join(f"T{i}" for i in range(60)) + ")*\n" + "\n".join(
        f"T{i}: /(.*{chr(97 + i % 26)}.{{{i % 26 + 3}}})/" for i in range(60))),
    "three ways": text('start: s*\ns: a | b | c\na: "x" s "y" | "x" s | "x"\n'
                       'b: "x" s "y" | "x" s | "x"\nc: "x" s "y" s | "x"\n'),
    "windows": text("start: w*\nw: " + " | ".join(f"/[a-z ]{{{i},{i + 40}}}/"
                                                 for i in range(1, 40))),
    "gbnf repeats": text('root ::= ("a"{0,1000} "b"{0,1000}){0,1000}'),
    "gbnf ways": text('root ::= a*\na ::= "x" a "y"? | "x"+ a? | [xyz]* "x"'),
    "pieces": text("start: a*\na: " + " | ".join(f'"{word}" a?' for word in words(1500, 3))),
    "wide": text("start: (" + " | ".join(f"a{i}" for i in range(400)) + ")*\n" + "\n".join(
        f'a{i}: "x"+ "{i}"' for i in range(400))),
    "threes": text('start: e+\ne: e e e | e e | "a" | "aa" | "aaa"\n'),
    "64 KiB": text("start: " + " | ".join(f'"{word}"' for word in words(5000, 8))),
    # --- tags and choices
    "choices": Structured(choice=words(1000, 60)),
    "triggers": Structured(structural_tag=json.dumps({"structures": [
        {"begin": f"<{i:03}>", "schema": {}, "end": f"</{i}>"} for i in range(600)],
        "triggers": [f"<{i:03}>" for i in range(600)]})),
    "a trigger": Structured(structural_tag=json.dumps({"structures": [
        {"begin": f"<f{i}>", "schema": {"type": "object", "properties": {"a": {}}}, "end": "</f>"}
        for i in range(250)], "triggers": ["<f"]})),
}
PLAIN = {
    "arithmetic": text('root ::= expr\nexpr ::= term (("+"|"-") term)*\n'
                       'term ::= factor (("*"|"/") factor)*\nfactor ::= [0-9]+ | "(" expr ")"'),
    "sql": text('start: "SELECT " cols " FROM " name (" WHERE " cond)?\n'
                'cols: name ("," " "? name)*\n'
                'cond: name " "? op " "? val ((" AND "|" OR ") cond)?\nop: "=" | "<" | ">"\n'
                "val: /[0-9]+/ | \"'\" /[a-z ]*/ \"'\"\nname: /[a-zA-Z_][a-zA-Z0-9_]*/\n"),
    "brackets": text('start: "(" start* ")" | /[a-z]/'),
}
SLICE = ("left", "three ways", "gbnf ways", "wide", "threes", "optional", "two to the 100", "deep",
         "any ladder", "triggers")
"""In `make test`."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 49,152 tokens."""
    made = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, draw = made["model"]["vocab"], random.Random(SIZE)
    while len(vocabulary) < SIZE:
        word = "".join(draw.choices('abcdefxy0123456789-"{}:, ()', k=draw.randint(2, 6)))
        vocabulary.setdefault(word.replace(" ", "\u0120"), len(vocabulary))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(made), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Path) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, SIZE, [EOS])


@pytest.fixture(scope="module")
def checker(tokenizer: Path) -> Iterator[GrammarProcess]:
    made = GrammarProcess(tokenizer, SIZE, [EOS])
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def follow(matcher: GrammarMatcher, seed: int, tokens: int) -> tuple[int, float]:
    """(tokens, longest seconds of one and the mask before it) along a random text that the grammar
    allows."""
    draw, longest = random.Random(seed), 0.0
    for number in range(tokens):
        began = thread_time()
        bits = matcher.masks([])[0]
        took = thread_time() - began
        ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:SIZE])
        ids = ids[ids != EOS]
        if matcher.error or matcher.over or not len(ids):
            return number, max(longest, took)
        token = int(ids[draw.randrange(len(ids))])
        began = thread_time()
        fine = matcher.accept([token])
        longest = max(longest, took + thread_time() - began)
        if not fine:
            assert matcher.error, "its request is told why"
            return number, longest
    return tokens, longest


def slowest(vocabulary: GrammarVocabulary, grammar: str, tokens: int, limit: float) -> float:
    """The same of three texts; what took too long is looked at again, since a machine with other
    work has slower instructions."""
    for _ in range(3):
        found = max(follow(vocabulary.matcher(grammar), seed, tokens)[1] for seed in range(3))
        if found < limit:
            break
    return found


@pytest.mark.mended("an ambiguous grammar (start: start start | \"a\") took the scheduler 540 ms "
                    "for a mask and 200 ms for a token; with n=128 minutes for a step")
def test_a_grammar_is_refused_or_its_masks_have_a_price(vocabulary: GrammarVocabulary,
                                                        checker: GrammarProcess,
                                                        tried: Any, amount: Any) -> None:
    refused: dict[str, str] = {}
    slow: dict[str, float] = {}
    for name, wanted in UGLY.items():
        if name not in SLICE and not amount(False, True):
            continue
        try:
            wanted.check()
            grammar = checker.check(wanted)
            found = slowest(vocabulary, grammar, amount(80, 300), BUSY)
            if found > BUSY:
                slow[name] = round(found, 3)
            many = for_choices(grammar, MAX_WRITTEN_N)
            if many != grammar:
                found = slowest(vocabulary, many, amount(80, 300), BUSY_OF_MANY)
                if found > BUSY_OF_MANY:
                    slow[f"{name} of many"] = round(found, 4)
        except (InvalidRequest, ValueError) as error:
            refused[name] = str(error)
        tried()
    assert not slow
    assert all(why.startswith("structured: ") for why in refused.values()), refused
    assert "wide" in refused and "left" not in refused


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_grammar_is_followed_for_any_number_of_choices(vocabulary: GrammarVocabulary,
                                                               name: str,
                                                              tried: Any) -> None:
    grammar = grammar_of(PLAIN[name])
    assert grammar.startswith(WRITTEN)
    for n in (1, 4, 5, MAX_WRITTEN_N):
        matcher = vocabulary.matcher(for_choices(grammar, n))
        follow(matcher, 7, 100)
        assert not matcher.error
        tried()
    with pytest.raises(ValueError, match="n: at most 16 choices with a grammar, got 17"):
        SamplingParams(n=MAX_WRITTEN_N + 1, structured=PLAIN[name]).check()
    tag = json.dumps({"type": "structural_tag",
                      "format": {"type": "grammar", "grammar": PLAIN[name].grammar}})
    within = grammar_of(Structured(structural_tag=tag))
    assert for_choices(within, MAX_WRITTEN_N)
    with pytest.raises(InvalidRequest, match="n: at most 16 choices with a grammar, got 17"):
        for_choices(within, MAX_WRITTEN_N + 1)
