"""How a request's prompt is made: templates of its own, turns that are left open, truncation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from helpers_text import Asked, i4, ints, write_model

from actorium.actors.client.requests import encode_raw
from actorium.actors.config.retention import TEMPLATES
from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import ChatMessage, Generate, Rejected, Submit, Tokenize, Tokenized
from actorium.actors.params import SamplingParams
from actorium.actors.tokenizer.chat_template import ChatTemplate, PromptEnding
from actorium.actors.tokenizer.prompt_encoder import SHORT_CHARS
from actorium.actors.tokenizer.template_renderer import Templates, TemplateSource

HI = [ChatMessage("user", "hi"), ChatMessage("assistant", "end of ")]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
STRIPS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}"
OPEN = PromptEnding(add_generation_prompt=False, continue_final_message=True)
OWN = "{{ bos_token }}own{% for m in messages %}{{ m.content }}{% endfor %}" \
      "{% if add_generation_prompt %}?{% endif %}"
NUMBERS = count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m", max_position_embeddings=64)


@pytest.fixture
def asked(model: Path) -> Iterator[Asked]:
    made = Asked(model)
    yield made
    assert made.core._prompts is not None
    made.core._prompts.close()


def prompt(asked: Asked, max_tokens: int | None = 4, **given: Any) -> list[int] | Rejected:
    """Of a request; where it is tokenized alone, it comes to the same."""
    rid = f"r{next(NUMBERS)}"
    said = asked.tell(Generate(rid, SamplingParams(max_tokens=max_tokens), **given))
    said = said or asked.later()
    if isinstance(said[0], Rejected):
        return said[0]
    assert isinstance(said[0], Submit)
    ids = ints(said[0].prompt)
    if "messages" in given and "truncate_prompt_tokens" not in given:
        question = Tokenize("t", "", False, **given)
        (answer,) = asked.tell(question) or asked.later()
        assert isinstance(answer, Tokenized) and ints(answer.tokens) == ids
    return ids


def text_of(asked: Asked, **given: Any) -> str:
    ids = prompt(asked, **given)
    assert isinstance(ids, list), ids
    assert asked.core._model is not None
    return asked.core._model.decode(ids, False)


# --- the last turn --------------------------------------------------------------------------------

@pytest.mark.parametrize("source", [PLAIN, STRIPS])
@pytest.mark.parametrize("content", ["end", "end of ", " a\n", "<end>", "x<end>\ny", "e"])
def test_a_turn_that_is_left_open_as_in_transformers(source: str, content: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    (theirs,), _ = render_jinja_template([talk], chat_template=source, add_generation_prompt=False,
                                         continue_final_message=True)
    turns = [ChatMessage(turn["role"], turn["content"]) for turn in talk]
    assert ChatTemplate(source, {}).render(turns, {}, ending=OPEN) == theirs


def test_an_empty_turn_can_be_left_open() -> None:
    turns = [ChatMessage("user", "hi"), ChatMessage("assistant", "")]
    assert ChatTemplate(PLAIN, {}).render(turns, {}, ending=OPEN) == "<user>hi<end><assistant>"


@pytest.mark.parametrize("args", [{}, {"add_generation_prompt": True}])
def test_a_prompt_ends_in_one_way(args: dict[str, Any]) -> None:
    ending = PromptEnding(add_generation_prompt=not args, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="not with add_generation_prompt") as refused:
        ChatTemplate(PLAIN, {}).render(HI, args, ending=ending)
    assert refused.value.param == "continue_final_message"
    with pytest.raises(InvalidRequest, match="leaves the last turn out"):
        ChatTemplate("{{ messages[0].content }}", {}).render(HI, {}, ending=OPEN)


def test_how_a_prompt_ends(asked: Asked) -> None:
    turns = "<bos><|user|>hi<|assistant|>end of "
    assert text_of(asked, messages=HI) == turns + "<|assistant|>"
    assert text_of(asked, messages=HI, add_generation_prompt=False) == turns
    args = encode_raw({"add_generation_prompt": False}, dict, "template_args")
    assert text_of(asked, messages=HI, template_args=args) == turns
    long = [ChatMessage("user", "hi"), ChatMessage("assistant", "x" * SHORT_CHARS + " y")]
    whole = text_of(asked, messages=long, add_generation_prompt=False, truncate_prompt_tokens=5)
    assert text_of(asked, messages=long, add_generation_prompt=False, continue_final_message=True,
                   truncate_prompt_tokens=5) == whole == "xxx y"
    refused = prompt(asked, messages=HI, continue_final_message=True)
    assert isinstance(refused, Rejected) and refused.param == "continue_final_message"


# --- templates of requests ------------------------------------------------------------------------

def test_a_template_of_its_own(asked: Asked) -> None:
    assert text_of(asked, messages=HI, chat_template=OWN) == "<bos>ownhiend of ?"
    assert text_of(asked, messages=HI, chat_template=OWN, add_generation_prompt=False,
                   continue_final_message=True) == "<bos>ownhiend of "
    assert text_of(asked, messages=HI) == "<bos><|user|>hi<|assistant|>end of <|assistant|>"


def test_a_model_without_a_template_takes_one(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m")
    (path / "tokenizer_config.json").write_text('{"bos_token": "<bos>"}')
    asked = Asked(path)
    assert text_of(asked, messages=HI, chat_template=OWN) == "<bos>ownhiend of ?"
    refused = prompt(asked, messages=HI)
    assert isinstance(refused, Rejected) and "no chat template" in refused.message
    assert asked.core._prompts is not None
    asked.core._prompts.close()


@pytest.mark.parametrize("source, why", [
    ("{% if %}", "does not compile"), ("{{ raise_exception('no') }}", "refused them: no"),
    ("{% for a in messages[0].content * 9999 %}{% for b in messages[0].content * 9999 %}"
     "{% endfor %}{% endfor %}", "loop iterations"),
    ("{% set x = messages[0].content | center(3000000) %}{% for i in range(9999) %}"
     "{{ x.replace(' ', 'ab') | length }}{% endfor %}",
     "chat_template: the chat template takes more than")])
def test_a_template_that_misbehaves_is_refused(asked: Asked, source: str, why: str) -> None:
    refused = prompt(asked, messages=HI, chat_template=source)
    assert isinstance(refused, Rejected) and why in refused.message, refused
    assert refused.param in ("chat_template", "messages")
    assert text_of(asked, messages=HI, chat_template=OWN) == "<bos>ownhiend of ?"


def test_few_compiled_templates_are_kept() -> None:
    templates = Templates(TemplateSource("model's", {}))
    first = templates.get("0")
    assert templates.get("0") is first and templates.get("").source == "model's"
    for number in range(TEMPLATES):
        templates.get(str(number + 1))
    assert len(templates._kept) == TEMPLATES and templates.get("0") is not first


@pytest.mark.parametrize("given", [
    {"chat_template": OWN}, {"continue_final_message": True}, {"add_generation_prompt": False}])
def test_what_is_for_conversations_alone(asked: Asked, given: dict[str, Any]) -> None:
    (name,) = given
    refused = prompt(asked, text="hello", **given)
    assert isinstance(refused, Rejected) and refused.param == name
    (refused,) = asked.tell(Tokenize("t", "hello", **given))
    assert isinstance(refused, Rejected) and refused.param == name


# --- truncation -----------------------------------------------------------------------------------

def test_the_last_tokens_are_kept(asked: Asked) -> None:
    ids = list(range(60))
    for given in ({"tokens": i4(ids)}, {"text": "".join(map(chr, range(65, 91)))}):
        whole = prompt(asked, **given)
        assert isinstance(whole, list)
        assert prompt(asked, truncate_prompt_tokens=7, **given) == whole[-7:]
        assert prompt(asked, truncate_prompt_tokens=64, **given) == whole


def test_as_many_as_fit_the_context(asked: Asked) -> None:
    long = [number % 200 for number in range(1000)]
    assert prompt(asked, tokens=i4(long), truncate_prompt_tokens=-1) == long[-60:]
    assert prompt(asked, max_tokens=None, tokens=i4(long), truncate_prompt_tokens=-1) == long[-63:]
    whole = prompt(asked, text="ab" * 10_000, truncate_prompt_tokens=-1)
    assert whole == [97, 98] * 30
    refused = prompt(asked, tokens=i4(long), max_tokens=64, truncate_prompt_tokens=-1)
    assert isinstance(refused, Rejected) and refused.param == "max_tokens"
    (answer,) = asked.tell(Tokenize("t", "abcdef", truncate_prompt_tokens=2))
    assert ints(answer.tokens) == [101, 102]


@pytest.mark.parametrize("wrong", [0, 65])
def test_a_truncation_that_cannot_be(asked: Asked, wrong: int) -> None:
    refused = prompt(asked, text="hello", truncate_prompt_tokens=wrong)
    assert isinstance(refused, Rejected) and refused.param == "truncate_prompt_tokens"
