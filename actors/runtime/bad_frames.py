"""One clear line about a frame that is no message, with field names instead of positions."""

from __future__ import annotations

import re
import typing
from typing import Any

import msgspec

_PATH = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_INDEX = re.compile(r"^\[(\d+)\](.*)$", re.DOTALL)


class _Tagged(msgspec.Struct, array_like=True):
    """The first element of an array; the others, which may be a million, are skipped."""

    tag: msgspec.Raw


def describe_bad_frame(frame: bytes, union: Any, error: Exception) -> str:
    """Why `frame` could not be decoded as `union`: "params.top_p: Expected `float`, got `str`".

    msgspec names the place by its index in the array; the message's tag gives the field's name.
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
