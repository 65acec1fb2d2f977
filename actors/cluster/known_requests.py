"""Requests with their output, as a ledger has them, on their way between router and replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from actorium.actors.cluster.cluster_messages import KnownRequest
from actorium.actors.ledger.records import (
    LedgerEntry,
    SequenceOutput,
    is_worth_recording,
    output_record,
)

PIECE = 4 << 20
"""Bytes of prompts and tokens in one message, after which the rest goes into another."""
BESIDES = 4096
"""Bytes that a request takes beside them, at a guess."""
LOGPROBS = 256
"""Bytes of a row of logprobs, at a guess."""


def known_request(entry: LedgerEntry) -> KnownRequest:
    """The message of an entry."""
    return KnownRequest(entry.submit, entry.choices[0].sid, [
        output_record(output) for output in entry.choices if is_worth_recording(output)])


def entry_of(known: KnownRequest) -> LedgerEntry:
    """Inverse of `known_request`."""
    choices = [SequenceOutput(known.sid + i, bytearray(), logprobs=[], prompt_logprobs=[])
               for i in range(known.submit.n)]
    for record in known.outputs:
        if 0 <= (index := record.sid - known.sid) < len(choices):
            choices[index] = SequenceOutput(
                record.sid, bytearray(record.tokens), record.cached_tokens, list(record.logprobs),
                list(record.prompt_logprobs), record.finish, record.drafted, record.accepted)
    return LedgerEntry(known.submit, choices)


def entry_bytes(entry: LedgerEntry) -> int:
    """What the entry takes, nearly."""
    rows = sum(len(output.logprobs) + len(output.prompt_logprobs) for output in entry.choices)
    return (BESIDES + len(entry.submit.prompt) + LOGPROBS * rows
            + sum(len(output.tokens) for output in entry.choices))


def pieces(entries: Iterable[LedgerEntry]) -> Iterator[list[KnownRequest]]:
    """All of them, so many at a time as fit a message; at least one piece, which may be empty."""
    part: list[KnownRequest] = []
    size = 0
    for entry in entries:
        if size > PIECE:
            yield part
            part, size = [], 0
        part.append(known_request(entry))
        size += entry_bytes(entry)
    yield part

