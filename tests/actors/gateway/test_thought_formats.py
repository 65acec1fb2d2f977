"""Every format of reasoning: what is a thought, what is the answer, however the text is cut."""

from __future__ import annotations

import random

import pytest
from helpers_parsing import check, cut_at, in_parts

from actorium.actors.config.reasoning_formats import (
    ALIASES,
    AUTO,
    GEMMA4,
    HARMONY,
    NAMES,
    NONE,
    REASONING_FORMATS,
    THINK,
    format_chosen,
    format_shown,
)
from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.parsers.parser_factory import ModelTemplates, ParserFactory
from actorium.actors.gateway.parsers.parts import OutputParser, ReasoningPart, TextPart
from actorium.actors.gateway.parsers.thoughts import Thought

OWN = [name for name in REASONING_FORMATS if name not in (HARMONY, GEMMA4)]
"""Those of `ThinkParser`; the others' parsers have tests of their own."""
KEPT = "minimax_m2_append_think"


def parser(name: str, thought: Thought) -> OutputParser:
    factory = ParserFactory(NONE, name, ModelTemplates())
    assert factory.special_marks is REASONING_FORMATS[name].special
    return factory.parser(None, None, True, thought)


@pytest.mark.parametrize("name", [name for name in OWN if name != KEPT])
def test_a_thought_and_an_answer(name: str) -> None:
    row = REASONING_FORMATS[name]
    before, after = (row.answer[0], "".join(row.answer[1:])) if row.answer else ("", "")
    wanted = [ReasoningPart("Hm, é <b>\n[x]"), TextPart("Yes <ok>")]
    for begin, end in zip(row.begin, row.end, strict=False):
        rest = f"\nHm, é <b>\n[x]\n{end}\n\n{before}Yes <ok>{after}"
        check(lambda: parser(name, Thought.MAY), f"\n{begin}{rest}", wanted)
        check(lambda: parser(name, Thought.OPEN), rest, wanted)
        check(lambda: parser(name, Thought.OPEN), begin + rest, wanted)
        half = f"Hm {end[:-1]}"
        check(lambda: parser(name, Thought.OPEN), half, [ReasoningPart(half)])
        check(lambda: parser(name, Thought.MAY), f" Well, {begin}", [TextPart(f" Well, {begin}")])


@pytest.mark.parametrize("name", OWN)
def test_nothing_depends_on_cuts(name: str) -> None:
    row, draw = REASONING_FORMATS[name], random.Random(name)
    pieces = (*row.begin, *row.end, *row.answer, "a", " ", "\n", "<", "</", "[", "é")
    for _ in range(150):
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(9)))
        at = draw.randrange(len(text) + 1)
        text = text[:at] + text[at + 1:] if draw.random() < 0.3 else text
        for thought in (Thought.MAY, Thought.OPEN):
            whole = in_parts(parser(name, thought), [text])
            for _ in range(3):
                parts = cut_at(text, [draw.randrange(1 << 16) for _ in range(4)])
                assert in_parts(parser(name, thought), parts) == whole, (text, parts)
            assert in_parts(parser(name, thought), list(text)) == whole, text


def test_a_thought_that_stays_in_the_answer() -> None:
    check(lambda: parser(KEPT, Thought.OPEN), "a</think>b", [TextPart("<think>a</think>b")])
    check(lambda: parser(KEPT, Thought.MAY), "a", [TextPart("a")])


def test_an_answer_begins_without_the_end_of_the_thought() -> None:
    check(lambda: parser("kimi_k3", Thought.OPEN),
          "Hm<|open|>response<|sep|>Yes<|close|>response<|sep|><|close|>message<|sep|>",
          [ReasoningPart("Hm"), TextPart("Yes")])


@pytest.mark.parametrize(("name", "args", "wanted"), [
    ("deepseek_r1", {}, Thought.OPEN), ("deepseek_r1", {"enable_thinking": False}, Thought.OPEN),
    ("deepseek_v3", {}, Thought.NONE), ("deepseek_v3", {"thinking": True}, Thought.OPEN),
    ("deepseek-v3", {"thinking": 1}, Thought.NONE), ("qwen3", {}, Thought.MAY),
    ("holo2", {}, Thought.OPEN), ("holo2", {"thinking": False}, Thought.NONE),
    ("minimax-m3", {"thinking_mode": "disabled"}, Thought.NONE),
    ("hunyuan", {"reasoning_effort": "no_think"}, Thought.NONE),
    ("identity", {}, Thought.NONE), ("openai_gptoss", {}, Thought.MAY)])
def test_whether_there_is_a_thought(name: str, args: dict[str, object], wanted: Thought) -> None:
    assert ParserFactory(NONE, name, ModelTemplates()).thought(args, False) is wanted


@pytest.mark.parametrize(("template", "wanted"), [
    ("{{ '<|channel|>' }}", HARMONY), ("<|channel>", GEMMA4), ("[THINK]", "mistral"),
    ("<think>", "qwen3"), ("x</think>", "qwen3"), ("<seed:think>", "seed_oss"), ("", NONE),
    ("</think><answer>", "hunyuan_a13b"), ("</think><response>", "ernie45"),
    ("<|START_THINKING|>", "cohere_command"), ("/no_think <think></think>", "qwen3")])
def test_the_template_chooses(template: str, wanted: str) -> None:
    assert format_shown(template) == format_chosen(AUTO, AUTO, template) == wanted


def test_names() -> None:
    names = [name for row in REASONING_FORMATS.values() for name in row.names]
    assert len(names) == len(set(names)) and not set(names) & set(REASONING_FORMATS)
    assert REASONING_FORMATS["qwen3"] is THINK
    for name in (*NAMES, *ALIASES):
        validate(Config(gateway=GatewayConfig(reasoning_parser=name)))
    with pytest.raises(BadConfig, match="must be one of auto, none, harmony, gemma4, ") as refused:
        validate(Config(gateway=GatewayConfig(reasoning_parser="muse")))
    assert "reasoning_parser" in refused.value.message
