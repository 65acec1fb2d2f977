"""The settings of events of the prefix cache, a section of the tree."""

from __future__ import annotations

import re

from msgspec import Struct

ENDPOINT = re.compile(r"tcp://(\*|[^\s:*]+|\[[0-9a-fA-F:]+\]):(\d{1,5})|ipc://\S+")
LAYOUTS = ("map", "array")


class KVEventConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Events for routers outside: which pages the prefix cache holds (docs/kv-events.md)."""

    kv_events_endpoint: str = ""
    """Publish events of the prefix cache at this address of ZeroMQ, in vLLM's layout: tcp://*:5557,
    tcp://[::]:5557 or ipc://PATH to listen at, another host's to connect to. Whoever gets them
    reads the tokens of all prompts. Replica N of a cluster takes the port N higher (ipc: -N behind
    the path). Empty = none are published."""
    kv_events_replay_endpoint: str = ""
    """Where to listen for subscribers that ask for events they have missed."""
    kv_events_topic: str = ""
    """The first frame of each message; llm-d wants kv@POD@MODEL."""
    kv_events_buffer: int = 10_000
    """Messages that are kept to be asked for."""
    kv_events_hwm: int = 100_000
    """Messages that wait for a subscriber that reads slowly; what is more it misses, as the numbers
    of the messages show."""
    kv_events_layout: str = "map"
    """Of an event: map (fields by name, as vLLM has them now) | array (by place, as it had them
    before)."""


def kv_event_rules(settings: KVEventConfig, prefix_cache: bool) -> list[tuple[str, bool, str]]:
    """(section.field, whether its value is valid, what it must be)"""
    s, defaults = settings, KVEventConfig()
    on = bool(s.kv_events_endpoint)
    return [
        *((f"kv_events.{name}", not getattr(s, name) or _is_endpoint(getattr(s, name)),
           "must be tcp://HOST:PORT, where HOST may be *, or ipc://PATH")
          for name in ("kv_events_endpoint", "kv_events_replay_endpoint")),
        ("kv_events.kv_events_endpoint", not on or prefix_cache,
         "goes with the prefix cache, which is off"),
        ("kv_events.kv_events_replay_endpoint",
         not on or s.kv_events_replay_endpoint != s.kv_events_endpoint,
         "must be another one than kv_events_endpoint"),
        ("kv_events.kv_events_buffer", 1 <= s.kv_events_buffer <= 1_000_000,
         "must be between 1 and 1,000,000"),
        ("kv_events.kv_events_hwm", 1 <= s.kv_events_hwm <= 10_000_000,
         "must be between 1 and 10,000,000"),
        ("kv_events.kv_events_layout", s.kv_events_layout in LAYOUTS,
         f"must be one of {', '.join(LAYOUTS)}"),
        *((f"kv_events.{name}", on or getattr(s, name) == getattr(defaults, name),
           "goes with --kv-events-endpoint")
          for name in KVEventConfig.__struct_fields__ if name != "kv_events_endpoint"),
    ]


def _is_endpoint(text: str) -> bool:
    found = ENDPOINT.fullmatch(text)
    return found is not None and (found[2] is None or 1 <= int(found[2]) <= 65_535)


def of_replica(endpoint: str, index: int) -> str:
    """The address of a cluster's replica, numbered from 0."""
    if not endpoint or not index:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}-{index}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + index}"
