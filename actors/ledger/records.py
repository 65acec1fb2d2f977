"""The ledger's records, and reading them back: every request that was admitted, with its output.

Pure. Reading is idempotent: a compaction that was cut short leaves records twice, and twice is as
good as once. Requests are identified by (client, rid), tokens by their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.ledger.segments import BREAK, LedgerRecord
from actorium.actors.messages import (
    Column,
    Count,
    NamedAdapter,
    RowExperts,
    RowLogprobs,
    SequenceEvent,
    Short,
    Sid,
    StepNo,
    Submit,
    TokenBatch,
    WeightsRuns,
    WeightsSource,
    add_experts,
)

META, ADMISSION, BATCH, OUTPUT, COUNTS, ACTIVITY, ADAPTERS, WEIGHTS = 1, 2, 3, 4, 5, 6, 7, 8
"""Kinds of records."""


class LedgerMeta(Struct, frozen=True, array_like=True):
    """First of every segment."""

    boot: str
    """Id of the machine's boot: CLOCK_MONOTONIC times mean nothing after another one."""
    model: str
    next_sid: Sid = 1
    """Sequences from here on have not been numbered yet (as of the segment's start)."""
    ledger: str = ""
    """Id of the ledger: numbers of sequences mean nothing in another one."""


class AdmissionRecord(Struct, frozen=True, array_like=True):
    """A request was admitted; its choices are the sequences sid, sid + 1, ..."""

    submit: Submit
    sid: Sid


class SequenceMarks(Struct, frozen=True, array_like=True):
    """What has been counted of a sequence that has not ended. Times: CLOCK_MONOTONIC seconds, 0 =
    not yet."""

    admitted: float = 0.0
    """When it was first admitted to the batch."""
    first: float = 0.0
    """When its first token came, and its last one."""
    last: float = 0.0
    cached_tokens: Count | None = None
    """Prompt tokens found in the prefix cache then; None = its prompt is not counted yet."""
    preemptions: Count = 0
    recoveries: list[tuple[float, str]] = []
    """Of a request that is traced: when it went on after a death, and the role that had died."""

    def shifted(self, by: float) -> SequenceMarks:
        """Returns them with the times of a clock that is so many seconds ahead."""
        times = {name: at + by for name in ("admitted", "first", "last")
                 if (at := getattr(self, name))}
        return msgspec.structs.replace(self, **times, recoveries=[
            (at + by, role) for at, role in self.recoveries])


NO_MARKS = SequenceMarks()


class CountsRecord(Struct, frozen=True, array_like=True):
    """What a wake of the scheduler has counted, with the records that it is about: so that a
    scheduler that is started again counts everything once."""

    number: StepNo
    """Counts these records up."""
    counts: dict[str, float]
    """By name of the gauge: what is added to it."""
    at: float = 0.0
    """When; CLOCK_MONOTONIC seconds."""
    marks: dict[Sid, SequenceMarks] = {}
    """Of the sequences that something new was counted of, `last` excepted."""
    whole: bool = False
    """`counts` are all there are, since the ledger was begun."""


class ActivityRecord(Struct, frozen=True, array_like=True):
    """Whether the engine generates, is paused or sleeps, from here on."""

    paused: str = ""
    """"wait" | "keep": what has begun ends, or stops; "" = not paused."""
    level: Count = 0
    """Of the sleep that is wanted; 0 = none."""
    keeps: bool = False
    """What has begun does not end before that."""
    by_itself: bool = False
    """It sleeps since nobody needed it: the next request wakes it."""
    asleep: bool = False
    """The sleep is reached."""


class AdapterEntry(Struct, frozen=True, array_like=True):
    """What an adapter's name stands for."""

    adapter: NamedAdapter
    rank: Count = 0
    base: Short = ""
    """Name of the model that it was trained on; "" = not said."""


class AdaptersRecord(Struct, frozen=True, array_like=True):
    """All adapters that have names, from here on."""

    entries: list[AdapterEntry]
    orders: list[tuple[bytes, str]] = []
    """(client, rid) of the last orders that were carried out: a client that has lost the answer
    repeats its order."""


class WeightsRecord(Struct, frozen=True, array_like=True):
    """The model's weights from here on."""

    version: Count = 0
    """Counts the changes since the engine's start."""
    source: WeightsSource = WeightsSource()
    orders: list[tuple[bytes, str]] = []
    """(client, rid) of the last orders that were carried out."""


