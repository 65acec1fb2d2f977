"""Batches in JSON lines: one request a line in, one record a line out, in input order.

In: `prompt`, `prompt_token_ids` or `messages`, any field of `SamplingParams` (or OpenAI's
`logprobs: true` + `top_logprobs`, `max_completion_tokens`), `tenant`, `priority`, and how the
prompt is made (`OPTIONS`). Out:
`index` (the line's number from 0), `text`, `token_ids`, `finish_reason`, `prompt_tokens`,
`cached_tokens`, `completion_tokens` (with speculation also `draft_tokens`
and `accepted_tokens`), `logprobs` if asked; for n > 1 a list `choices` of such
records. A line that cannot be served becomes `{"index", "error"}` and the rest go on. Files of any
size: only a window of lines is held.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.client.requests import Request, check_priority, check_tenant
from actorium.actors.errors import ActoriumError, InvalidRequest
from actorium.actors.gateway.batch import json_lines
from actorium.actors.params import SamplingParams

PROMPTS = ("prompt", "prompt_token_ids", "messages")
ORDER = ("tenant", "priority")
OPTIONS = ("chat_template", "add_generation_prompt", "continue_final_message",
           "truncate_prompt_tokens", "cache_salt", "adapter")
"""Fields of `Request` by these names."""
_OPTION_TYPES = {field.name: field.type for field in msgspec.structs.fields(Request)
                 if field.name in OPTIONS}
_TYPES = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
_PARAMS = frozenset(_TYPES)


class BatchJob(Struct, frozen=True):
    index: int
    request: Request


class BadLine(Struct, frozen=True):
    """A line that is no request, and why."""

    index: int
    error: str


Generate = Callable[[BatchJob], Awaitable[list[Any]]]
"""Runs a job; gives its completions (`actorium.Completion`), one a choice."""


# --- lines in ------------------------------------------------------------------------------------

def parse_lines(lines: Iterable[bytes], defaults: dict[str, Any]) -> Iterator[BatchJob | BadLine]:
    """One item a line. `defaults` are sampling parameters for the lines that name none."""
    for index, line in enumerate(lines):
        try:
            yield parse_line(index, line, defaults)
        except ValueError as error:
            yield BadLine(index, str(error))


def parse_line(index: int, line: bytes, defaults: dict[str, Any]) -> BatchJob:
    """Raises `ValueError`, naming the field at fault."""
    body = _decode(line)
    given = [name for name in PROMPTS if body.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ValueError(f"one of {', '.join(PROMPTS)} is needed, got {found}")
    text, tokens, turns = (body.pop(name, None) for name in PROMPTS)
    tenant, priority = _order(body)
    options = _options(body)
    return BatchJob(index, Request(
        prompt=_text(text) if tokens is None else _tokens(tokens), messages=_messages(turns),
        params=params(body, defaults), tenant=tenant, priority=priority, **options))


def _options(body: dict[str, Any]) -> dict[str, Any]:
    """Take `OPTIONS` out of a line; null = not said."""
    found = {}
    for name in OPTIONS:
        value = body.pop(name, None)
        if value is None:
            continue
        try:
            found[name] = msgspec.convert(value, _OPTION_TYPES[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {_reason(error)}") from None
    return found


def _order(body: dict[str, Any]) -> tuple[str | None, int]:
    """Take `tenant` and `priority` out of a line; null = not said."""
    tenant, priority = (body.pop(name, None) for name in ORDER)
    try:
        return (None if tenant is None else check_tenant(tenant),
                0 if priority is None else check_priority(priority))
    except InvalidRequest as error:
        raise ValueError(error.message) from None


def _decode(line: bytes) -> dict[str, Any]:
    if len(line.rstrip(b"\r\n")) > json_lines.MAX_LINE_BYTES:
        raise ValueError(f"the line is longer than {json_lines.MAX_LINE_BYTES} bytes")
    try:
        body = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"a line must hold a JSON object, got {type(body).__name__}")
    return body


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"prompt: must be a string, got {type(value).__name__}")
    return value


def _tokens(value: Any) -> list[int] | None:
    try:
        return msgspec.convert(value, list[int] | None)
    except msgspec.ValidationError as error:
        raise ValueError(f"prompt_token_ids: {_reason(error)}") from None


def _messages(value: Any) -> list[dict[str, str]] | None:
    try:
        turns = msgspec.convert(value, list[dict[str, str]] | None)
    except msgspec.ValidationError as error:
        raise ValueError(f"messages: {_reason(error)}") from None
    for turn in turns or ():
        if set(turn) != {"role", "content"}:
            raise ValueError("messages: every message needs role and content, and nothing else")
    return turns


def _reason(error: msgspec.ValidationError) -> str:
    return str(error).replace("`", "")


def params(body: dict[str, Any], defaults: dict[str, Any] | None = None) -> SamplingParams:
    """Sampling parameters of a JSON object. Raises `ValueError`, naming the field."""
    body = _from_openai(body)
    unknown = sorted(set(body) - _PARAMS)
    if unknown:
        from actorium.actors.config.sources import suggestion

        hint = suggestion(unknown[0], (*_PARAMS, *PROMPTS, *ORDER, *OPTIONS))
        raise ValueError(f"{unknown[0]}: no such field{hint}")
    merged = {**(defaults or {}), **body}
    result = SamplingParams(**{name: _converted(name, value) for name, value in merged.items()})
    result.check()
    return result


def _from_openai(body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's spellings as ours."""
    body = dict(body)
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise ValueError("max_completion_tokens: max_tokens is given, too")
        body["max_tokens"] = body.pop("max_completion_tokens")
    top = body.pop("top_logprobs", None)
    if isinstance(asked := body.get("logprobs"), bool):
        body["logprobs"] = (0 if top is None else top) if asked else None
    elif top is not None and asked is None:
        raise ValueError("top_logprobs: needs logprobs: true")
    return body


