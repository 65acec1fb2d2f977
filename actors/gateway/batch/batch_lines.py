"""Lines of OpenAI's batch files: a request each in the input, an answer each in the output.

In: `{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}`. Out:
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`; `response` is
null, and `error` has a code and a message, where no request was made. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from actorium.actors.gateway.batch.json_lines import MAX_LINE_BYTES
from actorium.actors.gateway.http.routes import ROUTES, find

BATCH = "actorium.batch"
"""In the scope of a request that is a line of a batch: its `LineContext`."""
MAX_ID = 512
"""Characters of a custom_id."""
ENDPOINTS = tuple(path for route in ROUTES if route.generates for path in route.paths)
"""What a line may ask."""
STREAM_BY_DEFAULT = frozenset({"ollama_chat", "ollama_generate"})
"""Names of routes whose answers are streams unless the body says otherwise."""
SHOWN = ", ".join(route.paths[0] for route in ROUTES if route.generates)
"""The same without other names."""
encode = msgspec.json.Encoder().encode


class LineContext(NamedTuple):
    """What a request that is a line of a batch has in place of a caller."""

    tenant: str
    seconds: float
    """The batch's time that is left."""
    key: str
    """Names the line: of the same line of a batch it is always the same."""


class BatchLine(NamedTuple):
    """One line of the input."""

    number: int
    """From 1."""
    custom_id: str
    url: str
    body: bytes
    """JSON."""
    wrong: str = ""
    """Why it is no request, beginning with the field's name; empty = it is one."""


class _Line(Struct):
    """What may stand in a line: undecoded, since 32 MiB of empty lists take a GiB, and seconds in
    which the process answers nobody."""

    custom_id: Raw = Raw(b"null")
    method: Raw = Raw(b"null")
    url: Raw = Raw(b"null")
    body: Raw = Raw(b"null")


class LineResponse(Struct, kw_only=True):
    """What a request was answered with."""

    status_code: int
    request_id: str
    body: Raw = Raw(b"null")


class LineError(Struct):
    """Why there was no request."""

    code: str
    message: str


class LineResult(Struct, kw_only=True):
    """One line of the output."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None


class _Streaming(Struct):
    """The fields of bodies whose answers are no whole ones."""

    stream: Raw = Raw(b"null")
    background: Raw = Raw(b"null")


_decode = msgspec.json.Decoder(_Line).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_streaming = msgspec.json.Decoder(_Streaming).decode
decode_result = msgspec.json.Decoder(LineResult).decode


def parse_line(number: int, data: bytes) -> BatchLine:
    """Returns the line, with what is wrong with it."""
    if len(data.rstrip(b"\r\n")) > MAX_LINE_BYTES:
        return BatchLine(number, "", "", b"", f"longer than {MAX_LINE_BYTES} bytes")
    try:
        line = _decode(data)
        custom_id, url = _text(line.custom_id), _text(line.url)
        return BatchLine(number, custom_id or "", url or "", bytes(line.body),
                         _wrong(line, custom_id, url))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return BatchLine(number, "", "", b"", f"not a JSON object: {error or 'nested too deeply'}")


def _text(value: Raw) -> str | None:
    """Returns a text of JSON; None for any other value."""
    return _decode_text(value) if bytes(value).startswith(b'"') else None


def _wrong(line: _Line, custom_id: str | None, url: str | None) -> str:
    if custom_id is None or not 0 < len(custom_id) <= MAX_ID:
        return f"custom_id: must be a text of 1 to {MAX_ID} characters"
    if _text(line.method) != "POST":
        return f"method: must be POST, got {_shown(line.method)}"
    if url is None or not is_endpoint(url):
        return f"url: {_shown(line.url)} is not one of {SHOWN}"
    try:
        body = _decode_streaming(line.body)
    except msgspec.MsgspecError:
        return "body: must be a JSON object"
    for name in ("stream", "background"):
        if bytes(getattr(body, name)) not in (b"null", b"false"):
            return f"body.{name}: a batch's answers are whole"
    if find(url).name in STREAM_BY_DEFAULT and bytes(body.stream) != b"false":
        return "body.stream: must be false: a batch's answers are whole, this route's are streams"
    return ""


def _shown(value: Raw) -> str:
    """Returns the beginning of a value of JSON, for an error."""
    text = _text(value)
    return bytes(value)[:100].decode(errors="replace") if text is None else repr(text[:100])


def is_endpoint(url: str) -> bool:
    """Returns whether a batch may ask this path."""
    return url in ENDPOINTS and find(url).generates


def result_line(line: BatchLine, batch: str, response: LineResponse | None,
                error: LineError | None = None) -> bytes:
    """Returns the line of the output, without its end. batch: the batch's id."""
    return encode(LineResult(id=f"batch_req_{batch.removeprefix('batch_')}_{line.number}",
                             custom_id=line.custom_id, response=response, error=error))


def succeeded(data: bytes) -> bool:
    """Returns whether a line of the output has the answer that was asked for."""
    response = decode_result(data).response
    return response is not None and response.status_code == 200
