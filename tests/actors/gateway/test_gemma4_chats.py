"""Gemma 4's chats: thoughts, calls however their text is cut, and the grammars that bind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_examples import examples
from helpers_gateway import Scripted, scripted_client
from helpers_parsing import Told, call, check, cut_at, in_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gateway_tools import TOOL, both
from test_gateway_tools import check as same

from actorium.actors.gateway.api.answer_grammar import constraint
from actorium.actors.gateway.api.offered_tools import (
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolSelection,
)
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.parsers.argument_types import ANY
from actorium.actors.gateway.parsers.gemma4 import Gemma4Parser
from actorium.actors.gateway.parsers.gemma4_values import GEMMA4_FORM, argument_of
from actorium.actors.gateway.parsers.parser_factory import ModelTemplates, ParserFactory
from actorium.actors.gateway.parsers.parts import (
    ChainedParser,
    MessagePart,
    OutputParser,
    ReasoningPart,
    TextPart,
    parse_all,
)
from actorium.actors.gateway.parsers.thoughts import Thought
from actorium.actors.params import Structured
from actorium.actors.structured.grammar import GrammarVocabulary, grammar_of

SCHEMAS = {"f": {"type": "object", "properties": {
    "n": {"type": "integer"}, "s": {"type": "string"}, "b": {"type": "boolean"},
    "o": {"type": "object"}, "xs": {"type": "array"}, "m": {"type": ["string", "null"]}}}}
MACHINES: dict[str, Callable[[], OutputParser]] = {
    "both": lambda: Gemma4Parser(SCHEMAS, True),
    "thinking": lambda: Gemma4Parser(SCHEMAS, True, Thought.OPEN),
    "calls": lambda: Gemma4Parser(SCHEMAS, False),
    "reasons": lambda: Gemma4Parser(None, True),
    "text": lambda: Gemma4Parser(None, False),
}
THOUGHT = "<|channel>thought\nRiga, I think.\n<channel|>"
HM = ReasoningPart("Riga, I think.")


def q(text: str) -> str:
    return f"{GEMMA4_FORM.quote}{text}{GEMMA4_FORM.quote}"


def written(arguments: str, name: str = "f") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


CASES: list[tuple[str, str, list[MessagePart]]] = [
    ("both", "Just a text.\n", [TextPart("Just a text.\n")]),
    ("both", THOUGHT + "It is 12 °C.\n", [HM, TextPart("It is 12 °C.\n")]),
    ("both", "<|channel>thought\n<channel|>Hi", [TextPart("Hi")]),
    ("both", "<|channel>thought<channel|>\n\nHi", [TextPart("Hi")]),
    ("both", THOUGHT + written("n:42"), [HM, *call(0, "f", '{"n": 42}')]),
    ("both", written(f"s:{q('a')},n:1") + written("b:true") + "<|tool_response>",
     [*call(0, "f", '{"s": "a", "n": 1}'), *call(1, "f", '{"b": true}')]),
    ("both", f"Let me see.\n{written('')}\nSo.", [
        TextPart("Let me see."), *call(0, "f", "{}"), TextPart("\nSo.")]),
    ("both", written(f"s:{q('')},o:{{k:{{deep:[1,{q('}')}]}},l:null}},xs:[]"), call(
        0, "f", '{"s": "", "o": {"k": {"deep": [1, "}"]}, "l": null}, "xs": []}')),
    ("both", "<|turn>model\n" + THOUGHT + "Hi", [HM, TextPart("Hi")]),
    ("both", "<|turn>mod", [TextPart("<|turn>mod")]),
    # Within a text everything is literal.
    ("both", written("s:" + q('a\n"b" \\n {,} <tool_call|> <|tool_call>call:g{') + ",n:1"), call(
        0, "f", json.dumps({"s": 'a\n"b" \\n {,} <tool_call|> <|tool_call>call:g{', "n": 1}))),
    # The schema has the last word on types.
    ("both", written(f"s:42,n:{q('7')},b:True,m:null,x:3.50,y:word,z:None"), call(
        0, "f", '{"s": "42", "n": 7, "b": true, "m": null, "x": 3.50, "y": "word", "z": null}')),
    ("both", written(f"m:{q('null')},s:{{a:1}},o:{q('{}')}"), call(
        0, "f", '{"m": "null", "s": "{\\"a\\": 1}", "o": {}}')),
    ("both", written("o:{a:True,b:None,c:a word,d:1.0}"), call(
        0, "f", '{"o": {"a": true, "b": null, "c": "a word", "d": 1.0}}')),
    # JSON, as grammars bind it and models slip into it.
    ("both", written('"s": "a, \\"b\\" }", "xs": [1, {"k": "]"}], "n": 2').replace(":f{", ":f {"),
     call(0, "f", '{"s": "a, \\"b\\" }", "xs": [1, {"k": "]"}], "n": 2}')),
    ("both", written(f"{q('s')}:{q('a')} , n : 2 ,"), call(0, "f", '{"s": "a", "n": 2}')),
    ("both", written("s:5\" pipe,n:1"), call(0, "f", '{"s": "5\\" pipe", "n": 1}')),
    # Broken calls.
    ("both", "<|tool_call>call:f{n:1<tool_call|>ok", [
        *call(0, "f", '{"n": 1}'), TextPart("ok")]),
    ("both", "<|tool_call>call:f{o:{k:[1<tool_call|>", call(0, "f", '{"o": {"k": [1]}}')),
    ("both", "<|tool_call>call:f{n:1}" + written("n:2"), [
        *call(0, "f", '{"n": 1}'), *call(1, "f", '{"n": 2}')]),
    ("both", "<|tool_call>call:f<tool_call|>", call(0, "f", "{}")),
    ("both", '<|tool_call>call:f{s:<|"|>some text}<tool_call|>',
     call(0, "f", '{"s": "some text"}')),
    ("both", '<|tool_call>call:f{n:1,s:<|"|>som', call(0, "f", '{"n": 1, "s": "som"}')),
    ("both", "<|tool_call>call:f{n:1", call(0, "f", '{"n": 1}')),
    ("both", written("junk,n:1,]:,x"), call(0, "f", '{"n": 1}')),
    ("both", "<|tool_call>call:f", [TextPart("<|tool_call>call:f")]),
    ("both", "see <|tool_call>call: me<tool_call|>", [
        *[TextPart("see")], *call(0, "me", "{}")]),
    ("both", "<|tool_call>{} and <|tool_call> or <|tool_c", [
        TextPart("<|tool_call>{} and <|tool_call> or <|tool_c")]),
    ("both", f"<|tool_call>call:{'x' * 600}{{}}", [
        TextPart(f"<|tool_call>call:{'x' * 600}{{}}")]),
    # Thoughts that are not closed, empty, several, or elsewhere.
    ("both", "<|channel>thought\nhm\n" + written("n:1"),
     [ReasoningPart("hm"), *call(0, "f", '{"n": 1}')]),
    ("both", "<|channel>thought\nuse <|tool_call> so\n<channel|>ok",
     [ReasoningPart("use <|tool_call> so"), TextPart("ok")]),
    ("both", "<|channel>thou", []),
    ("both", "<|channel>thought\nhm <chan", [ReasoningPart("hm <chan")]),
    ("both", f"<|channel>{THOUGHT}a {THOUGHT} b<|channel>thought\n<channel|>", [
        HM, TextPart("a"), ReasoningPart("\nRiga, I think."), TextPart(" b")]),
    ("both", "Hi.<channel|>", [TextPart("Hi.")]),
    ("thinking", "hm\n<channel|>\nHi", [ReasoningPart("hm"), TextPart("Hi")]),
    ("thinking", f"{THOUGHT}Hi", [HM, TextPart("Hi")]),
    # What is not asked for stays text.
    ("calls", THOUGHT + written("n:1"), [TextPart(THOUGHT), *call(0, "f", '{"n": 1}')]),
    ("reasons", THOUGHT + written("n:1"), [HM, TextPart(written("n:1"))]),
    ("text", THOUGHT + written("n:1") + "\n", [TextPart(THOUGHT + written("n:1") + "\n")]),
]


@pytest.mark.parametrize(("kind", "text", "want"), CASES)
def test_what_is_read_however_the_text_is_cut(kind: str, text: str,
                                              want: list[MessagePart]) -> None:
    check(MACHINES[kind], text, want)


@pytest.mark.parametrize(("text", "arguments"), [
    ("n:1", "{"), ("n:1,", '{"n": 1'), (f"s:{q('a')}", '{"s": "a"'), ("o:{a:1}", '{"o": {"a": 1}'),
    ('s:<|"|>a', "{"), ("o:{a:1", "{"), ("o:{a:[1]", "{"), ("", "{")])
def test_of_a_call_that_was_cut_what_is_complete_is_returned(text: str, arguments: str) -> None:
    check(MACHINES["both"], f"<|tool_call>call:f{{{text}", call(0, "f", arguments), cut=True)


FRAGMENTS = ["<|turn>model\n", "<|channel>", "thought", "\n", "<channel|>", "<|tool_call>",
             "<tool_call|>", "call:", "f", "f{", "{", "}", "[", "]", '<|"|>', '"', "\\", ",", ":",
             "n:", "s:", "o:{", "3", " ", "text", "<", "|>", "<|tool_response>", "<turn|>",
             "é", "true", "x" * 600, '"k":', written("n:1"), THOUGHT]


@pytest.mark.parametrize("kind", MACHINES)
@settings(max_examples=examples(150), deadline=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=16),
       places=st.lists(st.integers(0, 1 << 16), max_size=6), cut=st.booleans())
def test_whatever_comes_cuttings_agree(kind: str, parts: list[str], places: list[int],
                                       cut: bool) -> None:
    text = "".join(parts)
    whole = parse_all(MACHINES[kind](), text, cut)
    assert in_parts(MACHINES[kind](), cut_at(text, places), cut) == whole
    assert in_parts(MACHINES[kind](), list(text), cut) == whole
    if not cut:
        for _, arguments in Told(whole).calls:
            assert isinstance(json.loads(arguments), dict)


def native(value: Any) -> str:
    """A value as Gemma's template writes it."""
    if isinstance(value, str):
        return q(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{native(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(native, value)) + "]"
    return json.dumps(value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.text("abc_-. é", min_size=1, max_size=4).filter(lambda key: key == key.strip()), inner,
        max_size=3), max_leaves=8)


@settings(max_examples=examples(200), deadline=None)
@given(value=VALUES)
def test_values_come_through_whole(value: Any) -> None:
    assert json.loads(argument_of(native(value), ANY, GEMMA4_FORM)) == value
    assert json.loads(argument_of(json.dumps(value), ANY, GEMMA4_FORM)) == value
    (_, arguments), = Told(parse_all(Gemma4Parser({}, True), written(f"k:{native(value)}"))).calls
    assert json.loads(arguments) == {"k": value}


def test_deep_values_and_half_characters_end() -> None:
    assert json.loads(argument_of("[" * 5000, ANY, GEMMA4_FORM))
    assert argument_of('"\\ud83d"', ANY, GEMMA4_FORM).encode() == b'"?"'
    deep = parse_all(Gemma4Parser({}, True), written("k:" + "{a:" * 3000))
    assert json.loads(Told(deep).calls[0][1])["k"]


# --- which parser, and whether a thought comes ----------------------------------------------------

TEMPLATE = """{{ bos_token }}{% if enable_thinking is defined and enable_thinking or tools \
-%}<|turn>system
{% if enable_thinking is defined and enable_thinking %}<|think|>
{% endif %}{% for tool in tools or [] %}<|tool>declaration:{{ tool.function.name }}<tool|>\
{% endfor %}<turn|>
{% endif %}{% for message in messages %}<|turn>{{ message.role }}
{% for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name + '{' }}\
{% for key, value in call.function.arguments | dictsort %}{{ key }}:{{ value }},{% endfor %}\
{{ '}' }}<tool_call|>{% endfor %}{{ message.content }}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% if not enable_thinking | default(false) %}<|channel>thought
<channel|>{% endif %}{% endif %}"""
"""An excerpt of the model's own way to write."""


@pytest.mark.parametrize(("tools", "reasoning", "found"), [
    ("auto", "auto", ("gemma4", "gemma4")), ("gemma4", "auto", ("gemma4", "gemma4")),
    ("auto", "none", ("gemma4", "none")), ("none", "auto", ("none", "gemma4")),
    ("hermes", "gemma4", ("hermes", "gemma4"))])
def test_the_template_selects_the_parsers(tools: str, reasoning: str,
                                          found: tuple[str, str]) -> None:
    factory = ParserFactory(tools, reasoning, ModelTemplates(TEMPLATE, TEMPLATE))
    assert (factory.tools, factory.reasoning) == found and factory.special_marks
    assert factory.row.end[0] == ("</think>" if reasoning == "none" else "<channel|>")


def test_flags_select_them_where_the_template_does_not() -> None:
    for flags in (("gemma4", "auto"), ("auto", "gemma4")):
        factory = ParserFactory(*flags, ModelTemplates("{{ messages }}", "{{ messages }}"))
        assert (factory.tools, factory.reasoning) == ("gemma4", "gemma4")


def test_whether_an_answer_begins_with_a_thought() -> None:
    factory = ParserFactory("auto", "auto", ModelTemplates(TEMPLATE, TEMPLATE))
    for args, wanted in (({}, Thought.NONE), ({"enable_thinking": False}, Thought.NONE),
                         ({"enable_thinking": True}, Thought.MAY)):
        assert factory.thought(args, False) is factory.thought(args, True) is wanted
    opened = TEMPLATE.replace("<channel|>", "")
    assert ParserFactory("auto", "auto", ModelTemplates(opened, opened)).thought({}, False) \
        is Thought.OPEN


def test_thoughts_before_calls_of_another_form() -> None:
    factory = ParserFactory("hermes", "gemma4", ModelTemplates(TEMPLATE, TEMPLATE))
    parser = factory.parser(SCHEMAS, None, True, Thought.MAY)
    assert isinstance(parser, ChainedParser)
    text = THOUGHT + '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse_all(parser, text) == [HM, *call(0, "f", "{}")]


@pytest.mark.parametrize("seed", range(3))
def test_chats(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    text = THOUGHT + "Let me look." + written(f"place:{q('Riga')}", "weather") * 2
    for ask in ({}, {"tool_choice": "required"}):
        script = Scripted([text], seed, TEMPLATE)
        choice, got = asyncio.run(both(scripted_client(monkeypatch, script), tools=[TOOL], **ask))
        same(choice, got)
        assert (got["reasoning"], got["content"]) == ("Riga, I think.", "Let me look.")
        assert got["calls"] == [["weather", '{"place": "Riga"}']] * 2
        params = script.asked[0].params
        assert params is not None and not params.skip_special_tokens
    assert params.structured is not None


# --- grammars -------------------------------------------------------------------------------------

MARKS = ("<turn|>", "<|tool_response>", "<|channel>", "<channel|>", "<|tool_call>",
         "<tool_call|>", '<|"|>')
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS = [Tool("function", Function("weather", parameters=PLACE)),
         Tool("function", Function("clock"))]
STRICT = [Tool("function", Function("weather", parameters=PLACE, strict=True))]
FORMAT = Structured(json_schema='{"type": "object", "properties": {"ok": {"type": "boolean"}}, '
                    '"required": ["ok"]}')
OK = '{"ok": true}'
RIGA = '<|tool_call>call:weather{"place": "Riga"}<tool_call|>'
NATIVE = written(f"place:{q('Riga {')},x:{{y:1}}", "weather")
CLOCK = "<|tool_call>call:clock{}<tool_call|>"
WEATHER = NamedTool("function", NamedFunction("weather"))


@pytest.fixture(scope="module", params=["special", "of a GGUF file"])
def vocabulary(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
               ) -> GrammarVocabulary:
    """A vocabulary of bytes and Gemma's marks, which GGUF files have as tokens that are text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = request.param == "special"
    tokenizer.add_special_tokens(list(MARKS if special else MARKS[:2]))
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in MARKS])
    path: Path = tmp_path_factory.mktemp("gemma") / "tokenizer.json"
    tokenizer.save(str(path))
    return GrammarVocabulary(path, tokenizer.get_vocab_size(),
                             [tokenizer.token_to_id(one) for one in MARKS[:2]])


def tools(choice: Any = "auto", own: list[Tool] | None = None, parallel: bool = True
          ) -> ToolSelection:
    return ToolSelection(own or TOOLS, choice, parallel)


def bound(wanted: Structured | None, selected: ToolSelection, thought: Thought,
          parser: str = "gemma4") -> str:
    made = constraint(wanted, selected, parser, thought, "gemma4")
    assert made is not None
    made.check()
    return grammar_of(made)


NO_TOOLS = ToolSelection(None, None, True)


@pytest.mark.parametrize(("wanted", "selected", "thought", "yes", "no"), [
    (FORMAT, NO_TOOLS, Thought.NONE, [OK], ["no", THOUGHT + OK, CLOCK]),
    (FORMAT, NO_TOOLS, Thought.MAY, [OK, THOUGHT + OK, THOUGHT + "\n" + OK],
     ["no", THOUGHT, THOUGHT + "no", THOUGHT + THOUGHT + OK]),
    (FORMAT, NO_TOOLS, Thought.OPEN, ["hm\n<channel|>" + OK], [OK, THOUGHT]),
    (FORMAT, tools(), Thought.MAY,
     [OK, THOUGHT + NATIVE, NATIVE + RIGA + CLOCK, THOUGHT + OK],
     [OK + NATIVE, NATIVE + OK, CLOCK.replace("clock", "other"), NATIVE[:-1]]),
    (FORMAT, tools("auto", STRICT), Thought.NONE, [OK, RIGA],
     [NATIVE, RIGA.replace("place", "where")]),
    (FORMAT, tools(parallel=False), Thought.NONE, [NATIVE], [NATIVE + CLOCK]),
    (None, tools("required"), Thought.MAY, [RIGA, THOUGHT + RIGA + CLOCK],
     [OK, NATIVE, THOUGHT, RIGA.replace("place", "where"), ""]),
    (None, tools("required", parallel=False), Thought.NONE, [RIGA], [RIGA + CLOCK]),
    (FORMAT, tools(WEATHER), Thought.NONE, [RIGA], [CLOCK, OK, RIGA + RIGA])])
def test_grammars(vocabulary: GrammarVocabulary, wanted: Structured | None,
                  selected: ToolSelection, thought: Thought, yes: list[str],
                  no: list[str]) -> None:
    made = bound(wanted, selected, thought)
    for texts, right in ((yes, True), (no, False)):
        for text in texts:
            matcher = vocabulary.matcher(made)
            said = all(not matcher.over and matcher.accept([token])
                       for token in vocabulary._tokens.tokenize_str(text, parse_special=True))
            assert (said and bool(matcher.inner.is_accepting())) is right, text


def test_calls_that_are_bound_are_read(vocabulary: GrammarVocabulary) -> None:
    parser = ParserFactory("auto", "auto", ModelTemplates(TEMPLATE, TEMPLATE)).parser(
        tools(WEATHER).schemas, "weather", True, Thought.MAY)
    assert parse_all(parser, THOUGHT + RIGA) == [HM, *call(0, "weather", '{"place": "Riga"}')]


def test_what_cannot_be_bound_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    own = [Tool("function", Function("f", parameters=schema))]
    with pytest.raises(HttpError, match="the parameters of 'f'"):
        constraint(None, tools("required", own), "gemma4", Thought.NONE, "gemma4")
    assert constraint(None, tools(), "gemma4", Thought.MAY, "gemma4") is None
