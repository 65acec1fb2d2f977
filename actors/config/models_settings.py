"""The settings of a server of several models, a section of the tree."""

from __future__ import annotations

import math
import re

from msgspec import Struct

FOR_GOOD = -1.0
"""A `keep_alive` of an engine that stays."""
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_DURATION = re.compile(r"([+-]?)((?:(?:\d+(?:\.\d*)?|\.\d+)(?:ms|[smhd]))+)")
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|[smhd])")


class ModelsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several models behind one port, each with an engine that is started when it is asked for
    (docs/many-models.md)."""

    models_dir: str | None = None
    """Folder of models, each under its name there: folders in HF format and .gguf files. It is read
    again when a request names a model that is not known."""
    models: str | None = None
    """TOML file of models, with a table each: what serves it (`model`), further names (`names`),
    `keep_alive`, `pinned`, `load_on_start`, and any flag of `serve` for its engine."""
    models_max: int = 0
    """Engines that run at once; 0 = as many as there is memory for."""
    models_memory: int = 0
    """Bytes that all engines may take together, by what `actorium plan` says of each; 0 = no limit.
    """
    keep_alive: str = "5m"
    """How long an engine stays after its last request: seconds, 10m, 1h30m; 0 = it ends at once, -1
    = it stays. Requests and models may have their own."""
    models_wait: float = 600.0
    """Seconds that a request waits for its model's engine."""
    models_queue: int = 1024
    """Requests that may wait for engines; more are refused."""
    models_allow_pull: bool = False
    """Let callers with the admin key fetch models by their names, into `download_dir`."""


def serves_models(settings: ModelsConfig) -> bool:
    """Whether the server has a model manager, and engines of their own for its models."""
    return settings.models_dir is not None or settings.models is not None


def parse_keep_alive(value: object) -> float:
    """Seconds of a number, or of a text as Ollama has it ("300", "5m", "1h30m", "-1"); `FOR_GOOD`
    for any that is negative. Raises `ValueError` with what it must be."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        seconds = sum(float(number) * UNITS[unit] for number, unit in _PART.findall(match[2]))
        seconds = -seconds if match[1] == "-" else seconds
    if not seconds <= 1e9:
        raise ValueError('must be seconds or a duration as "5m" (0 = no time, -1 = for good), '
                         f"got {value!r:.80}")
    return FOR_GOOD if seconds < 0 else seconds