def _converted(name: str, value: Any) -> Any:
    """`value` as the field has it. Raises `ValueError` naming the field."""
    try:
        return msgspec.convert(value, _TYPES[name], str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {_reason(error)}") from None


# --- records out ---------------------------------------------------------------------------------

def record(job: BatchJob, completions: list[Any]) -> dict[str, Any]:
    params = job.request.params or SamplingParams()
    if params.n == 1:
        return {"index": job.index, **_choice(params, completions[0])}
    choices = [{"index": i, **_choice(params, c)} for i, c in enumerate(completions)]
    return {"index": job.index, "choices": choices}


def _choice(params: SamplingParams, completion: Any) -> dict[str, Any]:
    usage = completion.usage
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    if usage.draft_tokens:
        fields |= {"draft_tokens": usage.draft_tokens, "accepted_tokens": usage.accepted_tokens}
    if params.logprobs is not None or params.logprob_token_ids is not None:
        fields["logprobs"] = _logprobs(completion.logprobs)
    if params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = _logprobs(completion.prompt_logprobs)
    return fields


def _logprobs(rows: Any) -> list[Any]:
    return [None if row is None else {"token_id": row.token_id, "logprob": row.logprob,
                                      "rank": row.rank, "top": [list(pair) for pair in row.top]}
            for row in rows or ()]


def run_batch(items: Iterable[BatchJob | BadLine], generate: Generate,
              window: int) -> AsyncGenerator[dict[str, Any], None]:
    """Records in input order; at most `window` jobs are held at any moment.

    A failed job becomes an error record; an engine that has ended raises.
    """
    return json_lines.in_order(items, partial(_answered, generate), window)


async def _answered(generate: Generate, item: BatchJob | BadLine) -> dict[str, Any]:
    from actorium.actors.errors import EngineUnavailable

    if isinstance(item, BadLine):
        return {"index": item.index, "error": item.error}
    try:
        return record(item, await generate(item))
    except EngineUnavailable:
        raise
    except (ActoriumError, ValueError) as error:
        return {"index": item.index, "error": str(error)}