class OutputRecord(Struct, frozen=True, array_like=True):
    """Everything that a sequence has emitted, in one record: compaction replaces its batches by it.
    """

    sid: Sid
    tokens: Column
    cached_tokens: Count | None = None
    logprobs: list[RowLogprobs] = []
    """In order; together they cover all the tokens."""
    prompt_logprobs: list[RowLogprobs] = []
    finish: SequenceEvent | None = None
    drafted: Count = 0
    accepted: Count = 0
    marks: SequenceMarks = NO_MARKS
    runs: WeightsRuns = []
    experts: list[RowExperts] = []


class RequestRecord(Struct, frozen=True, array_like=True, gc=False):
    """A request with all that it has emitted, as messages and recordings have it."""

    submit: Submit
    sid: Sid
    """Of its first choice; the others follow."""
    outputs: list[OutputRecord] = []
    """Of the choices of which there is anything."""


class SequenceOutput(Struct):
    """The known state of one sequence."""

    sid: int
    tokens: bytearray
    cached_tokens: int | None = None
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[RowLogprobs] = []
    finish: SequenceEvent | None = None
    drafted: int = 0
    """Drafts verified for it, and those accepted."""
    accepted: int = 0
    marks: SequenceMarks = NO_MARKS
    runs: WeightsRuns = []
    experts: list[RowExperts] = []
    incomplete: bool = False
    """Some of it may be missing: it goes on after what is known, whether or not it had ended."""


class LedgerEntry(Struct):
    """The known state of one request."""

    submit: Submit
    choices: list[SequenceOutput]
    model: str = ""
    """Model of the segment that it was found in; "" = not known."""

    @property
    def finished(self) -> bool:
        """Every choice has ended."""
        return all(output.finish is not None for output in self.choices)


