"""Converts finish reasons, usage and log-probabilities of the engine to OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actorium.actors.client.requests import Completion, StreamDelta
from actorium.actors.gateway.api.chat_protocol import (
    ChatLogprobs,
    CompletionUsage,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from actorium.actors.gateway.served_model import AnyTokenTexts, TokenTexts
from actorium.actors.messages import TokenLogprob, Usage

REASONS = {"deadline": "length", "abort": "abort"}
"""OpenAI's names of the engine's finish reasons, where they differ."""


def reason(name: str | None) -> str | None:
    """Returns OpenAI's name of a finish reason."""
    return None if name is None else REASONS.get(name, name)


def usage(counts: Iterable[Usage]) -> CompletionUsage:
    """Returns the usage of all choices of one prompt."""
    each = list(counts)
    prompt = max((one.prompt_tokens for one in each), default=0)
    done = sum(one.completion_tokens for one in each)
    drafted = sum(one.draft_tokens for one in each)
    accepted = sum(one.accepted_tokens for one in each)
    details = {"accepted_prediction_tokens": accepted,
               "rejected_prediction_tokens": drafted - accepted} if drafted else {}
    return CompletionUsage(prompt, done, prompt + done,
                 {"cached_tokens": max((one.cached_tokens for one in each), default=0)}, details)


def sum_usage(parts: Sequence[CompletionUsage]) -> CompletionUsage:
    """Returns the usage of several prompts."""
    prompt, done = (sum(getattr(part, name) for part in parts)
                    for name in ("prompt_tokens", "completion_tokens"))
    cached = sum(part.prompt_tokens_details.get("cached_tokens", 0) for part in parts)
    return CompletionUsage(prompt, done, prompt + done, {"cached_tokens": cached})


def chat_logprobs(found: Sequence[TokenLogprob] | None, texts: AnyTokenTexts
                  ) -> ChatLogprobs | None:
    """Returns log-probabilities in the form of chat completions."""
    if found is None:
        return None
    return ChatLogprobs([ContentLogprob(texts.name_of(one.token_id), one.logprob,
                                        list(texts.bytes_of(one.token_id)),
                                        [TopLogprob(texts.name_of(token), value,
                                                    list(texts.bytes_of(token)))
                                         for token, value in one.top]) for one in found])


def last_counts(deltas: Iterable[StreamDelta | Completion]) -> list[Usage]:
    """Returns the token counts of the choices that have ended."""
    return [one.usage for one in deltas if one.usage is not None]


class UsageCounter:
    """Counts tokens while deltas arrive: a choice's counts are exact once it has ended."""

    def __init__(self, prompt_tokens: int = 0) -> None:
        self._prompt = prompt_tokens
        self._counts: dict[int, Usage] = {}

    def add(self, delta: StreamDelta) -> None:
        """Counts a delta's tokens."""
        before = self._counts.get(delta.index)
        done = before.completion_tokens if before is not None else 0
        self._counts[delta.index] = delta.usage or Usage(self._prompt, 0,
                                                        done + len(delta.token_ids))

    def usage(self) -> CompletionUsage:
        """Returns the usage of all choices so far."""
        return usage(self._counts.values()) if self._counts else usage([Usage(self._prompt, 0, 0)])


def prompt_logprobs(choices: Sequence[Completion], texts: TokenTexts) -> PromptLogprobs | None:
    """Returns prompt log-probabilities in vLLM's form: for each token, the alternatives by their
    ids."""
    found = choices[0].prompt_logprobs if choices else None
    if found is None:
        return None
    return [None if one is None else _alternatives(one, texts) for one in found]


def _alternatives(one: TokenLogprob, texts: TokenTexts) -> dict[str, PromptLogprob]:
    ranked = {str(token): PromptLogprob(value, rank, texts.text_of(token))
              for rank, (token, value) in enumerate(one.top, 1)}
    own = PromptLogprob(one.logprob, one.rank, texts.text_of(one.token_id))
    return {str(one.token_id): own} | ranked
