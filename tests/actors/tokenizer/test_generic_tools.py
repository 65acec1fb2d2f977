"""Chat templates without a place for tools, their calls or results: nothing vanishes, and what a
template shows by itself it shows as before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actorium.actors.messages import ChatMessage, ToolCall, TurnPart
from actorium.actors.tokenizer.chat_template import ChatTemplate, ChatTemplates
from actorium.actors.tokenizer.generic_tools import TemplateTraits

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {
    "name": "weather", "description": "The weather of a place.", "parameters": {
        "type": "object", "properties": {"place": {"type": "string"}}}}}]
PLAIN = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '\\n' }}{% endfor %}"
         "{% if add_generation_prompt %}<|assistant|>{% endif %}")
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}" + PLAIN.replace(
        "{% for m in messages %}", ""))
"""Of Gemma's kind: no system message either."""
SHOWS = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
    "ARGUMENTS]{% endfor %}")
OBJECTS = SHOWS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
PARTS = PLAIN.replace("{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% else %}"
                      "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}")
ASKED = ChatMessage("user", "How is it in Riga and Bonn?")
CALLS = ChatMessage("assistant", "", tool_calls=[
    ToolCall("weather", '{"place": "Riga"}', "a"), ToolCall("weather", '{"place":  "Bonn"}', "b")])
RESULTS = [ChatMessage("tool", "12 °C", name="weather", tool_call_id="a"),
           ChatMessage("tool", "30 °C", name="weather", tool_call_id="b")]
THANKS = ChatMessage("user", "And in Rome?")
TOLD = [
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Riga"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>',
    "<tool_response>\n12 °C\n</tool_response>\n<tool_response>\n30 °C\n</tool_response>"]


def render(source: str, messages: list[ChatMessage], tools: Any = None) -> str:
    return ChatTemplate(source, {}).render(messages, {}, tools)


def test_tools_are_told_in_the_system_message() -> None:
    found = render(PLAIN, [ChatMessage("system", "Be brief."), ASKED], TOOLS)
    assert found.startswith("<|system|>Be brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in found
    assert found.endswith("</tool_call>\n<|user|>How is it in Riga and Bonn?\n<|assistant|>")
    assert found.replace("<|system|>Be brief.\n\n#", "<|system|>#") == render(PLAIN, [ASKED], TOOLS)
    assert "Tools" not in render(PLAIN, [ASKED], [])


def test_and_before_the_users_words_where_there_is_none() -> None:
    found = render(ALTERNATING, [ASKED], TOOLS)
    assert found.startswith("<|user|># Tools\n")
    assert found.endswith("</tool_call>\n\nHow is it in Riga and Bonn?\n<|assistant|>")


@pytest.mark.parametrize("source", [PLAIN.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>" * 2),
                                    ALTERNATING])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_calls_and_results_are_told(source: str, tools: Any) -> None:
    found = render(source, [ASKED, CALLS, *RESULTS, THANKS], tools)
    if source == ALTERNATING or tools:
        assert f"<|user|>{TOLD[1]}\n\nAnd in Rome?\n" in found
    assert f"<|assistant|>{TOLD[0]}\n" in found and found.count("°C") == 2


def test_parts_stay_parts() -> None:
    """A conversation with images has lists of parts."""
    talk = [ChatMessage("user", [TurnPart("text", "hm")]), CALLS,
            ChatMessage("tool", [TurnPart("text", "12 °C")], tool_call_id="a")]
    found = render(PARTS, talk, TOOLS)
    assert "<|user|>(hm)\n" in found
    assert "<|user|>(<tool_response>\n)(12 °C)(\n</tool_response>)\n" in found


def test_what_a_template_shows_it_shows_by_itself() -> None:
    found = render(OBJECTS, [ASKED, CALLS, *RESULTS], TOOLS)
    assert "# Tools" not in found and "<tool_call>" not in found
    assert '[weather {"place": "Riga"}]' in found and "<|tool|>12 °C\n" in found
    shown = TemplateTraits(tools=False)  # calls and results alone
    assert ChatTemplate(OBJECTS.replace("{{ tools | tojson }}", ""), {}).traits() == shown


@pytest.mark.parametrize(("written", "want"), [
    ("{{ c.function.arguments }}", '{"place":  "Bonn"}'),
    ("{{ 'to ' + c.function.arguments }}", 'to {"place":  "Bonn"}'),
    ("{{ c.function.arguments | tojson }}", '{"place": "Bonn"}'),
    ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
     "{{ c.function.arguments | tojson }}{% endif %}", '{"place": "Bonn"}'),
    ("{% for k, v in c.function.arguments.items() %}<{{ k }}={{ v }}>{% endfor %}", "<place=Bonn>"),
    ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
     "{% for k, v in c.function.arguments.items() %}<{{ k }}={{ v }}>{% endfor %}{% endif %}",
     "<place=Bonn>"),
])
def test_arguments_are_given_as_the_template_writes_them(written: str, want: str) -> None:
    found = render(SHOWS.replace("ARGUMENTS", written), [ASKED, CALLS, *RESULTS])
    assert f"[weather {want}]" in found


