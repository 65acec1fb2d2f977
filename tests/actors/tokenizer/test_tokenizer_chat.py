"""Chat templates: as transformers renders them, and nothing a client sends can hang them."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from actorium.actors.errors import BadModel, InvalidRequest
from actorium.actors.messages import ChatMessage, ToolCall
from actorium.actors.tokenizer.chat_template import MAX_TURNS, ChatTemplate, load

HI = [ChatMessage("system", "be brief"), ChatMessage("user", "h<i> & é")]


def render(source: str, messages: list[ChatMessage] | None = None, **args: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(HI if messages is None else messages, args)


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m['role'] == 'user' %}[{{ m.content }}]"
    "{% else %}{{ m.content | trim | upper }}{% continue %}{% endif %}\n{% endfor %}",
    "{%- for m in messages -%}{{ loop.index }}{{ m | tojson }}{%- if loop.last -%}!{%- break -%}"
    "{%- endif -%}{%- endfor -%}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ messages | length }}{{ tools is none }}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{% for m in messages[::-1] %}{{ f(m.role) }}"
    "{% endfor %}{% generation %}g{% endgeneration %}{% if add_generation_prompt %}A{% endif %}",
    "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', "
    "'user') | list | length }}{{ flag if flag is defined }}{{ 'a' * 3 }}{{ eos_token }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_same_as_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{"role": m.role, "content": m.content} for m in HI]
    theirs, _ = render_jinja_template([conversation], chat_template=source,
                                      add_generation_prompt=True, bos_token="<s>",
                                      eos_token="</s>", flag="yes")
    assert render(source, flag="yes") == theirs[0]


@pytest.mark.parametrize("source", [
    "{{ raise_exception('roles must alternate') }}",
    "{{ messages[9].content }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ undefined_thing.x }}",
    "{{ 'x' * 999999999 }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in messages[0].content * 100 %}{% for b in messages[0].content * 100 %}"
    "{% for c in messages[0].content * 100 %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "{% for i in range(999999999) %}{% endfor %}",
])
def test_templates_that_misbehave_are_refused_soon(source: str) -> None:
    begin = monotonic()
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages" and monotonic() - begin < 30
    assert caught.value.message.startswith("messages: ")


def test_many_messages_cannot_square_the_time() -> None:
    nested = "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="loop iterations"):
        render(nested, [ChatMessage("user", "x")] * MAX_TURNS)
    with pytest.raises(InvalidRequest, match="1 to"):
        render("", [ChatMessage("user", "x")] * (MAX_TURNS + 1))


def test_arguments_cannot_replace_reserved_variables() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    for name in ("bos_token", "messages", "raise_exception", "_actorium_tick", "a b"):
        with pytest.raises(InvalidRequest, match="may not be set"):
            ChatTemplate("", {}).render(HI, {name: "x"})


def test_where_templates_are_found(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        load(tmp_path, None).pick(None, False)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one{{ bos_token }}",
                                  "bos_token": {"content": "<b>"}}))

    def text(override: str | None = None) -> str:
        found = load(tmp_path, override).pick(None, False)
        assert found is not None
        return found.render(HI, {})

    assert text() == "one<b>"
    config.write_text(json.dumps({"chat_template": [{"name": "tool_use", "template": "no"},
                                                    {"name": "default", "template": "two"}]}))
    assert text() == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert text() == "three"
    (tmp_path / "own.jinja").write_text("four")
    assert text(str(tmp_path / "own.jinja")) == "four"
    with pytest.raises(BadModel, match="cannot read"):
        load(tmp_path, str(tmp_path / "none.jinja"))
    (tmp_path / "own.jinja").write_text("{% if %}")
    with pytest.raises(BadModel, match="does not compile"):
        load(tmp_path, str(tmp_path / "own.jinja"))


TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}}]
QWEN_LIKE = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>"
    "{% endif %}{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{% if call.function %}{% set call = call.function "
    "%}{% endif %}<tool_call>{\"name\": \"{{ call.name }}\", \"arguments\": "
    "{{ call.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
LLAMA_LIKE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content | tojson }}<|eot_id|>"
    "{% elif 'tool_calls' in message %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{% set call = message.tool_calls[0].function %}{\"name\": \"{{ call.name }}\", "
    "\"parameters\": {% for k, v in call.arguments.items() %}{{ k }}={{ v }};{% endfor %}}"
    "<|eot_id|>{% else %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endif %}{% endfor %}")
TALK = [
    ChatMessage("user", "How is it in Riga? "),
    ChatMessage("assistant", "", tool_calls=[ToolCall("weather", '{"place": "Riga", "n": 2}', "c")],
                reasoning_content="look it up"),
    ChatMessage("tool", "12 \u00b0C", name="weather", tool_call_id="c"),
]


@pytest.mark.parametrize(("source", "tools"), [(QWEN_LIKE, TOOLS), (LLAMA_LIKE, None)])
def test_tools_and_their_calls_look_as_transformers_shows_them(
        source: str, tools: list[dict[str, Any]] | None) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [
        {"role": "user", "content": "How is it in Riga? "},
        {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [
            {"type": "function", "id": "c", "function": {
                "name": "weather", "arguments": {"place": "Riga", "n": 2}}}]},
        {"role": "tool", "content": "12 \u00b0C", "name": "weather", "tool_call_id": "c"}]
    want = render_jinja_template(conversations=[plain], chat_template=source, tools=tools,
                                 add_generation_prompt=True, bos_token="<s>")[0][0]
    got = ChatTemplate(source, {"bos_token": "<s>"}).render(TALK, {}, tools)
    assert got == want and "Riga" in got
