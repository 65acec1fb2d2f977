"""Typed access to the fields of a parsed `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorium.actors.errors import BadModel, shown

MAX_INT = 2**31 - 1
"""The largest size, number or id that a field may name."""
MAX_LAYERS = 4096
MIN_FLOAT, MAX_FLOAT = 1e-30, 1e30
"""What float32 can still multiply."""


class Fields:
    """Typed access to the fields of a config, with errors that name them."""

    def __init__(self, raw: dict[str, Any], where: Path, prefix: str = "") -> None:
        self.raw, self.where, self.prefix = raw, where, prefix

    def bad(self, name: str, why: str) -> BadModel:
        return BadModel(f"{self.where}: {self.prefix}{name}: {why}")

    def layers(self) -> int:
        """Their number: what is read for each of them is bounded by it."""
        return self.int("num_hidden_layers", maximum=MAX_LAYERS)

    def kinds(self, name: str, known: tuple[str, ...], layers: int) -> list[str]:
        """What the field says of each layer, one of the known, of which errors name
        two. Raises `BadModel`."""
        found = self.raw.get(name)
        if (not isinstance(found, list) or len(found) != layers
                or not all(isinstance(kind, str) and kind in known for kind in found)):
            raise self.bad(name, f"must be {layers} times {' or '.join(known[:2])}")
        return found

    def int(self, name: str, default: int | None = None, maximum: int = MAX_INT) -> int:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(name, f"must be a positive integer, got {shown(value)}")
        if value > maximum:
            raise self.bad(name, f"must be at most {maximum}, got {shown(value)}")
        return value

    def float(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.bad(name, f"must be a positive number, got {shown(value)}")
        if not MIN_FLOAT <= value <= MAX_FLOAT:
            raise self.bad(name, f"must be between {MIN_FLOAT:g} and {MAX_FLOAT:g}, "
                           f"got {shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        return default if value is None else bool(value)
