"""The grammar of a whole completion: a thought, then a text in its format, or calls of tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_calls import Call, written
from helpers_masking import says, vocabulary
from helpers_parsing import Told

from actorium.actors.gateway.api.answer_grammar import constraint
from actorium.actors.gateway.api.offered_tools import (
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolSelection,
)
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.parsers.call_formats import FORMATS, call_marks
from actorium.actors.gateway.parsers.parser_factory import call_parser
from actorium.actors.gateway.parsers.parts import parse_all
from actorium.actors.gateway.parsers.thoughts import Thought
from actorium.actors.params import Structured
from actorium.actors.structured.grammar import GrammarVocabulary, grammar_of

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
CODE = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["b"]}
TREE = {"type": "object", "properties": {"v": {"$ref": "#/$defs/V"}, "next": {"$ref": "#"}},
        "required": ["v"], "$defs": {"V": {"type": "integer"}}}
TOOLS = [Tool("function", Function("weather", parameters=PLACE)),
         Tool("function", Function("clock"))]
WEATHER = NamedTool("function", NamedFunction("weather"))
ROME = '{"name": "weather", "arguments": {"place": "Rome"}}'
FORMAT = Structured(json_schema='{"type": "object", "properties": {"ok": {"type": "boolean"}}, '
                    '"required": ["ok"]}')
OK = '{"ok": true}'
HM = "Hm, {\"ok\"? < or </think\n"
NO_TOOLS = ToolSelection(None, None, True)


def tools(choice: Any = "auto", own: list[Tool] | None = None, parallel: bool = True
          ) -> ToolSelection:
    return ToolSelection(own or TOOLS, choice, parallel)


def grammar(wanted: Structured | None, selected: ToolSelection, parser: str = "hermes",
            thought: Thought = Thought.NONE) -> str:
    found = constraint(wanted, selected, parser, thought)
    assert found is not None
    found.check()
    return grammar_of(found)


def marked(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


CODER = ("<tool_call>\n<function=f>\n<parameter=a>\nx\"1\n</parameter>\n<parameter=b>\n5\n"
         "</parameter>\n</function>\n</tool_call>")
CODER_TOOLS = tools(own=[Tool("function", Function("f", parameters=CODE)),
                         Tool("function", Function("g"))])
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "format": (grammar(FORMAT, NO_TOOLS), [OK], ["{}", f"{HM}</think>{OK}", ""]),
    "format behind a thought": (
        grammar(FORMAT, NO_TOOLS, thought=Thought.OPEN),
        [f"{HM}</think>{OK}", f"</think>\n\n{OK}"],
        [OK, f"{HM}</think>{HM}", HM, f"{HM}</think>\n{OK} ", f"{HM}</think>" + "\n" * 9 + OK]),
    "format, perhaps behind a thought": (
        grammar(FORMAT, NO_TOOLS, thought=Thought.MAY),
        [OK, f"<think>{HM}</think>\n{OK}"], [f"{HM}</think>{OK}", f"<think>{OK}", f"x{OK}"]),
    "choices": (grammar(Structured(choice=["yes", "no"]), NO_TOOLS, thought=Thought.OPEN),
                ["a</think>yes", "</think>\nno"], ["yes", "a</think>maybe"]),
    "any object": (grammar(Structured(json_object=True), NO_TOOLS, thought=Thought.OPEN),
                   ['a</think>{"b":[1]}'], ["a</think>[]"]),
    "expression": (grammar(Structured(regex="[0-9]{40}"), NO_TOOLS, thought=Thought.OPEN),
                   ["a</think>" + "1" * 40], ["a</think>1"]),
    "Lark": (grammar(Structured(grammar='start: "(" start* ")" | /[a-z]/'), NO_TOOLS,
                     thought=Thought.MAY), ["((a)b)", "<think></think>(a)"], ["(", "<think>(a)"]),
    "GBNF": (grammar(Structured(grammar='root ::= "a" ("," root)?'), NO_TOOLS,
                     thought=Thought.OPEN), ["</think>a,a"], ["</think>a,"]),
    "tags": (grammar(Structured(structural_tag=json.dumps({
        "structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}],
        "triggers": ["<f"]})), NO_TOOLS, thought=Thought.OPEN),
        ["</think>x<f>1</f>", "a</think>"], ["a", "</think><f>2</f>"]),
    "format or calls": (
        grammar(FORMAT, tools()),
        [OK, marked(ROME), marked(ROME, ROME), marked('{"name": "clock", "arguments": {"x":1}}')],
        [ROME, f"{OK}{marked(ROME)}", "Hi", marked(ROME)[:-1],
         marked('{"name": "other", "arguments": {}}'),
         marked('{"name": "clock", "arguments": 1}')]),
    "format or a call": (grammar(FORMAT, tools(parallel=False)), [OK, marked(ROME)],
                         [marked(ROME, ROME)]),
    "format or calls of strict tools": (
        grammar(FORMAT, tools(own=[Tool("function", Function("weather", None, PLACE, True))])),
        [marked(ROME), OK], [marked('{"name": "weather", "arguments": {}}')]),
    "format or calls, Llama 3": (
        grammar(FORMAT, tools(), "llama3_json"),
        [OK, '{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}'], [ROME]),
    "any object or calls of strict tools, Llama 3": (
        grammar(Structured(json_object=True),
                tools(own=[Tool("function", Function("tree", None, TREE, True))]), "llama3_json"),
        [OK, '{"name": "tree", "parameters": {"v": 1, "next": {"v": 2}}}; '
         '{"name": "tree", "parameters": {"v": 3}}'],
        ['{"name": "tree", "parameters": {"v": 1}}; {"name": "tree", "parameters": {}}']),
    "format or calls, Qwen3-Coder": (
        grammar(FORMAT, CODER_TOOLS, "qwen3_coder"),
        [OK, CODER, f"{CODER}\n{CODER}", CODER.replace('<parameter=a>\nx"1\n</parameter>\n', ""),
         "<tool_call>\n<function=g>\n</function>\n</tool_call>"],
        [marked(ROME), CODER.replace("=b", "=c"), CODER.replace("f>", "h>", 1)]),
    "format, no form of calls": (grammar(FORMAT, tools(), "none"), [OK], [marked(ROME)]),
    "format, tools that must not be called": (grammar(FORMAT, tools("none")), [OK],
                                              [marked(ROME)]),
    "format or calls behind a thought": (
        grammar(FORMAT, tools(), thought=Thought.OPEN),
        [f"{HM}</think>\n\n{OK}", f"{HM}</think>\n{marked(ROME)}"], [OK, marked(ROME)]),
    "calls demanded": (
        grammar(None, tools("required")), [marked(ROME), marked(ROME, ROME)],
        ["", ROME, f"[{ROME}]", f"{marked(ROME)}\n",
         marked('{"name": "weather", "arguments": {}}'), f"Hm</think>{marked(ROME)}",
         marked('{"name": "clock", "arguments": {"x": 1}}')]),
    "one call demanded": (grammar(FORMAT, tools("required", parallel=False)), [marked(ROME)],
                          [marked(ROME, ROME), OK]),
    "calls demanded behind a thought": (
        grammar(None, tools("required"), thought=Thought.OPEN), [f"{HM}</think>\n{marked(ROME)}"],
        [marked(ROME), f"{HM}</think>{ROME}"]),
    "a function demanded": (grammar(FORMAT, tools(WEATHER)), [marked(ROME)],
                            [OK, "{}", marked(ROME, ROME)]),
    "a function demanded, perhaps behind a thought": (
        grammar(None, tools(WEATHER), thought=Thought.MAY),
        [marked(ROME), f"<think>a</think>\n\n{marked(ROME)}"], ["{}", f"a</think>{marked(ROME)}"]),
    "calls demanded, no form of calls": (
        grammar(None, tools("required"), "none"), [f"[{ROME}]", f"[{ROME}, {ROME}]"],
        ["[]", ROME, f"[{ROME}, ]", '[{"name": "weather", "arguments": {}}]',
         '[{"name": "clock", "arguments": {"x": 1}}]']),
    "a function demanded, no form of calls": (
        grammar(FORMAT, tools(WEATHER), "none"), ['{"place": "Rome"}'], [OK, "{}"]),
    "a function demanded whose text is bound, Qwen3-Coder": (
        grammar(None, tools("required", [Tool("function", Function("h", parameters={
            "type": "object", "required": ["a"], "additionalProperties": False,
            "properties": {"a": {"type": "string", "pattern": "^[0-9]+$"}}}))]), "qwen3_coder"),
        ['[{"name": "h", "arguments": {"a": "12"}}]'],
        ["<tool_call>\n<function=h>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"]),
    "a text with calls of strict tools": (
        grammar(None, tools(own=[Tool("function", Function("weather", None, PLACE, True)),
                                 Tool("function", Function("clock"))])),
        ["Hi.", "", f"So: {marked(ROME)} and {marked(ROME)}.", "<tool <",
         marked('{"name": "clock", "arguments": {"x": 1}}')],
        [marked('{"name": "weather", "arguments": {}}'), "<tool_call>\n", marked(ROME)[:-1],
         marked('{"name": "other", "arguments": {}}')]),
    "one call of strict tools behind a thought": (
        grammar(None, tools(own=[Tool("function", Function("weather", None, PLACE, True))],
                            parallel=False), thought=Thought.OPEN),
        [f"{HM}</think>\n\nSo: {marked(ROME)}", f"{HM}</think>Hi."], [f"Hm {marked(ROME)}"])}


@pytest.mark.parametrize("case", CASES)
def test_what_may_be_said(case: str) -> None:
    wanted, good, bad = CASES[case]
    for text in good:
        assert says(wanted, text), text
    for text in bad:
        assert not says(wanted, text), text


def test_references_stay_within_each_tools_schema() -> None:
    """`#` is the root of the tool's own schema, and names of definitions may be the same."""
    def tool(name: str, leaf: Any) -> Tool:
        return Tool("function", Function(name, parameters={
            "type": "object", "required": ["p"], "additionalProperties": False,
            "properties": {"p": {"$ref": "#/$defs/P"}, "q": {"$ref": "#/properties/p"},
                           "old": {"$ref": "#/definitions/P"}, "again": {"$ref": "#"}},
            "$defs": {"P": leaf}, "definitions": {"P": {"type": "null"}}}))

    own = [tool("one", {"type": "integer"}), tool("two", {"enum": ["x"]})]
    for wanted in (grammar(None, tools("required", own)),
                   grammar(None, tools(NamedTool("function", NamedFunction("two")), own))):
        listed = wanted == grammar(None, tools("required", own))
        for name, arguments, good in (
                ("one", '{"p": 1, "q": 2, "old": null, "again": {"p": 3}}', True),
                ("one", '{"p": "x"}', False), ("one", '{"p": 1, "again": []}', False),
                ("two", '{"p": "x", "again": {"p": "x"}}', True), ("two", '{"p": 1}', False)):
            text = marked(f'{{"name": "{name}", "arguments": {arguments}}}')
            if listed or name == "two":
                assert says(wanted, text) is good, text


