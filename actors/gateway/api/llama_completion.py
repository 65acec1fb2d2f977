"""llama-server's `/completion` and `/infill`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from time import monotonic
from typing import Any, ClassVar

import msgspec

from actorium.actors.client.requests import Request, StreamDelta
from actorium.actors.gateway.answer_events import (
    ABORT,
    LENGTH,
    AnswerEvent,
    ChoiceEvents,
    ChoiceStarted,
    DeltaReader,
)
from actorium.actors.gateway.api.fill_in_middle import fill_in_middle
from actorium.actors.gateway.api.llama_body import (
    ENGINE_FIELDS,
    NEVER,
    RANDOM_SEEDS,
    InfillBody,
    LlamaCompletionBody,
    Prompt,
    PromptObject,
    generation_settings,
)
from actorium.actors.gateway.api.sampling_fields import SEED_MASK, TOKEN, check_ids
from actorium.actors.gateway.api.turn import SCHEMA_HEADER, HttpTurn
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, bad_field
from actorium.actors.gateway.http.replies import sse_event
from actorium.actors.gateway.resume.delta_streams import Deltas, prompts_of, with_ready
from actorium.actors.gateway.served_model import ServedModel
from actorium.actors.messages import TokenLogprob, Usage
from actorium.actors.params import SamplingParams

NO_SLOT = -1
"""`id_slot` of every answer: requests are not bound to slots."""


class LlamaChoice:
    """One completion so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.first_at = 0.0
        """When its first token came, CLOCK_MONOTONIC seconds."""
        self.has_new_line = False
        self.last: ChoiceEvents | None = None
        """With its end, once that has come."""

    def add(self, events: ChoiceEvents) -> None:
        """Adds events."""
        self.first_at = self.first_at or monotonic()
        self.text.append(events.text)
        self.tokens += events.token_ids
        self.logprobs += events.logprobs or ()
        self.has_new_line |= "\n" in events.text
        if events.finish_reason is not None:
            self.last = events


