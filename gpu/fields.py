"""Typed access to the fields of a parsed `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorium.actors.errors import BadModel


class Fields:
    """Typed access to the fields of a config, with errors that name them."""

    def __init__(self, raw: dict[str, Any], where: Path, prefix: str = "") -> None:
        self.raw, self.where, self.prefix = raw, where, prefix

    def bad(self, name: str, why: str) -> BadModel:
        return BadModel(f"{self.where}: {self.prefix}{name}: {why}")

    def int(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(name, f"must be a positive integer, got {value!r}")
        return value

    def float(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.bad(name, f"must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        return default if value is None else bool(value)
