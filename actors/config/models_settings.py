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
    """TOML file of models, with a table each, by name: what its engine is started with (`model`),
    `keep_alive`, `pinned`, `load_on_start`, `default`, and any flag of an engine."""
    models_max: int = 0
    """Engines that run at once; 0 = as many as there is memory for."""
    models_memory: int | None = None
    """Bytes that all engines may take together, by what `actorium plan` says of each; 0 = no limit.
    Default: four fifths of the memory that there is (of a GPU's, where engines run on one)."""
    keep_alive: str = "5m"
    """How long an engine stays after its last request: seconds, 10m, 1h30m; 0 = it ends at once, -1
    = it stays. Requests and models may have their own."""
    models_wait: float = 600.0
    """Seconds that a request waits for its model's engine."""
    models_queue: int = 1024
    """Requests that may wait for engines; more are refused."""
    models_allow_pull: bool = False
    """Let callers with the admin key fetch models by their names, into `download_dir`."""
    engine_of: str = ""
    """Set by a server of models for its engines: which server, and which of its lives; not for
    people."""


def serves_models(settings: ModelsConfig) -> bool:
    """Whether the server has a model manager, and engines of their own for its models."""
    return settings.models_dir is not None or settings.models is not None


def models_rules(settings: ModelsConfig, model: str) -> list[tuple[str, bool, str]]:
    """(section.field, whether its value is valid, what it must be). model: the setting."""
    s, several = settings, serves_models(settings)
    rules = [
        ("model.model", not (several and model),
         "goes into the file of --models or the folder of --models-dir, where there are several"),
        ("models.models_max", s.models_max >= 0, "must not be negative (0 = no limit)"),
        ("models.models_memory", s.models_memory is None or s.models_memory >= 0,
         "must not be negative (0 = no limit)"),
        ("models.keep_alive", not (fault := _keep_alive_fault(s.keep_alive)), fault),
        ("models.models_wait", 0 < s.models_wait < math.inf, "must be above 0 seconds, and finite"),
        ("models.models_queue", s.models_queue >= 1, "must be at least 1"),
    ]
    defaults = ModelsConfig()
    return rules + [
        (f"models.{name}", several or getattr(s, name) == getattr(defaults, name),
         "goes with --models-dir or --models")
        for name in ("models_max", "models_memory", "keep_alive", "models_wait", "models_queue",
                     "models_allow_pull")]


def _keep_alive_fault(text: str) -> str:
    try:
        parse_keep_alive(text)
    except ValueError as error:
        return str(error).partition(", got")[0]
    return ""


def parse_keep_alive(value: object) -> float:
    """Seconds of a number, or of a text as Ollama has it ("300", "5m", "1h30m", "-1"); `FOR_GOOD`
    for any that is negative. Raises `ValueError` with what it must be."""
    seconds = math.nan
    if isinstance(value, str):
        seconds = _seconds(value.strip())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not seconds <= 1e9:
        raise ValueError('must be seconds or a duration as "5m" (0 = no time, -1 = for good), '
                         f"got {value!r:.80}")
    return FOR_GOOD if seconds < 0 else seconds


def _seconds(text: str) -> float:
    """Those of a text; NaN where it is no duration."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if (match := _DURATION.fullmatch(text)) is None:
        return math.nan
    seconds = sum(float(number) * UNITS[unit] for number, unit in _PART.findall(match[2]))
    return -seconds if match[1] == "-" else seconds
