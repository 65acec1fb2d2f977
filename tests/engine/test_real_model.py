"""Whole processes with weights that someone trained, as their file has them: SmolLM2, in 4 bits."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from helpers_smollm2 import smollm2

from actorium import Engine, SamplingParams
from actorium.actors.messages import ChatMessage
from actorium.actors.models.model_dir import resolve
from actorium.actors.tokenizer import chat_template

__all__ = ["smollm2"]
CONVERSATIONS = [
    [("user", "What is the capital of France?")],
    [("system", "You answer in one word."), ("user", "Is the Earth flat?")],
    [("user", "Hi"), ("assistant", "Hello! How can I help?"), ("user", "Add 12 and 30.")],
    [("user", "  def f(x):\n\treturn x ** 2  # caf\u00e9, \u4e2d\u6587\n\nWhat is f(12)?\n")],
]


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    base = tempfile.mkdtemp(dir="/tmp", prefix="act")
    try:
        with Engine(str(smollm2), run_dir=base, device="cpu") as found:
            yield found
    finally:
        shutil.rmtree(base, ignore_errors=True)


def test_it_knows_what_it_was_taught(engine: Engine) -> None:
    turns = [{"role": "user", "content": "What is the capital of Japan?"}]
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    first = engine.client.chat(turns, greedy)
    assert (first.text, first.finish_reason) == ("The capital of Japan is Tokyo.", "stop")
    turns += [{"role": "assistant", "content": first.text},
              {"role": "user", "content": "And of France?"}]
    second = engine.client.chat(turns, greedy)
    assert (second.text, second.finish_reason) == ("The capital of France is Paris.", "stop")
    assert second.usage.cached_tokens > 16, "the first turn"
    water = [{"role": "user", "content": "What is the chemical symbol for water?"}]
    assert "H2O" in engine.client.chat(water, greedy).text


def test_draws_of_one_seed_are_the_same(engine: Engine) -> None:
    """Alone and beside others."""
    def drawn(prompts: list[str], seed: int) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, max_tokens=24, seed=seed, ignore_eos=True)
        return [list(one.token_ids) for one in engine.client.generate(prompts, params)]

    prompt = "Once upon a time, in a village at the edge of a forest,"
    first, = drawn([prompt], 7)
    assert drawn([prompt], 7) == [first] and drawn([prompt], 8) != [first]
    assert drawn(["The report says that", prompt, "Water is made of"], 7)[1] == first


def test_chats_are_rendered_as_by_transformers(smollm2: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = gguf.GGUFReader(smollm2).fields["tokenizer.chat_template"].contents()
    own = chat_template.load(resolve(str(smollm2)), None).pick(None, tools=False)
    assert own is not None
    for turns in CONVERSATIONS:
        theirs, _ = render_jinja_template(
            [[{"role": role, "content": text} for role, text in turns]], chat_template=source,
            add_generation_prompt=True, bos_token="<|im_start|>", eos_token="<|im_end|>")
        assert own.render([ChatMessage(*turn) for turn in turns], {}) == theirs[0]
