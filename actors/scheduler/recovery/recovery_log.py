"""The scheduler's memory beyond a request's end and its own: records for the ledger, ended requests
for a detokenizer or a client that has missed something, and their restoration in its next life.

Requests may outlive their clients, for another that takes them up by name: what stands before the
first "." of a rid names a request, what follows says what was asked.

Pure. What is written down goes out as `Send(LEDGER, record)` before the news that it is about.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np

from actorium.actors.config.retention import RETAINED_BYTES, RETAINED_REQUESTS
from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.core import LEDGER, Send
from actorium.actors.ledger.records import (
    ACTIVITY,
    ADAPTERS,
    ADMISSION,
    BATCH,
    COUNTS,
    NO_MARKS,
    WEIGHTS,
    ActivityRecord,
    AdaptersRecord,
    AdmissionRecord,
    CountsRecord,
    LedgerEntry,
    LedgerHistory,
    SequenceMarks,
    SequenceOutput,
    WeightsRecord,
    entry_records,
    make_record,
)
from actorium.actors.ledger.segments import LedgerRecord
from actorium.actors.messages import (
    ResumeRequest,
    RowExperts,
    RowLogprobs,
    Submit,
    TokenBatch,
    joined_experts,
)
from actorium.actors.runtime.inflight_journal import InflightJournal
from actorium.actors.scheduler.request_state import (
    RequestState,
    SequenceState,
    new_request_state,
)
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.actors.scheduler.slot_table import SlotTable


def name_of(rid: str) -> str:
    """Returns the part of a rid that names the request."""
    return rid.partition(".")[0]


class ResumableRequests:
    """The requests of a group that can be resumed."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], RequestState] = {}

    def add(self, request: RequestState) -> None:
        """Adds a request in place of an older one of its name."""
        if request.submit.resume_seconds:
            self._named[_name_key(request)] = request

    def drop(self, request: RequestState) -> None:
        """Drops a request, unless a later one has its name."""
        if request.submit.resume_seconds and self._named.get(_name_key(request)) is request:
            del self._named[_name_key(request)]

    def get(self, rid: str, tenant: str) -> RequestState | None:
        """Returns the tenant's request of the rid's name, whatever it asked."""
        return self._named.get((tenant, name_of(rid)))


def _name_key(request: RequestState) -> tuple[str, str]:
    return request.submit.tenant, name_of(request.submit.rid)


REQUEST_BYTES, CHOICE_BYTES, LOGPROBS_BYTES = 2048, 768, 384
"""What Python's objects take beside the columns that they hold: of a request, of a choice, of a row
of logprobs."""
UNPACKED = 8
"""Bytes that a byte of msgpack comes to as Python's objects."""
RESENT_AT_ONCE = 32
"""Ended requests that are reported to a new detokenizer at one wake: live ones go first."""
Key = tuple[bytes, str]
_encode = msgspec.msgpack.Encoder().encode


class PriorRun(NamedTuple):
    """What an earlier life of the scheduler has left."""

    history: LedgerHistory
    same_boot: bool
    """Its times are of this boot of the machine."""
    now: float
    """CLOCK_MONOTONIC seconds."""


class RetainedRequests:
    """Requests that are over, kept for a while for clients that have lost their stream."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: OrderedDict[Key, tuple[float, RequestState, int]] = OrderedDict()
        self.bytes = 0
        """Of all of them, as `retained_bytes` counts."""
        self.resumable = ResumableRequests()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[RequestState]:
        return (request for _, request, _ in self._kept.values())

    def keep(self, request: RequestState, now: float) -> None:
        """Keeps a request in place of an older one of the same key, but not one whose vector is
        lost: when it is asked for, it is computed again. A request that lingered and was aborted
        may be sent again under its name."""
        self.drop(request.key)
        if request.lost_vector:
            return
        if request.submit.resume_seconds and any(
                choice.finish is not None and choice.finish.finish_reason == "abort"
                for choice in request.choices):
            return
        size = retained_bytes(request)
        self._kept[request.key] = now + self._seconds, request, size
        self.bytes += size
        self.resumable.add(request)
        while len(self._kept) > RETAINED_REQUESTS or self.bytes > RETAINED_BYTES:
            self.drop(next(iter(self._kept)))

    def get(self, key: Key) -> RequestState | None:
        kept = self._kept.get(key)
        return None if kept is None else kept[1]

    def drop(self, key: Key) -> None:
        """Unknown ones are ignored."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.bytes -= kept[2]
            self.resumable.drop(kept[1])

    def expire(self, now: float) -> None:
        """Drops those whose time is over."""
        while self._kept and next(iter(self._kept.values()))[0] <= now:
            self.drop(next(iter(self._kept)))


