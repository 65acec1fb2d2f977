"""Chat templates of 70 published models, which llama.cpp's source package carries: each renders
every conversation to the very text of transformers, or both refuse it; and what a template leaves
out of tools is told all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.errors import InvalidRequest
from actorium.actors.gateway.parsers.parser_factory import ModelTemplates, ParserFactory
from actorium.actors.gateway.parsers.parts import ReasoningPart, ToolCallArguments, parse_all
from actorium.actors.gateway.parsers.thoughts import Thought
from actorium.actors.messages import ChatMessage, ToolCall
from actorium.actors.tokenizer.chat_template import ChatTemplate
from actorium.actors.tokenizer.generic_tools import TemplateTraits

pytestmark = pytest.mark.conformance
FOLDER = Path(__file__).parents[2] / "build" / "llamacpp" / "models" / "templates"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {
    "name": name, "description": f"The {name} of a place.", "parameters": {
        "type": "object", "required": ["place"], "properties": {
            "place": {"type": "string", "description": "A town."},
            "days": {"type": "integer", "description": "From now on."}}}}}
    for name in ("weather", "tides")]

SYSTEM, HI = ("system", "Be brief."), ("user", "How is it in Riga? <b>é</b>\n")
ANSWER, MORE = ("assistant", "Fine, I think.\n"), ("user", "  And in Bonn?")
CALL = ("assistant", "", [("weather", {"place": "Riga", "days": 2}, "call00001")])
BOTH = ("assistant", "Let me look.", [("weather", {"place": "Riga"}, "call00001"),
                                      ("tides", {"place": "Bonn \"am\" Rhein"}, "call00002")])
RESULT, OTHER = ("tool", '{"degrees": 12}', "call00001"), ("tool", "high\ntide", "call00002")
CONVERSATIONS: dict[str, list[tuple[Any, ...]]] = {
    "one turn": [HI], "a system message": [SYSTEM, HI], "three turns": [HI, ANSWER, MORE],
    "all of these": [SYSTEM, HI, ANSWER, MORE], "two questions": [HI, MORE],
    "an answer at the end": [HI, ANSWER],
    "a call": [HI, CALL], "a result": [SYSTEM, HI, CALL, RESULT],
    "two calls": [HI, BOTH, RESULT, OTHER],
    "after a result": [HI, CALL, RESULT, ANSWER, MORE],
    "two rounds": [SYSTEM, HI, CALL, RESULT, ("assistant", "", [
        ("tides", {"place": "Bonn"}, "call00002")]), OTHER],
}


def ours(template: ChatTemplate, talk: list[tuple[Any, ...]], tools: Any) -> str | None:
    """The prompt; None where the template refuses it."""
    messages = []
    for role, content, *more in talk:
        if role == "tool":
            messages.append(ChatMessage(role, content, name="weather", tool_call_id=more[0]))
        else:
            calls = [ToolCall(name, json.dumps(own), rid) for name, own, rid in
                     (more[0] if more else ())]
            messages.append(ChatMessage(role, content, tool_calls=calls))
    try:
        return template.render(messages, {}, tools)
    except InvalidRequest as error:
        assert "the chat template refused them" in error.message
        return None


def theirs(source: str, talk: list[tuple[Any, ...]], tools: Any, traits: TemplateTraits
           ) -> str | None:
    """The same of transformers, with arguments and results as the template wants them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    plain: list[dict[str, Any]] = []
    for role, content, *more in talk:
        plain.append({"role": role, "content": content})
        if role == "tool":
            plain[-1] |= {"name": "weather", "tool_call_id": more[0]}
        elif more:
            plain[-1]["tool_calls"] = [
                {"type": "function", "id": rid, "function": {
                    "name": name, "arguments": json.dumps(own) if traits.text_arguments else own}}
                for name, own, rid in more[0]]
    plain = in_calls(plain) if traits.responses else plain
    try:
        found: str = render_jinja_template([plain], tools=tools, chat_template=source,
                                           add_generation_prompt=True, **SPECIAL)[0][0]
    except Exception:
        return None
    return found


