"""Media that come within the request, and files of this machine: no network."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from actorium.actors.config.media_settings import MediaConfig
from actorium.actors.errors import InvalidRequest, shown
from actorium.actors.vision.image_decoding import check_bytes
from actorium.actors.vision.media_formats import TYPES, sniffed

LONGEST_HEAD = 200
"""Characters before the comma of a data: URL."""


def read_data_url(url: str, limits: MediaConfig, param: str) -> bytes:
    """The bytes of `data:image/png;base64,...`. The type must be one that is read, or left out, and
    be what the bytes are; base64 is taken as RFC 4648 has it, without spaces and with its padding.
    Raises `InvalidRequest` that names `param`."""
    head, comma, body = url[len("data:"):].partition(",")
    if not comma or len(head) > LONGEST_HEAD:
        raise InvalidRequest(f"{param}: is no data: URL (data:image/png;base64,...)", param)
    declared, *options = head.lower().split(";")
    if not options or options[-1].strip() != "base64":
        raise InvalidRequest(f"{param}: a data: URL must be in base64 (data:image/png;base64,...)",
                             param)
    if declared and declared not in TYPES:
        raise InvalidRequest(f"{param}: has type {shown(declared)}; known are {', '.join(TYPES)}",
                             param)
    check_bytes(len(body) // 4 * 3 - body[-2:].count("="), limits, param)
    try:
        data = base64.b64decode(body, validate=True)
        canonical = base64.b64encode(base64.b64decode(body[-4:])).decode() == body[-4:]
    except (binascii.Error, ValueError):
        canonical = False
    if not canonical:
        raise InvalidRequest(f"{param}: is no valid base64", param)
    kind = sniffed(data)
    if declared and TYPES[declared] != kind:
        raise InvalidRequest(f"{param}: is declared as {declared} and is "
                             f"{kind or 'nothing that is known'}", param)
    return data


def read_local(url: str, limits: MediaConfig, param: str) -> bytes:
    """The bytes of a regular file below `allowed_local_media_path`, once all symbolic links are
    followed. Raises `InvalidRequest`, with the same words for what lies outside and for what is not
    there. Reads the disk."""
    root = limits.allowed_local_media_path
    if root is None:
        raise InvalidRequest(f"{param}: files are not read (--allowed-local-media-path)", param)
    refused = InvalidRequest(f"{param}: is no file below the folder that "
                             "--allowed-local-media-path names", param)
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
        if parts.netloc not in ("", "localhost") or "\0" in path or parts.query or parts.fragment:
            raise refused
        base, real = Path(root).resolve(strict=True), Path(path).resolve(strict=True)
        if not real.is_relative_to(base):
            raise refused
        # Between the check and the opening a link may be put there: what has been opened counts.
        file = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (OSError, ValueError, RuntimeError):
        raise refused from None
    opened = Path(os.readlink(f"/proc/self/fd/{file}"))
    if not stat.S_ISREG(os.fstat(file).st_mode) or not opened.is_relative_to(base):
        os.close(file)
        raise refused
    with os.fdopen(file, "rb") as source:
        data = source.read(limits.max_media_bytes + 1)
    check_bytes(len(data), limits, param)
    return data
