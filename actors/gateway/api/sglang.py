"""SGLang's `/generate` and `/abort_request`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Request
from actorium.actors.gateway.answer_events import (
    ABORT,
    STOP,
    AnswerEvent,
    ChoiceEvents,
    ChoiceStarted,
    DeltaReader,
)
from actorium.actors.gateway.api import answers
from actorium.actors.gateway.api.pooled_answers import HIDDEN_STATES, check_hidden, shown_hidden
from actorium.actors.gateway.api.sglang_body import (
    DEFAULT_NEW_TOKENS,
    HIDDEN_FIELD,
    GenerateBody,
    LogprobOptions,
    SglangSampling,
    renamed,
)
from actorium.actors.gateway.api.turn import HttpTurn
from actorium.actors.gateway.engine_call import EngineCall, call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.http.replies import JsonReply, sse_event
from actorium.actors.gateway.served_model import ServedModel
from actorium.actors.messages import TokenLogprob, Usage
from actorium.actors.params import PoolingParams, SamplingParams

Prompt = str | list[int]
FIRST_VERSION = "default"
"""SGLang's version of weights that were never replaced while serving."""
Row = tuple[float | None, int, str | None]
"""Log-probability, token, and the token's text where that is asked for."""


def shown_version(number: int) -> str:
    """Returns the version of weights as SGLang's answers have it."""
    return str(number) if number else FIRST_VERSION


class GenerateOutput:
    """One completion so far."""

    def __init__(self, label: str, options: LogprobOptions, text_of: Callable[[int], str] | None,
                 prompt_only: bool = False, first: int | None = None) -> None:
        """text_of: converts tokens to text, where that is shown; prompt_only: nothing is to be
        completed; first: the first token of the prompt whose log-probability is shown, if any."""
        self._label, self._options, self._text_of = label, options, text_of
        self._prompt_only, self._first = prompt_only, first
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt: list[TokenLogprob | None] = []
        self._last: ChoiceEvents | None = None

    def add(self, events: ChoiceEvents) -> None:
        """Adds events. Raises `HttpError` on a place that is not in the prompt."""
        self._text.append(events.text)
        self._ids += events.token_ids
        self._logprobs += events.logprobs or ()
        if events.prompt_logprobs is not None:
            self._prompt = events.prompt_logprobs
            if self._options.start > len(self._prompt):
                raise bad_field("logprob_start_len", f"{self._options.start}, in a prompt of "
                                f"{len(self._prompt)} tokens")
        if events.finish_reason is not None:
            self._last = events

    def as_dict(self, used: Usage, seconds: float | None) -> dict[str, Any]:
        """Returns everything so far. seconds: since the request came, None = not shown."""
        prompt_only = self._prompt_only
        return {"text": "" if prompt_only else "".join(self._text),
                "output_ids": [] if prompt_only else list(self._ids),
                "meta_info": self._meta(used, seconds)}

    def _meta(self, used: Usage, seconds: float | None) -> dict[str, Any]:
        done = 0 if self._prompt_only else used.completion_tokens
        meta: dict[str, Any] = {
            "id": self._label, "finish_reason": self._reason(done),
            "prompt_tokens": used.prompt_tokens,
            "weight_version": shown_version(used.weight_version),
            **self._logprob_fields(), "completion_tokens": done,
            "cached_tokens": used.cached_tokens}
        if self._last is not None:
            meta |= _speculation(used)
            if self._last.routed_experts is not None:
                meta["routed_experts"] = answers.experts_int32(self._last.routed_experts)
            if (hidden := self._last.pooled) is not None:
                meta["hidden_states"] = shown_hidden(hidden)
                meta["hidden_states_version"] = shown_version(hidden.weight_version)
            if seconds is not None:
                meta["e2e_latency"] = seconds
        return meta

    def _reason(self, tokens: int) -> dict[str, Any] | None:
        last = self._last
        if last is None:
            return None
        if last.finish_reason == ABORT:
            return {"type": "abort", "message": "The request was aborted.", "status_code": None,
                    "err_type": None}
        if self._prompt_only or last.finish_reason != STOP:
            return {"type": "length", "length": tokens}
        matched = last.stop_reason
        if matched is None and self._ids:
            matched = self._ids[-1]  # the model's own end of a sequence
        return {"type": "stop", "matched": matched}

    # --- log-probabilities ---

    def _logprob_fields(self) -> dict[str, Any]:
        options = self._options
        if not options.wanted:
            return {}
        prompt, made = self._prompt_part(), [] if self._prompt_only else self._logprobs
        fields: dict[str, Any] = {
            "input_token_logprobs": self._prompt_rows(prompt),
            "output_token_logprobs": [self._row(one.logprob, one.token_id) for one in made]}
        if options.top or options.ids:
            kind = "top_logprobs" if options.top else "token_ids_logprobs"
            fields[f"input_{kind}"] = [None if i == 0 or one is None else self._alternatives(one)
                                     for i, one in enumerate(prompt)]
            fields[f"output_{kind}"] = [self._alternatives(one) for one in made]
        return fields

    def _prompt_part(self) -> Sequence[TokenLogprob | None]:
        return self._prompt[self._options.start:] if self._options.start >= 0 else []

    def _prompt_rows(self, prompt: Sequence[TokenLogprob | None]) -> list[Row]:
        """Returns a row per token. The first has no log-probability, whatever stands before it."""
        rows = []
        for i, one in enumerate(prompt):
            if one is not None:
                rows.append(self._row(one.logprob if i else None, one.token_id))
            elif self._first is not None:
                rows.append(self._row(None, self._first))
        return rows

    def _alternatives(self, one: TokenLogprob) -> list[Row]:
        return [self._row(value, token) for token, value in one.top]

    def _row(self, logprob: float | None, token: int) -> Row:
        return logprob, token, None if self._text_of is None else self._text_of(token)