def test_of_what_refuses_everything_nothing_is_known() -> None:
    assert ChatTemplate("{{ raise_exception('no') }}", {}).traits() == TemplateTraits()
    assert ChatTemplate("{{ nothing.at.all }}", {}).traits() == TemplateTraits()


def test_the_engine_says_which_templates_lack_a_place() -> None:
    templates = ChatTemplates({"default": PLAIN, "tool_use": OBJECTS}, {})
    assert templates.info()["generic_tools"] == ["default"]


FIRST_ONLY = PLAIN.replace("<|{{ m.role }}|>", "{% if m.role == 'system' and not loop.first %}"
                           "{{ raise_exception('System message must be at the beginning.') }}"
                           "{% endif %}<|{{ m.role }}|>")
"""Of Qwen3.5's kind."""


@pytest.mark.parametrize(("roles", "want"), [
    ("s:a s:b u:c", "s:a\n\nb u:c"), ("u:a s:b u:c", "u:a\n\nb\n\nc"),
    ("s:a u:b a:c s:d u:e", "s:a u:b a:c u:d\n\ne"), ("u:a a:b s:c a:d", "u:a a:b u:c a:d"),
    ("u:a a:b s:c s:d u:e u:f", "u:a a:b u:c\n\nd\n\ne u:f"), ("s:a s:b s:c", "s:a\n\nb\n\nc"),
    ("u:a u:b s:c", "u:a u:b\n\nc"), ("s:a u:b", "s:a u:b")])
def test_late_system_messages_are_the_users_where_a_template_refuses_them(roles: str,
                                                                         want: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}

    def talk(text: str) -> list[ChatMessage]:
        return [ChatMessage(names[one[0]], one[2:]) for one in text.split(" ")]

    found = render(FIRST_ONLY, talk(roles))
    assert found == render(PLAIN, talk(want))
    said = "".join(f"<|{one.role}|>{one.content}\n" for one in talk(roles)) + "<|assistant|>"
    assert render(PLAIN, talk(roles)) == said, "and stay what they are where it shows them"


def test_late_system_messages_keep_the_turns_alternating() -> None:
    talk = [ASKED, ChatMessage("system", "Be brief."), ChatMessage("user", "Please."),
            ChatMessage("assistant", "Fine."), ChatMessage("system", "Now."),
            ChatMessage("user", "And?")]
    assert render(ALTERNATING, talk).count("<|user|>") == 2
    dropped = PLAIN.replace("{{ m.content }}", "{% if m.role != 'system' or loop.first %}"
                            "{{ m.content }}{% endif %}")
    assert "Now." in render(dropped, talk)


