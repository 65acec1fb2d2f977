"""Requests of the SDK's callers, their results, and the checks before anything is sent. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import (
    MAX_CLIENT_MESSAGE_BYTES,
    MAX_TEMPLATE,
    AdapterName,
    ChatMessage,
    Generate,
    Pooled,
    Priority,
    PromptEmbeds,
    RoutedExperts,
    Salt,
    Template,
    Tenant,
    TokenLogprob,
    TraceContext,
    Truncation,
    Usage,
)
from actorium.actors.params import PoolingParams, SamplingParams
from actorium.actors.tracing.trace_context import parse_traceparent

DEFAULT_PARAMS = SamplingParams()
_encode = msgspec.msgpack.Encoder().encode
_decode_generate = msgspec.msgpack.Decoder(Generate).decode
_decode_params = msgspec.msgpack.Decoder(SamplingParams).decode
"""They check types. `convert` does not: it takes structs that a caller has made, and those within
them, as they are; and of `Raw` there are no builtins that it could read instead."""


class Resumable(Struct, frozen=True, kw_only=True):
    """How a request outlives its client (see `messages.Resume`)."""

    rid: str
    """Its name, chosen by the caller and hard to guess: whoever knows it may adopt the request."""
    seconds: float
    """How long it goes on after its client has disconnected."""
    adopt: bool = True
    """Adopt it if the engine knows it already, whoever sent it, from its first token on."""
    must_exist: bool = False
    """Do not send it if the engine does not know it: that is an `UnknownRequest`."""
    created: int = 0
    """Unix time, seconds, which the engine records with it (`AsyncDeltaStream.created`)."""


NOT_RESUMABLE = Resumable(rid="", seconds=0.0)


class Request(Struct, frozen=True, kw_only=True):
    """One request: `prompt` (text or token ids) or `messages`, and how to complete it."""

    prompt: str | list[int] | PromptEmbeds | None = None
    messages: list[Any] | None = None
    """Turns of a conversation: `{"role": ..., "content": ...}` or `ChatMessage`."""
    media: list[Any] = []
    """Media of the prompt, beside those in contents: `MediaUpload`, or keys (`client/media.py`)."""
    mm_processor_kwargs: dict[str, Any] = {}
    """How images and videos are processed (docs/media.md)."""
    tools: list[dict[str, Any]] = []
    """Tools in OpenAI's form, for the chat template."""
    params: SamplingParams | None = None
    timeout: float | None = None
    """Seconds until the request ends with `DeadlineExceeded`; None = the engine's limit."""
    template_args: dict[str, Any] = {}
    chat_template: str | None = None
    """A template of the request's own, instead of the model's, for `messages`."""
    add_generation_prompt: bool = True
    """The prompt ends with the beginning of the model's turn."""
    continue_final_message: bool = False
    """The model continues the last of `messages`; needs `add_generation_prompt=False`."""
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of the prompt, its last ones; -1 = as many as fit the context."""
    cache_salt: str | None = None
    """Cached prefixes are shared among requests of the same salt (and tenant) only."""
    tenant: str | None = None
    """Cached prefixes are shared within a tenant only, and fair scheduling is between tenants. At
    most 64 printable ASCII characters; None = the client's tenant."""
    priority: int = 0
    """Higher goes first where the engine schedules by priority; the lowest, `messages.BACKGROUND`,
    gives way to all others in any case."""
    adapter: str | None = None
    """Name of the LoRA adapter that computes it; None = the model by itself."""
    resumable: Resumable | None = None
    """Lets the request outlive its client."""
    traceparent: str | None = None
    """The caller's span, as in the HTTP header of W3C Trace Context: parent of the request's own,
    where the engine exports traces."""
    tracestate: str = ""
    """As in that header."""
    pooling: PoolingParams | None = None
    """A vector or scores of the prompt are wanted, not a completion (docs/pooling.md)."""
    text_pair: str | None = None
    """The second text of a pair to score, beside `prompt`; with the task classify."""