class LedgerHistory:
    """The state that follows from the records read so far."""

    def __init__(self) -> None:
        self.entries: dict[tuple[bytes, str], LedgerEntry] = {}
        self.next_sid = 1
        self.meta: LedgerMeta | None = None
        """Of the last segment read."""
        self.boots: set[str] = set()
        """Boots of all segments read."""
        self.activity = ActivityRecord()
        self.adapters: AdaptersRecord | None = None
        """None = nothing is recorded of any."""
        self.weights: WeightsRecord | None = None
        """Likewise."""
        self.unreadable = 0
        """Records that are whole but mean nothing to this version."""
        self.counts: dict[str, float] = {}
        """All that was counted, as of the record `counted`."""
        self.counted = 0
        self._uncounted: Counter[str] = Counter()
        """Of the records since then: a write that was cut short may lack the counts at its end."""
        self._outputs: dict[int, SequenceOutput] = {}
        self._grown: set[int] = set()
        """Sequences with tokens since the last counts."""

    @property
    def all_counts(self) -> dict[str, float]:
        """`counts`, and what the records behind them say by themselves."""
        return self.counts | {name: self.counts.get(name, 0.0) + count
                              for name, count in self._uncounted.items()}

    def read(self, records: Iterable[LedgerRecord]) -> LedgerHistory:
        """Apply records in order; returns self."""
        for kind, payload in records:
            if kind == BREAK:
                self._on_break()
                continue
            try:
                self._apply(kind, payload)
            except (msgspec.DecodeError, KeyError):
                self.unreadable += 1
                self._on_break()
        return self

    def _on_break(self) -> None:
        """Records may be missing here, of any sequence that runs."""
        for output in self._outputs.values():
            output.incomplete = output.finish is None

    def _apply(self, kind: int, payload: bytes) -> None:
        self.apply(_DECODE[kind](payload))

    def apply(self, message: LedgerMeta | AdmissionRecord | OutputRecord | TokenBatch
              | CountsRecord | ActivityRecord | AdaptersRecord | WeightsRecord) -> None:
        """Apply a record's message."""
        if isinstance(message, LedgerMeta):
            self.meta = message
            self.boots.add(message.boot)
            self.next_sid = max(self.next_sid, message.next_sid)
        elif isinstance(message, AdmissionRecord):
            self._on_admission(message)
        elif isinstance(message, OutputRecord):
            self._on_output(message)
        elif isinstance(message, CountsRecord):
            self._on_counts(message)
        elif isinstance(message, ActivityRecord):
            self.activity = message
        elif isinstance(message, AdaptersRecord):
            self.adapters = message
        elif isinstance(message, WeightsRecord):
            self.weights = message
        else:
            self._on_batch(message)

    def restore(self, record: RequestRecord) -> None:
        """Apply all that is known of a request."""
        self.apply(AdmissionRecord(record.submit, record.sid))
        for output in record.outputs:
            self.apply(output)

    def _on_admission(self, message: AdmissionRecord) -> None:
        submit = message.submit
        key = submit.client, submit.rid
        self.next_sid = max(self.next_sid, message.sid + submit.n)
        known = self.entries.get(key) or self._adopted(message)
        if known is not None and known.finished and message.sid > known.choices[-1].sid:
            self.forget(key)  # long finished, and its rid was used again
            known = None
        if known is None:
            choices = [SequenceOutput(message.sid + i, bytearray(), logprobs=[], prompt_logprobs=[],
                                      runs=[], experts=[])
                       for i in range(submit.n)]
            self.entries[key] = LedgerEntry(submit, choices, self.meta.model if self.meta else "")
            self._outputs.update((output.sid, output) for output in choices)
            if self.meta is None or message.sid >= self.meta.next_sid:  # else it was written anew
                self._uncounted["started_sequences"] += submit.n

    def _adopted(self, message: AdmissionRecord) -> LedgerEntry | None:
        """The entry of these very sequences, which another client had before. Of two requests with
        the same sids, which only a damaged ledger has, the later one gets them."""
        submit = message.submit
        theirs = {message.sid + i for i in range(submit.n)}
        if not any(sid in self._outputs for sid in theirs):
            return None
        for before, entry in [*self.entries.items()]:
            if theirs.isdisjoint(output.sid for output in entry.choices):
                continue
            if entry.choices[0].sid == message.sid and _same(entry.submit, submit):
                del self.entries[before]
                entry.submit = submit
                self.entries[submit.client, submit.rid] = entry
                return entry
            self.forget(before)
        return None

    def _on_output(self, message: OutputRecord) -> None:
        output = self._outputs.get(message.sid)
        if output is None or len(message.tokens) < len(output.tokens):
            return
        output.tokens = bytearray(message.tokens)
        output.logprobs = list(message.logprobs)
        output.prompt_logprobs = list(message.prompt_logprobs)
        output.experts = list(message.experts)
        output.cached_tokens = message.cached_tokens
        output.drafted, output.accepted = message.drafted, message.accepted
        output.marks, output.runs = message.marks, list(message.runs)
        output.incomplete = False
        output.finish = message.finish or output.finish

    def _on_counts(self, record: CountsRecord) -> None:
        grown, self._grown = self._grown, set()
        self._uncounted.clear()
        if record.number <= self.counted:  # read before, or part of what was written as a whole
            return
        self.counted = record.number
        if record.whole:
            self.counts = dict(record.counts)
            return
        for name, count in record.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + count
        for sid in grown | record.marks.keys():
            if (output := self._outputs.get(sid)) is not None:
                marks = record.marks.get(sid, output.marks)
                last = record.at if sid in grown else output.marks.last
                output.marks = msgspec.structs.replace(marks, last=last)

    def _on_batch(self, batch: TokenBatch) -> None:
        wide = len(batch.sids) == 8 * len(batch.counts)  # 4 bytes each in a ledger of version 1
        sids, starts = (memoryview(batch.sids).cast("q" if wide else "i"),
                        memoryview(batch.starts).cast("i"))
        fresh: dict[int, int] = {}
        at = 0
        for row, (sid, start, count) in enumerate(zip(sids, starts, batch.counts, strict=True)):
            output = self._outputs.get(sid)
            mine, at = batch.tokens[4 * at:4 * (at + count)], at + count
            if output is None or output.finish is not None:
                continue
            known = len(output.tokens) // 4 - start
            output.incomplete = known < 0 or (output.incomplete and known >= count)
            if 0 <= known < count:
                output.tokens += mine[4 * known:]
                self._uncounted["tokens"] += count - known
                fresh[sid] = known
                self._grown.add(sid)
                if batch.drafts and row >= batch.firsts:
                    output.drafted += (batch.draft_counts[row - batch.firsts]
                                       if batch.draft_counts else batch.drafts)
                    output.accepted += count - 1
        for event in batch.events:
            self._on_event(event, fresh.get(event.sid))

    def _on_event(self, event: SequenceEvent, known: int | None) -> None:
        """known: how many of the batch's tokens were read before; None = it has none of them."""
        output = self._outputs.get(event.sid)
        if output is None or output.finish is not None:
            return
        if event.cached_tokens is not None:
            output.cached_tokens = event.cached_tokens
        if event.logprobs is not None and known is not None:
            output.logprobs.append(cut(event.logprobs, known))
        if event.prompt_logprobs is not None:
            starts = {row.start for row in output.prompt_logprobs}
            if event.prompt_logprobs.start not in starts:
                output.prompt_logprobs.append(event.prompt_logprobs)
        if event.experts is not None:
            add_experts(output.experts, event.experts)
        if event.weights is not None and (known is not None or not output.tokens):
            first, version = event.weights[0] + (known or 0), event.weights[1]
            if not output.runs or (output.runs[-1][0] < first and output.runs[-1][1] != version):
                output.runs.append((first, version))
        if event.finish_reason is not None and not output.incomplete:
            output.finish = msgspec.structs.replace(event, logprobs=None, prompt_logprobs=None,
                                                    pooled=None, experts=None)
            self._uncounted[f"finished_{event.finish_reason}"] += 1

    def forget(self, key: tuple[bytes, str]) -> None:
        """Drop a request that nobody will ask for again."""
        for output in self.entries.pop(key).choices:
            del self._outputs[output.sid]
            self._grown.discard(output.sid)


