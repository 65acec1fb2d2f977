"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from actorium.actors.client.requests import Completion, Request, StreamDelta
from actorium.actors.gateway.api import answers
from actorium.actors.gateway.api.answers import UsageCounter
from actorium.actors.gateway.api.chat_protocol import (
    ApiObject,
    CompletionUsage,
    PromptLogprobs,
)
from actorium.actors.gateway.api.response_formats import format_field, structured_of
from actorium.actors.gateway.api.sampling_fields import (
    SamplingFields,
    check_ids,
    request_for,
    sampling,
)
from actorium.actors.gateway.api.turn import HttpTurn
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.replies import encode_json, event
from actorium.actors.gateway.resume.delta_streams import Deltas, prompts_of
from actorium.actors.gateway.served_model import AnyTokenTexts, ServedModel, TokenIdTexts
from actorium.actors.messages import TokenLogprob

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
        """Alternatives shown for each token; None = no log-probabilities."""
        return 0 if self.logprob_token_ids is not None else self.logprobs

    @property
    def wants_prompt_ids(self) -> bool:
        """The answer has the prompts' tokens."""
        return self.return_token_ids or self.return_prompt_token_ids

    @property
    def max_new_tokens(self) -> int | None:
        """Tokens of each completion at the most; None = to the end of the context."""
        if self.max_tokens is None and self.n_predict is None:
            return DEFAULT_MAX_TOKENS
        return self.limit

    def check(self) -> None:
        """Raise `HttpError` on what is not offered."""
        if self.suffix:
            raise HttpError(400, "suffix: not supported", "suffix")
        if self.thinking_token_budget is not None:
            raise HttpError(400, "thinking_token_budget: only with messages",
                            "thinking_token_budget")
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


