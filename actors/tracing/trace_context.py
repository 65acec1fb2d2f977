"""Which trace a request belongs to: W3C Trace Context in, ids of spans out. Pure.

The ids of spans are hashes of what the span is about, so that an actor that is started again gives
a span the same id as the one before it, and no actor has to ask another for one.
"""

from __future__ import annotations

import re
from hashlib import blake2b

from actorium.actors.messages import TraceContext

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")
SAMPLED = 1
"""Bit of the flags of `traceparent`."""
TRACE_BYTES, SPAN_BYTES = 16, 8


def parse_traceparent(parent: str, state: str = "") -> TraceContext | None:
    """Returns the trace that a caller's headers `traceparent` and `tracestate` name; None where the
    first is invalid, as if there were none."""
    found = _PARENT.fullmatch(parent.strip())
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    return TraceContext(bytes.fromhex(trace), bytes.fromhex(span), bool(int(flags, 16) & SAMPLED),
                        state if _STATE.fullmatch(state) else "")


def new_trace(*parts: bytes) -> TraceContext:
    """Returns a trace that begins here. parts: what makes it differ from any other."""
    return TraceContext(_hashed(TRACE_BYTES, parts))


def traceparent(trace: TraceContext, span: bytes) -> str:
    """Returns the header for whoever works for a span of the trace."""
    return f"00-{trace.trace_id.hex()}-{span.hex()}-{int(trace.sampled):02x}"


def span_id(trace: TraceContext, *parts: str) -> bytes:
    """Returns the id of a span. parts: what makes it differ from others with the same parent."""
    return _hashed(SPAN_BYTES, (trace.trace_id, trace.parent or b"",
                                *(part.encode() for part in parts)))


def _hashed(size: int, parts: tuple[bytes, ...]) -> bytes:
    digest = blake2b(digest_size=size)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()
