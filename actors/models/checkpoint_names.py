"""Which of a folder's or a repository's files hold the weights."""

from __future__ import annotations

import re
from collections.abc import Iterable

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
_PART = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})\.safetensors")
_MAX_PARTS = 10_000


def unindexed_files(names: Iterable[str]) -> list[str]:
    """The safetensors files of a checkpoint without an index: model.safetensors, or else the parts
    of the only one that is in parts (all that there should be), or the only file of another name.
    [] where there is none, or more than one could be meant."""
    own = sorted(name for name in names if name.endswith(SUFFIX) and "/" not in name)
    if SINGLE in own:
        return [SINGLE]
    series = {(found[1], found[3]) for name in own if (found := _PART.fullmatch(name))}
    if len(series) == 1:
        (stem, count), = series
        if 1 <= int(count) <= _MAX_PARTS:
            return [f"{stem}-{i:0{len(count)}}-of-{count}{SUFFIX}"
                    for i in range(1, int(count) + 1)]
    return own if len(own) == 1 and not series else []
