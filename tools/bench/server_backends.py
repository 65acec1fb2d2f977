"""How each kind of server is asked for a completion, and how its stream is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.errors import BadConfig, EngineUnavailable, InvalidRequest
from actorium.actors.params import SamplingParams
from actorium.tools.bench.datasets.sample import SampleRequest
from actorium.tools.bench.http_client import Http
from actorium.tools.bench.load_driver import Stream, StreamChunk

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
ENDPOINTS = {
    "openai": COMPLETIONS, "vllm": COMPLETIONS, "sglang-oai": COMPLETIONS,
    "llama.cpp": COMPLETIONS, "openai-chat": CHAT, "vllm-chat": CHAT, "sglang-oai-chat": CHAT,
    "sglang": GENERATE, "sglang-native": GENERATE,
}
"""Kinds of servers -> where they are asked unless --endpoint says else."""
SDK = "actorium"
"""The kind that is asked through the client instead of over HTTP."""
_GENERATE_NAMES = {"max_tokens": "max_new_tokens"}


class Asking(NamedTuple):
    """What every request of a run has in common."""

    model: str | None = None
    """The name that goes with each; None = none."""
    sampling: Mapping[str, Any] = {}
    """Sampling parameters, by OpenAI's names and vLLM's."""
    ignore_eos: bool = False
    extra: Mapping[str, Any] = {}
    """Further members of the body, which win."""
    headers: str = ""
    """Further lines of the head, each with its end."""
    stream: bool = True


def kind_of(endpoint: str) -> str:
    """COMPLETIONS, CHAT or GENERATE, by how a path ends. Raises `BadConfig`."""
    for kind in (CHAT, COMPLETIONS, GENERATE):
        if endpoint.endswith(kind.removeprefix("/v1")):
            return kind
    raise BadConfig(f"--endpoint: must end with /completions, /chat/completions or /generate, got "
                    f"{endpoint!r}", "endpoint")


def http_stream(http: Http, endpoint: str, asking: Asking) -> Stream:
    """Requests to `endpoint` of a server."""
    body_of, chunk_of = _KINDS[kind_of(endpoint)]

    async def stream(request: SampleRequest) -> AsyncIterator[StreamChunk]:
        read = chunk_of(asking.stream)
        async for event in http.events(endpoint, body_of(request, asking), asking.headers):
            chunk = read(event)
            if chunk is not None:
                yield chunk

    return stream


def sdk_stream(client: AsyncClient, asking: Asking) -> Stream:
    """Requests through the ZMQ client. Raises `BadConfig` on a parameter that it does not take."""
    try:
        base = SamplingParams(**{"ignore_eos": asking.ignore_eos, **asking.sampling,
                                 **asking.extra})
        base.check()
    except (TypeError, ValueError) as error:
        raise BadConfig(f"--extra-request-body: {error}", "extra_request_body") from None

    async def stream(request: SampleRequest) -> AsyncIterator[StreamChunk]:
        params = msgspec.structs.replace(base, max_tokens=request.output_len)
        if request.messages is not None:
            deltas = await client.chat(request.messages, params, stream=True)
        else:
            deltas = client.stream(request.prompt or "", params)
        total = 0
        async for delta in deltas:
            total += len(delta.token_ids)
            usage = delta.usage
            yield StreamChunk(delta.text, bool(delta.token_ids), total,
                        usage.prompt_tokens if usage else 0, usage.cached_tokens if usage else 0)

    return stream


def _openai_body(request: SampleRequest, asking: Asking) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": request.output_len, "stream": asking.stream}
    if asking.stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if asking.model is not None:
        body["model"] = asking.model
    if asking.ignore_eos:
        body["ignore_eos"] = True
    return {**body, **asking.sampling, **asking.extra}


def _completions_body(request: SampleRequest, asking: Asking) -> dict[str, Any]:
    if request.prompt is None:
        raise InvalidRequest("a chat cannot go to /v1/completions", "endpoint")
    return {"prompt": request.prompt, **_openai_body(request, asking)}


def _chat_body(request: SampleRequest, asking: Asking) -> dict[str, Any]:
    messages = request.messages
    if messages is None:
        if not isinstance(request.prompt, str):
            raise InvalidRequest("token ids cannot go to /v1/chat/completions", "endpoint")
        messages = [{"role": "user", "content": request.prompt}]
    return {"messages": messages, **_openai_body(request, asking)}


def _generate_body(request: SampleRequest, asking: Asking) -> dict[str, Any]:
    if request.prompt is None:
        raise InvalidRequest("a chat cannot go to /generate", "endpoint")
    sampling = {_GENERATE_NAMES.get(name, name): value for name, value in asking.sampling.items()}
    text = isinstance(request.prompt, str)
    return {"text" if text else "input_ids": request.prompt, "stream": asking.stream,
            "sampling_params": {"max_new_tokens": request.output_len,
                                "ignore_eos": asking.ignore_eos, **sampling}, **asking.extra}


# --- what comes back -----------------------------------------------------------------------------

class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Text(Struct):
    content: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(Struct):
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    finish_reason: Any = None


class _Event(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Meta(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Generated(Struct):
    text: str = ""
    meta_info: _Meta | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Event)
_generated = msgspec.json.Decoder(_Generated)
Reader = Callable[[bytes], StreamChunk | None]


def _openai_reader(streamed: bool) -> Reader:
    def read(data: bytes) -> StreamChunk | None:
        event = _decoded(_event, data)
        choice = event.choices[0] if event.choices else None
        text, bears = _of_choice(choice, streamed)
        usage = event.usage
        if usage is None:
            return StreamChunk(text, bears) if choice is not None else None
        details = usage.prompt_tokens_details
        return StreamChunk(text, bears, usage.completion_tokens, usage.prompt_tokens or 0,
                     (details.cached_tokens if details else None) or 0)

    return read


def _of_choice(choice: _Choice | None, streamed: bool) -> tuple[str, bool]:
    """(text, whether a token is in it). An event without text bears one all the same (half a
    character, a special token), unless it opens the stream of a chat or ends one."""
    if choice is None:
        return "", False
    if choice.text is not None:
        return choice.text, bool(choice.text) or choice.finish_reason is None
    part = choice.delta if streamed else choice.message
    if part is None:
        return "", False
    words = (part.reasoning_content or part.reasoning, part.content)
    text = "".join(word for word in words if isinstance(word, str))
    return text, bool(text or part.tool_calls)


def _generate_reader(streamed: bool) -> Reader:
    """SGLang sends the whole text in each event, or with --incremental-streaming-output what is
    new; the tokens are counted from the beginning either way."""
    before = ""

    def read(data: bytes) -> StreamChunk | None:
        nonlocal before
        event = _decoded(_generated, data)
        meta = event.meta_info or _Meta()
        new = event.text
        if before and new.startswith(before):
            new = new.removeprefix(before)
        before += new
        return StreamChunk(new, bool(new), meta.completion_tokens, meta.prompt_tokens or 0,
                     meta.cached_tokens or 0)

    return read


def _decoded(decoder: Any, data: bytes) -> Any:
    """Raises `EngineUnavailable` on an error in the stream, and on what is no JSON."""
    try:
        event = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineUnavailable(f"in the stream: {error}: {data[:200]!r}") from None
    if event.error is not None:
        raise EngineUnavailable(f"in the stream: {event.error}")
    return event


_KINDS: dict[str, tuple[Callable[[SampleRequest, Asking], dict[str, Any]],
                        Callable[[bool], Reader]]] = {
    COMPLETIONS: (_completions_body, _openai_reader), CHAT: (_chat_body, _openai_reader),
    GENERATE: (_generate_body, _generate_reader)}