class Completion(Struct, frozen=True, kw_only=True):
    """One finished choice."""

    text: str
    token_ids: list[int]
    finish_reason: str
    """stop | length"""
    stop_reason: str | int | None = None
    """The stop string or the stop token that ended it; None = another reason."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each prompt token, None for the first."""
    usage: Usage
    index: int = 0
    """Number of the choice, 0..n-1."""
    rid: str = ""
    pooled: Pooled | None = None
    """What `Request.pooling` asks for; there is no text then. Or the hidden states of prompt and
    completion, if asked for."""
    weight_versions: list[tuple[int, int]] = []
    """(number of the first token, version) of each run of tokens that one version of the model's
    weights has made, where these were changed (`update_weights`); version 0 is left out in front.
    """
    routed_experts: RoutedExperts | None = None
    """Of each token of the prompt and of the completion but its last, if asked for."""


class StreamDelta(Struct, frozen=True, kw_only=True):
    """The new part of one choice. `text` may lag behind `token_ids`, never the other way round."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    """stop | length | abort | deadline; set with the last delta of a choice."""
    stop_reason: str | int | None = None
    usage: Usage | None = None
    """Set with finish_reason."""
    index: int = 0
    rid: str = ""
    pooled: Pooled | None = None
    """Set with finish_reason, if asked for; see `Completion`."""
    weight_versions: list[tuple[int, int]] = []
    """Set with finish_reason; see `Completion`."""
    routed_experts: RoutedExperts | None = None
    """Set with finish_reason, if asked for; see `Completion`."""


def hidden_rid(rid: str, index: int) -> str:
    """Returns the rid of the request for the hidden states of a request's choice: another name, of
    the same question (see `Resumable`)."""
    name, dot, question = rid.partition(".")
    return f"{name}-h{index}{dot}{question}"


def hidden_request(request: Request, rid: str, index: int, tokens: list[int],
                   seconds: float) -> Request:
    """Returns the request for the hidden states of a choice that has ended. rid: of `request`,
    whose prompt is token ids; tokens: the choice's; seconds: that are left, inf = any number."""
    assert request.params is not None and isinstance(request.prompt, Sequence)
    own = request.resumable or NOT_RESUMABLE
    return msgspec.structs.replace(
        request, prompt=[*request.prompt, *tokens], params=None,
        pooling=PoolingParams(task="hidden_states", layers=tuple(request.params.hidden_states)),
        timeout=None if math.isinf(seconds) else max(seconds, 0.001),
        resumable=msgspec.structs.replace(
            own, rid=hidden_rid(rid, index), must_exist=False,
            adopt=request.resumable is not None and own.adopt))


def merge_deltas(deltas: Iterable[StreamDelta]) -> list[StreamDelta]:
    """Merges deltas to one for each choice, in the order of first ones, for a reader that lags
    behind."""
    by_choice: dict[int, list[StreamDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.index, []).append(delta)
    return [several[0] if len(several) == 1 else _merge(several) for several in by_choice.values()]


def _merge(deltas: list[StreamDelta]) -> StreamDelta:
    last = deltas[-1]
    return StreamDelta(
        text="".join([delta.text for delta in deltas]),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[each for delta in deltas for each in delta.logprobs or ()] or None,
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs),
                             None),
        finish_reason=last.finish_reason, stop_reason=last.stop_reason, usage=last.usage,
        index=last.index, rid=last.rid, pooled=last.pooled, weight_versions=last.weight_versions,
        routed_experts=last.routed_experts)


