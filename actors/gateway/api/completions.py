"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, structs

from actorium.actors.client.requests import Request
from actorium.actors.gateway.answer_events import (
    LENGTH,
    STOP,
    AnswerEvent,
    ChoiceEvents,
    ChoiceStarted,
    DeltaReader,
)
from actorium.actors.gateway.api import answers
from actorium.actors.gateway.api.answers import (
    ApiObject,
    CompletionUsage,
    PromptLogprobs,
    ShownExperts,
)
from actorium.actors.gateway.api.fill_in_middle import fill_in_middle
from actorium.actors.gateway.api.sampling_fields import (
    MAX_PROMPTS,
    SamplingFields,
    check_ids,
    format_field,
    request_for,
    sampling,
    structured_of,
)
from actorium.actors.gateway.api.turn import HttpTurn
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.http.replies import sse_event
from actorium.actors.gateway.served_model import AnyTokenTexts, ServedModel, TokenIdTexts
from actorium.actors.messages import PromptEmbeds, TokenLogprob
from actorium.actors.prompt_embeds import of_file

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default; a chat goes on to the end of the context."""


class CompletionBody(SamplingFields, kw_only=True):
    """A text completion's request."""

    prompt: str | list[str | int | list[int]] | None = None
    prompt_embeds: bytes | list[bytes] | None = None
    """Prompts given as embeddings, which come before those of `prompt`: base64 of a safetensors
    file with the tensor prompt_embeds, [tokens, hidden]."""
    echo: bool = False
    logprobs: int | None = None
    suffix: str | None = None
    """The completion is the text between the prompt and this, where the model has tokens for it."""
    add_special_tokens: bool = True
    return_prompt_token_ids: bool = False

    def prompts(self, max_model_len: int) -> list[str | list[int] | PromptEmbeds]:
        """Returns one or several prompts, as embeddings, text or token ids. Raises `HttpError`."""
        embeds = self.prompt_embeds or []
        files = [embeds] if isinstance(embeds, bytes) else embeds
        others = [] if files and not self.prompt else self._prompts(max_model_len)
        if len(files) + len(others) > MAX_PROMPTS:
            raise bad_field("prompt_embeds", f"at most {MAX_PROMPTS} prompts")
        return [*map(of_file, files), *others]

    def _prompts(self, max_model_len: int) -> list[str | list[int]]:
        given: Any = self.prompt
        if given is None:
            raise bad_field("prompt", "is required")
        if isinstance(given, str):
            return [given]
        kinds = set(map(type, given))
        if int in kinds and len(kinds) > 1:
            raise bad_field("prompt", "token ids and texts are mixed")
        prompts: list[Any] = [given] if int in kinds else given
        if len(prompts) > MAX_PROMPTS:
            raise bad_field("prompt", f"at most {MAX_PROMPTS} of them, got {len(prompts)}")
        if not prompts or not all(prompts):
            raise bad_field("prompt", "must not be empty")
        for one in prompts:
            if not isinstance(one, str) and self.truncate_prompt_tokens is None:
                check_ids(one, max_model_len, "prompt")
        return prompts

    def alternatives(self) -> int | None:
        """Returns how many alternatives are shown for each token; None = no log-probabilities."""
        return 0 if self.logprob_token_ids is not None else self.logprobs

    @property
    def wants_prompt_ids(self) -> bool:
        """True if the answer has the prompts' tokens."""
        return self.return_token_ids or self.return_prompt_token_ids

    @property
    def max_new_tokens(self) -> int | None:
        """Returns the most tokens of a completion; None = to the end of the context."""
        if self.max_tokens is None and self.n_predict is None:
            return DEFAULT_MAX_TOKENS
        return self.limit

    def check(self) -> None:
        """Raises `HttpError` for unsupported fields."""
        if self.prompt_embeds:
            for name in ("echo", "suffix", "prompt_logprobs", "truncate_prompt_tokens",
                         "return_token_ids", "return_prompt_token_ids"):
                if getattr(self, name) not in (None, False):
                    raise bad_field(name, "not together with prompt_embeds")
            if not self.add_special_tokens:
                raise bad_field("add_special_tokens", "not together with prompt_embeds")
        if self.suffix:
            for name in ("truncate_prompt_tokens", "prompt_logprobs"):
                if getattr(self, name) is not None:
                    raise bad_field(name, "not together with suffix")
            if not self.add_special_tokens:
                raise bad_field("add_special_tokens", "not together with suffix")
        if self.stream and self.prompt_logprobs is not None:
            raise bad_field("prompt_logprobs", "not in a stream")
        if self.stream and self.return_routed_experts:
            raise bad_field("return_routed_experts", "not in a stream")
        if self.max_tokens == 0 and not self.echo:
            raise bad_field("max_tokens", "must be at least 1 without echo")


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
    routed_experts: ShownExperts | UnsetType = UNSET


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
        self._infill_ends: list[int] = []
        self._prompt_texts: list[str] = []
        """Each prompt's, where the answer has them."""
        self._offsets: dict[int, int] = {}
        """By choice: characters of its tokens so far. Its text may have fewer (special tokens), and
        lags behind by what is held back, so it depends on how the answer is cut."""
        self.answer = DeltaReader(prompts=len(self._prompts), choices=self._n)

    @property
    def counts_prompt(self) -> bool:
        return self.body.continuous_usage

    def engine_fields(self) -> dict[str, str]:
        return {"structured": format_field(self.body), "max_tokens": self.body.limit_field,
                "token_ids": "prompt", "tokens": "prompt",
                "routed_experts": "return_routed_experts"}

    @property
    def shows_token_texts(self) -> bool:
        return self.body.alternatives() is not None or self.body.prompt_logprobs is not None

    async def requests(self) -> list[Request]:
        body = self.body
        echoed = body.logprobs if body.echo else None
        more: dict[str, Any] = {} if echoed is None else {"prompt_logprobs": echoed}
        await self._look_up_prompts()
        if self._infill_ends and not body.ignore_eos:
            more["stop_token_ids"] = [*(body.stop_token_ids or ()), *self._infill_ends]
        params = sampling(body, body.alternatives(), structured=structured_of(body),
                          max_tokens=1 if self._prompt_only else body.max_new_tokens, **more)
        return [request_for(body, params, self.call.tenant, prompt=prompt)
                for prompt in self._prompt_ids or self._prompts]

    async def _look_up_prompts(self) -> None:
        body, client = self.body, self.engine.client
        wants_ids = (body.wants_prompt_ids or body.cuts_right
                     or (body.echo and body.logprobs is not None))
        for prompt in self._prompts:
            if isinstance(prompt, PromptEmbeds):
                return  # `check` has refused whatever needs a prompt's ids
            if body.suffix:
                if isinstance(prompt, list):
                    raise bad_field("suffix", "only with prompts that are texts")
                infill = await fill_in_middle(self.engine, self.model, prompt, body.suffix)
                self._prompt_ids.append(infill.ids)
                self._infill_ends = infill.stop_token_ids
            elif wants_ids or not body.add_special_tokens:
                ids = prompt if isinstance(prompt, list) \
                    else await client.tokenize(prompt, body.add_special_tokens)
                self._prompt_ids.append(body.truncated(
                    ids, self.model.max_model_len, 1 if self._prompt_only else body.max_new_tokens))
            if body.echo:
                self._prompt_texts.append(prompt if isinstance(prompt, str)
                                          else await client.detokenize(prompt))

    @property
    def _prompt_only(self) -> bool:
        """True if nothing is to be completed."""
        return self.body.max_tokens == 0

    # --- the answer ---

    async def collect(self, requests: list[Request]) -> TextCompletion:
        choices = [self._choice(events) for events in await self.complete(requests)]
        return self._completion(choices, self._usage())

    def encode(self, event: AnswerEvent) -> bytes:
        if isinstance(event, ChoiceStarted):
            return b""
        choice, body = self._choice(event), self.body
        counted = event.token_ids and (body.return_token_ids or body.continuous_usage)
        if not (choice.text or event.text or event.finish_reason or event.logprobs or counted):
            return b""
        return sse_event(self._completion(
            [choice], self._usage() if body.continuous_usage else None))

    async def end(self) -> bytes:
        return sse_event(self._completion([], self._usage())) if self.body.include_usage else b""

    def _choice(self, events: ChoiceEvents) -> TextChoice:
        body, index = self.body, events.index
        prompt, first = index // self._n, index not in self._offsets
        echoed = self._prompt_texts[prompt] if body.echo and first else ""
        self._offsets.setdefault(index, len(echoed))
        ids = self._prompt_ids[prompt] if first and self._prompt_ids else None
        return TextChoice(
            index=index, text=echoed + ("" if self._prompt_only else events.text),
            logprobs=self._logprobs(
                events, ids if body.echo and body.logprobs is not None else None),
            finish_reason=LENGTH if self._prompt_only and events.finish_reason == STOP
            else events.finish_reason,
            stop_reason=events.stop_reason,
            prompt_logprobs=answers.prompt_logprobs(events.prompt_logprobs, self.engine.token_texts)
            if body.prompt_logprobs is not None else None,
            prompt_token_ids=ids if body.wants_prompt_ids else None,
            token_ids=events.token_ids if body.return_token_ids else None,
            routed_experts=answers.shown_experts(events.routed_experts))

    def _logprobs(self, events: ChoiceEvents, ids: list[int] | None) -> TextLogprobs | None:
        """ids: of the prompt, where its tokens come first."""
        if events.logprobs is None and ids is None:
            return None
        new: Column = [] if self._prompt_only or events.logprobs is None else events.logprobs
        tokens = [entry.token_id for entry in new if entry]
        offset = self._offsets[events.index]
        if ids is not None:
            new = [*(events.prompt_logprobs or [None] * len(ids)), *new]
            tokens, offset = [*ids, *tokens], 0
        columns = text_logprobs(tokens, new, self._texts, offset)
        if tokens:
            self._offsets[events.index] = columns.text_offset[-1] + len(
                self._texts.text_of(tokens[-1]))
        return columns

    def _usage(self) -> CompletionUsage:
        used = self.answer.usage()
        if self._prompt_only:
            return CompletionUsage(used.prompt_tokens, 0, used.prompt_tokens)
        return answers.completion_usage(structs.replace(used, draft_tokens=0))

    def _completion(self, choices: list[TextChoice], usage: CompletionUsage | None
                    ) -> TextCompletion:
        return TextCompletion(id=self._id, created=self.call.created, model=self.model.name,
                              choices=choices, usage=usage)


def text_logprobs(tokens: Sequence[int], found: Column, texts: AnyTokenTexts,
                  offset: int) -> TextLogprobs:
    """Returns the four columns. offset: characters before the first token."""
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
