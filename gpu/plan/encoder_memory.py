"""Bytes of what a vision tower takes beside its weights: what it has made, which is kept, and its
temporaries."""

from __future__ import annotations

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.vision_shape import VisionShape
from actorium.gpu.plan.memory_plan import Demand

FLOAT = 4
INDEX = 8
"""Of a place in a frame, an int64."""


def encoder_width(v: VisionShape) -> int:
    """Numbers of a row: the embedding, and what is added behind the decoder's first layers."""
    return v.out_hidden * (1 + len(v.deepstack))


def encoder_rows(shape: ModelShape, demand: Demand) -> int:
    """Rows that are kept, each of which is a placeholder's."""
    if shape.vision is None:
        return 0
    return demand.encoder_cache // (encoder_width(shape.vision) * shape.itemsize)


def encoder_cache_bytes(shape: ModelShape, demand: Demand) -> int:
    """Of these, to the byte."""
    v = shape.vision
    return encoder_rows(shape, demand) * encoder_width(v) * shape.itemsize if v else 0


def encoder_work_bytes(shape: ModelShape, demand: Demand) -> int:
    """An estimate of the tower's temporaries, of the largest image or frame allowed, and of another
    one that waits half way; and of the rows that a step takes, twice: as they are gathered and as
    they are joined. Not counted: the blocks of torch's attention on a CPU, 0.6 MB a thread."""
    v = shape.vision
    if v is None:
        return 0
    tokens = min(demand.encoder_tokens, shape.max_model_len)
    patches, size = tokens * v.merge**2, shape.itemsize
    rows = encoder_width(v) * size
    kept = v.hidden * size + 2 * v.head_dim * FLOAT + 2 * INDEX
    entering = v.pixels * (FLOAT + size) + (v.positions > 0) * v.hidden * (4 * FLOAT + INDEX)
    attention = v.hidden * (9 * size + 3 * FLOAT)
    mlp = v.hidden * 2 * size + v.intermediate * (4 if v.gated else 2) * size
    return (patches * (2 * kept + max(entering, attention, mlp)) + tokens * 2 * rows
            + 2 * demand.chunk * rows)
