"""The router's book of requests: who asked for what, where it runs, and all that was emitted.

What a replica reports is entered before it goes on to the detokenizer, in the form in which a
scheduler's ledger is read back (`LedgerHistory`): so a request can go on at another replica as it
would after a death of its own scheduler, with the same seeds, penalties, grammar and logprobs. The
router's own ledger, where it has one, gets the same records, for the book of the next router.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from actorium.actors.cluster.cluster_messages import entry_bytes
from actorium.actors.config.retention import RETAINED_BYTES, RETAINED_REQUESTS
from actorium.actors.ledger.records import (
    ADMISSION,
    BATCH,
    OUTPUT,
    AdmissionRecord,
    LedgerEntry,
    LedgerHistory,
    OutputRecord,
    entry_records,
    make_record,
    output_record,
)
from actorium.actors.ledger.segments import LedgerRecord
from actorium.actors.messages import (
    AbortRequest,
    Open,
    ResumeRequest,
    SequenceEvent,
    Stop,
    Submit,
    TokenBatch,
)
from actorium.actors.scheduler.media_holds import MediaHolds
from actorium.actors.scheduler.recovery.recovery_log import name_of
from actorium.actors.scheduler.request_state import Key

NOWHERE = -1
"""The replica of a request that waits for one."""


class RoutedRequest:
    """A request, and where it is."""

    __slots__ = ("aborted", "entry", "number", "opened", "orders", "over", "replica",
                 "reported_tokens", "sid", "uncached")

    def __init__(self, entry: LedgerEntry) -> None:
        self.entry = entry
        self.sid = entry.choices[0].sid
        self.replica = NOWHERE
        self.number = 0
        """Of the order that has placed it: reports from before are about an earlier stay."""
        self.opened = False
        """A replica has accepted it, and the detokenizer knows."""
        self.aborted = False
        self.uncached = 0
        """Prompt tokens that its replica has to compute before its first token."""
        self.reported_tokens = 0
        """Prompt tokens of which its replica has said that they are cached there."""
        self.over = False
        """All of its sequences have ended."""
        self.orders: list[Stop | AbortRequest | ResumeRequest] = []
        """Orders about it that its next replica must get as well."""

    @property
    def submit(self) -> Submit:
        return self.entry.submit

    @property
    def key(self) -> Key:
        return self.entry.submit.client, self.entry.submit.rid

    @property
    def begun(self) -> bool:
        """Whether a replica needs more than the request itself."""
        return self.opened or any(output.tokens for output in self.entry.choices)


class RequestBook:
    """All requests that live, and for a while those that are over."""

    def __init__(self, retain: float, prior: LedgerHistory | None,
                 media: MediaHolds | None) -> None:
        """retain: seconds for which requests are kept that are over; prior: what the book of an
        earlier router has written down; None: nothing is written; media: counts the images and
        videos of requests that are not over, wherever they are."""
        self._retain, self.media = retain, media
        self._history = prior or LedgerHistory()
        self.written = prior is not None
        """A ledger has it."""
        self.records: list[LedgerRecord] = []
        """For the ledger: what has come into the book since they were last taken."""
        self.requests: dict[Key, RoutedRequest] = {}
        self.by_sid: dict[int, RoutedRequest] = {}
        self.live: dict[Key, RoutedRequest] = {}
        """Those that are not over."""
        self._resumable: dict[tuple[str, str], RoutedRequest] = {}
        self._over: OrderedDict[Key, tuple[float, int]] = OrderedDict()
        """When they ended, and their bytes."""
        self._over_bytes = 0
        for entry in sorted(self._history.entries.values(), key=lambda each: each.choices[0].sid):
            request = self._enter(entry)
            request.opened = True  # as far as is known

    @property
    def next_sid(self) -> int:
        """The first number that no sequence of the book has had."""
        return self._history.next_sid

    def add(self, submit: Submit, sid: int) -> RoutedRequest:
        """A new request, whose sequences are numbered from `sid`."""
        self._apply(ADMISSION, AdmissionRecord(submit, sid))
        return self._enter(self._history.entries[submit.client, submit.rid])

    def _enter(self, entry: LedgerEntry) -> RoutedRequest:
        submit, request = entry.submit, RoutedRequest(entry)
        self.requests[request.key] = self.live[request.key] = request
        self.by_sid.update((request.sid + i, request) for i in range(submit.n))
        if submit.resume_seconds:
            self._resumable[submit.tenant, name_of(submit.rid)] = request
        if self.media is not None:
            self.media.queued(request.submit)
        return request

    def _apply(self, kind: int, message: AdmissionRecord | OutputRecord | TokenBatch) -> None:
        self._history.apply(message)
        if self.written:
            self.records.append(make_record(kind, message))

    def add_outputs(self, request: RoutedRequest, records: Iterable[OutputRecord]) -> None:
        """What a request's sequences have emitted, as far as it is more than is known."""
        known = {output.sid: output for output in request.entry.choices}
        for record in records:
            output = known.get(record.sid)
            if output is not None and (len(record.tokens) > len(output.tokens)
                                       or (record.finish and not output.finish)):
                self._apply(OUTPUT, record)

    def same(self, submit: Submit, sid: int) -> RoutedRequest | None:
        """The request of that name and number, whichever client it was last known to belong to."""
        request = self.by_sid.get(sid)
        known = request is not None and (request.sid, request.submit.rid) == (sid, submit.rid)
        return request if known else None

    def waiting(self) -> Iterator[RoutedRequest]:
        """Requests that are not over and nowhere."""
        return (request for request in self.live.values() if request.replica == NOWHERE)

    def live_records(self) -> Iterator[list[LedgerRecord]]:
        """All records of the book, a request at a time."""
        return (list(entry_records(request.entry)) for request in [*self.requests.values()])

    def resumable(self, rid: str, tenant: str) -> RoutedRequest | None:
        """The tenant's request of the rid's name that another client may take up."""
        return self._resumable.get((tenant, name_of(rid)))

    def placed_at(self, replica: int) -> Iterator[RoutedRequest]:
        """All requests of a replica, those that are over among them."""
        return (request for request in self.requests.values() if request.replica == replica)

    # --- reports ---

    def apply_open(self, message: Open, request: RoutedRequest) -> None:
        """A replica has accepted a sequence, or reports it anew."""
        request.opened = True
        if (message.client, message.rid) != request.key:
            self.change_client(request, message.client)
        if message.emitted or message.end is not None:
            self._apply(OUTPUT, OutputRecord(
                message.sid, message.emitted, message.cached_tokens, message.emitted_logprobs,
                message.prompt_logprobs, message.end, message.draft_tokens,
                message.accepted_tokens, runs=message.weights, experts=message.experts))

    def apply_batch(self, batch: TokenBatch) -> None:
        """Tokens and events of sequences of the book."""
        self._apply(BATCH, batch)

    def end_all(self, request: RoutedRequest, event: SequenceEvent) -> None:
        """Ends every sequence that has not ended, as `event` says."""
        for output in request.entry.choices:
            if output.finish is None:
                output.finish = msgspec.structs.replace(event, sid=output.sid, logprobs=None,
                                                        prompt_logprobs=None, experts=None)
                if self.written:
                    self.records.append(make_record(OUTPUT, output_record(output)))

    def check_end(self, request: RoutedRequest, now: float) -> bool:
        """Whether the request is over; one that has just come to its end is kept for a while."""
        if not request.over and request.entry.finished:
            request.over = True
            if self.media is not None:
                self.media.ended(request.submit)
            if request.submit.embeds is not None:  # nobody computes it again
                request.entry.submit = msgspec.structs.replace(request.submit, embeds=None)
            self.live.pop(request.key, None)
            size = entry_bytes(request.entry)
            self._over[request.key] = now, size
            self._over_bytes += size
        return request.over

    def change_client(self, request: RoutedRequest, client: bytes) -> None:
        """Another client has taken the request up."""
        before, rid = request.key, request.submit.rid
        if (known := self.requests.get((client, rid))) is not None and known is not request:
            self.forget(known)
        submit = msgspec.structs.replace(request.submit, client=client)
        self._history.apply(AdmissionRecord(submit, request.sid))
        request.entry = self._history.entries[client, rid]
        for table in (self.requests, self.live):
            if table.pop(before, None) is not None:
                table[client, rid] = request
        if before in self._over:
            self._over[client, rid] = self._over.pop(before)
        if self.written:
            self.records += entry_records(request.entry)

    # --- the end ---

    def expire(self, now: float) -> None:
        """Forget those that ended long ago, and the oldest of too many."""
        while self._over:
            key, (ended, _) = next(iter(self._over.items()))
            if (ended + self._retain > now and len(self._over) <= RETAINED_REQUESTS
                    and self._over_bytes <= RETAINED_BYTES):
                return
            self.forget(self.requests[key])

    def forget(self, request: RoutedRequest) -> None:
        """Nobody asks for it any more."""
        key, submit = request.key, request.submit
        if not request.over and self.media is not None:
            self.media.ended(request.submit)
        self._over_bytes -= self._over.pop(key, (0.0, 0))[1]
        self._history.forget(key)
        del self.requests[key]
        self.live.pop(key, None)
        for i in range(submit.n):
            del self.by_sid[request.sid + i]
        name = submit.tenant, name_of(submit.rid)
        if self._resumable.get(name) is request:
            del self._resumable[name]


def without_sids(batch: TokenBatch, ended: set[int]) -> TokenBatch | None:
    """The batch without what it says of these sequences; None if that was all."""
    sids = np.frombuffer(batch.sids, np.int64)
    keep = ~np.isin(sids, list(ended))
    events = [event for event in batch.events if event.sid not in ended]
    if not keep.any() and not events:
        return None
    counts = np.frombuffer(batch.counts, np.uint8)
    return msgspec.structs.replace(
        batch, sids=sids[keep].tobytes(),
        starts=np.frombuffer(batch.starts, np.int32)[keep].tobytes(),
        counts=counts[keep].tobytes(), events=events,
        tokens=np.frombuffer(batch.tokens, np.int32)[np.repeat(keep, counts)].tobytes(),
        firsts=int(keep[:batch.firsts].sum()))
