"""Long prompts: nobody waits for them, and they come to the same token ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_text import Asked, context, ints, loaded, write_model
from msgspec import Raw
from msgspec.msgpack import encode

from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import (
    MAX_TURNS,
    NO_ARGS,
    NO_TOOLS,
    Abort,
    AbortRequest,
    Accepted,
    ChatMessage,
    Detokenize,
    Detokenized,
    Generate,
    Rejected,
    Submit,
    Tokenize,
    Tokenized,
)
from actorium.actors.params import SamplingParams, Structured
from actorium.actors.tokenizer.chat_template import (
    ChatTemplate,
    ChatTemplates,
    RenderBudgetExceeded,
)
from actorium.actors.tokenizer.core import SUBMIT_AGAIN, TokenizerCore
from actorium.actors.tokenizer.prompt_encoder import SHORT_CHARS, SHORT_IDS, SHORT_TURNS
from actorium.actors.tokenizer.template_renderer import TemplateRenderer

CLIENT, NOW = Asked.CLIENT, Asked.NOW
LONG = "hello wörld " * (SHORT_CHARS // 8)
MANY = [ChatMessage(("user", "assistant")[i % 2], f"turn {i}") for i in range(SHORT_TURNS + 1)]
SQUARES = ("{% set ns = namespace(all='') %}{% for m in messages %}"
           "{% set ns.all = ns.all + m.content %}{% endfor %}{{ ns.all }}")
"""Copies all of it for each message."""
FOREVER = "{% for m in messages %}{{ m.content.replace('a', m.content) | length }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m",
                       max_position_embeddings=1 << 14)


@pytest.fixture
def asked(model: Path) -> Iterator[Asked]:
    made = Asked(model)
    yield made
    assert made.core._prompts is not None
    made.core._prompts.close()


def generate(rid: str, **more: Any) -> Generate:
    return Generate(rid, SamplingParams(max_tokens=4), **(more or {"text": "hello"}))


QUESTIONS = [
    Tokenize("q", LONG), Tokenize("q", LONG, add_special_tokens=False),
    Tokenize("q", "", messages=MANY), Tokenize("q", "", messages=[ChatMessage("user", LONG)]),
    Tokenize("q", "", messages=MANY[:2], tools=Raw(encode([{"x": "y" * SHORT_CHARS}]))),
    Detokenize("q", bytes(4 * (SHORT_IDS + 1)))]


@pytest.mark.parametrize("question", QUESTIONS, ids=range(len(QUESTIONS)))
def test_a_long_question_is_answered_later_and_as_if_it_were_short(asked: Asked, question: Any,
                                                                   model: Path) -> None:
    alone = loaded(TokenizerCore(context(model)))  # nobody wakes it: it does all by itself
    alone.on_client(CLIENT, question, NOW)
    (want,) = [send.message for send in alone.on_wake(NOW)]
    assert asked.tell(question) == [] and not asked.core.done
    (soon,) = asked.tell(Tokenize("short", "a"))
    assert soon.rid == "short"
    assert asked.later() == [want] and asked.core.done
    assert isinstance(want, Tokenized | Detokenized)


def test_a_long_prompt_is_submitted_once(asked: Asked) -> None:
    long = generate("r", messages=MANY)
    assert asked.tell(long) == [] and asked.tell(long) == []  # sent again while it waits
    submit, accepted = asked.later()
    assert isinstance(submit, Submit) and isinstance(accepted, Accepted)
    assert submit.arrival == NOW and accepted.prompt_tokens == len(ints(submit.prompt)) > 0
    (again,) = asked.tell(long)
    assert again == accepted
    assert asked.tell(long, NOW + SUBMIT_AGAIN) == []  # the scheduler may have died with it
    assert [type(message) for message in asked.later()] == [Submit, Accepted]


def test_errors_in_a_long_prompt_are_reported(asked: Asked) -> None:
    cases = [(generate("r", text="x" * 10**6), "prompt", "context_overflow"),
             (generate("r", messages=[MANY[0]] * (MAX_TURNS + 1)), "messages", "invalid_request"),
             (generate("r", messages=MANY, template_args=Raw(encode({"messages": 1}))),
              "template_args", "invalid_request")]
    for message, param, code in cases:
        assert asked.tell(message) == []
        (refused,) = asked.later()
        assert isinstance(refused, Rejected) and (refused.param, refused.code) == (param, code)
    (refused,) = asked.tell(Generate("r", SamplingParams(top_p=7.0), text=LONG))
    assert refused.param == "top_p", "before anything is done for it"


def test_a_grammar_and_a_long_prompt(asked: Asked) -> None:
    message = Generate("r", SamplingParams(structured=Structured(regex="[ab]"), max_tokens=4),
                       messages=MANY)
    assert asked.tell(message) == []
    said: list[Any] = []
    while not said:
        said = asked.later()
    assert isinstance(said[0], Submit) and "[ab]" in said[0].grammar and asked.core.done
    assert asked.core._model is not None
    asked.core._model.grammars.close()


def test_an_aborted_long_prompt_is_never_submitted(asked: Asked) -> None:
    assert asked.tell(generate("r", messages=MANY)) == []
    assert [type(message) for message in asked.tell(Abort("r"))] == [Rejected, AbortRequest]
    assert asked.core.done and asked.wake() == []


def test_a_template_with_more_iterations_than_estimated(asked: Asked) -> None:
    loops = ChatTemplate("{% for i in range(50000) %}{% endfor %}done", {})
    with pytest.raises(RenderBudgetExceeded):
        loops.render(MANY, {}, ticks=1000)
    assert loops.render(MANY, {}) == "done"
    assert asked.core._model is not None
    asked.core._model._templates = ChatTemplates({"default": loops.source}, {})
    short = Tokenize("t", "", messages=MANY[:1])
    assert asked.tell(short) == []
    (told,) = asked.later()
    (want,) = asked.tell(Tokenize("t", "done", add_special_tokens=False))
    assert told == want


def test_a_render_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = TemplateRenderer(FOREVER, {})
    try:
        assert renderer.render([ChatMessage("user", "aa")], NO_ARGS, NO_TOOLS, {}) == "4"
        first = renderer.child.process
        with pytest.raises(InvalidRequest, match=r"takes more than 2 s or 4 GiB") as caught:
            renderer.render([ChatMessage("user", "a" * 20_000)] * 100, NO_ARGS, NO_TOOLS, {})
        assert caught.value.param == "messages"
        assert first is not None and first.returncode is not None, "it is dead"
        again = renderer.render([ChatMessage("user", "aa")], NO_ARGS, NO_TOOLS, {})
        assert again == "4", "there is another one"
    finally:
        renderer.close()


def test_quadratic_templates_are_rendered_outside_the_actor(asked: Asked) -> None:
    template = ChatTemplate(SQUARES, {})
    assert asked.core._model is not None
    asked.core._model._templates = ChatTemplates({"default": SQUARES}, {})
    turns = [ChatMessage("system", "x" * 20)] * MAX_TURNS
    assert asked.tell(Tokenize("t", "", messages=turns)) == []
    (told,) = asked.later()
    (want,) = asked.tell(Tokenize("t", template.render(turns[:10], {}), add_special_tokens=False))
    assert 10 * len(told.tokens) == MAX_TURNS * len(want.tokens)