class LlamaCompletionTurn(HttpTurn):
    """`/completion`: one request under way, of one or several prompts."""

    body_type: ClassVar[Any] = LlamaCompletionBody
    last_event = b""
    body: LlamaCompletionBody

    def __init__(self, call: EngineCall, model: ServedModel, body: LlamaCompletionBody) -> None:
        super().__init__(call, model, body)
        self._prompts = body.prompts()
        self._n = body.completions
        self._defaults: dict[str, Any] = model.info.get("generation_defaults") or {}
        self._sampling = body.sampling(self._defaults, model.max_model_len)
        self._ids: list[list[int]] = []
        self._texts: list[str] = []
        self._stop_token_ids: list[int] = []
        self._truncated = False
        """A part of a prompt was left out."""
        self._choices = [LlamaChoice() for _ in range(len(self._prompts) * self._n)]
        self._settings: dict[str, Any] = {}
        self.answer = DeltaReader(prompts=len(self._prompts), choices=self._n)

    def engine_fields(self) -> dict[str, str]:
        return ENGINE_FIELDS | {
            "structured": "grammar" if self.body.grammar else "json_schema"}

    @property
    def shows_token_texts(self) -> bool:
        return bool(self.body.probabilities)

    @property
    def counts_prompt(self) -> bool:
        return True

    # --- the requests ---

    async def requests(self) -> list[Request]:
        body = self.body
        for prompt in self._prompts:
            ids = await self._prompt_ids(prompt)
            check_ids(ids, self.model.max_model_len, "prompt")
            self._ids.append(ids)
            self._texts.append(await self._text_of(ids))
        params = await self._params()
        self._settings = generation_settings(body, params, self._defaults)
        salt = None if body.cache_prompt else self.call.token.hex()
        return [Request(prompt=ids, params=params, tenant=self.call.tenant, cache_salt=salt)
                for ids in self._ids]

    async def _prompt_ids(self, prompt: Prompt) -> list[int]:
        """Returns a prompt's tokens. What begins with a text begins with the tokenizer's special
        tokens."""
        return await self._mixed_ids(prompt, special=True)

    async def _mixed_ids(self, prompt: Prompt, special: bool) -> list[int]:
        if isinstance(prompt, PromptObject):
            prompt = prompt.prompt_string
        ids: list[int] = []
        for i, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
            ids += [part] if isinstance(part, int) \
                else await self.engine.client.tokenize(part, special and not i)
        return ids

    async def _text_of(self, ids: list[int]) -> str:
        fields = self.body.response_fields
        shown = not fields or "prompt" in fields
        known = shown and bool(ids) and self.model.info.get("has_tokenizer", True)
        return await self.engine.client.detokenize(ids) if known else ""

    async def _params(self) -> SamplingParams:
        body = self.body
        indent = body.indent_stop
        return SamplingParams(
            n=self._n, max_tokens=1 if self._prompt_only else body.limit,
            seed=None if body.seed is None or body.seed in RANDOM_SEEDS else body.seed & SEED_MASK,
            stop=body.stops() or None, stop_regex=[indent] if indent else None,
            stop_token_ids=None if body.ignore_eos else self._stop_token_ids or None,
            ignore_eos=body.ignore_eos, logit_bias=await self._bias(),
            logprobs=body.probabilities or None, structured=body.structured(), **self._sampling)

    async def _bias(self) -> dict[int, float] | None:
        given = self.body.logit_bias or ()
        biases: dict[int, float] = {}
        for token, value in given.items() if isinstance(given, dict) else given:
            if value is True:
                raise bad_field("logit_bias", "a number, or false for never; got true")
            bias = NEVER if value is False else float(value)
            ids = [int(token)] if isinstance(token, int) or TOKEN.fullmatch(token) \
                else await self.engine.client.tokenize(token, False)
            biases |= dict.fromkeys(ids, bias)
        return biases or None

    @property
    def _prompt_only(self) -> bool:
        """True if nothing is to be completed."""
        return self.body.limit == 0

    def _headers(self, requests: list[Request]) -> dict[str, str]:
        passed_over = self.body.passed_over(self._settings["samplers"])
        return super()._headers(requests) | (
            {SCHEMA_HEADER: ", ".join(passed_over)} if passed_over else {})

    # --- the answer ---

    async def collect(self, requests: list[Request]) -> Any:
        """Returns an object, or a list of several."""
        async with self.call.stream(*requests) as stream:
            async for deltas in self._deltas(stream):
                for delta in deltas:
                    for event in self.answer.read(delta):
                        if isinstance(event, ChoiceEvents):
                            self._choices[event.index].add(event)
        shown = [self._final(choice.last) for choice in self._choices if choice.last is not None]
        return shown if len(shown) > 1 else shown[0]

    async def events(self, requests: list[Request]) -> AsyncGenerator[bytes, None]:
        async with self.call.stream(*requests) as stream:
            await stream.accepted()
            self.answer.prompt_tokens = prompts_of(stream)
            async for deltas in self._deltas(stream):
                self.call.admitted(stream)
                if events := b"".join([self.encode(event) for delta in deltas
                                       for event in self.answer.read(delta)]):
                    yield events

    async def _deltas(self, stream: Deltas) -> AsyncGenerator[list[StreamDelta], None]:
        """Yields the deltas that come together, and ends choices whose time is over."""
        limit = self.body.t_max_predict_ms / 1000
        async for delta in stream:
            deltas = with_ready(delta, stream)
            yield deltas
            if limit > 0 and all(one.last or self._is_late(one, limit) for one in self._choices):
                yield [StreamDelta(text="", token_ids=[], finish_reason=LENGTH, index=i)
                       for i, one in enumerate(self._choices) if one.last is None]
                return

    @staticmethod
    def _is_late(choice: LlamaChoice, limit: float) -> bool:
        return choice.has_new_line and monotonic() > choice.first_at + limit

    def encode(self, event: AnswerEvent) -> bytes:
        if isinstance(event, ChoiceStarted):
            return b""
        choice = self._choices[event.index]
        choice.add(event)
        out = b""
        if (event.text or event.token_ids) and not self._prompt_only:
            out = b"".join([sse_event(self._partial(one)) for one in self._single_tokens(event)])
        if event.finish_reason is not None:
            out += sse_event(self._final(event))
        return out

    def _single_tokens(self, event: ChoiceEvents) -> list[ChoiceEvents]:
        """Returns the event cut into those of single tokens where it shows their probabilities,
        as clients expect them; all the text comes with the last."""
        if not event.logprobs or len(event.logprobs) != len(event.token_ids):
            return [event]
        last = len(event.token_ids) - 1
        return [msgspec.structs.replace(
            event, parts=event.parts if i == last else [], token_ids=[token], logprobs=[logprob])
            for i, (token, logprob) in enumerate(zip(event.token_ids, event.logprobs,
                                                     strict=True))]

    def _partial(self, event: ChoiceEvents) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": event.index, "content": event.text, "tokens": event.token_ids, "stop": False,
            "id_slot": NO_SLOT, "tokens_predicted": len(self._choices[event.index].tokens),
            "tokens_evaluated": len(self._ids[event.index // self._n])}
        if event.logprobs:
            shown["completion_probabilities"] = self._probabilities(event.logprobs)
        if self.body.timings_per_token:
            shown["timings"] = self._timings(event.index)
        return shown

    def _final(self, event: ChoiceEvents) -> dict[str, Any]:
        """Returns the whole answer of a choice; in a stream its last event, without what has come
        before."""
        body, choice = self.body, self._choices[event.index]
        whole = not body.stream and not self._prompt_only
        prompt = event.index // self._n
        used = self.answer.usage_of(event.index)
        stop_type, word = self._stop(event)
        full = stop_type == "limit" and \
            len(self._ids[prompt]) + len(choice.tokens) >= self.model.max_model_len
        shown: dict[str, Any] = {
            "index": event.index, "content": "".join(choice.text) if whole else "",
            "tokens": choice.tokens if whole and body.return_tokens else [],
            "id_slot": NO_SLOT, "stop": True, "model": self.model.name,
            "tokens_predicted": 0 if self._prompt_only else len(choice.tokens),
            "tokens_evaluated": len(self._ids[prompt]), "generation_settings": self._settings,
            "prompt": self._texts[prompt], "has_new_line": choice.has_new_line,
            "truncated": self._truncated or full, "stop_type": stop_type, "stopping_word": word,
            "tokens_cached": used.cached_tokens, "timings": self._timings(event.index)}
        if whole and choice.logprobs:
            shown["completion_probabilities"] = self._probabilities(choice.logprobs)
        return _picked(shown, body.response_fields) if body.response_fields else shown

    def _stop(self, event: ChoiceEvents) -> tuple[str, str]:
        """Returns (`stop_type`, `stopping_word`)."""
        reason = event.stop_reason
        if event.finish_reason == ABORT:
            return "none", ""
        if event.finish_reason == LENGTH or self._prompt_only or (
                reason is not None and reason == self.body.indent_stop):
            return "limit", ""
        return ("word", reason) if isinstance(reason, str) else ("eos", "")

    def _timings(self, index: int) -> dict[str, Any]:
        """Returns counts, and milliseconds where they are this answer's own: one that may be sent
        again takes another time then."""
        choice, used = self._choices[index], self.answer.usage_of(index)
        predicted = 0 if self._prompt_only else len(choice.tokens)
        prompt = max(0, len(self._ids[index // self._n]) - used.cached_tokens)
        shown: dict[str, float] = {
            "cache_n": used.cached_tokens, "prompt_n": prompt, "predicted_n": predicted}
        if not self.call.resumable:
            now = monotonic()
            shown |= _speeds("prompt", prompt, (choice.first_at or now) - self.call.began)
            shown |= _speeds("predicted", predicted, now - (choice.first_at or now))
        return shown | _drafts(used)

    def _probabilities(self, each: list[TokenLogprob]) -> list[dict[str, Any]]:
        return [self._probability(one.token_id, one.logprob)
                | {"top_logprobs": [self._probability(*other) for other in one.top]}
                for one in each]

    def _probability(self, token: int, logprob: float) -> dict[str, Any]:
        texts = self.engine.token_texts
        return {"id": token, "token": texts.text_of(token), "bytes": list(texts.bytes_of(token)),
                "logprob": logprob}


class InfillTurn(LlamaCompletionTurn):
    """`/infill`: the text between a prefix and a suffix."""

    body_type = InfillBody
    body: InfillBody

    def __init__(self, call: EngineCall, model: ServedModel, body: InfillBody) -> None:
        super().__init__(call, model, body)
        if model.fim is None:
            raise HttpError(501, "infill: this model has no tokens for filling in the middle",
                            None, SERVER, "not_supported")
        if len(self._prompts) > 1:
            raise bad_field("prompt", "one alone: the begin of the text in the middle")

    async def _prompt_ids(self, prompt: Prompt) -> list[int]:
        body, context = self.body, self.model.max_model_len
        begun = await self._mixed_ids(prompt, special=False) if prompt else []
        room = context - min(body.limit or context // 4, context // 2)
        infill = await fill_in_middle(
            self.engine, self.model, body.input_prefix, body.input_suffix, "input_suffix",
            body.input_extra, begun, room)
        self._stop_token_ids, self._truncated = infill.stop_token_ids, infill.truncated
        return infill.ids


def _speeds(name: str, count: int, seconds: float) -> dict[str, float]:
    return {f"{name}_ms": seconds * 1000,
            f"{name}_per_token_ms": seconds * 1000 / max(count, 1),
            f"{name}_per_second": count / seconds if seconds > 0 else 0.0}


def _drafts(used: Usage) -> dict[str, int]:
    return {"draft_n": used.draft_tokens, "draft_n_accepted": used.accepted_tokens} \
        if used.draft_tokens else {}


def _picked(whole: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """Returns the fields of these paths, by their paths; those that are missing are left out."""
    shown = {}
    for path in paths:
        value: Any = whole
        for name in path.split("/"):
            value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            shown[path] = value
    return shown


_MISSING = object()
