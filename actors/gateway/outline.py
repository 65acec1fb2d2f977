"""What a body's JSON is made of, counted before it is decoded.

Decoding takes time by the value, not by the byte: 4 MiB of text are 10 ms, of empty lists half a
second (the collector looks at each of them again and again), of numbers with long fractions more
than a second; and while one body is decoded, no other caller of the process is answered. Pure.
"""

from __future__ import annotations

from actorium.actors.gateway.errors import HttpError

SMALL = 64 << 10
"""Bytes of a body that cannot cost much, whatever it is made of."""
MAX_CONTAINERS = 1 << 16
"""Objects and arrays."""
MAX_STRINGS = 1 << 17
"""Names of members included."""
MAX_FRACTIONS = 1 << 11
"""Numbers with a point or an exponent."""


def check(body: bytes) -> None:
    """Raise `HttpError` 400 for a body of more values than any request needs.

    Of what is no JSON the counts are some numbers; decoding will say what it is.
    """
    if len(body) <= SMALL:
        return
    # Never too many, so that it may refuse; too few where strings end with a backslash.
    _bound("strings", (body.count(b'"') - body.count(b'\\"')) // 2, MAX_STRINGS)
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts = body.split(b'"')
    _bound("strings", len(parts) // 2, MAX_STRINGS)
    rest = b"".join(parts[::2])
    _bound("objects and arrays", rest.count(b"{") + rest.count(b"["), MAX_CONTAINERS)
    words = rest.count(b"true") + rest.count(b"false")
    _bound("numbers with fractions",
           rest.count(b".") + rest.count(b"e") + rest.count(b"E") - words, MAX_FRACTIONS)


def _bound(what: str, count: int, most: int) -> None:
    if count > most:
        raise HttpError(400, f"body: {count} {what} are more than the limit of {most}",
                        code="body_too_large")
