"""Reads `multipart/form-data` (RFC 7578) that has come whole: fields, and one file. Pure."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser
from mmap import mmap
from typing import NamedTuple

from actorium.actors.gateway.http.http_errors import HttpError, bad_field

MAX_PARTS, MAX_HEAD, MAX_VALUE = 64, 8 << 10, 4 << 10
"""Parts of a form; bytes of a part's head; bytes of a field's value."""
FILE = "file"
"""The name of the file's part."""
_parse = HeaderParser().parsestr


class FormData(NamedTuple):
    """A form: its fields, and where its file lies."""

    fields: dict[str, str]
    filename: str
    start: int
    end: int
    """The file's bytes are `data[start:end]`."""


def boundary_of(content_type: str) -> bytes:
    """Returns what separates the parts. Raises `HttpError` 415."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary("")
    if message.get_content_type() != "multipart/form-data" or not 0 < len(boundary) <= 70:
        raise HttpError(415, "content-type: a file comes as multipart/form-data with a boundary",
                        "content-type")
    return b"--" + boundary.encode("latin-1", "replace")


def read_form(data: bytes | mmap, boundary: bytes) -> FormData:
    """Returns what a body holds. Raises `HttpError` 400 naming the field."""
    fields: dict[str, str] = {}
    file: tuple[str, int, int] | None = None
    at = _after(data, 0, boundary)
    for _ in range(MAX_PARTS):
        if data[at:at + 2] == b"--":
            break
        head_end = data.find(b"\r\n\r\n", at, at + MAX_HEAD)
        end = data.find(b"\r\n" + boundary, max(head_end, at))
        if head_end < 0 or end < 0:
            raise _broken()
        head = _parse(data[at + 2:head_end + 4].decode(errors="replace"))
        name = head.get_param("name", header="content-disposition")
        start = min(head_end + 4, end)
        if name == FILE and file is None:
            file = head.get_filename("") or "file", start, end
        elif isinstance(name, str) and name not in (FILE, *fields) and end - start <= MAX_VALUE:
            fields[name] = data[start:end].decode(errors="replace")
        else:
            raise bad_field(str(name)[:100], "twice, without a name, or longer than "
                            f"{MAX_VALUE} bytes")
        at = end + 2 + len(boundary)
    else:
        raise HttpError(400, f"body: more than {MAX_PARTS} parts")
    if file is None:
        raise bad_field(FILE, "is required")
    return FormData(fields, *file)


def _after(data: bytes | mmap, at: int, boundary: bytes) -> int:
    """Returns where the first part's head begins."""
    first = data.find(boundary, at, at + MAX_HEAD)
    if first < 0:
        raise _broken()
    return first + len(boundary)


def _broken() -> HttpError:
    return HttpError(400, "body: is no whole multipart/form-data", code="invalid_form")
