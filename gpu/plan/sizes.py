"""How many pages fit: plain arithmetic."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from actorium.actors.errors import BadConfig


def page_table_width(max_model_len: int, page_size: int) -> int:
    """Pages that a slot's table holds: the longest sequence, and one reserved ahead of it."""
    return -(-max_model_len // page_size) + 1


class PageDemand(NamedTuple):
    """What the pages of a worker are to hold."""

    page_size: int
    sequences: int
    """That run at once."""
    max_model_len: int
    chunk: int
    """Tokens extended in one step at most, over all sequences (max_num_batched_tokens)."""

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence's table."""
        return page_table_width(self.max_model_len, self.page_size)

    def for_one(self, window: int) -> int:
        """Pages that one sequence needs at most, while its prompt is extended: those of its chunk
        and of the window before it, which begins anywhere in a page. window: 0 = all."""
        whole = self.table_width
        return min(whole, -(-(window + self.chunk) // self.page_size) + 1) if window else whole

    def for_all(self, window: int) -> int:
        """Pages that all sequences need at most, together: each its window, begun and ended
        anywhere in a page, and the chunk of the step shared among them."""
        if not window:
            return self.sequences * self.table_width
        each = min(self.table_width, -(-window // self.page_size) + 2)
        return min(self.sequences * each + -(-self.chunk // self.page_size),
                   self.sequences * self.table_width)


class GroupPages(NamedTuple):
    """What sizing needs to know of a group of layers."""

    window: int
    page_bytes: int


def pool_pages(groups: Sequence[GroupPages], demand: PageDemand, budget: int,
               max_total_tokens: int | None = None) -> list[int]:
    """Pages of each group's pool, the sink page included.

    The group that sees furthest (full attention, else the widest window) gets as many as `budget`
    bytes hold beside the others, but no more than all sequences could fill and than
    `max_total_tokens` ask for. A narrower group gets what its windows need, and never more pages
    than that one. Raises `BadConfig` when the bytes do not hold one page of each, or, where all
    layers are windowed, not what one sequence needs.
    """
    lead = max(groups, key=lambda group: group.window or math.inf)
    wanted = demand.for_all(lead.window)
    if max_total_tokens is not None:
        if max_total_tokens < demand.page_size:
            raise BadConfig(f"max_total_tokens: {max_total_tokens} tokens are less than one "
                            f"page of {demand.page_size}", "memory.max_total_tokens")
        wanted = min(wanted, max_total_tokens // demand.page_size)
    least = demand.for_one(lead.window) if lead.window else 1
    wanted = max(wanted, least)

    def shares(pages: int) -> list[int]:
        return [pages if group is lead else min(pages, demand.for_all(group.window))
                for group in groups]

    def cost(pages: int) -> int:
        return sum((1 + own) * group.page_bytes
                   for own, group in zip(shares(pages), groups, strict=True))

    if cost(least) > budget:
        raise BadConfig(
            f"kv_cache_bytes: {max(budget, 0):,} bytes for pages hold " + (
                f"less than a window of {lead.window} tokens and max_num_batched_tokens "
                f"{demand.chunk} ({cost(least):,} bytes)" if lead.window else
                f"no page of {sum(group.page_bytes for group in groups):,} bytes beside the sink "
                "page") + "; on cuda memory_fraction sets them", "memory.kv_cache_bytes")
    fit = bisect_right(range(wanted + 1), budget, key=cost) - 1
    return [1 + own for own in shares(fit)]


def device_budget(fraction: float, total: int, in_use: int, workspace: int) -> int:
    """Bytes left for pages on a device of `total` bytes; may be negative.

    in_use: weights and tables, and what others hold; workspace: the largest step's temporaries.
    """
    return int(total * fraction) - in_use - workspace
