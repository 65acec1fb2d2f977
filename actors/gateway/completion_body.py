"""The body of `/v1/completions`, and the shapes of its answers."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from actorium.actors.gateway.chat_body import PromptLogprobs, Usage
from actorium.actors.gateway.errors import HttpError
from actorium.actors.gateway.fields import SamplingFields, check_ids

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, which every engine has here; a chat goes on to the end of the context."""


class CompletionBody(SamplingFields, kw_only=True):
    """A text completion's request."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True
    return_prompt_token_ids: bool = False

    def prompts(self, max_model_len: int) -> list[str | list[int]]:
        """One or several, as text or as token ids. Raises `HttpError`."""
        given: Any = self.prompt
        if isinstance(given, str):
            return [given]
        kinds = set(map(type, given))
        if int in kinds and len(kinds) > 1:
            raise HttpError(400, "prompt: token ids and texts are mixed", "prompt")
        found: list[Any] = [given] if int in kinds else given
        if len(found) > MAX_PROMPTS:
            raise HttpError(400, f"prompt: at most {MAX_PROMPTS} of them, got {len(found)}",
                            "prompt")
        if not found or not all(found):
            raise HttpError(400, "prompt: must not be empty", "prompt")
        for one in found:
            if not isinstance(one, str) and self.truncate_prompt_tokens is None:
                check_ids(one, max_model_len, "prompt")
        return found

    def alternatives(self) -> int | None:
        """Alternatives told of each token; None = no log-probabilities."""
        return 0 if self.logprob_token_ids is not None else self.logprobs

    @property
    def wants_prompt_ids(self) -> bool:
        """The answer tells the prompts' tokens."""
        return self.return_token_ids or self.return_prompt_token_ids

    @property
    def most(self) -> int | None:
        """Tokens of each completion at the most; None = to the end of the context."""
        if self.max_tokens is None and self.n_predict is None:
            return DEFAULT_MAX_TOKENS
        return self.limit

    def check(self) -> None:
        """Raise `HttpError` on what is not offered."""
        if self.suffix:
            raise HttpError(400, "suffix: not supported", "suffix")
        if self.stream and self.prompt_logprobs is not None:
            raise HttpError(400, "prompt_logprobs: not in a stream", "prompt_logprobs")
        if self.max_tokens == 0 and not self.echo:
            raise HttpError(400, "max_tokens: must be at least 1 without echo", "max_tokens")


class TextLogprobs(Struct):
    """Four columns, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class TextCompletion(Struct, kw_only=True):
    """The whole answer, or an event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    system_fingerprint: None = None
