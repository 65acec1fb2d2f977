"""Prompts as token ids: vLLM's `/render` routes, which return them, and `/inference/v1/generate`,
which accepts what those return. And `/invocations`, SageMaker's one path for every kind of body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import UNSET, Struct, UnsetType, to_builtins
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message

from actorium.actors.client.requests import Request, check_params
from actorium.actors.gateway.answer_events import (
    AnswerEvent,
    ChoiceEvents,
    ChoiceStarted,
    DeltaReader,
)
from actorium.actors.gateway.api import answers, embeddings, responses, scoring
from actorium.actors.gateway.api.answers import (
    ChatLogprobs,
    CompletionUsage,
    PromptLogprobs,
    ShownExperts,
)
from actorium.actors.gateway.api.chat_completions import ChatTurn
from actorium.actors.gateway.api.completions import CompletionsTurn
from actorium.actors.gateway.api.sampling_fields import StreamOptions, check_ids
from actorium.actors.gateway.api.sglang import GenerateTurn
from actorium.actors.gateway.api.tokens import prompt_ids
from actorium.actors.gateway.api.turn import HttpTurn
from actorium.actors.gateway.engine_call import EngineCall, call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.http.replies import JsonReply, sse_event
from actorium.actors.gateway.served_model import GENERATE, ServedModel
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
                raise bad_field(name, "not supported")
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "only with stream=true")
        if self.sampling_params.hidden_states:
            raise bad_field("sampling_params.hidden_states", "not supported here, but by /generate")
        if not self.token_ids:
            raise bad_field("token_ids", "must not be empty")


class InferenceChoice(Struct, kw_only=True):
    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int]
    routed_experts: ShownExperts | UnsetType = UNSET


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
    return JsonReply(await _rendered(turn, request, name))


async def render_completion(http: HttpRequest) -> Response:
    """Handles `/v1/completions/render`: returns a list, an entry per prompt."""
    turn = await CompletionsTurn.read(http)
    name = f"cmpl-{turn.call.answer_id}"
    return JsonReply([await _rendered(turn, request, f"{name}-{number}")
                      for number, request in enumerate(await turn.requests())])


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
        self.answer = DeltaReader(choices=self._params.n)

    def engine_fields(self) -> dict[str, str]:
        return {"prompt": "token_ids"}

    @property
    def shows_token_texts(self) -> bool:
        return self._params.logprobs is not None or self._params.prompt_logprobs is not None

    async def requests(self) -> list[Request]:
        body = self.body
        return [Request(prompt=body.token_ids, params=self._params, tenant=self.call.tenant,
                        priority=body.priority, cache_salt=body.cache_salt)]

    async def collect(self, requests: list[Request]) -> InferenceAnswer:
        choices = await self.complete(requests)
        whole = self._answer([self._choice(events) for events in choices], True)
        whole.prompt_logprobs = answers.prompt_logprobs(choices[0].prompt_logprobs,
                                                        self.engine.token_texts)
        return whole

    def encode(self, event: AnswerEvent) -> bytes:
        if isinstance(event, ChoiceStarted) or not (event.token_ids or event.finish_reason):
            return b""
        return sse_event(self._answer([self._choice(event)], False))

    async def end(self) -> bytes:
        options = self.body.stream_options
        wanted = options is not None and options.include_usage
        return sse_event(self._answer([], True)) if wanted else b""

    def _choice(self, events: ChoiceEvents) -> InferenceChoice:
        return InferenceChoice(
            index=events.index, token_ids=events.token_ids, finish_reason=events.finish_reason,
            logprobs=answers.chat_logprobs(events.logprobs, self.engine.token_texts),
            routed_experts=answers.shown_experts(events.routed_experts))

    def _answer(self, choices: list[InferenceChoice], with_usage: bool) -> InferenceAnswer:
        usage = answers.completion_usage(self.answer.usage()) if with_usage else None
        return InferenceAnswer(request_id=self.call.answer_id, choices=choices, usage=usage)


class InvocationBody(Struct, kw_only=True):
    """The fields that determine a body's kind."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    text: Any = None
    input_ids: Any = None
    documents: Any = None
    text_2: Any = None
    model: str | None = None
    keep_alive: str | float | None = None
    timeout: float | None = None
    stream: Any = None
    """This and the three before are fields of every kind."""


ROUTES: dict[str, Callable[[HttpRequest], Awaitable[Any]]] = {
    "messages": ChatTurn.handle, "prompt": CompletionsTurn.handle,
    "input": responses.create, "text": GenerateTurn.handle, "input_ids": GenerateTurn.handle,
    "documents": scoring.rerank, "text_2": scoring.score}
"""The handler of a body with this field: the first one that it has."""
POOLED: dict[str, Callable[[HttpRequest], Awaitable[Any]]] = {
    "messages": embeddings.embeddings, "input": embeddings.embeddings, "text": embeddings.encode,
    "input_ids": embeddings.encode}
"""The same where the model does not generate."""


async def invocations(http: HttpRequest) -> Any:
    """Forwards to the route that the body belongs to."""
    body = await bodies.raw(http)
    found = bodies.decode(body, InvocationBody)
    kind = next((name for name in ROUTES if getattr(found, name) is not None), None)
    if kind is None:
        raise HttpError(400, f"body: one of {', '.join(ROUTES)} is needed")

    handle = ROUTES[kind]
    if kind in POOLED and GENERATE not in (await call_of(http).chosen.model(found)).tasks:
        handle = POOLED[kind]

    async def again() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return await handle(HttpRequest(http.scope, again))
