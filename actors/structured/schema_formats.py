"""Formats of texts: which of them a grammar is made of, and how. All others say nothing.

`format` is an annotation in the standard, which tells a reader what a text means. Those that are
regular and mean the same everywhere are enforced all the same, so that what a model writes passes a
validator that asserts them. Pure.
"""

from __future__ import annotations

GRAMMARS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Those that llguidance knows."""
TIMES = frozenset({"date-time", "time"})
"""Those that generators write of times without a zone or without seconds, too, with a pattern that
says so."""
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_URL64 = "[A-Za-z0-9_-]"
_BASE32 = "[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]"


def _uuid(version: int) -> str:
    hexes = "[0-9a-fA-F]"
    return rf"^{hexes}{{8}}-{hexes}{{4}}-{version}{hexes}{{3}}-[89abAB]{hexes}{{3}}-{hexes}{{12}}$"


PATTERNS: dict[str, str] = {
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "jwt": rf"^{_URL64}+\.{_URL64}+\.{_URL64}*$",
    "e164": r"^\+[1-9][0-9]{6,14}$",
    "cidrv4": rf"^{_IPV4}/(?:[12]?[0-9]|3[0-2])$",
    "ipv4network": rf"^{_IPV4}/(?:[12]?[0-9]|3[0-2])$",
    "json-pointer": r"^(?:/(?:[^/~]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~]|~[01])*)*)$",
    "cuid": r"^[cC][0-9a-z]{8,}$", "cuid2": "^[0-9a-z]+$", "nanoid": f"^{_URL64}{{21}}$",
    "ulid": f"^[0-7]{_BASE32}{{25}}$", "ksuid": "^[A-Za-z0-9]{27}$", "xid": "^[0-9a-vA-V]{20}$",
    **{f"uuid{version}": _uuid(version) for version in range(1, 9)},
    **{f"uuidv{version}": _uuid(version) for version in range(1, 9)},
}
"""Enforced where the schema has no pattern of its own."""
NAMES: dict[str, str] = {
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "ipv4": f"^{_IPV4}$", "date": r"^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])$"}
"""Of names of properties, which llguidance has no formats for."""