class RecoveryLog:
    """Writes the ledger's records, and remembers ended requests for those who ask again."""

    def __init__(self, recovery: RecoveryConfig, journal: InflightJournal | None = None,
                 marks_of: Callable[[SequenceState], SequenceMarks] = lambda _: NO_MARKS) -> None:
        """marks_of: returns what is counted of a sequence."""
        self._journal = journal or InflightJournal(actor="scheduler")
        self.retained = RetainedRequests(recovery.retain)
        self.keep_history = keeps_history(recovery)
        """Whether requests keep the logprobs that were reported of them."""
        self._writes = self.keep_history and recovery.ledger
        self._resumable = ResumableRequests()
        """Of those that have not ended."""
        self._records: list[Send] = []
        self._marks_of = marks_of
        self._to_resend: deque[RequestState] = deque()

    # --- the ledger ---

    def admitted(self, request: RequestState) -> None:
        """Records a request that was accepted."""
        self._resumable.add(request)
        if self._writes:
            first = request.choices[0].sid
            self._write(make_record(ADMISSION, AdmissionRecord(request.submit, first)))

    def restored(self, request: RequestState) -> None:
        """Takes note of an unfinished request of an earlier life, which goes on."""
        self._resumable.add(request)

    def reported(self, batch: TokenBatch) -> None:
        """Records a batch that is about to be sent to the detokenizer."""
        if self._writes:
            self._write(make_record(BATCH, batch))

    def counted(self, counts: CountsRecord | None) -> None:
        """Records what a wake has counted, if anything."""
        if self._writes and counts is not None:
            self._write(make_record(COUNTS, counts))

    def activity(self, record: ActivityRecord) -> None:
        """Records that the engine is to sleep, to be paused, or to go on."""
        if self._writes:
            self._write(make_record(ACTIVITY, record))

    def adapters(self, record: AdaptersRecord) -> None:
        """Records which adapters have names."""
        if self._writes:
            self._write(make_record(ADAPTERS, record))

    def weights(self, record: WeightsRecord) -> None:
        """Records which weights the worker has."""
        if self._writes:
            self._write(make_record(WEIGHTS, record))

    def _write(self, written: LedgerRecord) -> None:
        self._records.append(Send(LEDGER, written))

    def pop_records(self) -> list[Send]:
        """Records for the ledger since the last call; they go out before what they are about."""
        records, self._records = self._records, []
        return records

    def all_records(self, state: SchedulerState) -> Iterator[list[LedgerRecord]]:
        """Returns the ledger's records of everything that must not be forgotten, a request at a
        time."""
        for request in [*self.retained, *state.requests.values()]:
            yield self._request_records(request, state.table)

    def _request_records(self, request: RequestState, table: SlotTable) -> list[LedgerRecord]:
        """Returns the records that say all of a request."""
        return list(entry_records(LedgerEntry(request.submit, [
            self._choice_record(choice, table) for choice in request.choices])))

    def _choice_record(self, sequence: SequenceState, table: SlotTable) -> SequenceOutput:
        return SequenceOutput(
            sequence.sid, bytearray(table.emitted_of(sequence).tobytes()),
            sequence.cached_len if sequence.first_token_reported else None, sequence.logprobs,
            sequence.prompt_logprobs, sequence.finish, *table.drafts_of(sequence),
            self._marks_of(sequence), sequence.runs, sequence.experts)

    # --- ended requests, and those of other clients ---

    def finished(self, requests: list[RequestState], now: float) -> None:
        """Retains requests that have ended, and empties the list."""
        for request in requests:
            self._resumable.drop(request)
            if self.keep_history:
                self._retain(request, now)
        requests.clear()
        self.retained.expire(now)

    def _retain(self, request: RequestState, now: float) -> None:
        """Keeps an ended request; where that fails it is forgotten."""
        self._journal.put(request.name)
        try:
            _compact(request)
            self.retained.keep(request, now)
        except BaseException as error:
            self._journal.failed(error, request.submit.rid)
        self._journal.clear()

    def queue_retained(self, sids: Sequence[int]) -> None:
        """Queues every retained request to be reported to a new detokenizer, or those of these
        sequences to one that has missed something: see `next_retained`."""
        if not sids:
            self._to_resend = deque(self.retained)
            return
        wanted = set(sids)
        self._to_resend += [request for request in self.retained
                            if not wanted.isdisjoint(choice.sid for choice in request.choices)]

    def next_retained(self) -> list[RequestState]:
        """Returns a few of the ended requests that have to be reported again."""
        return [self._to_resend.popleft()
                for _ in range(min(RESENT_AT_ONCE, len(self._to_resend)))]

    @property
    def resending(self) -> bool:
        """There are more requests to report again."""
        return bool(self._to_resend)

    def find_resumed(self, state: SchedulerState, resume: ResumeRequest,
               now: float) -> tuple[RequestState | None, bool]:
        """Returns the request that a client asks for; and, where there is none, whether its name
        belongs to a request that asked for something else."""
        self.finished(state.finished_requests, now)
        key = resume.client, resume.rid
        request = state.requests.get(key) or self.retained.get(key)
        if not resume.adopt:
            return request, False
        if request is not None:
            return (request if request.submit.tenant == resume.tenant else None), False
        found = self._find_resumable(resume)
        if found is not None and found.submit.rid == resume.rid:
            return self._adopt(state, found, resume.client, now), False
        return None, found is not None

    def find_repeated(self, state: SchedulerState, submit: Submit,
                         now: float) -> RequestState | None:
        """Returns the request that `submit` repeats, if that one has ended or is another client's.
        """
        self.finished(state.finished_requests, now)
        known = self.retained.get((submit.client, submit.rid))
        if known is None and submit.resume_seconds:
            known = self._find_resumable(submit)
            if known is not None:
                same = known.submit.rid == submit.rid
                known = self._adopt(state, known, submit.client, now) if same else None
        return known

    def _find_resumable(self, asked: ResumeRequest | Submit) -> RequestState | None:
        """Returns the tenant's resumable request of that name, whichever client it belongs to."""
        for group in (self._resumable, self.retained.resumable):
            request = group.get(asked.rid, asked.tenant)
            if request is not None:
                return request
        return None

    def _adopt(self, state: SchedulerState, request: RequestState, client: bytes,
               now: float) -> RequestState:
        """Gives a request to another client, in the ledger, too."""
        if request.live:
            state.change_client(request, client)
        else:
            self.retained.drop(request.key)
            request.submit = msgspec.structs.replace(request.submit, client=client)
            self.retained.keep(request, now)
        if self._writes:
            for written in self._request_records(request, state.table):
                self._write(written)
        return request

    def gauges(self) -> dict[str, float]:
        """Returns the gauges for the heartbeat."""
        return {"retained": len(self.retained), "retained_bytes": self.retained.bytes}


