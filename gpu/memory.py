"""How many pages fit: plain arithmetic."""

from __future__ import annotations

from actorium.actors.config import MemoryConfig
from actorium.actors.errors import BadConfig


def page_table_width(max_model_len: int, page_size: int) -> int:
    """Pages that a slot's table holds: the longest sequence, and one reserved ahead of it."""
    return -(-max_model_len // page_size) + 1


def pool_pages(memory: MemoryConfig, page_bytes: int, slots: int, max_model_len: int,
               budget: int) -> int:
    """Pages of the pool, the sink page included.

    As many as `budget` bytes hold, but no more than max_total_tokens ask for and than all slots
    (the sink slot not counted) could fill. Raises `BadConfig` when not even one fits.
    """
    size = memory.page_size
    wanted = (slots - 1) * page_table_width(max_model_len, size)
    if memory.max_total_tokens is not None:
        if memory.max_total_tokens < size:
            raise BadConfig(f"max_total_tokens: {memory.max_total_tokens} tokens are less than one "
                            f"page of {size}", "memory.max_total_tokens")
        wanted = min(wanted, memory.max_total_tokens // size)
    fit = budget // page_bytes - 1
    if fit < 1:
        raise BadConfig(f"kv_cache_bytes: {max(budget, 0):,} bytes for pages hold no page of "
                        f"{page_bytes:,} bytes beside the sink page; on cuda memory_fraction sets "
                        "them", "memory.kv_cache_bytes")
    return 1 + min(wanted, fit)


def device_budget(fraction: float, total: int, in_use: int, workspace: int) -> int:
    """Bytes left for pages on a device of `total` bytes; may be negative.

    in_use: weights and tables, and what others hold; workspace: the largest step's temporaries.
    """
    return int(total * fraction) - in_use - workspace
