"""The body of `/v1/completions`, and the shapes of its answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from time import time
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Completion, Request, StreamDelta
from actorium.actors.gateway.faces import answers
from actorium.actors.gateway.faces.answers import Running
from actorium.actors.gateway.faces.chat_protocol import PromptLogprobs, Usage
from actorium.actors.gateway.faces.response_formats import format_field, structured_of
from actorium.actors.gateway.faces.sampling_fields import (
    SamplingFields,
    check_ids,
    request_for,
    sampling,
)
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.guard import Reply, caller, engine_of
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.sse import EventStream, event
from actorium.actors.gateway.resume.delta_streams import prompts_of, together
from actorium.actors.gateway.served_engine import Engine, Facts
from actorium.actors.gateway.token_texts import IdPieces, TokenPieces
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


_encode = msgspec.json.Encoder().encode
Column = Sequence[TokenLogprob | None]


async def completions(http: HttpRequest) -> Response | EventStream:
    """The route."""
    engine = engine_of(http)
    body = await bodies.read(http, CompletionBody)
    body.check()
    engine.ask.fields = {"structured": format_field(body)}
    await engine.serves(body.model)
    text = Text(engine, await engine.facts(), body, caller(http).request_id)
    requests = await text.requests(caller(http).tenant)
    if body.alternatives() is not None or body.prompt_logprobs is not None:
        await engine.pieces.ready()
    if body.stream:
        return EventStream(text.events(requests))
    return Reply(_encode(await text.whole(requests)))


class Text:
    """One request under way: a prompt or several."""

    def __init__(self, engine: Engine, facts: Facts, body: CompletionBody,
                 request_id: str) -> None:
        """Raises `HttpError` on prompts that are none."""
        self._engine, self._body, self._model = engine, body, facts.model
        self._id = f"cmpl-{answers.name_of(body.request_id, request_id)}"
        self._created = int(time())
        self._n = body.n or 1
        self._limit = facts.max_model_len
        self._pieces = IdPieces(engine.pieces) if body.return_tokens_as_token_ids \
            else engine.pieces
        self._prompts = body.prompts(facts.max_model_len)
        self._ids: list[list[int]] = []
        """Of each prompt, where they are told."""
        self._texts: list[str] = []
        """Of each prompt, where they are told."""

    async def requests(self, tenant: str) -> list[Request]:
        """What the engine is asked. Raises `HttpError`, `ActoriumError`."""
        body = self._body
        echoed = body.logprobs if body.echo else None
        more = {} if echoed is None else {"prompt_logprobs": echoed}
        params = sampling(body, body.alternatives(), structured=structured_of(body),
                          max_tokens=1 if self._mute else body.most, **more)
        await self._look_up_prompts()
        return [request_for(body, params, tenant, prompt=prompt)
                for prompt in self._ids or self._prompts]

    async def _look_up_prompts(self) -> None:
        body, client = self._body, self._engine.client
        wants_ids = (body.wants_prompt_ids or body.cuts_right
                     or (body.echo and body.logprobs is not None))
        for prompt in self._prompts:
            if wants_ids or not body.add_special_tokens:
                ids = prompt if isinstance(prompt, list) \
                    else await client.tokenize(prompt, body.add_special_tokens)
                self._ids.append(body.truncated(ids, self._limit, 1 if self._mute else body.most))
            if body.echo:
                self._texts.append(prompt if isinstance(prompt, str)
                                   else await client.detokenize(prompt))

    @property
    def _mute(self) -> bool:
        """The prompt alone is wanted."""
        return self._body.max_tokens == 0

    # --- all at once ---

    async def whole(self, requests: list[Request]) -> TextCompletion:
        """The answer. Raises `ActoriumError`."""
        found = await self._engine.complete(requests)
        counts = [answers.usage(answers.last_counts(choices)) for choices in found]
        usage = answers.joined(counts)
        if self._mute:
            usage = Usage(usage.prompt_tokens, 0, usage.prompt_tokens)
        return self._answer([self._choice(i, one) for i, choices in enumerate(found)
                             for one in choices], usage)

    def _choice(self, prompt: int, one: Completion) -> TextChoice:
        body = self._body
        before = self._texts[prompt] if body.echo else ""
        ids = self._ids[prompt] if self._ids else None
        return TextChoice(
            index=prompt * self._n + one.index, text=before + ("" if self._mute else one.text),
            logprobs=self._logprobs(one, len(before), self._echoed_ids(prompt)),
            finish_reason="length" if self._mute else answers.reason(one.finish_reason),
            stop_reason=one.stop_reason,
            prompt_logprobs=answers.prompt_logprobs([one], self._engine.pieces)
            if body.prompt_logprobs is not None else None,
            prompt_token_ids=ids if body.wants_prompt_ids else None,
            token_ids=one.token_ids if body.return_token_ids else None)

    def _logprobs(self, one: Completion | StreamDelta, offset: int, ids: list[int] | None
                  ) -> TextLogprobs | None:
        """offset: characters before the first token that the model has made; ids: of the prompt,
        where its tokens come first."""
        if one.logprobs is None and ids is None:
            return None
        said: Column = [] if self._mute or one.logprobs is None else one.logprobs
        tokens = [entry.token_id for entry in said if entry]
        if ids is None:
            return text_logprobs(tokens, said, self._pieces, offset)
        prompt = one.prompt_logprobs or [None] * len(ids)
        return text_logprobs([*ids, *tokens], [*prompt, *said], self._pieces, 0)

    def _echoed_ids(self, prompt: int) -> list[int] | None:
        """Of the prompt, where log-probabilities tell of its tokens, too."""
        body = self._body
        return self._ids[prompt] if body.echo and body.logprobs is not None else None

    # --- as it comes ---

    async def events(self, requests: list[Request]) -> AsyncGenerator[bytes, None]:
        """The events of the stream, but the last, `[DONE]`."""
        body = self._body
        counts = [Running() for _ in requests]
        offsets: dict[int, int] = {}
        async with self._engine.stream(*requests) as deltas:
            if body.continuous_usage:
                await deltas.accepted()
                counts = [Running(each) for each in prompts_of(deltas) or [0] * len(requests)]
            async for several in together(deltas):
                out = [self._event(delta, counts, offsets) for delta in several]
                if any(out):
                    yield b"".join(out)
        if body.include_usage:
            yield event(_encode(self._answer([], self._usage(counts))))

    def _event(self, delta: StreamDelta, counts: list[Running], offsets: dict[int, int]) -> bytes:
        """Empty where there is nothing to tell. offsets: characters told of each choice."""
        index, before = delta.index, ""
        prompt, first = index // self._n, index not in offsets
        counts[prompt].add(delta)
        if first:
            before = self._texts[prompt] if self._body.echo else ""
            offsets[index] = len(before)
        offset = offsets[index]
        offsets[index] += len(delta.text)
        counted = delta.token_ids and (self._body.return_token_ids or self._body.continuous_usage)
        if not (before or delta.text or delta.finish_reason or delta.logprobs or counted):
            return b""
        used = self._usage(counts) if self._body.continuous_usage else None
        choice = TextChoice(
            index=index, text=before + ("" if self._mute else delta.text),
            logprobs=self._logprobs(delta, offset, self._echoed_ids(prompt) if first else None),
            finish_reason=answers.reason(delta.finish_reason), stop_reason=delta.stop_reason,
            prompt_token_ids=self._ids[prompt] if first and self._body.wants_prompt_ids else None,
            token_ids=delta.token_ids if self._body.return_token_ids else None)
        return event(_encode(self._answer([choice], used)))

    def _usage(self, counts: list[Running]) -> Usage:
        used = answers.joined([each.usage() for each in counts])
        return Usage(used.prompt_tokens, 0, used.prompt_tokens) if self._mute else used

    def _answer(self, choices: list[TextChoice], usage: Usage | None) -> TextCompletion:
        return TextCompletion(id=self._id, created=self._created, model=self._model,
                              choices=choices, usage=usage)


def text_logprobs(tokens: Sequence[int], found: Column, pieces: TokenPieces,
                  offset: int) -> TextLogprobs:
    """The four columns; offset: characters before the first token."""
    out = TextLogprobs([], [], [], [])
    for token, one in zip(tokens, found, strict=False):
        name = pieces.name_of(token)
        out.tokens.append(name)
        out.text_offset.append(offset)
        offset += len(pieces.text_of(token))
        out.token_logprobs.append(None if one is None else one.logprob)
        top: dict[str, float] = {}
        for other, value in () if one is None else one.top:
            top.setdefault(pieces.name_of(other), value)  # the likelier of two that look alike
        if one is not None:
            top.setdefault(name, one.logprob)
        out.top_logprobs.append(top if one is not None else None)
    return out
