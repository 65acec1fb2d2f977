"""What the ledger says, and reading it back: every request that was admitted, with all it emitted.

Pure. Reading is idempotent: a compaction that was cut short leaves records twice, and twice is as
good as once. Requests are told apart by (client, rid), tokens by their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.ledger.segments import BREAK, Record
from actorium.actors.messages import (
    Column,
    Count,
    RowLogprobs,
    SequenceEvent,
    Sid,
    Submit,
    TokenBatch,
)

META, ADMITTED, BATCH, EMITTED = 1, 2, 3, 4
"""Kinds of records."""


class Meta(Struct, frozen=True, array_like=True):
    """First of every segment: whose it is."""

    boot: str
    """Id of the machine's boot: CLOCK_MONOTONIC times mean nothing in another one."""
    model: str
    next_sid: Sid = 1
    """Sequences from here on have not been numbered yet (as of the segment's start)."""
    ledger: str = ""
    """Id of the ledger: numbers of sequences mean nothing in another one."""


class Admitted(Struct, frozen=True, array_like=True):
    """A request is on the ring; its choices are the sequences sid, sid + 1, ..."""

    submit: Submit
    sid: Sid


class Emitted(Struct, frozen=True, array_like=True):
    """All that a sequence has said, in one record: what compaction keeps of its batches."""

    sid: Sid
    tokens: Column
    cached_tokens: Count | None = None
    logprobs: list[RowLogprobs] = []
    """In order; together of all the tokens."""
    prompt_logprobs: list[RowLogprobs] = []
    finish: SequenceEvent | None = None
    drafted: Count = 0
    accepted: Count = 0


class Said(Struct):
    """What is known of one sequence."""

    sid: int
    tokens: bytearray
    cached_tokens: int | None = None
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[RowLogprobs] = []
    finish: SequenceEvent | None = None
    drafted: int = 0
    """Drafts verified for it, and those accepted."""
    accepted: int = 0
    doubt: bool = False
    """Something of it may be missing: it goes on behind what is known, whatever was its end."""


class Entry(Struct):
    """What is known of one request."""

    submit: Submit
    choices: list[Said]
    model: str = ""
    """Of the segment that it was found in; "" = not known."""

    @property
    def over(self) -> bool:
        """Every choice has ended."""
        return all(said.finish is not None for said in self.choices)