def keeps_history(recovery: RecoveryConfig) -> bool:
    """Returns whether anything is remembered beyond this life."""
    return recovery.restart or recovery.ledger_dir is not None


def retained_bytes(request: RequestState) -> int:
    """Returns how many bytes are kept of a request that is over, nearly."""
    submit = request.submit
    size = REQUEST_BYTES + len(submit.prompt) + len(submit.grammar)
    size += UNPACKED * len(_encode((submit.params, submit.text, submit.rules)))
    for choice in request.choices:
        size += CHOICE_BYTES + choice.emitted.nbytes
        if choice.finish is not None and choice.finish.pooled is not None:
            size += len(choice.finish.pooled.data)
        size += sum(LOGPROBS_BYTES + len(own.experts.data) for own in choice.experts)
        for row in (*choice.logprobs, *choice.prompt_logprobs):
            size += LOGPROBS_BYTES + sum(map(len, _columns(row)))
    return size


def _compact(request: RequestState) -> None:
    """Drops what only a living request needs, and joins what came in pieces."""
    for choice in request.choices:
        choice.key = choice.match = choice.started = None
        choice.logprobs = joined_rows(choice.logprobs)
        choice.prompt_logprobs = joined_rows(choice.prompt_logprobs)
        if choice.experts:
            choice.experts = [RowExperts(0, 0, joined_experts(choice.experts))]


