"""Messages that carry requests through a cluster, and the envelopes of its links.

A link has a sender and a receiver at each end, and keeps the order of messages. The router's orders
are numbered, and each report of a replica names the last order that it follows: so the router knows
which reports were made before an order, however late they come. Requests travel with all their
output, as a ledger has them, in pieces that fit a frame.

A node is a machine with an agent (`node_agent`), which starts replicas as the head orders and
carries their messages. It calls the head (`nodes_core`), never the other way round. Such a link is
one session: frames are numbered in each direction, and after a gap or a silence a new session
begins. What was in flight is then lost, and recovered as after any loss: the router asks the
replicas for their requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from actorium.actors.cluster.cluster_control import Index
from actorium.actors.ledger.records import LedgerEntry, RequestRecord, request_record
from actorium.actors.messages import (
    AbortRequest,
    AdapterOrder,
    Count,
    Epoch,
    Flush,
    Hello,
    Message,
    Open,
    Reply,
    ResumeRequest,
    RunningMode,
    Short,
    Sid,
    StepNo,
    Stop,
    Submit,
    TokenBatch,
    Unknown,
    WeightsOrder,
    WeightsSource,
)

Life = Annotated[int, Meta(ge=0, le=2**62)]
"""Of a replica's scheduler: later ones have higher numbers. 0 = none is known."""
PIECE = 4 << 20
"""Bytes of prompts and tokens in one message, after which the rest goes into another."""
BESIDES = 4096
"""Bytes that a request takes beside them, at a guess."""
LOGPROBS = 256
"""Bytes of a row of logprobs, at a guess."""


# --- router -> scheduler of a replica ------------------------------------------------------------

class RouterHello(Message, frozen=True):
    """A router has started, or has found a new scheduler: report everything."""

    number: StepNo
    epoch: Epoch


class Assign(Message, frozen=True):
    """A new request. Its choices get the sequence numbers sid, sid + 1, ..."""

    life: Life
    """Whom it is for: a later incarnation drops the order."""
    number: StepNo
    sid: Sid
    submit: Submit


class Adopt(Message, frozen=True):
    """Requests that go on at this replica, after what they have emitted elsewhere."""

    life: Life
    number: StepNo
    requests: list[RequestRecord]


class Evict(Message, frozen=True):
    """A request continues elsewhere, or nowhere: end it without a report."""

    life: Life
    number: StepNo
    rid: str
    client: bytes


class Resync(Message, frozen=True):
    """A delta of the cache was missed: report all of it."""


class PlanWeights(Message, frozen=True):
    """Read these weights beside those that are served, answer with a `Reply` of that name, and wait
    for `SettleWeights`. A `RouterHello` has the replica forget it."""

    number: StepNo
    source: WeightsSource
    """Its digest is empty."""
    mode: RunningMode = "wait"
    clear_cache: bool = True


class SettleWeights(Message, frozen=True):
    """What becomes of weights that were read under this number: they are taken, and then answered
    with a `Reply`; or given up."""

    number: StepNo
    version: Count
    """0 = they are given up."""


ToReplica = (RouterHello | Resync | Assign | Adopt | Evict | AbortRequest | Stop | ResumeRequest
             | Hello | Flush | PlanWeights | SettleWeights | WeightsOrder | AdapterOrder)


# --- scheduler of a replica -> router ------------------------------------------------------------

class ReplicaReport(Message, frozen=True):
    """How the replica is, every quarter of a second or so."""

    ready: bool
    """It has a worker, and takes requests."""
    next_sid: Sid
    """Higher than the numbers of all sequences that it knows."""
    gauges: dict[str, float]


class Inventory(Message, frozen=True):
    """All requests that the replica knows, in pieces: the answer to `RouterHello`."""

    requests: list[RequestRecord]
    more: bool
    """Another piece follows."""


class CacheDelta(Message, frozen=True):
    """Prefixes added to the cache and removed since the last delta (`page_numbers.prefix_hashes`).
    """

    sequence: StepNo
    """One more than the last one's: after a gap nothing is known of the cache. 0 = this is all that
    it has, whatever was known."""
    added: Annotated[bytes, Meta(max_length=32 << 20)]
    """u8[n]"""
    removed: Annotated[bytes, Meta(max_length=32 << 20)]
    """u8[n]"""


class FromReplica(Message, frozen=True):
    """The reports of a replica's scheduler after a wake."""

    replica: Index
    life: Life
    seen: StepNo
    """Number of the last order that it received."""
    messages: list[TokenBatch | Open | Unknown | Reply | ReplicaReport | Inventory | CacheDelta]


# --- the link of a node ---------------------------------------------------------------------------

Session = Annotated[str, Meta(min_length=1, max_length=64)]
ANY_SESSION = "-"
"""Whichever the node has: a message that was refused does not say."""
Launch = Epoch
"""How often a replica was started: higher than in any life before."""


class LinkFrame(Message, frozen=True):
    """The envelope of a session, in either direction."""

    session: Session
    number: StepNo
    """One more than the last one's, from 1."""


class LinkBeat(Message, frozen=True):
    """A heartbeat."""


