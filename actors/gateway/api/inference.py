"""Prompts as token ids: vLLM's `/render` routes, which return them, and `/inference/v1/generate`,
which accepts what those return.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, to_builtins
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.requests import Completion, Request, StreamDelta, check_params
from actorium.actors.gateway.api import answers
from actorium.actors.gateway.api.answers import UsageCounter
from actorium.actors.gateway.api.chat_completions import ChatTurn
from actorium.actors.gateway.api.chat_protocol import (
    ChatLogprobs,
    CompletionUsage,
    PromptLogprobs,
)
from actorium.actors.gateway.api.completions import CompletionsTurn
from actorium.actors.gateway.api.sampling_fields import StreamOptions, check_ids
from actorium.actors.gateway.api.tokens import prompt_ids
from actorium.actors.gateway.api.turn import HttpTurn
from actorium.actors.gateway.engine_call import EngineCall
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.replies import JsonReply, encode_json, event
from actorium.actors.gateway.served_model import ServedModel
from actorium.actors.params import SamplingParams


class InferenceSampling(SamplingParams, frozen=True, kw_only=True, omit_defaults=True,
                        forbid_unknown_fields=True):
    """The SDK's parameters, most of which have the same names in vLLM, and those of vLLM's that
    change nothing here."""

    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: Any = None

    def params(self) -> SamplingParams:
        """Returns the SDK's parameters."""
        return SamplingParams(**{name: getattr(self, name)
                                 for name in SamplingParams.__struct_fields__})


class InferenceBody(Struct, kw_only=True):
    """Token ids in, token ids out."""

    token_ids: list[int]
    sampling_params: InferenceSampling
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    features: Any = None
    kv_transfer_params: Any = None

    def check(self) -> None:
        """Raises `HttpError` for unsupported fields."""
        for name in ("features", "kv_transfer_params"):
            if getattr(self, name):
                raise HttpError(400, f"{name}: not supported", name)
        if self.stream_options is not None and not self.stream:
            raise HttpError(400, "stream_options: only with stream=true", "stream_options")
        if not self.token_ids:
            raise HttpError(400, "token_ids: must not be empty", "token_ids")


class InferenceChoice(Struct, kw_only=True):
    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int]


class InferenceAnswer(Struct, kw_only=True):
    """The whole answer, or an event of a stream."""

    request_id: str
    choices: list[InferenceChoice]
    prompt_logprobs: PromptLogprobs | None = None
    usage: CompletionUsage | None = None
    kv_transfer_params: None = None


async def render_chat(http: HttpRequest) -> Response:
    """Handles `/v1/chat/completions/render`."""
    turn = await ChatTurn.read(http)
    [request] = await turn.requests()
    name = f"chatcmpl-{turn.call.answer_id}"
    return JsonReply(encode_json(await _rendered(turn, request, name)))


async def render_completion(http: HttpRequest) -> Response:
    """Handles `/v1/completions/render`: returns a list, an entry per prompt."""
    turn = await CompletionsTurn.read(http)
    name = f"cmpl-{turn.call.answer_id}"
    return JsonReply(encode_json([await _rendered(turn, request, f"{name}-{number}")
                                  for number, request in enumerate(await turn.requests())]))


async def _rendered(turn: ChatTurn | CompletionsTurn, request: Request,
                    name: str) -> dict[str, Any]:
    """Returns the request that would be run, and its text. Raises `HttpError`, `ActoriumError`."""
    model, client, body = turn.model, turn.engine.client, turn.body
    params = check_params(request.params or SamplingParams())
    ids = body.truncated(await prompt_ids(client, request), model.max_model_len,
                         params.max_tokens)
    check_ids(ids, model.max_model_len, "messages" if request.messages else "prompt")
    return {"request_id": name, "token_ids": ids, "features": None,
            "sampling_params": to_builtins(params, str_keys=True), "model": model.name,
            "stream": body.stream, "stream_options": to_builtins(body.stream_options),
            "cache_salt": body.cache_salt, "priority": body.priority, "kv_transfer_params": None,
            "prompt": await client.detokenize(ids)}


class InferenceTurn(HttpTurn):
    """`/inference/v1/generate`: one request under way."""

    body_type = InferenceBody
    body: InferenceBody

    def __init__(self, call: EngineCall, model: ServedModel, body: InferenceBody) -> None:
        super().__init__(call, model, body)
        check_ids(body.token_ids, model.max_model_len, "token_ids")
        self._params = body.sampling_params.params()
        self._counts = UsageCounter()

    def engine_fields(self) -> dict[str, str]:
        return {"prompt": "token_ids"}

    @property
    def tells_token_texts(self) -> bool:
        return self._params.logprobs is not None or self._params.prompt_logprobs is not None

    async def requests(self) -> list[Request]:
        body = self.body
        return [Request(prompt=body.token_ids, params=self._params, tenant=self.call.tenant,
                        priority=body.priority, cache_salt=body.cache_salt)]

    async def collect(self, requests: list[Request]) -> InferenceAnswer:
        [choices] = await self.call.complete(requests)
        return InferenceAnswer(
            request_id=self.call.answer_id, choices=[self._choice(one) for one in choices],
            prompt_logprobs=answers.prompt_logprobs(choices, self.engine.token_texts),
            usage=answers.usage(answers.last_counts(choices)))

    def _choice(self, one: Completion | StreamDelta) -> InferenceChoice:
        return InferenceChoice(
            index=one.index, token_ids=one.token_ids,
            finish_reason=answers.reason(one.finish_reason),
            logprobs=answers.chat_logprobs(one.logprobs, self.engine.token_texts))

    def on_deltas(self, deltas: list[StreamDelta]) -> bytes:
        out = []
        for delta in deltas:
            self._counts.add(delta)
            if delta.token_ids or delta.finish_reason:
                out.append(self._event([self._choice(delta)]))
        return b"".join(out)

    async def end(self) -> bytes:
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return b""
        return self._event([], self._counts.usage())

    def _event(self, choices: list[InferenceChoice], usage: CompletionUsage | None = None) -> bytes:
        return event(encode_json(InferenceAnswer(request_id=self.call.answer_id, choices=choices,
                                                 usage=usage)))