class TextCompletion(ApiObject, kw_only=True):
    """The whole answer, or an event of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: CompletionUsage | None = None
    system_fingerprint: None = None


Column = Sequence[TokenLogprob | None]

class CompletionsTurn(HttpTurn):
    """One text completion under way: of a prompt or several."""

    body_type = CompletionBody
    body: CompletionBody

    def __init__(self, call: EngineCall, model: ServedModel, body: CompletionBody) -> None:
        super().__init__(call, model, body)
        self._id = f"cmpl-{call.answer_id}"
        self._n = body.n or 1
        self._texts = TokenIdTexts(self.engine.token_texts) if body.return_tokens_as_token_ids \
            else self.engine.token_texts
        self._prompts = body.prompts(model.max_model_len)
        self._prompt_ids: list[list[int]] = []
        """Of each prompt, where the answer has them."""
        self._prompt_texts: list[str] = []
        """Of each prompt, where the answer has them."""
        self._counts = [UsageCounter() for _ in self._prompts]
        self._offsets: dict[int, int] = {}
        """Characters sent of each choice of a stream."""

    def engine_fields(self) -> dict[str, str]:
        return {"structured": format_field(self.body), "max_tokens": self.body.limit_field}

    @property
    def tells_token_texts(self) -> bool:
        return self.body.alternatives() is not None or self.body.prompt_logprobs is not None

    async def requests(self) -> list[Request]:
        body = self.body
        echoed = body.logprobs if body.echo else None
        more = {} if echoed is None else {"prompt_logprobs": echoed}
        params = sampling(body, body.alternatives(), structured=structured_of(body),
                          max_tokens=1 if self._prompt_only else body.max_new_tokens, **more)
        await self._look_up_prompts()
        return [request_for(body, params, self.call.tenant, prompt=prompt)
                for prompt in self._prompt_ids or self._prompts]

    async def _look_up_prompts(self) -> None:
        body, client = self.body, self.engine.client
        wants_ids = (body.wants_prompt_ids or body.cuts_right
                     or (body.echo and body.logprobs is not None))
        for prompt in self._prompts:
            if wants_ids or not body.add_special_tokens:
                ids = prompt if isinstance(prompt, list) \
                    else await client.tokenize(prompt, body.add_special_tokens)
                self._prompt_ids.append(body.truncated(
                    ids, self.model.max_model_len, 1 if self._prompt_only else body.max_new_tokens))
            if body.echo:
                self._prompt_texts.append(prompt if isinstance(prompt, str)
                                          else await client.detokenize(prompt))

    @property
    def _prompt_only(self) -> bool:
        """The prompt alone is wanted."""
        return self.body.max_tokens == 0

    # --- all at once ---

    async def collect(self, requests: list[Request]) -> TextCompletion:
        found = await self.call.complete(requests)
        counts = [answers.usage(answers.last_counts(choices)) for choices in found]
        return self._answer([self._choice(i, one) for i, choices in enumerate(found)
                             for one in choices], self._usage(counts))

    def _choice(self, prompt: int, one: Completion) -> TextChoice:
        body = self.body
        before = self._prompt_texts[prompt] if body.echo else ""
        ids = self._prompt_ids[prompt] if self._prompt_ids else None
        return TextChoice(
            index=prompt * self._n + one.index,
            text=before + ("" if self._prompt_only else one.text),
            logprobs=self._logprobs(one, len(before), self._echoed_ids(prompt)),
            finish_reason="length" if self._prompt_only else answers.reason(one.finish_reason),
            stop_reason=one.stop_reason,
            prompt_logprobs=answers.prompt_logprobs([one], self.engine.token_texts)
            if body.prompt_logprobs is not None else None,
            prompt_token_ids=ids if body.wants_prompt_ids else None,
            token_ids=one.token_ids if body.return_token_ids else None)

    def _logprobs(self, one: Completion | StreamDelta, offset: int, ids: list[int] | None
                  ) -> TextLogprobs | None:
        """offset: characters before the first token that the model has made; ids: of the prompt,
        where its tokens come first."""
        if one.logprobs is None and ids is None:
            return None
        made: Column = [] if self._prompt_only or one.logprobs is None else one.logprobs
        tokens = [entry.token_id for entry in made if entry]
        if ids is None:
            return text_logprobs(tokens, made, self._texts, offset)
        prompt = one.prompt_logprobs or [None] * len(ids)
        return text_logprobs([*ids, *tokens], [*prompt, *made], self._texts, 0)

    def _echoed_ids(self, prompt: int) -> list[int] | None:
        """Of the prompt, where it has log-probabilities as well."""
        body = self.body
        return self._prompt_ids[prompt] if body.echo and body.logprobs is not None else None

    # --- as it comes ---

    async def begin(self, stream: Deltas) -> None:
        if self.body.continuous_usage:
            await stream.accepted()
            known = prompts_of(stream) or [0] * len(self._prompts)
            self._counts = [UsageCounter(each) for each in known]

    def on_deltas(self, deltas: list[StreamDelta]) -> bytes:
        return b"".join([self._event(delta) for delta in deltas])

    async def end(self) -> bytes:
        if not self.body.include_usage:
            return b""
        return event(encode_json(self._answer([], self._counted())))

    def _event(self, delta: StreamDelta) -> bytes:
        """Empty where there is nothing to tell."""
        body, index, before = self.body, delta.index, ""
        prompt, first = index // self._n, index not in self._offsets
        self._counts[prompt].add(delta)
        if first:
            before = self._prompt_texts[prompt] if body.echo else ""
            self._offsets[index] = len(before)
        offset = self._offsets[index]
        self._offsets[index] += len(delta.text)
        counted = delta.token_ids and (body.return_token_ids or body.continuous_usage)
        if not (before or delta.text or delta.finish_reason or delta.logprobs or counted):
            return b""
        choice = TextChoice(
            index=index, text=before + ("" if self._prompt_only else delta.text),
            logprobs=self._logprobs(delta, offset, self._echoed_ids(prompt) if first else None),
            finish_reason=answers.reason(delta.finish_reason), stop_reason=delta.stop_reason,
            prompt_token_ids=self._prompt_ids[prompt] if first and body.wants_prompt_ids else None,
            token_ids=delta.token_ids if body.return_token_ids else None)
        used = self._counted() if body.continuous_usage else None
        return event(encode_json(self._answer([choice], used)))

    def _counted(self) -> CompletionUsage:
        """Of the stream so far."""
        return self._usage([each.usage() for each in self._counts])

    def _usage(self, counts: list[CompletionUsage]) -> CompletionUsage:
        used = answers.sum_usage(counts)
        if self._prompt_only:
            return CompletionUsage(used.prompt_tokens, 0, used.prompt_tokens)
        return used

    def _answer(self, choices: list[TextChoice], usage: CompletionUsage | None) -> TextCompletion:
        return TextCompletion(id=self._id, created=self.call.created, model=self.model.name,
                              choices=choices, usage=usage)


def text_logprobs(tokens: Sequence[int], found: Column, texts: AnyTokenTexts,
                  offset: int) -> TextLogprobs:
    """The four columns; offset: characters before the first token."""
    out = TextLogprobs([], [], [], [])
    for token, one in zip(tokens, found, strict=False):
        name = texts.name_of(token)
        out.tokens.append(name)
        out.text_offset.append(offset)
        offset += len(texts.text_of(token))
        out.token_logprobs.append(None if one is None else one.logprob)
        top: dict[str, float] = {}
        for other, value in () if one is None else one.top:
            top.setdefault(texts.name_of(other), value)  # the likelier of two that look alike
        if one is not None:
            top.setdefault(name, one.logprob)
        out.top_logprobs.append(top if one is not None else None)
    return out
