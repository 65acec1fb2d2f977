"""Chat templates: as transformers renders them, and nothing a client sends can hang them."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic

import pytest

from actorium.actors.errors import BadModel, InvalidRequest
from actorium.actors.messages import ChatMessage
from actorium.actors.tokenizer.chat import MAX_MESSAGES, ChatTemplate, load

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
    assert caught.value.param == "messages" and monotonic() - begin < 10
    assert caught.value.message.startswith("messages: ")


def test_many_messages_cannot_square_the_time() -> None:
    nested = "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="loop iterations"):
        render(nested, [ChatMessage("user", "x")] * MAX_MESSAGES)
    with pytest.raises(InvalidRequest, match="1 to"):
        render("", [ChatMessage("user", "x")] * (MAX_MESSAGES + 1))


def test_arguments_cannot_replace_what_is_given() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    for name in ("bos_token", "messages", "raise_exception", "_actorium_tick", "a b"):
        with pytest.raises(InvalidRequest, match="may not be set"):
            ChatTemplate("", {}).render(HI, {name: "x"})


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert load(tmp_path, None) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one{{ bos_token }}",
                                  "bos_token": {"content": "<b>"}}))

    def text(override: str | None = None) -> str:
        found = load(tmp_path, override)
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
