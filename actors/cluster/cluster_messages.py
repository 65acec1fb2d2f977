"""Messages between a cluster's router and its replicas' schedulers, and requests in them.

A link is one sender and one receiver at each end, with the order of messages kept. Everything that
the router orders has a number, and everything that a replica reports says up to which number it has
heard: so the router knows which reports were made before an order, however late they come. Requests
travel with all their output, as a ledger has them, in pieces that fit a frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

from msgspec import Meta, Struct

from actorium.actors.ledger.records import (
    LedgerEntry,
    OutputRecord,
    SequenceOutput,
    is_worth_recording,
    output_record,
)
from actorium.actors.messages import (
    Cancel,
    Epoch,
    Flush,
    Hello,
    Message,
    Open,
    Recall,
    Reply,
    Sid,
    StepNo,
    Stop,
    Submit,
    TokenBatch,
    Unknown,
)

Life = Annotated[int, Meta(ge=0, le=2**62)]
"""Of a replica's scheduler: later ones have higher numbers. 0 = none has been heard of."""
PIECE = 4 << 20
"""Bytes of prompts and tokens in one message, after which the rest goes into another."""
BESIDES = 4096
"""Bytes that a request takes beside them, at a guess."""
LOGPROBS = 256
"""Bytes of a row of logprobs, at a guess."""


class KnownRequest(Struct, frozen=True, array_like=True, gc=False):
    """A request with all that it has emitted, as a ledger has it."""

    submit: Submit
    sid: Sid
    """Of its first choice; the others follow."""
    outputs: list[OutputRecord] = []
    """Of the choices of which there is anything."""


# --- router -> scheduler of a replica ------------------------------------------------------------

class RouterHello(Message, frozen=True):
    """A router has started, or has heard of a scheduler that is new: tell it everything."""

    number: StepNo
    epoch: Epoch


class Place(Message, frozen=True):
    """A new request. Its choices get the sequence numbers sid, sid + 1, ..."""

    life: Life
    """Whom it is for: a later incarnation drops the order."""
    number: StepNo
    sid: Sid
    submit: Submit


class Adopt(Message, frozen=True):
    """Requests that go on here, after what they have emitted elsewhere."""

    life: Life
    number: StepNo
    requests: list[KnownRequest]


class Evict(Message, frozen=True):
    """A request goes on elsewhere, or nowhere: end it, and do not tell."""

    life: Life
    number: StepNo
    rid: str
    client: bytes


class Resync(Message, frozen=True):
    """A delta of the cache was missed: tell all of it."""


ToReplica = RouterHello | Resync | Place | Adopt | Evict | Cancel | Stop | Recall | Hello | Flush


# --- scheduler of a replica -> router ------------------------------------------------------------

class ReplicaReport(Message, frozen=True):
    """How the replica is, every quarter of a second or so."""

    ready: bool
    """It has a worker, and takes requests."""
    next_sid: Sid
    """Higher than all numbers of sequences that it has heard of."""
    gauges: dict[str, float]


class Inventory(Message, frozen=True):
    """All requests that the replica knows, in pieces: the answer to `RouterHello`."""

    requests: list[KnownRequest]
    more: bool
    """Another piece follows."""


class CacheDelta(Message, frozen=True):
    """Prefixes that have come into the cache or left it since the last delta, as numbers of whole
    pages (`prefix_index.prefix_hashes`)."""

    sequence: StepNo
    """One more than the last one's: after a gap nothing is known of the cache. 0 = this is all that
    it has, whatever was known."""
    added: Annotated[bytes, Meta(max_length=32 << 20)]
    """u8[n]"""
    removed: Annotated[bytes, Meta(max_length=32 << 20)]
    """u8[n]"""


class FromReplica(Message, frozen=True):
    """What a replica's scheduler has to say after a wake."""

    replica: Annotated[int, Meta(ge=0, le=63)]
    life: Life
    seen: StepNo
    """Number of the last order that it has heard."""
    messages: list[TokenBatch | Open | Unknown | Reply | ReplicaReport | Inventory | CacheDelta]


class ReplicaGone(Message, frozen=True):
    """The launcher has seen a replica die."""

    replica: Annotated[int, Meta(ge=0, le=63)]
    launch: Epoch
    """Which of its starts."""


ToRouter = Submit | Cancel | Recall | Hello | Stop | Flush | FromReplica | ReplicaGone


def life_of(launch: int, epoch: int) -> int:
    """The life of a scheduler: launch = how often the replica was started, epoch = the scheduler's
    within that."""
    return launch << 31 | epoch


def launch_of(life: int) -> int:
    """Inverse of `life_of`."""
    return life >> 31


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
