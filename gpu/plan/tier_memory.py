"""Bytes that pages pass through on their way between a CUDA device and the host."""

from __future__ import annotations

from actorium.actors.config.tree import Config
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.plan.memory_plan import as_served, demand_of, state_bytes, token_bytes

ROOM_BYTES = 128 << 20
"""What goes at once, at most, in each direction: 3 to 5 ms on PCIe 5 or 4."""


def staging_bytes(config: Config, shape: ModelShape) -> int:
    """Of both directions: each has as many pages as the largest step writes, of every group of
    layers, if they fit; at least one of them, or a checkpoint. 0 where nothing goes to the host."""
    if not (config.memory.host_cache or config.memory.disk_cache):
        return 0
    shape, demand = as_served(shape, demand_of(config))
    page = token_bytes(shape, demand) * demand.page_size
    return 2 * max(page, state_bytes(shape, demand).checkpoint,
                   min(ROOM_BYTES, page * -(-demand.chunk // demand.page_size)))
