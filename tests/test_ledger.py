"""The ledger: whole batches or none, torn ends, full disks, compaction killed anywhere."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.errors import EngineUnavailable
from actorium.actors.ledger import ledger as ledgers
from actorium.actors.ledger import segments as files
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import (
    ADMITTED,
    BATCH,
    Admitted,
    History,
    cut,
    entry_records,
    record,
)
from actorium.actors.ledger.segments import LedgerFull, Record, Writer, pack, read_all, unpack
from actorium.actors.messages import RowLogprobs, SequenceEvent, Submit, TextParams, TokenBatch
from actorium.actors.params import Resolved

RECORDS = st.lists(st.tuples(st.integers(1, 255), st.binary(max_size=200)), max_size=12)


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def submit(rid: str, n: int = 1, prompt: bytes = ints(1, 2, 3)) -> Submit:
    return Submit(rid, b"client", prompt, n, Resolved(max_tokens=9), TextParams(), seed=7)


def batch(*rows: tuple[int, int, list[int]], events: list[SequenceEvent] | None = None,
          ) -> TokenBatch:
    """rows: (sid, start, tokens)"""
    return TokenBatch(1, ints(*(r[0] for r in rows)), ints(*(r[1] for r in rows)),
                      bytes(len(r[2]) for r in rows), ints(*(t for r in rows for t in r[2])),
                      events or [])


def row(*values: float, k: int = 2) -> RowLogprobs:
    count = len(values)
    return RowLogprobs(0, 0, np.array(values, np.float32).tobytes(), ints(*range(count)),
                       ints(*range(k * count)), np.zeros(k * count, np.float32).tobytes())


# --- segments ------------------------------------------------------------------------------------

@given(RECORDS)
def test_what_is_packed_is_unpacked(records: list[tuple[int, bytes]]) -> None:
    data = files.MAGIC + pack(Record(*r) for r in records)
    assert unpack(data) == ([Record(*r) for r in records], len(data))


@given(RECORDS, st.data())
def test_a_torn_end_costs_no_more_than_itself(records: list[tuple[int, bytes]],
                                              data: st.DataObject) -> None:
    whole = files.MAGIC + pack(Record(*r) for r in records)
    at = data.draw(st.integers(0, len(whole)))
    found, end = unpack(whole[:at])
    assert found == [Record(*r) for r in records][:len(found)] and end <= at
    assert at == len(whole) or len(found) < len(records) or not records
    if records and at > len(files.MAGIC):
        spoilt = bytearray(whole)
        place = data.draw(st.integers(len(files.MAGIC), len(whole) - 1))
        spoilt[place] ^= 1 << data.draw(st.integers(0, 7))
        found, _ = unpack(bytes(spoilt))
        assert found == [Record(*r) for r in records][:len(found)]
        assert len(found) < len(records), "a changed bit is noticed"


def test_segments_follow_each_other(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.commit(pack([Record(1, b"a")]))
    writer.roll()
    writer.commit(pack([Record(2, b"b")]))
    writer.close()
    again = Writer(tmp_path)
    assert again.path.name == "00000003.seg"
    again.commit(pack([Record(3, b"c")]))
    assert read_all(tmp_path) == ([Record(1, b"a"), Record(2, b"b"), Record(3, b"c")], [])
    again.close()


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "00000001.seg").write_bytes(b"something else entirely")
    with pytest.raises(ValueError, match="00000001.seg: not a segment"):
        read_all(tmp_path)


def test_a_full_disk_takes_a_batch_whole_or_not_at_all(tmp_path: Path) -> None:
    """RLIMIT_FSIZE cuts a write short as a full disk does."""
    writer = Writer(tmp_path)
    writer.commit(pack([Record(1, b"kept")]))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (writer.size + 100, old[1]))
        with pytest.raises(LedgerFull) as full:
            writer.commit(pack([Record(2, b"x" * 200)]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert full.value.errno == errno.EFBIG
    assert read_all(tmp_path) == ([Record(1, b"kept")], [])
    writer.commit(pack([Record(2, b"x" * 200)]))
    assert [r.kind for r in read_all(tmp_path)[0]] == [1, 2]
    writer.close()


def test_a_killed_writer_loses_nothing_it_has_acknowledged(tmp_path: Path) -> None:
    code = ("import sys; from pathlib import Path\n"
            "from actorium.actors.ledger.segments import Record, Writer, pack\n"
            "w = Writer(Path(sys.argv[1]))\n"
            "for i in range(10**9):\n"
            "    w.commit(pack([Record(1, b'%d' % i), Record(2, bytes(i % 5000))]))\n"
            "    sys.stdout.write('%d\\n' % i); sys.stdout.flush()\n")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    seen = [int(process.stdout.readline()) for _ in range(300)]
    process.kill()
    rest = process.stdout.read().splitlines()
    process.wait()
    said = seen + [int(line) for line in rest[:-1]]
    records, _ = read_all(tmp_path)
    assert [int(r.payload) for r in records if r.kind == 1][:len(said)] == said


# --- reading it back -----------------------------------------------------------------------------

def test_a_history() -> None:
    end = SequenceEvent(2, finish_reason="stop", stop_token=5)
    history = History().read([
        record(ADMITTED, Admitted(submit("a", n=2), 1)),
        record(BATCH, batch((1, 0, [10]), (2, 0, [20, 21]),
                            events=[SequenceEvent(1, cached_tokens=16, logprobs=row(-1.0))])),
        record(BATCH, batch((1, 1, [11, 12]), (2, 2, [5]),
                            events=[end, SequenceEvent(1, logprobs=row(-2.0, -3.0))])),
        record(BATCH, batch((2, 3, [99]), (7, 0, [1]))),
    ])
    entry = history.entries[b"client", "a"]
    first, second = entry.choices
    assert (bytes(first.tokens), first.cached_tokens) == (ints(10, 11, 12), 16)
    assert [len(r.chosen) // 4 for r in first.logprobs] == [1, 2]
    assert (bytes(second.tokens), second.finish) == (ints(20, 21, 5), end), "later tokens are void"
    assert history.next_sid == 3 and not entry.over and history.unreadable == 0


def test_twice_is_as_good_as_once() -> None:
    records = [record(ADMITTED, Admitted(submit("a"), 4)),
               record(BATCH, batch((4, 0, [1, 2]), events=[
                   SequenceEvent(4, logprobs=row(-1.0, -2.0), prompt_logprobs=row(-9.0))])),
               record(BATCH, batch((4, 2, [3]), events=[
                   SequenceEvent(4, finish_reason="length", logprobs=row(-3.0))]))]
    once, twice = History().read(records), History().read([*records, *records])
    assert once.entries == twice.entries and once.next_sid == twice.next_sid == 5
    overlap = History().read([*records[:2], record(BATCH, batch((4, 1, [2, 3]), events=[
        SequenceEvent(4, finish_reason="length", logprobs=row(-2.0, -3.0))]))])
    said = overlap.entries[b"client", "a"].choices[0]
    assert bytes(said.tokens) == ints(1, 2, 3)
    assert b"".join(r.chosen for r in said.logprobs) == row(-1.0, -2.0, -3.0).chosen


def test_a_row_of_logprobs_is_cut() -> None:
    assert cut(row(-1.0, -2.0, -3.0), 1).chosen == row(-2.0, -3.0).chosen
    assert cut(row(-1.0, -2.0), 1).top_ids == ints(2, 3)
    assert cut(row(-1.0, k=0), 0) == row(-1.0, k=0)


def test_what_compaction_writes_says_the_same() -> None:
    history = History().read([
        record(ADMITTED, Admitted(submit("a", n=2), 1)), record(ADMITTED, Admitted(submit("b"), 3)),
        record(BATCH, batch((1, 0, [10]), (3, 0, [30, 31]), events=[
            SequenceEvent(1, cached_tokens=0, logprobs=row(-1.0), prompt_logprobs=row(-2.0)),
            SequenceEvent(3, finish_reason="length")]))])
    again = History().read(r for e in history.entries.values() for r in entry_records(e))
    assert again.entries == history.entries and again.next_sid == history.next_sid


def test_unknown_records_are_counted() -> None:
    history = History().read([Record(77, b"x"), Record(ADMITTED, b"\xc1"),
                              record(ADMITTED, Admitted(submit("a"), 1))])
    assert history.unreadable == 2 and len(history.entries) == 1


# --- the ledger ----------------------------------------------------------------------------------

def fill(ledger: Ledger, rids: str) -> None:
    for i, rid in enumerate(rids):
        ledger.append(ADMITTED, Admitted(submit(rid), 1 + i))
        ledger.append(BATCH, batch((1 + i, 0, [i, i])))
        ledger.commit()


def test_another_life_reads_what_was_committed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "new" / "ledger", model="m")
    fill(ledger, "abc")
    ledger.append(ADMITTED, Admitted(submit("not committed"), 9))
    ledger.close()
    again = Ledger(tmp_path / "new" / "ledger")
    assert [rid for _, rid in again.history.entries] == ["a", "b", "c"]
    assert again.history.meta is not None and again.history.meta.model == "m" and again.same_boot
    assert oct((tmp_path / "new" / "ledger").stat().st_mode)[-3:] == "700"
    again.close(forget=True)
    assert list((tmp_path / "new" / "ledger").iterdir()) == []


def test_one_writer(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with pytest.raises(EngineUnavailable, match="another engine writes this"):
        Ledger(tmp_path)
    ledger.close()
    Ledger(tmp_path).close()


def test_a_torn_tail_is_said_and_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(tmp_path)
    fill(ledger, "ab")
    ledger.close()
    path = files.segments(tmp_path)[-1]
    with path.open("ab") as file:
        file.write(pack([record(ADMITTED, Admitted(submit("c"), 3))])[:-2])
    again = Ledger(tmp_path)
    assert len(again.history.entries) == 2 and len(again.torn) == 1
    assert "cut short" in caplog.text
    again.close()


def test_drafts_are_counted_from_the_batches() -> None:
    first = batch((1, 0, [1]), (2, 0, [1, 2]))  # 1 has the token after its prompt here
    first = msgspec.structs.replace(first, drafts=3, firsts=1)
    second = msgspec.structs.replace(batch((1, 1, [2, 3, 4]), (2, 2, [3])), drafts=2)
    opened = [record(ADMITTED, Admitted(submit(rid), sid)) for sid, rid in ((1, "a"), (2, "b"))]
    records = [*opened, *(record(BATCH, b) for b in (first, second, second))]
    history = History().read(records)
    said = [entry.choices[0] for entry in history.entries.values()]
    assert [(s.drafted, s.accepted) for s in said] == [(2, 2), (5, 1)]
    compacted = [r for entry in history.entries.values() for r in entry_records(entry)]
    for again in (compacted, compacted + records, records + compacted):
        assert History().read(again).entries == history.entries


def test_a_rid_that_was_used_again_is_another_request() -> None:
    end = batch(events=[SequenceEvent(1, "length")])
    first = [record(ADMITTED, Admitted(submit("a"), 1)), record(BATCH, batch((1, 0, [5]))),
             record(BATCH, end)]
    second = [record(ADMITTED, Admitted(submit("a"), 7)), record(BATCH, batch((7, 0, [6])))]
    history = History().read(first + second)
    (entry,) = history.entries.values()
    assert not entry.over and bytes(entry.choices[0].tokens) == ints(6)
    assert History().read(first + second + second).entries == history.entries
    (entry,) = History().read(first[:2] + second).entries.values()
    assert entry.choices[0].sid == 1, "it is the same as long as it is not over"


def test_compaction_forgets_what_is_over(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, segment_bytes=2000)
    fill(ledger, "abcdefghijkl")
    assert ledger.grown
    history = History().read(read_all(tmp_path)[0])
    kept = [history.entries[b"client", rid] for rid in "bd"]
    before = ledger.bytes
    ledger.compact(lambda: (list(entry_records(entry)) for entry in kept), 13)
    assert ledger.bytes < before and not ledger.grown and len(files.segments(tmp_path)) == 1
    ledger.append(BATCH, batch((2, 2, [5])))
    ledger.commit()
    ledger.close()
    again = Ledger(tmp_path)
    assert [rid for _, rid in again.history.entries] == ["b", "d"]
    assert bytes(again.history.entries[b"client", "b"].choices[0].tokens) == ints(1, 1, 5)
    assert again.history.next_sid == 13, "sids of forgotten requests are not given again"
    again.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12))
def test_compaction_may_be_cut_short_anywhere(stop: int) -> None:
    """After any number of its file operations the directory says the same as before."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        ledger = Ledger(path)
        fill(ledger, "abc")
        ledger._writer.roll()  # more than one old segment
        ledger.append(BATCH, batch((2, 2, [7])))
        ledger.commit()
        expected = History().read(read_all(path)[0])
        copy = Path(folder) / "copy"
        steps = 0

        def spy(name: str) -> Any:
            real = getattr(os, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal steps
                if steps == stop and not copy.exists():
                    shutil.copytree(path, copy)
                steps += str(folder) in str(args[0]) or name == "write"
                return real(*args, **kwargs)
            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("write", "open", "unlink"):
                patch.setattr(os, name, spy(name))
            ledger.compact(lambda: (list(entry_records(e)) for e in expected.entries.values()),
                           expected.next_sid)
        ledger.close()
        for directory in (copy, path):
            if directory.exists():
                found = History().read(read_all(directory)[0])
                assert found.entries == expected.entries


class Writing:
    """A ledger to which all sorts of things are written, and what it must say."""

    def __init__(self, path: Path) -> None:
        self.ledger, self.records, self.sids = Ledger(path), list[Record](), 0

    def append(self, *records: Record) -> None:
        self.ledger.commit(records)
        self.records += records

    @property
    def expected(self) -> History:
        return History().read(self.records)

    def admit(self) -> None:
        self.sids += 2
        self.append(record(ADMITTED, Admitted(submit(f"r{self.sids}", n=2), self.sids)))

    def say(self, sid: int, count: int, end: bool) -> None:
        """Of one sequence, if it is there and lives."""
        found = [said for entry in self.expected.entries.values() for said in entry.choices
                 if said.sid == sid and said.finish is None]
        for said in found:
            start = len(said.tokens) // 4
            event = SequenceEvent(sid, logprobs=row(*map(float, range(count)))) if not end else \
                SequenceEvent(sid, finish_reason="stop")
            self.append(record(BATCH, batch((sid, start, [sid] * count), events=[event])))

    def compact(self) -> None:
        if self.ledger.compacting:
            self.ledger.compact_some()
        else:
            self.ledger.begin_compaction(self.alive, self.sids + 2)

    def alive(self) -> Iterator[list[Record]]:
        for key in list(self.expected.entries):
            yield list(entry_records(self.expected.entries[key]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(
    st.just(("admit",)), st.just(("compact",)), st.just(("compact",)),
    st.tuples(st.just("say"), st.integers(2, 9), st.integers(1, 4), st.booleans())),
    min_size=20, max_size=50))
def test_a_compaction_by_slices_says_the_same_at_any_moment(steps: list[Any]) -> None:
    """Wherever it is killed, whatever comes between."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledgers, "SLICE_REQUESTS", 1)
        writing = Writing(Path(folder))
        for name, *args in [("admit",), *steps, *[("compact",)] * 20]:
            getattr(writing, name)(*args)
            found = History().read(read_all(Path(folder))[0])
            assert found.entries == writing.expected.entries
        while writing.ledger.compacting:
            writing.compact()
        assert len(files.segments(Path(folder))) == 1
        assert History().read(read_all(Path(folder))[0]).next_sid >= writing.sids + 2
        writing.ledger.close()


def test_no_slice_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests are kept: a step that follows waits for one slice."""
    ledger = Ledger(tmp_path, segment_bytes=1)
    said = [[record(ADMITTED, Admitted(submit(f"r{number}", prompt=bytes(400)), number + 1)),
             record(BATCH, batch((number + 1, 0, [7] * 250)))] for number in range(4096)]
    for records in said:
        ledger.commit(records)
    written, spent, write = [], [], os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(len(data)) or write(fd, data))
    ledger.begin_compaction(lambda: iter(said), 5000)
    while ledger.compacting:
        before = time.thread_time()
        ledger.compact_some()
        spent.append(time.thread_time() - before)
    assert max(written) < ledgers.SLICE_BYTES + 4000 and len(written) >= 4096 // 32
    assert statistics.median(spent) < 0.01
    assert len(History().read(read_all(tmp_path)[0]).entries) == 4096
    ledger.close()


def test_compaction_on_a_full_disk_leaves_all_as_it_was(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    fill(ledger, "ab")
    before = read_all(tmp_path)[0]

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(LedgerFull):
            ledger.compact(lambda: [[Record(1, b"x")]], 1)
        ledger.append(BATCH, batch((1, 2, [9])))
        with pytest.raises(LedgerFull):
            ledger.commit()
    assert read_all(tmp_path)[0] == before
    ledger.commit()
    history = History().read(read_all(tmp_path)[0])
    assert bytes(history.entries[b"client", "a"].choices[0].tokens) == ints(0, 0, 9)
    ledger.close()
