"""What actors keep of requests that are over, and how many bytes that may take: the bounds, and the
table of them that `actorium plan` and `actorium ps` print.

Each is a bound by bytes where entries differ much in size, else a number of entries of a size that
the contract bounds; those are told at their largest. What belongs to requests under way is not
here: the number of those is bounded by settings of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.config.tree import Config

# --- scheduler ---
RETAINED_REQUESTS, RETAINED_BYTES = 4096, 32 << 20
"""Requests that are over, for clients that have lost their stream."""
GRAMMAR_BYTES = 64 << 20
"""Compiled grammars for requests to come: some 300 schemas of usual size."""
IDLE_TENANTS = 1024
"""Whose fair share is remembered without a request of theirs."""

# --- tokenizer ---
KNOWN_REQUESTS = 1 << 16
"""For telling a request that is sent again from a new one."""
CHECKED_BYTES = 16 << 20
"""Grammars that were checked, with their answers."""
TEMPLATES = 16
"""Compiled templates of requests, of 64 Ki characters at the most."""

# --- detokenizer ---
ENDED_SEQUENCES = 16_384
"""That are over, should a new scheduler tell of them again."""
LOST_CLIENTS, LOST_REQUESTS = 256, 16_384
"""Clients that vanished and their requests, should they come back and ask."""
REACHED_CLIENTS = 4096
"""That need no knock."""
REFUSED_SEQUENCES = 1024
"""Whose text could not be made."""

# --- gateway ---
TOKEN_TEXTS = 1 << 17
"""Tokens' texts, for log-probabilities."""
DASHBOARD_SAMPLES = 90

_ENTRY = 768
"""Bytes of an entry of names at the most: two strings and a tuple in a dict. Names of clients have
up to 255 bytes, those of requests 64."""
_TEMPLATE = 2 << 20
_TEXT = 224
_SAMPLE = 16 << 10
STORE_FACTOR = 2
"""What SQLite takes for each byte stored, at the most: pages half full, and indices."""


class RetentionBound(NamedTuple):
    """One kind of thing that an actor keeps."""

    role: str
    what: str
    bytes: int
    """At the most, of one process."""
    setting: str = ""
    """That changes it."""


def retention_bounds(config: Config) -> tuple[RetentionBound, ...]:
    """All of them, for an engine of this configuration."""
    gateway = config.gateway
    rows = [
        RetentionBound("scheduler", "finished requests", RETAINED_BYTES, "retain"),
        RetentionBound("scheduler", "compiled grammars", GRAMMAR_BYTES),
        RetentionBound("scheduler", "tenants' shares", 2 * IDLE_TENANTS * _ENTRY),
        RetentionBound("tokenizer", "names of requests", KNOWN_REQUESTS * _ENTRY),
        RetentionBound("tokenizer", "checked grammars", CHECKED_BYTES),
        RetentionBound("tokenizer", "requests' templates", TEMPLATES * _TEMPLATE),
        RetentionBound("detokenizer", "ended sequences", ENDED_SEQUENCES * _ENTRY),
        RetentionBound("detokenizer", "lost clients", (LOST_REQUESTS + LOST_CLIENTS) * _ENTRY),
        RetentionBound("detokenizer", "clients reached", REACHED_CLIENTS * _ENTRY),
        RetentionBound("detokenizer", "refused sequences", 2 * REFUSED_SEQUENCES * _ENTRY)]
    if gateway.port is not None:
        in_memory = gateway.responses_store is None and gateway.gateways == 1
        rows += [
            RetentionBound("gateway", "stored responses",
                 STORE_FACTOR * gateway.responses_max_bytes if in_memory else 0,
                 "responses-max-bytes"),
            RetentionBound("gateway", "tokens' texts", TOKEN_TEXTS * _TEXT),
            RetentionBound("gateway", "dashboard", DASHBOARD_SAMPLES * _SAMPLE)]
    return tuple(rows)


def max_retained_bytes(config: Config, role: str) -> int:
    """Bytes that one process of the role may keep of requests that are over."""
    role = role.rpartition("-")[0] if role.startswith("gateway-") else role
    return sum(row.bytes for row in retention_bounds(config) if row.role == role)
