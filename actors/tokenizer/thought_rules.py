"""The limit on a request's thoughts (`thinking_token_budget`), as the scheduler takes it."""

from __future__ import annotations

from actorium.actors.config.reasoning_formats import REASONING_FORMATS, ReasoningFormat
from actorium.actors.messages import Generate, ThoughtRule, TurnPart
from actorium.actors.tokenizer.chat_template import unpacked_args
from actorium.actors.tokenizer.text_model import TextModel, TokenIds

LAST_TOKENS = 32
"""Tokens at a prompt's end in which the beginning of a thought is looked for."""


def thought_rule(message: Generate, prompt: TokenIds, max_tokens: int, model: TextModel
                 ) -> ThoughtRule | None:
    """Returns the limit of a checked request; None where nothing is limited. max_tokens: the most
    tokens of its completion."""
    budget = message.params.thought_limit(max_tokens)
    if budget is None:
        return None
    name = model.facts.reasoning
    return ThoughtRule(name, budget, _is_opened(message, prompt, model, REASONING_FORMATS[name]))


def _is_opened(message: Generate, prompt: TokenIds, model: TextModel, row: ReasoningFormat) -> bool:
    """Returns whether the completion begins within a thought."""
    if message.continue_final_message and message.messages:
        return row.left_open(_text(message.messages[-1].content))
    opened = row.ends_open(model.decode(prompt[-LAST_TOKENS:].tolist(), False))
    if opened is not None:
        return opened
    return row.begins(model.default_args | unpacked_args(message.template_args)) is True


def _text(content: str | list[TurnPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
