"""In how many bits the weights of a GGUF file are held: as the file has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.gguf_config import GGUF
from actorium.gpu.families.weight_formats import GroupedShape, WeightFormat

FORMATS = {
    "F32": None, "F16": None, "BF16": None,
    "Q4_0": WeightFormat(4, 32, False), "Q4_1": WeightFormat(4, 32, True),
    "Q5_0": WeightFormat(5, 32, False), "Q5_1": WeightFormat(5, 32, True),
    "Q8_0": WeightFormat(8, 32, False), "Q4_K": WeightFormat(4, 32, True),
    "Q5_K": WeightFormat(5, 32, True), "Q6_K": WeightFormat(6, 16, False),
}
"""Of each type of tensor; None: it is plain."""


def gguf_grouped(raw: dict[str, Any], where: Path) -> GroupedShape | None:
    """Which weights are held in which format; None where the config was not made of a GGUF file, or
    all of its weights are plain. Raises `BadModel` naming the field."""
    own = raw.get(GGUF)
    if own is None:
        return None
    if not isinstance(own, dict) or not isinstance(own.get("modules"), dict):
        raise BadModel(f"{where}: {GGUF}: must name the types of modules")

    def form(name: str, kind: Any) -> WeightFormat | None:
        if not isinstance(kind, str) or kind not in FORMATS:
            raise BadModel(f"{where}: {GGUF}.{name}: must be one of {', '.join(FORMATS)}, "
                           f"got {shown(kind)}")
        return FORMATS[kind]

    modules = tuple((str(name), form("modules", kind)) for name, kind in own["modules"].items())
    default = form("default", own.get("default"))
    if default is None and not any(one for _, one in modules):
        return None
    return GroupedShape(GGUF, default, modules)
