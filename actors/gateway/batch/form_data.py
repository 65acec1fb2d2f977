"""Reads `multipart/form-data` (RFC 7578) that has come whole: fields, and one file. Pure."""

from __future__ import annotations

from contextlib import suppress
from email.message import Message
from email.parser import HeaderParser
from mmap import mmap
from typing import NamedTuple

from actorium.actors.gateway.http.http_errors import HttpError, bad_field

MAX_PARTS, MAX_HEAD, MAX_VALUE = 64, 8 << 10, 4 << 10
"""Parts of a form; bytes of a part's head; bytes of a field's value."""
PIECE = 1 << 20
"""Bytes that are searched at once."""
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
    message, boundary = Message(), ""
    with suppress(ValueError):  # of another charset's name, or too many digits
        message["content-type"] = content_type[:MAX_HEAD]
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
        head_end = data[at:at + MAX_HEAD].find(b"\r\n\r\n")
        if head_end < 0:
            raise _broken()
        head_end += at
        end = _find(data, b"\r\n" + boundary, head_end)
        if end < 0:
            raise _broken()
        name, filename = _names(data[at + 2:head_end + 4].decode(errors="replace"))
        start = min(head_end + 4, end)
        if name == FILE and file is None:
            file = filename or "file", start, end
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
    first = data[at:at + MAX_HEAD].find(boundary)
    if first < 0:
        raise _broken()
    return at + first + len(boundary)


def _find(data: bytes | mmap, pattern: bytes, at: int) -> int:
    """Returns where the pattern is, -1 if it is not. A piece at a time, between which other threads
    run, and by the search of bytes: that of `mmap` compares each place with the whole pattern."""
    while at < len(data):
        found = data[at:at + PIECE].find(pattern)
        if found >= 0:
            return at + found
        at += PIECE - len(pattern) + 1
    return -1


def _names(head: str) -> tuple[object, str]:
    """Returns a part's name, and its file's. Raises `HttpError` 400."""
    try:
        fields = _parse(head)
        name, filename = (fields.get_param("name", header="content-disposition"),
                          fields.get_filename(""))
    except ValueError as error:  # of another charset's name, or too many digits
        raise bad_field("content-disposition", str(error)[:100]) from None
    # A charset may decode to half a character, which no UTF-8 has.
    return name, filename.encode(errors="replace").decode()


def _broken() -> HttpError:
    return HttpError(400, "body: is no whole multipart/form-data", code="invalid_form")
