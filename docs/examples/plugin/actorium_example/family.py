"""A model family: Llama by another name, whose config calls the number of layers `depth`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorium.gpu.families.architectures import Architecture
from actorium.gpu.families.llama_config import causal_layer, llama
from actorium.gpu.families.model_shape import ModelShape


def read(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reads a config.json; raises `BadModel` that names a field."""
    return llama({**raw, "num_hidden_layers": raw.get("depth")}, where, dtype)


FAMILY = Architecture(read, causal_layer)
