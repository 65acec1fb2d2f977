"""The shapes of OpenAI's answers that several APIs share: usage and log-probabilities."""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType

from actorium.actors.gateway.served_model import AnyTokenTexts, TokenTexts
from actorium.actors.messages import RoutedExperts, TokenLogprob, Usage


class ApiObject(Struct, kw_only=True):
    """The first fields of OpenAI's answers, and of each event of a stream."""

    id: str
    object: str
    created: int
    """Unix time, seconds."""
    model: str


class CompletionUsage(Struct):
    """Token counts of a request: the prompt once, all choices together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: dict[str, int] = {}
    completion_tokens_details: dict[str, int] = {}
    weight_version: int | UnsetType = UNSET
    """Of the weights that made the last token; left out while they are those of the start."""


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ContentLogprob]
    refusal: None = None


class PromptLogprob(Struct):
    """One alternative at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, None at the first: token id -> alternative."""


def completion_usage(used: Usage) -> CompletionUsage:
    """Returns the usage of an answer."""
    prompt, done = used.prompt_tokens, used.completion_tokens
    details = {"accepted_prediction_tokens": used.accepted_tokens,
               "rejected_prediction_tokens": used.draft_tokens - used.accepted_tokens} \
        if used.draft_tokens else {}
    return CompletionUsage(prompt, done, prompt + done, {"cached_tokens": used.cached_tokens},
                           details, used.weight_version or UNSET)


class ShownExperts(Struct):
    """Experts that the layers of a mixture of experts chose."""

    shape: tuple[int, int, int]
    """Tokens (of prompt and completion, but the last), layers, experts chosen by each."""
    dtype: str
    """uint8 | uint16"""
    data: str
    """Base64 of the numbers, little-endian."""


def shown_experts(experts: RoutedExperts | None) -> ShownExperts | UnsetType:
    """Returns them as one string; nothing where they were not asked for."""
    if experts is None:
        return UNSET
    return ShownExperts(experts.shape, f"uint{8 * experts.width}",
                        b64encode(experts.data).decode())


def experts_int32(experts: RoutedExperts) -> str:
    """Returns them as SGLang does."""
    numbers = array("BH"[experts.width - 1], experts.data)
    return b64encode(array("i", numbers).tobytes()).decode()


def chat_logprobs(each: Sequence[TokenLogprob] | None, texts: AnyTokenTexts
                  ) -> ChatLogprobs | None:
    """Returns log-probabilities in the form of chat completions."""
    if each is None:
        return None
    return ChatLogprobs([ContentLogprob(texts.name_of(one.token_id), one.logprob,
                                        list(texts.bytes_of(one.token_id)),
                                        [TopLogprob(texts.name_of(token), value,
                                                    list(texts.bytes_of(token)))
                                         for token, value in one.top]) for one in each])


def prompt_logprobs(each: Sequence[TokenLogprob | None] | None, texts: TokenTexts
                    ) -> PromptLogprobs | None:
    """Returns prompt log-probabilities in vLLM's form: for each token, the alternatives by their
    ids."""
    if each is None:
        return None
    return [None if one is None else _alternatives(one, texts) for one in each]


def _alternatives(one: TokenLogprob, texts: TokenTexts) -> dict[str, PromptLogprob]:
    ranked = {str(token): PromptLogprob(value, rank, texts.text_of(token))
              for rank, (token, value) in enumerate(one.top, 1)}
    actual = PromptLogprob(one.logprob, one.rank, texts.text_of(one.token_id))
    return {str(one.token_id): actual} | ranked