def joined_rows(rows: list[RowLogprobs]) -> list[RowLogprobs]:
    """Joins logprobs of consecutive tokens into as few rows as possible: one, unless the number of
    alternatives differs."""
    joined: list[RowLogprobs] = []
    for _, group in groupby(rows, key=_alternatives):
        several = list(group)
        chosen, ranks, ids, values = (b"".join(column) for column in
                                      zip(*map(_columns, several), strict=True))
        joined.append(RowLogprobs(several[0].row, several[0].start, chosen, ranks, ids, values))
    return joined


def _columns(row: RowLogprobs) -> tuple[bytes, bytes, bytes, bytes]:
    return row.chosen, row.ranks, row.top_ids, row.top_logprobs


def _alternatives(row: RowLogprobs) -> int:
    return len(row.top_ids) // len(row.chosen) if row.chosen else 0


# --- reading the ledger ---------------------------------------------------------------------------

def restore_requests(past: PriorRun, timeout: float) -> Iterator[RequestState]:
    """Returns the requests of the ledger in order of admission (a compaction writes down those that
    it finds behind those that come meanwhile); those without a living sequence are over. timeout:
    seconds, for those with a deadline in the time of another boot that is not to be had back from
    their arrival."""
    for entry in sorted(past.history.entries.values(), key=lambda entry: entry.choices[0].sid):
        submit = entry.submit
        if not past.same_boot:
            submit = in_this_boot(submit, past.now, timeout)
        request = new_request_state(submit, entry.choices[0].sid)
        for choice, output in zip(request.choices, entry.choices, strict=True):
            _restore(choice, output)
            if not past.same_boot:
                choice.marks = msgspec.structs.replace(
                    choice.marks, recoveries=[],
                    **{name: past.now for name in ("admitted", "first", "last")
                       if getattr(choice.marks, name)})
        yield request


def in_this_boot(submit: Submit, now: float, timeout: float) -> Submit:
    """Returns the request with times of this boot of the machine, as if it came now; see
    `restore_requests`."""
    deadline = submit.deadline
    if deadline is not None:
        allowed = deadline - submit.arrival if submit.arrival else timeout
        deadline = now + max(allowed, 0.0)
    return msgspec.structs.replace(submit, deadline=deadline, arrival=now,
                                   queued=now if submit.queued else 0.0)


def _restore(sequence: SequenceState, output: SequenceOutput) -> None:
    sequence.emitted = np.frombuffer(bytes(output.tokens), np.int32)
    sequence.preempted = bool(len(sequence.emitted))
    sequence.logprobs, sequence.prompt_logprobs = output.logprobs, output.prompt_logprobs
    sequence.drafted, sequence.accepted = output.drafted, output.accepted
    sequence.marks, sequence.preemptions = output.marks, output.marks.preemptions
    if output.marks.cached_tokens is not None:
        sequence.counted, sequence.cached_len = True, output.marks.cached_tokens
    if output.cached_tokens is not None:
        sequence.first_token_reported, sequence.cached_len = True, output.cached_tokens
    sequence.runs, sequence.experts = output.runs, output.experts
    sequence.experts_reported = output.experts[-1].end if output.experts else 0
    sequence.prompt_logprobs_reported = max((row.start + len(row.chosen) // 4
                                             for row in output.prompt_logprobs),
                                            default=1)
    if output.finish is not None:
        sequence.finish = output.finish
        del sequence.request.live[sequence.sid]