def in_calls(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as Gemma 4's first templates get it: results, and an answer behind them, in
    the turn with their calls."""
    out: list[dict[str, Any]] = []
    for turn in talk:
        last = out[-1] if out else {}
        if turn["role"] == "tool":
            said = turn["content"]
            name = next(one["function"]["name"] for one in last["tool_calls"]
                        if one["id"] == turn["tool_call_id"])
            last.setdefault("tool_responses", []).append(
                {"name": name, "response": json.loads(said) if said.startswith("{") else said})
        elif turn["role"] == "assistant" and "tool_calls" not in turn \
                and "tool_responses" in last and not last["content"]:
            last["content"] = turn["content"]
        else:
            out.append(turn)
    return out


def one_by_one(talk: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The conversation as templates that show one call a turn get it: each call, then its result.
    """
    out: list[tuple[Any, ...]] = []
    for role, content, *more in talk:
        if role == "assistant" and more:
            out += [(role, content if not i else "", [own]) for i, own in enumerate(more[0])]
        elif role == "tool":
            at = next(i for i, own in enumerate(out) if len(own) > 2 and own[0] == "assistant"
                      and own[2][0][2] == more[0])
            out.insert(at + 1, (role, content, *more))
        else:
            out.append((role, content))
    return out


def test_they_are_there() -> None:
    assert len(TEMPLATES) >= 70, f"{FOLDER}: tests/conformance/setup.sh llamacpp fetches them"


@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers_renders_them(name: str) -> None:
    source = (FOLDER / name).read_text()
    template = ChatTemplate(source, SPECIAL)
    traits = template.traits(200_000)
    for title, talk in CONVERSATIONS.items():
        calls = any(role == "assistant" and more for role, _, *more in talk)
        results = any(role == "tool" for role, *_ in talk)
        for tools in (None, TOOLS):
            got = ours(template, talk, tools)
            lacks = (tools is not None and not traits.tools) or (calls and not traits.calls) \
                or (results and not traits.results)
            shown = one_by_one(talk) if traits.one_call else talk
            if not lacks:
                assert got == theirs(source, shown, tools, traits), (title, tools)
            elif got is not None:
                told = ["tides"] if tools else []
                told += ["Riga"] if calls else []
                told += ["12"] if results else []
                assert all(word in got for word in told), (title, tools, got)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "gemma-4" in name])
def test_gemmas_calls_are_read_as_its_template_writes_them(name: str) -> None:
    source = (FOLDER / name).read_text()
    factory = ParserFactory("auto", "auto", ModelTemplates(source, source))
    assert (factory.tools, factory.reasoning) == ("gemma4", "gemma4")
    assert [factory.thought({"enable_thinking": on}, tools) for on in (True, False)
            for tools in (True, False)] == [Thought.MAY] * 2 + [Thought.NONE] * 2
    own = {"a": 'x "y"\n{z}', "b": {"c": [1, -2.5, None, True, {"d": ""}], "e": {}}, "f": [[], "g"]}
    turn = ChatMessage("assistant", "", reasoning_content="Hm.", tool_calls=[
        ToolCall("weather", json.dumps(own), "call00001"), ToolCall("tides", "{}", "call00002")])
    prompt = ChatTemplate(source, SPECIAL).render([ChatMessage("user", "?"), turn], {}, TOOLS)
    said = prompt.partition("<|turn>model\n")[2]
    said = said[:said.rindex("<tool_call|>") + len("<tool_call|>")]
    first, *calls = parse_all(factory.parser({}, None, True, Thought.MAY), said)
    assert first == ReasoningPart("Hm.") and len(calls) == 4
    texts = [part.text for part in calls if isinstance(part, ToolCallArguments)]
    assert list(map(json.loads, texts)) == [own, {}]
