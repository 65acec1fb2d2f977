"""What actors retain of finished requests: the bounds, and the table of them that `actorium plan`
and `actorium ps` print.

A bound is a number of bytes where entries differ much in size, else a number of entries, counted in
the table at the largest size that the messages allow. What running requests need is not here: their
number is bounded by settings.
"""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.config.tree import Config

# --- scheduler ---
RETAINED_REQUESTS, RETAINED_BYTES = 4096, 32 << 20
"""Finished requests, for clients that lost their stream."""
GRAMMAR_BYTES = 64 << 20
"""Compiled grammars for later requests: some 300 schemas of usual size."""
IDLE_TENANTS = 1024
"""Tenants without a request whose fair share is remembered."""

# --- tokenizer ---
KNOWN_REQUESTS = 1 << 16
"""Names of requests, to tell a repetition from a new request."""
CHECKED_BYTES = 16 << 20
"""Grammars that were checked, with the results."""
TEMPLATES = 16
"""Compiled chat templates of requests, of at most 64 Ki characters."""

# --- detokenizer ---
ENDED_SEQUENCES = 16_384
"""Finished sequences, in case a restarted scheduler sends them again."""
LOST_CLIENTS, LOST_REQUESTS = 256, 16_384
"""Clients that vanished and their requests, in case they come back."""
REACHED_CLIENTS = 4096
"""Clients known to be connected."""
REFUSED_SEQUENCES = 1024
"""Sequences whose text could not be made."""

# --- whoever has clients ---
GIVEN_UP_CLIENTS = 1024
"""Clients that did not read and are sent nothing until they say something."""

# --- gateway ---
CHECKED_SCHEMAS = 64
"""Schemas of tools and of lenient formats, with what of them is not enforced."""
TOKEN_TEXTS = 1 << 17
"""Texts of tokens, for log-probabilities."""
DASHBOARD_SAMPLES = 90

_ENTRY = 768
"""Largest entry of names, in bytes: two strings and a tuple in a dict. Names of clients have up to
255 bytes, those of requests 64."""
_TEMPLATE = 2 << 20
_TEXT = 224
_SCHEMA = 5 << 16
"""A schema's text of at most 64 Ki characters, and some places in it."""
_SAMPLE = 16 << 10
STORE_FACTOR = 2
"""Bytes that SQLite takes at most for each byte stored: pages half full, and indices."""


class RetentionBound(NamedTuple):
    """One kind of thing that an actor retains."""

    role: str
    what: str
    bytes: int
    """At most, in one process."""
    setting: str = ""
    """Name of the setting that changes it."""


def retention_bounds(config: Config) -> tuple[RetentionBound, ...]:
    """The bounds of an engine of this configuration."""
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
        RetentionBound("detokenizer", "refused sequences", 2 * REFUSED_SEQUENCES * _ENTRY),
        *(RetentionBound(role, "clients given up", GIVEN_UP_CLIENTS * _ENTRY)
          for role in ("tokenizer", "detokenizer"))]
    if gateway.port is not None or gateway.uds is not None:
        in_memory = gateway.responses_store is None and gateway.gateways == 1
        rows += [
            RetentionBound("gateway", "stored responses",
                 STORE_FACTOR * gateway.responses_max_bytes if in_memory else 0,
                 "responses-max-bytes"),
            RetentionBound("gateway", "checked schemas", CHECKED_SCHEMAS * _SCHEMA),
            RetentionBound("gateway", "tokens' texts", TOKEN_TEXTS * _TEXT),
            RetentionBound("gateway", "dashboard", DASHBOARD_SAMPLES * _SAMPLE)]
    return tuple(rows)


def max_retained_bytes(config: Config, role: str) -> int:
    """Bytes of finished requests that one process of the role may retain."""
    role = role.rpartition("-")[0] if role.startswith("gateway-") else role
    return sum(row.bytes for row in retention_bounds(config) if row.role == role)