def _same(first: Submit, second: Submit) -> bool:
    """Returns whether they are the same request, from whichever client."""
    return (first.rid, first.prompt, first.n, first.seed, first.params) == (
        second.rid, second.prompt, second.n, second.seed, second.params)


def cut(row: RowLogprobs, first: int) -> RowLogprobs:
    """The row without its first tokens."""
    count = len(row.chosen) // 4
    if not first or not count:
        return row
    k = len(row.top_ids) // count
    return RowLogprobs(row.row, row.start, row.chosen[4 * first:], row.ranks[4 * first:],
                       row.top_ids[k * first:], row.top_logprobs[k * first:])


def request_record(entry: LedgerEntry) -> RequestRecord:
    """All that is known of a request; see `LedgerHistory.restore`."""
    return RequestRecord(entry.submit, entry.choices[0].sid, [
        output_record(output) for output in entry.choices
        if output.tokens or output.finish or output.prompt_logprobs or output.experts
        or output.marks != NO_MARKS])


def entry_records(entry: LedgerEntry) -> Iterator[LedgerRecord]:
    """The records of an entry that compaction writes."""
    known = request_record(entry)
    yield make_record(ADMISSION, AdmissionRecord(known.submit, known.sid))
    for output in known.outputs:
        yield make_record(OUTPUT, output)


def output_record(output: SequenceOutput) -> OutputRecord:
    """All that is known of the sequence."""
    return OutputRecord(output.sid, bytes(output.tokens), output.cached_tokens, output.logprobs,
                        output.prompt_logprobs, output.finish, output.drafted, output.accepted,
                        output.marks, output.runs, output.experts)


def make_record(kind: int, message: Any) -> LedgerRecord:
    """A message as a record: without vectors, which are computed again where they are lost."""
    if isinstance(message, TokenBatch) and any(event.pooled for event in message.events):
        message = msgspec.structs.replace(message, events=[
            msgspec.structs.replace(event, pooled=None) for event in message.events])
    elif isinstance(message, OutputRecord) and message.finish and message.finish.pooled:
        message = msgspec.structs.replace(
            message, finish=msgspec.structs.replace(message.finish, pooled=None))
    return LedgerRecord(kind, _encode(message))


_encode = msgspec.msgpack.Encoder().encode
_DECODE: dict[int, Any] = {
    kind: msgspec.msgpack.Decoder(type_).decode
    for kind, type_ in ((META, LedgerMeta), (ADMISSION, AdmissionRecord), (BATCH, TokenBatch),
                        (OUTPUT, OutputRecord), (COUNTS, CountsRecord),
                        (ACTIVITY, ActivityRecord), (ADAPTERS, AdaptersRecord),
                        (WEIGHTS, WeightsRecord))}
