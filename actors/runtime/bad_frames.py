"""Frames that are no messages: counted, and described in one line with the names of fields."""

from __future__ import annotations

import logging
import re
import time
import typing
from collections import Counter
from typing import Any

import msgspec

LOG = logging.getLogger("actorium.mailbox")
RECENT = 10.0
"""Seconds between two log lines about the same kind of bad frame."""
_PATH = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_INDEX = re.compile(r"^\[(\d+)\](.*)$", re.DOTALL)


class BadFrames:
    """Counts bad frames by kind, and logs each kind at most every `RECENT` seconds."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def add(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, -RECENT) >= RECENT:
            self._logged[kind] = now
            LOG.warning("%s: bad frame (%s, %d so far): %s", self.where, kind,
                        self.counts[kind], text[:200])

    @property
    def total(self) -> int:
        return self.counts.total()


class _Tagged(msgspec.Struct, array_like=True):
    """The first element of an array; the others, possibly a million, are skipped."""

    tag: msgspec.Raw


def describe_bad_frame(frame: bytes, union: Any, error: Exception) -> str:
    """Returns why `frame` could not be decoded as `union`: "params.top_p: Expected `float`, got
    `str`".

    msgspec gives the field's index in the array; the message's tag tells which struct's it is.
    """
    match = _PATH.match(str(error))
    if not isinstance(error, msgspec.ValidationError) or match is None:
        return f"not a message: {_one_line(str(error)) or type(error).__name__}"
    path, what = match["path"], _one_line(match["what"])
    indexed = _INDEX.match(path)
    struct = _struct(frame, union)
    if indexed is None or struct is None:
        return what
    # Position 0 is the tag.
    position = int(indexed[1]) - 1
    fields = struct.__struct_fields__
    if not 0 <= position < len(fields):
        return f"{struct.__name__}: {what}"
    return f"{fields[position]}{_one_line(indexed[2])}: {what}"


def _one_line(text: str) -> str:
    line = " ".join(text[:1000].split())[:300]
    return "".join(c if c.isprintable() else "?" for c in line)


def _struct(frame: bytes, union: Any) -> Any:
    """The struct of the union that the frame's tag names, or None."""
    try:
        tag = msgspec.msgpack.decode(msgspec.msgpack.decode(frame, type=_Tagged).tag)
    except Exception:  # the frame may be anything
        return None
    for struct in typing.get_args(union) or (union,):
        if struct.__struct_config__.tag == tag:
            return struct
    return None