def test_digits_beside_the_arguments_of_coders_calls_are_bounded() -> None:
    wanted = grammar(Structured(json_schema='{"type": "number"}'), CODER_TOOLS, "qwen3_coder")
    free = CODER.partition('x"1')[0]
    for text, follows in (("1" * 20, False), (free + '"' + "1" * 30, True)):
        matcher, spell = vocabulary().matcher(wanted), vocabulary()._tokens.tokenize_str
        assert matcher.accept([token for char in text for token in spell(char)])
        five = spell("5")[0]
        assert bool(matcher.masks([])[0][five // 32] >> np.uint32(five % 32) & 1) is follows


def test_digits_of_a_thought_are_not_bounded_and_those_of_its_answer_are() -> None:
    wanted = grammar(Structured(json_schema='{"type": "number"}'), NO_TOOLS, thought=Thought.OPEN)
    matcher, spell = vocabulary().matcher(wanted), vocabulary()._tokens.tokenize_str
    five = spell("5")[0]

    def may_follow() -> bool:
        return bool(matcher.masks([])[0][five // 32] >> np.uint32(five % 32) & 1)

    assert matcher.accept([token for char in '"' + "1" * 40 for token in spell(char)])
    assert may_follow()
    assert matcher.accept([token for char in "</think>" + "1" * 19 for token in spell(char)])
    assert may_follow() and matcher.accept([five]) and not may_follow()


# --- every format ---

F = {"type": "object", "required": ["text", "n"], "additionalProperties": False, "properties": {
    "text": {"type": "string"}, "n": {"type": "integer", "maximum": 9},
    "rows": {"type": "array", "items": {"type": "integer"}}, "on": {"type": "boolean"}}}
OWN = [Tool("function", Function("f", parameters=F)), Tool("function", Function("clock"))]
STRICT = [Tool("function", Function("f", None, F, True)), OWN[1]]
GOOD: list[Call] = [("f", {"text": 'a "b" é', "n": 3, "rows": [1, 2], "on": True}), ("clock", {}),
                    ("f", {"text": "x", "n": 1})]
BOUND = [name for name in FORMATS if name not in ("harmony", "gemma4")]


@pytest.mark.parametrize("name", BOUND)
def test_demanded_calls_have_the_models_format(name: str) -> None:
    wanted, one = (grammar(None, tools(choice, OWN), name) for choice in (
        "required", NamedTool("function", NamedFunction("f"))))
    for calls in (GOOD, GOOD[:1], GOOD[1:2], GOOD[2:]):
        assert says(wanted, written(name, calls, True)), written(name, calls, True)
        assert says(one, written(name, calls, True)) is (len(calls) == 1 and calls[0][0] == "f")
    for bad in (("f", {"text": "x", "n": 10}), ("f", {"n": 1}), ("g", {})):
        assert not says(wanted, written(name, [bad], True))
    assert not says(wanted, f"So {written(name, GOOD, True)}") and not says(wanted, "")
    schemas = {tool.function.name: tool.function.parameters or {} for tool in OWN}
    assert Told(parse_all(call_parser(name, schemas), written(name, GOOD, True))).text == ""


@pytest.mark.parametrize("name", BOUND)
def test_strict_tools_bind_calls_amid_text(name: str) -> None:
    found = constraint(None, tools(own=STRICT), name, Thought.NONE)
    assert constraint(None, tools(own=OWN), name, Thought.NONE) is None
    if found is None:  # nothing marks its calls
        assert name in ("llama3_json", "xlam", "pythonic", "llama4_pythonic")
        return
    wanted = grammar_of(found)
    for text in ("Hi { [1] <", f"So: {written(name, GOOD, True)}", written(name, GOOD[1:2], True)):
        assert says(wanted, text), text
    for bad in (("f", {"text": "x", "n": 10}), ("f", {"n": 1}), ("g", {})):
        assert not says(wanted, f"So: {written(name, [bad], True)}")


# --- harmony --------------------------------------------------------------------------------------

MARKS = ("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>",
         "<|end|>")
REASONED = "<|channel|>analysis<|message|>Hm, {\"ok\"?\n<|end|><|start|>assistant"
RIGA = ("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"place": "Riga"}')


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    """A vocabulary of bytes and harmony's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS))
    path = tmp_path_factory.mktemp("harmony") / "tokenizer.json"
    tokenizer.save(str(path))
    size = tokenizer.get_vocab_size()
    return GrammarVocabulary(path, size, [tokenizer.token_to_id(one) for one in MARKS[:2]])


@pytest.mark.parametrize(("wanted", "selected", "thought", "yes", "no"), [
    (FORMAT, NO_TOOLS, Thought.MAY,
     [f"<|channel|>final<|message|>{OK}", f"{REASONED}<|channel|>final<|message|>{OK}"],
     [OK, f"{REASONED}{OK}", "<|channel|>final<|message|>no", RIGA, REASONED]),
    (FORMAT, tools(), Thought.MAY,
     [f"<|channel|>final<|message|>{OK}", REASONED + RIGA, RIGA.replace("Riga", "x")],
     [RIGA.replace("weather", "other"), RIGA + OK]),
    (None, tools("required"), Thought.MAY, [RIGA, REASONED + RIGA],
     [f"<|channel|>final<|message|>{OK}", RIGA.replace("place", "where")]),
    (None, tools(WEATHER), Thought.MAY, [REASONED + RIGA],
     ["<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"]),
    (FORMAT, NO_TOOLS, Thought.OPEN,
     [f"hm<|end|><|start|>assistant<|channel|>final<|message|>{OK}"], [OK, REASONED]),
    (FORMAT, NO_TOOLS, Thought.NONE, [OK], ["no", f"<|channel|>final<|message|>{OK}"])])
def test_harmony(harmony: GrammarVocabulary, wanted: Structured | None, selected: ToolSelection,
                 thought: Thought, yes: list[str], no: list[str]) -> None:
    bound = grammar(wanted, selected, "harmony", thought)
    for texts, right in ((yes, True), (no, False)):
        for text in texts:
            matcher = harmony.matcher(bound)
            said = all(not matcher.over and matcher.accept([token])
                       for token in harmony._tokens.tokenize_str(text, parse_special=True))
            assert (said and bool(matcher.inner.is_accepting())) is right, text


def test_what_harmony_does_not_bind() -> None:
    assert constraint(None, tools(), "harmony", Thought.MAY) is None
    assert constraint(None, NO_TOOLS, "hermes", Thought.OPEN) is None
    with pytest.raises(HttpError, match="tool_choice"):
        constraint(None, tools("required"), "harmony", Thought.NONE)


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3", "kimi_k2", "granite"])
def test_marks_that_are_special_tokens_can_be_demanded(name: str, tmp_path: Path) -> None:
    """They are the model's own tokens then, not their letters alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", *sorted(call_marks())])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = GrammarVocabulary(tmp_path / "tokenizer.json", tokenizer.get_vocab_size(),
                              [tokenizer.token_to_id("<eos>")])
    text = written(name, GOOD, True)
    ids = tokenizer.encode(text).ids
    assert len(ids) < len(text.encode())
    matcher = words.matcher(grammar(None, tools("required", OWN), name))
    assert matcher.accept(ids) and matcher.inner.is_accepting(), text
    assert not words.matcher(grammar(None, tools("required", OWN), name)).accept(
        [tokenizer.token_to_id("<eos>")])
