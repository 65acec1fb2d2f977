"""Compaction of the ledger: in slices, on a full disk, killed anywhere."""

from __future__ import annotations

import errno
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_examples import examples
from helpers_ledger import admission, batch, fill, ints, read_all, row, submit
from helpers_speed import slowness
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.ledger import ledger as ledgers
from actorium.actors.ledger import segments as files
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import (
    BATCH,
    LedgerHistory,
    entry_records,
    make_record,
)
from actorium.actors.ledger.segments import LedgerFull, LedgerRecord
from actorium.actors.messages import SequenceEvent


def test_compaction_drops_finished_requests(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, segment_bytes=2000)
    fill(ledger, "abcdefghijkl")
    assert ledger.needs_compaction
    history = LedgerHistory().read(read_all(tmp_path)[0])
    kept = [history.entries[b"client", rid] for rid in "bd"]
    before = ledger.bytes
    ledger.compact(lambda: (list(entry_records(entry)) for entry in kept), 13)
    assert ledger.bytes < before and not ledger.needs_compaction
    assert len(files.segments(tmp_path)) == 1
    ledger.append(BATCH, batch((2, 2, [5])))
    ledger.commit()
    ledger.close()
    again = Ledger(tmp_path)
    assert [rid for _, rid in again.history.entries] == ["b", "d"]
    assert bytes(again.history.entries[b"client", "b"].choices[0].tokens) == ints(1, 1, 5)
    assert again.history.next_sid == 13, "sids of forgotten requests are not given again"
    again.close()


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 12))
def test_compaction_may_be_cut_short_anywhere(stop: int) -> None:
    """After any number of its file operations the directory says the same as before."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        ledger = Ledger(path)
        fill(ledger, "abc")
        ledger._writer.roll()  # more than one old segment
        ledger.append(BATCH, batch((2, 2, [7])))
        ledger.commit()
        expected = LedgerHistory().read(read_all(path)[0])
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
                found = LedgerHistory().read(read_all(directory)[0])
                for entry in found.entries.values():
                    for said in entry.choices:
                        said.incomplete = False  # of a segment that was begun, no more can be said
                assert found.entries == expected.entries


class Writing:
    """A ledger to which all sorts of things are written, and what it must say."""

    def __init__(self, path: Path) -> None:
        self.ledger, self.records, self.sids = Ledger(path), list[LedgerRecord](), 0

    def append(self, *records: LedgerRecord) -> None:
        self.ledger.commit(records)
        self.records += records

    @property
    def expected(self) -> LedgerHistory:
        return LedgerHistory().read(self.records)

    def admit(self) -> None:
        self.sids += 2
        self.append(admission(submit(f"r{self.sids}", n=2), self.sids))

    def say(self, sid: int, count: int, end: bool) -> None:
        """Of one sequence, if it is there and lives."""
        found = [said for entry in self.expected.entries.values() for said in entry.choices
                 if said.sid == sid and said.finish is None]
        for said in found:
            start = len(said.tokens) // 4
            event = SequenceEvent(sid, logprobs=row(*map(float, range(count)))) if not end else \
                SequenceEvent(sid, finish_reason="stop")
            self.append(make_record(BATCH, batch((sid, start, [sid] * count), events=[event])))

    def compact(self) -> None:
        if self.ledger.compacting:
            self.ledger.compact_slice()
        else:
            self.ledger.begin_compaction(self.alive, self.sids + 2)

    def alive(self) -> Iterator[list[LedgerRecord]]:
        for key in list(self.expected.entries):
            yield list(entry_records(self.expected.entries[key]))


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.one_of(
    st.just(("admit",)), st.just(("compact",)), st.just(("compact",)),
    st.tuples(st.just("say"), st.integers(2, 9), st.integers(1, 4), st.booleans())),
    min_size=20, max_size=50))
def test_a_compaction_by_slices_says_the_same_at_any_moment(steps: list[Any]) -> None:
    """Wherever it is killed, whatever comes between."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledgers, "SLICE_REQUESTS", 1)
        writing = Writing(Path(folder))
        for name, *args in [("admit",), *steps, *[("compact",)] * 20]:
            getattr(writing, name)(*args)
            found = LedgerHistory().read(read_all(Path(folder))[0])
            assert found.entries == writing.expected.entries
        while writing.ledger.compacting:
            writing.compact()
        assert len(files.segments(Path(folder))) == 1
        assert LedgerHistory().read(read_all(Path(folder))[0]).next_sid >= writing.sids + 2
        writing.ledger.close()


def test_compaction_slices_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests are kept: a step that follows waits for one slice."""
    ledger = Ledger(tmp_path, segment_bytes=1)
    said = [[admission(submit(f"r{number}", prompt=bytes(400)), number + 1),
             make_record(BATCH, batch((number + 1, 0, [7] * 250)))] for number in range(4096)]
    for records in said:
        ledger.commit(records)
    written, spent, write = [], [], os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(len(data)) or write(fd, data))
    ledger.begin_compaction(lambda: iter(said), 5000)
    while ledger.compacting:
        before = time.thread_time()
        ledger.compact_slice()
        spent.append(time.thread_time() - before)
    assert max(written) < ledgers.SLICE_BYTES + 4000 and len(written) >= 4096 // 32
    assert statistics.median(spent) < 0.01 * slowness()
    assert len(LedgerHistory().read(read_all(tmp_path)[0]).entries) == 4096
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
            ledger.compact(lambda: [[LedgerRecord(1, b"x")]], 1)
        ledger.append(BATCH, batch((1, 2, [9])))
        with pytest.raises(LedgerFull):
            ledger.commit()
    assert read_all(tmp_path)[0] == before
    ledger.commit()
    history = LedgerHistory().read(read_all(tmp_path)[0])
    assert bytes(history.entries[b"client", "a"].choices[0].tokens) == ints(0, 0, 9)
    ledger.close()