# --- node -> head --------------------------------------------------------------------------------

class JoinCluster(Message, frozen=True):
    """The first message of a session."""

    node: Short
    agent: Session
    """Of this process: another agent of the same name is another one."""
    session: Session
    instance: Short
    """Of the cluster whose replicas run at the node; empty = none do."""
    now: float
    """CLOCK_MONOTONIC of the node: times in messages are shifted by the difference."""
    running: dict[Index, Launch]
    """The replicas that run there."""
    processors: Count
    generation: StepNo = 0
    """A node's agent takes the place of one of a lower generation."""


class ReplicaEnded(Message, frozen=True):
    """A replica's process has ended."""

    index: Index
    launch: Launch
    status: int
    """Exit code or -signal."""
    why: Short
    """What it reported; empty = nothing."""


class LeaveCluster(Message, frozen=True):
    """The agent is about to end: have everything go on elsewhere."""


class NodeFrame(LinkFrame, frozen=True):
    """All other messages of a node, in the order in which they were sent."""

    messages: list[LinkBeat | ReplicaEnded | LeaveCluster | FromReplica]


FromNode = JoinCluster | NodeFrame


# --- head -> node --------------------------------------------------------------------------------

class Welcome(Message, frozen=True):
    """The session has begun."""

    session: Session
    instance: Short
    """Of the cluster: replicas of another one end."""
    config: bytes
    """The configuration of its replicas, JSON, without secrets."""
    timeout: float
    """Seconds without a word after which either side gives the session up."""
    replicas: Count = 1
    """As many as the node has at the most."""


class RefusedNode(Message, frozen=True):
    """There will be no session."""

    session: Session
    why: Short
    replaced: bool = False
    """Another agent has the node's name for good: this one is to end."""


class StartReplica(Message, frozen=True):
    """Start a replica, after the one of that index that may still be ending."""

    index: Index
    node_index: Index
    """As of `ReplicaState`."""
    launch: Launch


class EndReplica(Message, frozen=True):
    """End a replica."""

    index: Index
    now: bool = False
    """At once, without draining."""


class EndAgent(Message, frozen=True):
    """The node has no replica any more, and was placed for one alone: its agent is to end."""


class ForReplica(Message, frozen=True):
    """An order of the router; also router -> nodes' actor, which passes it on."""

    index: Index
    order: ToReplica


class HeadFrame(LinkFrame, frozen=True):
    """All other messages of the head, in the order in which they were sent."""

    messages: list[LinkBeat | StartReplica | EndReplica | EndAgent | ForReplica]


FromHead = Welcome | RefusedNode | HeadFrame


# --- requests in messages -------------------------------------------------------------------------

def life_of(launch: int, epoch: int) -> int:
    """The life of a scheduler. launch: of its replica, from 1; epoch: its own within that."""
    return launch << 31 | epoch


def launch_of(life: int) -> int:
    """Inverse of `life_of`."""
    return life >> 31


def entry_bytes(entry: LedgerEntry) -> int:
    """What the entry takes, nearly."""
    rows = sum(len(output.logprobs) + len(output.prompt_logprobs) for output in entry.choices)
    return (BESIDES + len(entry.submit.prompt) + LOGPROBS * rows
            + sum(len(output.tokens) + sum(len(own.experts.data) for own in output.experts)
                  for output in entry.choices))


def pieces(entries: Iterable[LedgerEntry]) -> Iterator[list[RequestRecord]]:
    """All of them, so many at a time as fit a message; at least one piece, which may be empty."""
    part: list[RequestRecord] = []
    size = 0
    for entry in entries:
        if size > PIECE:
            yield part
            part, size = [], 0
        part.append(request_record(entry))
        size += entry_bytes(entry)
    yield part


# --- times of another machine's clock ------------------------------------------------------------

def _shifted(submit: Submit, by: float) -> Submit:
    deadline = submit.deadline
    return msgspec.structs.replace(
        submit, arrival=submit.arrival + by,
        queued=submit.queued and submit.queued + by,
        deadline=None if deadline is None else deadline + by)


def _shifted_all(known: list[RequestRecord], by: float) -> list[RequestRecord]:
    return [msgspec.structs.replace(each, submit=_shifted(each.submit, by), outputs=[
        msgspec.structs.replace(output, marks=output.marks.shifted(by)) for output in each.outputs])
        for each in known]


def shifted_order(order: Any, by: float) -> Any:
    """An order with the times of a clock that is so many seconds ahead."""
    if isinstance(order, Assign):
        return msgspec.structs.replace(order, submit=_shifted(order.submit, by))
    if isinstance(order, Adopt):
        return msgspec.structs.replace(order, requests=_shifted_all(order.requests, by))
    return order


def shifted_report(frame: FromReplica, by: float) -> FromReplica:
    """What a replica says, likewise."""
    if not any(isinstance(message, Inventory) for message in frame.messages):
        return frame
    return msgspec.structs.replace(frame, messages=[
        msgspec.structs.replace(message, requests=_shifted_all(message.requests, by))
        if isinstance(message, Inventory) else message for message in frame.messages])
