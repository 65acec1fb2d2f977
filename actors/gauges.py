"""What the gauges of heartbeats say of memory and speculation, for all who show them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorium.actors.messages import Status

MEMORY_GAUGES = (
    "free_pages", "used_pages", "held_pages", "cached_pages", "quarantined_pages",
    "cache_hit_tokens", "cache_lookup_tokens", "evicted_pages",
    "preemptions_memory", "preemptions_priority", "preemptions_forced")
"""Gauges of the scheduler about pages, prefix cache and preemptions. Pages are those of the moment;
tokens, evictions and preemptions are counted since the start."""
_SPECULATION = "spec_decode_"
_MEASURED, _PLANNED = "_bytes", "_bytes_planned"


def memory_of(status: Status) -> dict[str, Any]:
    """Those of `MEMORY_GAUGES` that the scheduler has, and as `bytes` the worker's `bytes_of`."""
    found: dict[str, Any] = {}
    for actor in status.actors:
        if actor.role == "scheduler":
            found |= {name: int(actor.gauges[name]) for name in MEMORY_GAUGES
                      if name in actor.gauges}
        elif actor.role == "worker-0" and (measured := bytes_of(actor.gauges)):
            found["bytes"] = measured
    return found


def bytes_of(gauges: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Bytes that a worker holds: name -> {"planned", "measured"}. The workspace also has "tokens"
    and "rows" of the largest step it was measured at, 0 while there was none."""
    names = [key.removesuffix(_PLANNED) for key in gauges if key.endswith(_PLANNED)]
    found = {name: {"planned": int(gauges[name + _PLANNED]),
                    "measured": int(gauges[name + _MEASURED])}
             for name in names if name + _MEASURED in gauges}
    if "workspace" in found:
        found["workspace"] |= {part: int(gauges.get(f"workspace_{part}", 0))
                               for part in ("tokens", "rows")}
    return found


def speculation_of(status: Status) -> dict[str, float]:
    """Drafts made and accepted since the start, the present number of drafts (`k`), and what its
    choice rests on; empty where nothing is drafted."""
    return {name.removeprefix(_SPECULATION): value for actor in status.actors
            if actor.role == "scheduler" for name, value in actor.gauges.items()
            if name.startswith(_SPECULATION)}
