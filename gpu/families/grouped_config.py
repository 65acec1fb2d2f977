"""Which weights are held in 4 to 8 bits where they are quantised when they are read
(`--quantization int8|int4`)."""

from __future__ import annotations

from collections.abc import Iterable

from actorium.gpu.families.fp8_config import MADE_APART
from actorium.gpu.families.tensor_specs import EMBED, HEAD, TensorSpec
from actorium.gpu.families.weight_formats import MADE, GroupedShape, WeightFormat

GROUP = 32
"""Columns that share a scale, by default."""
HEAD_BITS = {"auto": 8, "int8": 8, "int4": 4}


def made_format(bits: int, group: int | None) -> WeightFormat:
    """What weights are made to be."""
    return WeightFormat(bits, GROUP if group is None else group, bits == 4)


def made_grouped(bits: int, group: int | None, head: str, tied: bool,
                 specs: Iterable[TensorSpec]) -> GroupedShape:
    """All projections but those that gate a recurrent layer's states, and the head.

    group, head: see `ModelConfig`. tied: the embedding is the head as well. specs: of the model.
    """
    apart: list[tuple[str, WeightFormat | None]] = [
        (spec.module, None) for spec in specs if spec.module.endswith(MADE_APART)]
    if head != "none":
        outer = EMBED if tied else HEAD
        group = None if group == 0 and HEAD_BITS[head] == 4 else group
        apart.append((outer.removesuffix(".weight"), made_format(HEAD_BITS[head], group)))
    return GroupedShape(MADE, made_format(bits, group), tuple(apart))