def encode_request(rid: str, request: Request, tenant: str = "") -> tuple[bytes, int]:
    """Returns (frame, n) of a request. tenant: where the request has none. Raises `InvalidRequest`
    naming the field."""
    params = check_params(request.params or DEFAULT_PARAMS)
    check_timeout(request.timeout)
    prompt, resumable = request.prompt, request.resumable or NOT_RESUMABLE
    if (prompt is None) == (request.messages is None):
        raise InvalidRequest("prompt: exactly one of prompt and messages is needed", "prompt")
    if params.hidden_states and (prompt is None or isinstance(prompt, PromptEmbeds)
                                 or request.media or request.truncate_prompt_tokens is not None):
        raise InvalidRequest("hidden_states: of a prompt of text or token ids alone, without "
                             "truncate_prompt_tokens", "hidden_states")
    text = prompt if isinstance(prompt, str) else None
    if text == "":
        raise InvalidRequest("prompt: must not be empty", "prompt")
    embeds = prompt if isinstance(prompt, PromptEmbeds) else None
    tokens = None if prompt is None or text is not None or embeds is not None \
        else pack_token_ids(prompt, "prompt")
    messages = None if request.messages is None else check_messages(request.messages)
    message = Generate(rid=rid, params=params, text=text, tokens=tokens, messages=messages,
                       timeout=None if request.timeout is None else float(request.timeout),
                       template_args=encode_raw(request.template_args, dict, "template_args"),
                       tools=encode_raw(request.tools, list, "tools"),
                       tenant=check_tenant(tenant if request.tenant is None else request.tenant),
                       priority=check_priority(request.priority),
                       chat_template=check_template(request.chat_template),
                       add_generation_prompt=request.add_generation_prompt,
                       continue_final_message=request.continue_final_message,
                       truncate_prompt_tokens=check_truncation(request.truncate_prompt_tokens),
                       cache_salt=check_salt(request.cache_salt),
                       resume_seconds=resumable.seconds, media=request.media,
                       created=resumable.created,
                       trace=check_trace(request.traceparent, request.tracestate),
                       pooling=check_pooling(request), text_pair=request.text_pair,
                       adapter=check_adapter(request.adapter), embeds=embeds)
    field = "prompt" if messages is None else "messages"
    frame = encode(message, field, large=embeds is not None)
    try:
        _decode_generate(frame)  # the engine would drop what it cannot decode
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"{field}: {error}", field) from None
    return frame, params.n


