"""Numbers and sizes as people write them: 32k, 8GiB."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
LEAST_DISK = 1 << 20


def whole_number(text: str) -> int | None:
    """`32k` = 32,768, `8GiB`, `1.5g`; None where it is none. Raises `ValueError` on other texts."""
    short = text[:-2] if text.lower().endswith(("kib", "mib", "gib", "tib")) else text
    scale = _SUFFIXES.get(short[-1:].lower())
    number = int(text) if scale is None else float(short[:-1]) * scale
    return int(number) if math.isfinite(number) and number == int(number) else None


class DiskBound(NamedTuple):
    """A directory and the most that may lie in it."""

    directory: Path
    bytes: int


def parse_disk_cache(text: str) -> DiskBound | None:
    """`DIR:64GiB`; None of an empty text. Raises `ValueError` with what it must be."""
    if not text:
        return None
    directory, colon, size = text.rpartition(":")
    try:
        bound = whole_number(size.strip())
    except ValueError:
        bound = None
    if not (colon and directory) or bound is None:
        raise ValueError("must be a directory and a size, as DIR:64GiB")
    if bound < LEAST_DISK:
        raise ValueError("must have room for at least 1 MiB (DIR:64GiB)")
    return DiskBound(Path(directory).expanduser().absolute(), bound)


def disk_cache_fault(text: str) -> str:
    """What is wrong with it; empty: nothing."""
    try:
        parse_disk_cache(text)
    except ValueError as error:
        return str(error)
    return ""
