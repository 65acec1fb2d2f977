"""Arguments of earlier calls: whatever they are, the conversation goes on."""

from __future__ import annotations

import json

import pytest
from test_generic_tools import ASKED, RESULTS, SHOWS

from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import ChatMessage, ToolCall
from actorium.actors.tokenizer.chat_template import ChatTemplate
from actorium.actors.tokenizer.generic_tools import arguments_of, for_template, unreadable

OBJECT = SHOWS.replace("ARGUMENTS", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}"
                       "{% endfor %}")
TEXT = SHOWS.replace("ARGUMENTS", "{{ c.function.arguments }}")
WHOLE = '{"path": "a \\"b\\"", "text": "\\u00e9\\n{", "n": [1, {"x": null}]}'
READ = [
    ('{"a": 1}', {"a": 1}, '{"a": 1}'), ("", {}, "{}"), (" \n", {}, "{}"), ("null", {}, "{}"),
    ("[]", {}, "{}"), ('""', {}, "{}"), ("{}", {}, "{}"),
    ('{"a": "x\ny\tz\x01"}', {"a": "x\ny\tz\x01"}, '{"a": "x\\ny\\tz\\u0001"}'),
    ('"{\\"a\\": \\"é\\"}"', {"a": "é"}, '{"a": "é"}'), (' {"a":  1} ', {"a": 1}, ' {"a":  1} ')]
HALF = '{"a": "x\\ud83d", "\\udc00": ["\\ud83d\\ude00"]}'
LOST = ["[1]", "{", "3", "true", "false", '"x"', "[" * 5000, '{"a": 1', '{"a": "x', '{"a": 1}}',
        "{'a': 1}", '{"a": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize(("text", "read", "written"), READ)
def test_what_can_be_read_is(text: str, read: object, written: str) -> None:
    assert arguments_of(text) == for_template(text, as_text=False) == read
    assert for_template(text, as_text=True) == written


@pytest.mark.parametrize("text", LOST)
def test_what_cannot_is_none_or_left_as_it_is(text: str) -> None:
    assert arguments_of(text) is None
    assert for_template(text, as_text=False) == {} and for_template(text, as_text=True) == text


def test_half_a_character_is_none() -> None:
    """It can be written as an escape, and no tokenizer takes it."""
    assert arguments_of(HALF) == {"a": "x?", "?": ["\U0001f600"]}
    for source in (OBJECT, TEXT):
        ChatTemplate(source, {}).render(talk(HALF), {}).encode()
    with pytest.raises(InvalidRequest, match="surrogates"):
        ChatTemplate("{{ '\\ud83d' }}", {}).render([ASKED], {})


@pytest.mark.parametrize("more", ["", "\\u0041"])
def test_arguments_that_are_nested_deeply_are_read_or_not(more: str) -> None:
    for depth in (*range(0, 900, 100), *range(900, 1100)):
        text = '{"' + more + '": ' + "[" * depth + "]" * depth + "}"
        for own in (text, json.dumps(text)):
            assert arguments_of(own) is None or depth < 1000
            for_template(own, as_text=True)


def talk(arguments: str) -> list[ChatMessage]:
    return [ASKED, ChatMessage("assistant", "", tool_calls=[ToolCall("f", arguments)]), RESULTS[0]]


@pytest.mark.parametrize("cut", range(len(WHOLE) + 1))
def test_a_conversation_with_arguments_cut_off_anywhere_is_rendered(cut: int) -> None:
    text = WHOLE[:cut]
    assert f"[f {text or '{}'}]" in ChatTemplate(TEXT, {}).render(talk(text), {})
    found = ChatTemplate(OBJECT, {}).render(talk(text), {})
    want = "".join(f"{k}={v}" for k, v in json.loads(text).items()) if cut == len(WHOLE) else ""
    assert f"[f {want}]" in found


def test_they_are_named() -> None:
    turns = [*talk("{}"), *talk('{"a'), *talk("null")]
    assert unreadable(turns) == ["messages[4].tool_calls[0] (f)"]