def _speculation(used: Usage) -> dict[str, Any]:
    """Returns the counts of drafts, where there were any. spec_verify_ct: the request's steps, each
    of which gives one token beside the drafts that it accepts."""
    if not used.draft_tokens:
        return {}
    steps = used.completion_tokens - used.accepted_tokens
    return {"spec_accept_rate": used.accepted_tokens / used.draft_tokens,
            "spec_accept_length": used.completion_tokens / max(steps, 1),
            "spec_accept_token_num": used.accepted_tokens,
            "spec_draft_token_num": used.draft_tokens, "spec_verify_ct": steps}


class GenerateTurn(HttpTurn):
    """One request under way: one or several prompts, each with one or several completions."""

    body_type = GenerateBody
    body: GenerateBody

    def __init__(self, call: EngineCall, model: ServedModel, body: GenerateBody) -> None:
        super().__init__(call, model, body)
        self._prompts = body.prompts(model.max_model_len)
        count = len(self._prompts)
        self._samplings = body.samplings(count)
        self._n = self._samplings[0].n
        self._options = body.logprob_options(count, self._n)
        self._salts, self._adapters = body.salts(count), body.adapters(count)
        self._processors = body.processors(count)
        self._labels = body.labels(count, self._n, call.answer_id)
        """Labels of the completions, the first prompt's first."""
        self._outputs: list[GenerateOutput] = []
        self.answer = DeltaReader(prompts=count, choices=self._n)
        self._several = body.several or self._n > 1

    @property
    def counts_prompt(self) -> bool:
        return True

    def engine_fields(self) -> dict[str, str]:
        return {"prompt": "text" if self.body.input_ids is None else "input_ids",
                "routed_experts": "return_routed_experts", "layers": HIDDEN_FIELD,
                "hidden_states": HIDDEN_FIELD}

    @property
    def shows_token_texts(self) -> bool:
        return self.body.return_text_in_logprobs and any(one.wanted for one in self._options)

    async def requests(self) -> list[Request]:
        body, made, layers = self.body, [], self.body.hidden_layers
        if layers:
            self._check_hidden()
        for i, prompt in enumerate(self._prompts):
            sampling, options = self._samplings[i], self._options[i]
            wants_ids = sampling.unlimited or options.start == 0 or layers
            ids = await self._ids(prompt) if wants_ids else None
            params = self._params(sampling, options, ids, self._processors[i])
            prompt_only = params.max_tokens == 0
            if prompt_only:
                params = msgspec.structs.replace(params, max_tokens=1, min_tokens=0)
            self._outputs += [
                GenerateOutput(label, options, self._text_of(), prompt_only,
                               ids[0] if ids else None)
                for label in self._labels[i * self._n:(i + 1) * self._n]]
            pooling = None
            if layers and prompt_only:
                pooling = self._of_prompt(params, layers)
            elif layers:
                params = msgspec.structs.replace(params, hidden_states=layers)
            made.append(Request(prompt=prompt if ids is None else ids, pooling=pooling,
                                params=None if pooling else params,
                                timeout=body.timeout, tenant=self.call.tenant,
                                priority=body.priority, cache_salt=self._salts[i],
                                adapter=self._adapters[i]))
        self.call.labels = self._labels
        return made

    def _check_hidden(self) -> None:
        """Raises `HttpError` where hidden states cannot be given, or not of so many choices."""
        if HIDDEN_STATES not in self.model.tasks:
            raise bad_field(HIDDEN_FIELD, "needs --enable-return-hidden-states")
        check_hidden(len(self._labels), HIDDEN_FIELD)

    def _of_prompt(self, params: SamplingParams, layers: tuple[int, ...]) -> PoolingParams:
        """Returns what is asked for where nothing is completed. Raises `HttpError`."""
        if params.n > 1 or params.logprobs is not None or params.routed_experts:
            raise bad_field(HIDDEN_FIELD, "with max_new_tokens=0 not together with n above 1, "
                            "return_logprob or return_routed_experts")
        return PoolingParams(task=HIDDEN_STATES, layers=layers)

    async def _ids(self, prompt: Prompt) -> list[int]:
        return await self.engine.client.tokenize(prompt) if isinstance(prompt, str) else prompt

    def _text_of(self) -> Any:
        return self.engine.token_texts.text_of if self.body.return_text_in_logprobs else None

    def _params(self, sampling: SglangSampling, options: LogprobOptions,
                ids: list[int] | None, processor: str | None) -> SamplingParams:
        """ids: of the prompt, where a default must be fitted into the context; processor: as of
        `SglangSampling.resolved`."""
        params = sampling.resolved(processor)
        if sampling.unlimited and ids is not None:
            room = max(1, self.model.max_model_len - len(ids))
            params = msgspec.structs.replace(params, max_tokens=min(DEFAULT_NEW_TOKENS, room))
        params = msgspec.structs.replace(params, **options.params(),
                                         routed_experts=self.body.return_routed_experts)
        try:
            prompt_only = params.max_tokens == 0
            (msgspec.structs.replace(params, max_tokens=None) if prompt_only else params).check()
        except ValueError as error:
            given = [name for name in SglangSampling.__struct_fields__
                     if getattr(sampling, name) is not msgspec.UNSET]
            raise HttpError(400, renamed(str(error), given), "sampling_params") from None
        return params

    async def collect(self, requests: list[Request]) -> Any:
        """Returns an object for each completion; an aborted one has its part so far."""
        async with self.call.stream(*requests) as stream:
            async for delta in stream:
                for event in self.answer.read(delta):
                    if isinstance(event, ChoiceEvents):
                        self._outputs[event.index].add(event)
        shown = [self._shown(index) for index in range(len(self._outputs))]
        return shown if self._several else shown[0]

    def encode(self, event: AnswerEvent) -> bytes:
        """Returns a completion so far, with its number where there are several."""
        if isinstance(event, ChoiceStarted):
            return b""
        self._outputs[event.index].add(event)
        if not (event.text or event.token_ids or event.finish_reason):
            return b""
        number = {"index": event.index} if self._several else {}
        return sse_event(self._shown(event.index) | number)

    def _shown(self, index: int) -> dict[str, Any]:
        # An answer that may be sent again takes another time then.
        seconds = None if self.call.resumable else monotonic() - self.call.began
        return self._outputs[index].as_dict(self.answer.usage_of(index), seconds)


class AbortBody(Struct, kw_only=True):
    """Names the requests to abort."""

    rid: str = ""
    """As `/generate` was given it, or answered it; of other routes the id of the answer. Of several
    prompts, all of them, or one by its number."""
    abort_all: bool = False
    """All of the caller's tenant; with the administrator's key, everybody's."""


async def abort(http: HttpRequest) -> Response:
    """Handles `/abort_request`: aborts HTTP requests of this engine."""
    call, body = call_of(http), await bodies.read(http, AbortBody)
    if not body.rid and not body.abort_all:
        raise bad_field("rid", "is required, or abort_all")
    ended = await call.abort_others("" if body.abort_all else body.rid,
                                    None if call.admin else call.tenant)
    return JsonReply({"aborted": ended})