class History:
    """The ledger, read."""

    def __init__(self) -> None:
        self.entries: dict[tuple[bytes, str], Entry] = {}
        self.next_sid = 1
        self.meta: Meta | None = None
        """Of the last segment."""
        self.boots: set[str] = set()
        """Of all of them."""
        self.unreadable = 0
        """Records that are whole but mean nothing to this version."""
        self._said: dict[int, Said] = {}

    def read(self, records: Iterable[Record]) -> History:
        """Take records in order; returns self."""
        for kind, payload in records:
            if kind == BREAK:
                self._break()
                continue
            try:
                self._take(kind, payload)
            except (msgspec.DecodeError, KeyError):
                self.unreadable += 1
                self._break()
        return self

    def _break(self) -> None:
        """Here something may be missing of whoever was there."""
        for said in self._said.values():
            said.doubt = said.finish is None

    def _take(self, kind: int, payload: bytes) -> None:
        message = _DECODE[kind](payload)
        if isinstance(message, Meta):
            self.meta = message
            self.boots.add(message.boot)
            self.next_sid = max(self.next_sid, message.next_sid)
        elif isinstance(message, Admitted):
            self._admitted(message)
        elif isinstance(message, Emitted):
            self._emitted(message)
        else:
            self._batch(message)

    def _admitted(self, message: Admitted) -> None:
        submit = message.submit
        key = submit.client, submit.rid
        self.next_sid = max(self.next_sid, message.sid + submit.n)
        known = self.entries.get(key) or self._handed_over(message)
        if known is not None and known.over and message.sid > known.choices[-1].sid:
            self.forget(key)  # long over, and its rid was used again
            known = None
        if known is None:
            choices = [Said(message.sid + i, bytearray(), logprobs=[], prompt_logprobs=[])
                       for i in range(submit.n)]
            self.entries[key] = Entry(submit, choices, self.meta.model if self.meta else "")
            self._said.update((said.sid, said) for said in choices)

    def _handed_over(self, message: Admitted) -> Entry | None:
        """The entry of these very sequences, that was another client's before. Of two requests that
        claim the same numbers, which only a damaged ledger has, the later one has them."""
        submit = message.submit
        theirs = {message.sid + i for i in range(submit.n)}
        if theirs.isdisjoint(self._said):
            return None
        for before, entry in [*self.entries.items()]:
            if theirs.isdisjoint(said.sid for said in entry.choices):
                continue
            if entry.choices[0].sid == message.sid and _same(entry.submit, submit):
                del self.entries[before]
                entry.submit = submit
                self.entries[submit.client, submit.rid] = entry
                return entry
            self.forget(before)
        return None

    def _emitted(self, message: Emitted) -> None:
        said = self._said.get(message.sid)
        if said is None or len(message.tokens) < len(said.tokens):
            return
        said.tokens = bytearray(message.tokens)
        said.logprobs = list(message.logprobs)
        said.prompt_logprobs = list(message.prompt_logprobs)
        said.cached_tokens = message.cached_tokens
        said.drafted, said.accepted = message.drafted, message.accepted
        said.doubt = False
        said.finish = message.finish or said.finish

    def _batch(self, batch: TokenBatch) -> None:
        sids, starts = (memoryview(c).cast("i") for c in (batch.sids, batch.starts))
        fresh: dict[int, int] = {}
        at = 0
        for row, (sid, start, count) in enumerate(zip(sids, starts, batch.counts, strict=True)):
            said = self._said.get(sid)
            mine, at = batch.tokens[4 * at:4 * (at + count)], at + count
            if said is None or said.finish is not None:
                continue
            known = len(said.tokens) // 4 - start
            said.doubt = known < 0 or (said.doubt and known >= count)
            if 0 <= known < count:
                said.tokens += mine[4 * known:]
                fresh[sid] = known
                if batch.drafts and row >= batch.firsts:
                    said.drafted += batch.drafts
                    said.accepted += count - 1
        for event in batch.events:
            self._event(event, fresh.get(event.sid))

    def _event(self, event: SequenceEvent, known: int | None) -> None:
        """known: how many of the batch's tokens had been read before; None = it brings none."""
        said = self._said.get(event.sid)
        if said is None or said.finish is not None:
            return
        if event.cached_tokens is not None:
            said.cached_tokens = event.cached_tokens
        if event.logprobs is not None and known is not None:
            said.logprobs.append(cut(event.logprobs, known))
        if event.prompt_logprobs is not None:
            starts = {row.start for row in said.prompt_logprobs}
            if event.prompt_logprobs.start not in starts:
                said.prompt_logprobs.append(event.prompt_logprobs)
        if event.finish_reason is not None and not said.doubt:
            said.finish = msgspec.structs.replace(event, logprobs=None, prompt_logprobs=None)

    def forget(self, key: tuple[bytes, str]) -> None:
        """A request that nobody will ask for again."""
        for said in self.entries.pop(key).choices:
            del self._said[said.sid]


def _same(one: Submit, other: Submit) -> bool:
    """Whether they ask for the same, whoever does."""
    return (one.rid, one.prompt, one.n, one.seed, one.params) == (
        other.rid, other.prompt, other.n, other.seed, other.params)


def cut(row: RowLogprobs, first: int) -> RowLogprobs:
    """The row without its first tokens."""
    count = len(row.chosen) // 4
    if not first or not count:
        return row
    k = len(row.top_ids) // count
    return RowLogprobs(row.row, row.start, row.chosen[4 * first:], row.ranks[4 * first:],
                       row.top_ids[k * first:], row.top_logprobs[k * first:])


def entry_records(entry: Entry) -> Iterator[Record]:
    """The records that say all of an entry: what compaction writes."""
    yield record(ADMITTED, Admitted(entry.submit, entry.choices[0].sid))
    for said in entry.choices:
        if said.tokens or said.finish or said.prompt_logprobs:
            yield record(EMITTED, Emitted(said.sid, bytes(said.tokens), said.cached_tokens,
                                          said.logprobs, said.prompt_logprobs, said.finish,
                                          said.drafted, said.accepted))


def record(kind: int, message: Any) -> Record:
    """A message as a record."""
    return Record(kind, _encode(message))


_encode = msgspec.msgpack.Encoder().encode
_DECODE: dict[int, Any] = {
    kind: msgspec.msgpack.Decoder(type_).decode
    for kind, type_ in ((META, Meta), (ADMITTED, Admitted), (BATCH, TokenBatch),
                        (EMITTED, Emitted))}
