"""Thoughts are separated as vLLM's and SGLang's own parsers do, on the same drawn texts of every
format; what differs is argued for. Their sources run without what these import
(`oracle_reasoning.py`)."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.config.reasoning_formats import (
    ALIASES,
    REASONING_FORMATS,
    THINK,
    ReasoningFormat,
)
from actorium.actors.gateway.parsers.gemma4 import Gemma4Parser
from actorium.actors.gateway.parsers.parts import (
    OutputParser,
    PlainParser,
    ReasoningPart,
    TextPart,
)
from actorium.actors.gateway.parsers.thoughts import KeptThought, ThinkParser, Thought

pytestmark = pytest.mark.conformance
FOLDER = Path(__file__).parents[2] / "build" / "parsers"
SCRIPT = Path(__file__).with_name("oracle_reasoning.py")
TEXTS = 2000
ON: dict[str, Any] = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
OPENED = [("vllm", name) for name in (
    "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "poolside_v1", "ernie45", "glm45",
    "glm47", "granite_thinking_parser", "ling3", "holo2", "hy_v3", "hy_v4", "k2_horizon", "kimi_k2",
    "kimi_k3", "mimo", "minicpmv", "minimax_m2", "minimax_m2_append_think", "nemotron_v3", "olmo3",
    "plamo3", "qwen3", "seed_oss", "step3", "step3p5")]
OPENED += [("sglang", name) for name in (
    "deepseek-r1", "qwen3-thinking", "minimax", "step3", "step3p5", "gigachat35", "kimi_k3",
    "iquest_q1", "minimax-append-think", "k2_horizon")]
"""Parsers that take the prompt to have begun a thought; here the template says so."""
BEGUN = [("vllm", name) for name in ("gemma4", "granite", "hunyuan_a13b", "minimax_m3", "mistral")]
BEGUN += [("sglang", name) for name in (
    "apertus2509", "deepseek-v3", "deepseek-v4", "deepseek-v41", "dots", "gemma4", "glm45",
    "granite_thinking_parser", "interns1", "kimi", "kimi_k2", "mimo", "minimax-m3", "mistral",
    "nanbeige", "nemotron_3", "poolside_v1", "qwen3")]
"""Parsers of models that begin their thoughts themselves.

