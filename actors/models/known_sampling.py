"""Sampling that suits models whose makers recommend it and whose files name none: at temperature 1
a small model's first answers are nonsense."""

from __future__ import annotations

import re
from collections.abc import Iterable

KNOWN_SAMPLING: dict[str, dict[str, float]] = {
    r"SmolLM2-[\d.]+[MB]-Instruct": {"temperature": 0.2, "top_p": 0.9},
    r"TinyLlama-[\d.]+[MB]-Chat": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    r"Zephyr-\d+B-(?:alpha|beta)": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
}
"""Part of a model's name -> the defaults of its maker's model card."""
_KNOWN = [(re.compile(rf"(?:^|[/_.-])({name})(?:$|[/_.:-])", re.IGNORECASE), values)
          for name, values in KNOWN_SAMPLING.items()]


def known_sampling(names: Iterable[str]) -> tuple[str, dict[str, float]] | None:
    """The model that one of these names (of a repository, a folder, a file) is of, as it is
    written there, and its defaults; None where none is known."""
    for name in names:
        for pattern, values in _KNOWN:
            if found := pattern.search(name):
                return found[1], values
    return None