def test_parts_of_late_system_messages_stay_parts() -> None:
    source = PARTS.replace("<|{{ m.role }}|>", "{% if m.role == 'system' and not loop.first %}"
                           "{{ raise_exception('no') }}{% endif %}<|{{ m.role }}|>")
    talk = [ChatMessage("user", [TurnPart("text", "a")]), ChatMessage("system", "b")]
    assert "<|user|>(a)(\n\n)(b)\n" in render(source, talk)


ONE_CALL = ("{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
            "{{ raise_exception('both') }}{% endif %}({{ m.content or m.thinking }})"
            "{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}"
            "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
            "{% if tools %}{{ tools | tojson }}{% endif %}")
"""Of gpt-oss's kind: the first call alone, and no text beside its thought."""


def test_a_turn_for_each_call_where_a_template_shows_the_first() -> None:
    said = ChatMessage("assistant", "Let me see.", reasoning_content="Two.",
                       tool_calls=CALLS.tool_calls)
    found = render(ONE_CALL, [ASKED, said, *RESULTS[::-1], THANKS], [])
    assert found == ('<|user|>How is it in Riga and Bonn?\n(Two.\n\nLet me see.)weather '
                     '{"place": "Riga"}\n<|tool|>12 °C\n()weather {"place": "Bonn"}\n'
                     '<|tool|>30 °C\n<|user|>And in Rome?\n')
    # A result of no call stays where it stands; other templates get turns as they are.
    lost = ChatMessage("tool", "?", tool_call_id="z")
    assert render(ONE_CALL, [ASKED, CALLS, lost, *RESULTS], []).endswith("<|tool|>?\n")
    assert not ChatTemplate(OBJECTS, {}).traits().one_call


def test_templates_that_refuse_several_calls_get_one_by_one() -> None:
    strict = ("{% for m in messages %}{% if m.tool_calls | length > 1 %}"
              "{{ raise_exception('one') }}{% endif %}{% endfor %}" + OBJECTS)
    assert render(strict, [ASKED, CALLS, *RESULTS], []).count("[weather") == 2


RESPONSES = ("{% for m in messages %}({{ m.role }}: {% for c in m.tool_calls or [] %}"
             "{{ c.function.arguments | tojson }}{% endfor %}{% for r in m.tool_responses or [] %}"
             "[{{ r.name }} {{ r.response | tojson }}]{% endfor %}{{ m.content }}){% endfor %}")
"""As Gemma 4's first templates: a turn of the role "tool" is shown, too, but as none of theirs."""


def test_results_are_in_the_turn_of_their_calls_where_a_template_wants_that() -> None:
    template = ChatTemplate(RESPONSES, {})
    assert template.traits().responses
    results = [RESULTS[0], ChatMessage("tool", '{"degrees": 30}', tool_call_id="b")]
    calls = '({}: {{"place": "Riga"}}{{"place": "Bonn"}}[weather "12 °C"]' \
        '[weather {{"degrees": 30}}]{})'
    asked = f"(user: {ASKED.content})"
    assert template.render([ASKED, CALLS, *results], {}) == asked + calls.format("assistant", "")
    answer = ChatMessage("assistant", "Warm.")
    assert template.render([ASKED, CALLS, *results, answer, THANKS], {}) == \
        asked + calls.format("assistant", "Warm.") + "(user: And in Rome?)"
    parts = [TurnPart("text", text="12 °C")]
    assert '[weather "12 °C"]' in template.render(
        [ASKED, CALLS, ChatMessage("tool", parts, tool_call_id="a")], {})
    said = ChatMessage("assistant", "I look.", tool_calls=CALLS.tool_calls)
    assert template.render([ASKED, said, *results, answer], {}) == \
        asked + calls.format("assistant", "I look.") + "(assistant: Warm.)"


def test_templates_that_show_results_of_both_kinds_alike_get_them_as_they_are() -> None:
    alike = ("{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
             "{{ c.function.arguments | tojson }}{% endfor %}{% for r in m.tool_responses or [] %}"
             "{{ r.response }}{% endfor %}{% endfor %}")
    assert not ChatTemplate(alike, {}).traits().responses
    assert not ChatTemplate(OBJECTS, {}).traits().responses