Not compared: harmony, whose parser has tests of its own; Cohere's, a library in Rust in vLLM, with
marks around every answer in SGLang; SGLang's hunyuan, which wants a tokenizer, and its ling3, which
is off by default."""
NOISE = ("a", " ", "\n", "\n\n", "Well, ", "é", "🙂", "<", "</", "think", "<thin", "</think",
         "[", "[/THIN", "Here", "Here is my", "thought", "<|", "|>", "<b>", "{\"x\": 1}", "5 < 6",
         "done.")


HUNYUAN = re.compile(r"(?s)<think>\n.*?\S.*?\n</think>\n<answer>\n.*?\S.*\n</answer>")


def row_of(name: str) -> ReasoningFormat:
    return REASONING_FORMATS[ALIASES.get(name, name)]


def drawn(name: str, opened: bool) -> list[str]:
    """Texts as models write them, and such as they should not."""
    draw, row = random.Random(name), row_of(name)
    pairs = list(zip(row.begin, row.end, strict=False))
    if row is not REASONING_FORMATS["granite"]:
        del pairs[1:]  # theirs knows one pair, by the tokenizer or the request
    marks = [mark for pair in pairs for mark in pair] + list(row.answer)

    def noise(most: int) -> str:
        return "".join(draw.choice(NOISE) for _ in range(draw.randrange(most)))

    texts = []
    for _ in range(TEXTS):
        begin, end = draw.choice(pairs)
        if row is REASONING_FORMATS["gemma4"]:
            begin += "\n"
        elif name == "hunyuan_a13b":
            begin, end = f"{begin}\n", f"\n{end}"
        text = begin if draw.random() < (0.2 if opened else 0.8) else ""
        text += noise(8)
        if draw.random() < 0.85:
            text += end
        if row.answer and draw.random() < 0.7:
            text += f"\n{row.answer[0]}\n{noise(6)}\n{row.answer[1]}"
        else:
            text += noise(8)
        if draw.random() < 0.1:
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(marks) + text[at:]
        texts.append(text)
    return texts


def ours(name: str, opened: bool, texts: list[str]) -> list[tuple[str, str]]:
    row, found = row_of(name), []
    for text in texts:
        parser: OutputParser = ThinkParser(opened, None, row)
        if row is REASONING_FORMATS["gemma4"]:
            parser = Gemma4Parser(None, True, Thought.MAY)
        elif row.kept:
            parser = KeptThought(row, opened, PlainParser())
        parts = parser.feed(text) + parser.end()
        found.append(("".join(part.text for part in parts if isinstance(part, ReasoningPart)),
                      "".join(part.text for part in parts if isinstance(part, TextPart))))
    return found


@cache
def theirs() -> dict[tuple[str, str], Any]:
    """What their parsers say of all texts."""
    which = [*((key, True) for key in OPENED), *((key, False) for key in BEGUN)]
    cases = [[*key, ON | ({"force": True} if opened and key[0] == "sglang" else {}),
              drawn(key[1], opened)] for key, opened in which]
    run = subprocess.run([str(FOLDER / "env/bin/python"), str(SCRIPT), str(FOLDER)],
                         input=json.dumps(cases), capture_output=True, text=True, check=True,
                         timeout=1800)
    return {key: answer for (key, _), answer in zip(which, json.loads(run.stdout), strict=True)}


def argued(engine: str, name: str, opened: bool, text: str) -> str:
    """Why a text may be separated in another way; empty = it may not."""
    row, words = row_of(name), text.strip()
    gemma = row is REASONING_FORMATS["gemma4"]
    begins = text.count("<|channel>") if gemma else sum(map(text.count, row.begin))
    at_start = any(words.startswith(mark) for mark in row.begin)
    ends = sum(text.count(mark) for mark in row.end)
    if begins > at_start:
        return "a mark that begins a thought stands within the text: it is a quotation"
    if ends > 1:
        return "a second end of the thought is text, not dropped"
    if not ends and name in ("olmo3", "k2_horizon", "granite", "hunyuan_a13b"):
        return "an unfinished thought is one; theirs says so in streams alone, or never"
    if not ends and at_start and engine == "vllm" and name == "minimax_m3":
        return "the same"
    if not opened and not at_start and (ends or gemma):
        return "an end without a beginning is text, and so is a channel's name"
    if at_start and not any(map(text.startswith, row.begin)):
        return "white space may stand before the mark"
    if name == "hunyuan_a13b" and HUNYUAN.fullmatch(text) is None:
        return "line ends and marks around the answer may be missing"
    if gemma and not text.startswith("<|channel>thought\n"):
        return "a channel without a name is a thought, too"
    if row.answer and (any(text.count(mark) > 1 for mark in row.answer) or not ends
                       or not words.endswith(row.answer[1:])
                       or any(map(text.count, row.answer[2:]))
                       or re.search(f"{re.escape(row.end[0])}\\s*{re.escape(row.answer[0])}",
                                    text) is None):
        return "marks around an answer surround all of it: others are text"
    if row.kept and not text:
        return "nothing is added to an empty text"
    if name == "step3" and engine == "vllm" and at_start:
        return "a beginning that the model writes although the prompt has is dropped"
    if any(f"{mark}"[:size] and text.endswith(mark[:size]) for mark in (*row.begin, *row.end)
           for size in range(2, len(mark))):
        return "the beginning of a mark at the end of a whole text is text"
    return ""


def plain(parts: Sequence[str | None], row: ReasoningFormat) -> list[str]:
    """The thought and the answer without the marks around the answer, and with single spaces."""
    pattern = "|".join(map(re.escape, row.answer)) or "(?!)"
    return [" ".join(re.sub(pattern, " ", part or "").split()) for part in parts]


@pytest.mark.parametrize(("key", "opened"), [
    *((key, True) for key in OPENED), *((key, False) for key in BEGUN)], ids=str)
def test_thoughts_are_separated_as_theirs(key: tuple[str, str], opened: bool) -> None:
    texts, answers = drawn(key[1], opened), theirs()[key]
    assert not isinstance(answers, str), answers
    same, row = 0, row_of(key[1])
    for text, own, other in zip(texts, ours(key[1], opened, texts), answers, strict=True):
        if plain(own, row) == plain(other, row):
            same += 1
        else:
            assert argued(*key, opened, text), (text, own, other)
    least = 0.2 if key[1] == "hunyuan_a13b" else 0.5
    assert same > least * len(texts), f"{same} of {len(texts)} are the same"


def test_every_name_is_known() -> None:
    """Or named in docs/reasoning.md as one that is not."""
    page = (Path(__file__).parents[2] / "docs" / "reasoning.md").read_text()
    registered = (FOLDER / "vllm/reasoning/__init__.py").read_text()
    listed = (FOLDER / "sglang/srt/parser/reasoning_parser_names.py").read_text()
    found = {line.split('"')[1] for line in registered.splitlines()
             if line.startswith('    "') and line.endswith("(  # name")}
    found |= {line.split('"')[1] for line in registered.splitlines()
              if line.startswith('    "') and line.rstrip().endswith("(")}
    found |= {line.split('"')[1] for line in listed.splitlines() if line.startswith('    "')}
    unknown = {name for name in found if name not in ALIASES and name not in REASONING_FORMATS}
    assert len(found) > 50 and all(f"`{name}`" in page for name in unknown), unknown
    assert THINK is REASONING_FORMATS["qwen3"]