def encode_raw(value: Any, kind: type[Any], field: str) -> msgspec.Raw:
    """Returns a dict or a list of dicts (`kind`) as MessagePack. Raises `InvalidRequest` naming
    `field`."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{field}: must be a {kind.__name__}, got {type(value).__name__}",
                             field)
    if not all(isinstance(item, str if kind is dict else dict) for item in value):
        raise InvalidRequest(f"{field}: " + ("names must be strings" if kind is dict
                                             else "must be a list of dicts"), field)
    try:
        return msgspec.Raw(_encode(value))
    except (UnicodeEncodeError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{field}: cannot be sent: {error}", field) from None


def encode(message: Any, field: str, large: bool = False) -> bytes:
    """Returns the frame of a message to the engine. large: its endpoint has another bound. Raises
    `InvalidRequest` naming `field`."""
    try:
        frame = _encode(message)
    except (UnicodeEncodeError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{field}: cannot be sent: {error}", field) from None
    if len(frame) > MAX_CLIENT_MESSAGE_BYTES and not large:
        raise InvalidRequest(f"{field}: {len(frame)} bytes exceed the limit of "
                             f"{MAX_CLIENT_MESSAGE_BYTES} for one message", field)
    return frame


def check_params(params: SamplingParams) -> SamplingParams:
    """Returns `params`. Raises `InvalidRequest` naming the field that is wrong in type or range."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params: must be SamplingParams, got {type(params).__name__}",
                             "params")
    try:
        _decode_params(_encode_params(params))
        params.check()
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`").split("[")[0] or "params"
        raise InvalidRequest(f"{field}: {what}", field) from None
    except (ValueError, TypeError, OverflowError) as error:
        field = str(error).split(":")[0]
        known = field in SamplingParams.__struct_fields__
        raise InvalidRequest(str(error) if known else f"params: {error}",
                             field if known else "params") from None
    return params


def check_pooling(request: Request) -> PoolingParams | None:
    """Returns the pooling parameters of a request. Raises `InvalidRequest` naming the field."""
    pooling = request.pooling
    if not isinstance(pooling, PoolingParams | None):
        raise InvalidRequest(f"pooling: must be PoolingParams, got {type(pooling).__name__}",
                             "pooling")
    if not isinstance(request.text_pair, str | None):
        raise InvalidRequest(f"text_pair: must be text, got {type(request.text_pair).__name__}",
                             "text_pair")
    if request.text_pair is not None and (
            not isinstance(request.prompt, str) or pooling is None or pooling.task != "classify"):
        raise InvalidRequest("text_pair: with a prompt of text and pooling for classify",
                             "text_pair")
    if pooling is None:
        return None
    if (request.params or DEFAULT_PARAMS) != DEFAULT_PARAMS:
        raise InvalidRequest("params: nothing is sampled where pooling is asked for", "params")
    try:
        msgspec.convert(msgspec.to_builtins(pooling), PoolingParams)  # its fields' types
        pooling.check()
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"pooling: {error}", "pooling") from None
    except ValueError as error:
        raise InvalidRequest(str(error), str(error).split(":")[0]) from None
    return pooling


def _encode_params(params: SamplingParams) -> bytes:
    try:
        return _encode(params)
    except OverflowError:  # an integer beyond 64 bits: the check says which
        params.check()
        raise


def check_timeout(timeout: Any, field: str = "timeout") -> None:
    """Raises `InvalidRequest` naming `field` unless it is None or a positive, finite number."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (number and 0 < timeout < math.inf):
        raise InvalidRequest(f"{field}: must be a positive number of seconds, got {timeout!r}",
                             field)


def check_tenant(tenant: Any) -> str:
    """Returns `tenant`. Raises `InvalidRequest` naming the field."""
    want = "at most 64 printable ASCII characters without spaces"
    return str(_within(tenant, Tenant, "tenant", want))


def check_priority(priority: Any) -> int:
    """Returns `priority`. Raises `InvalidRequest` naming the field."""
    want = "a whole number between -2147483648 and 2147483647"
    return int(_within(priority, Priority, "priority", want))


def check_template(template: Any) -> str | None:
    """Returns `template`. Raises `InvalidRequest` naming the field."""
    want = f"a chat template of 1 to {MAX_TEMPLATE} characters"
    checked: str | None = _within(template, Template | None, "chat_template", want)
    return checked


def check_truncation(tokens: Any) -> int | None:
    """Returns `tokens`. Raises `InvalidRequest` naming the field."""
    want = "a number of tokens, at least 1, or -1"
    checked: int | None = _within(tokens, Truncation | None, "truncate_prompt_tokens", want)
    if checked == 0:
        raise InvalidRequest(f"truncate_prompt_tokens: must be {want}, got 0",
                             "truncate_prompt_tokens")
    return checked


def check_salt(salt: Any) -> str:
    """Returns `salt`. Raises `InvalidRequest` naming the field."""
    if salt is None:
        return ""
    return str(_within(salt, Salt, "cache_salt", "a string of at most 256 characters"))


def check_adapter(name: Any) -> str:
    """Returns the name of an adapter, "" for None. Raises `InvalidRequest` naming the field."""
    if name is None:
        return ""
    return str(_within(name, AdapterName, "adapter", "a name of 1 to 256 characters"))


def check_trace(parent: Any, state: Any) -> TraceContext | None:
    """Returns the trace that a request belongs to. Raises `InvalidRequest` naming the field."""
    if parent is None:
        return None
    trace = parse_traceparent(parent, state) if isinstance(parent, str) else None
    if trace is None:
        raise InvalidRequest("traceparent: must be as in W3C Trace Context, "
                             f"got {repr(parent)[:100]}", "traceparent")
    return trace


def _within(value: Any, bounds: Any, field: str, want: str) -> Any:
    try:
        return msgspec.convert(value, bounds)
    except msgspec.ValidationError:
        raise InvalidRequest(f"{field}: must be {want}, got {repr(value)[:100]}", field) from None


def pack_token_ids(ids: Any, field: str) -> bytes:
    """Returns token ids as little-endian int32. Raises `InvalidRequest` naming `field`."""
    if isinstance(ids, str | bytes) or not hasattr(ids, "__len__"):
        raise InvalidRequest(f"{field}: must be text or a list of token ids, "
                             f"got {type(ids).__name__}", field)
    if not len(ids):
        raise InvalidRequest(f"{field}: must not be empty", field)
    if bool in set(map(type, ids)):
        raise InvalidRequest(f"{field}: token ids must be integers, got bool", field)
    try:
        packed = array("i", ids)
    except TypeError:
        raise InvalidRequest(f"{field}: token ids must be integers", field) from None
    except OverflowError:
        raise InvalidRequest(f"{field}: a token id is out of range", field) from None
    if min(packed) < 0:
        raise InvalidRequest(f"{field}: token id {min(packed)} is negative", field)
    return packed.tobytes()


def check_messages(messages: Any) -> list[ChatMessage]:
    """Returns the turns of a conversation. Raises `InvalidRequest` naming `messages`."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages: must be a list of at least one turn", "messages")
    try:
        return [m if isinstance(m, ChatMessage) else msgspec.convert(m, ChatMessage)
                for m in messages]
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"messages: {error}", "messages") from None
