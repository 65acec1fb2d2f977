"""Whether a prompt has begun a thought, as the tokenizer finds it for a budget."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from actorium.actors.messages import ChatMessage, Generate, ThoughtRule
from actorium.actors.params import SamplingParams
from actorium.actors.tokenizer.thought_rules import thought_rule


class Letters:
    """A model whose tokens are letters."""

    def __init__(self, reasoning: str) -> None:
        self.facts = self
        self.reasoning = reasoning
        self.default_args: dict[str, Any] = {}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def rule(name: str, prompt: str, budget: int | None = 5, **fields: Any) -> ThoughtRule | None:
    message = Generate(rid="r", params=SamplingParams(thinking_token_budget=budget), **fields)
    return thought_rule(message, array("i", map(ord, prompt)), 9, Letters(name))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "prompt", "opened"), [
    ("qwen3", "Hi <think>\n", True), ("qwen3", "Hi", False),
    ("qwen3", "<think>\n\n</think>\n\n", False), ("qwen3", "What is <think>?", False),
    ("deepseek_r1", "Hi", True), ("deepseek_r1", "<think></think>", False),
    ("deepseek_v3", "Hi", False), ("gemma4", "Hi<|channel>thought\n", True),
    ("mistral", "x" * 99 + "[THINK]", True)])
def test_the_prompts_end_tells(name: str, prompt: str, opened: bool) -> None:
    assert rule(name, prompt) == ThoughtRule(name, 5, opened)


def test_template_variables_and_continued_messages_tell_too() -> None:
    on = msgspec.Raw(msgspec.msgpack.encode({"thinking": True}))
    found = rule("deepseek_v3", "Hi", template_args=on)
    assert found is not None and found.opened
    for text, opened in (("<think>\nHm", True), ("<think>\nHm</think>So", False), ("So", False)):
        found = rule("qwen3", "whatever", messages=[ChatMessage("assistant", text)],
                     add_generation_prompt=False, continue_final_message=True)
        assert found is not None and found.opened is opened


def test_a_budget_that_limits_nothing_is_no_rule() -> None:
    assert rule("qwen3", "<think>", None) is None and rule("qwen3", "<think>", 9) is None
