"""The ledger: whole batches or none, torn ends, full disks, killed writers."""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_ledger import fill, read_all, submit
from hypothesis import given
from hypothesis import strategies as st

from actorium.actors.errors import EngineUnavailable
from actorium.actors.ledger import segments as files
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import ADMISSION, AdmissionRecord, make_record
from actorium.actors.ledger.segments import (
    LedgerFull,
    LedgerRecord,
    SegmentWriter,
    pack,
    unpack,
)

RECORDS = st.lists(st.tuples(st.integers(1, 255), st.binary(max_size=200)), max_size=12)


@given(RECORDS)
def test_what_is_packed_is_unpacked(records: list[tuple[int, bytes]]) -> None:
    data = files.MAGIC + pack(LedgerRecord(*r) for r in records)
    assert unpack(data) == ([LedgerRecord(*r) for r in records], len(data))


@given(RECORDS, st.data())
def test_a_torn_end_costs_no_more_than_itself(records: list[tuple[int, bytes]],
                                              data: st.DataObject) -> None:
    whole = files.MAGIC + pack(LedgerRecord(*r) for r in records)
    at = data.draw(st.integers(0, len(whole)))
    found, end = unpack(whole[:at])
    assert found == [LedgerRecord(*r) for r in records][:len(found)] and end <= at
    assert at == len(whole) or len(found) < len(records) or not records
    if records and at > len(files.MAGIC):
        spoilt = bytearray(whole)
        place = data.draw(st.integers(len(files.MAGIC), len(whole) - 1))
        spoilt[place] ^= 1 << data.draw(st.integers(0, 7))
        found, _ = unpack(bytes(spoilt))
        assert found == [LedgerRecord(*r) for r in records][:len(found)]
        assert len(found) < len(records), "a changed bit is noticed"


def test_segments_follow_each_other(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.commit(pack([LedgerRecord(1, b"a")]))
    writer.roll()
    writer.commit(pack([LedgerRecord(2, b"b")]))
    writer.close()
    again = SegmentWriter(tmp_path)
    assert again.path.name == "00000003.seg"
    again.commit(pack([LedgerRecord(3, b"c")]))
    abc = [LedgerRecord(number, text) for number, text in ((1, b"a"), (2, b"b"), (3, b"c"))]
    assert read_all(tmp_path) == (abc, [])
    again.close()


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "00000001.seg").write_bytes(b"something else entirely")
    with pytest.raises(ValueError, match="00000001.seg: not a segment"):
        read_all(tmp_path)


def test_a_full_disk_takes_a_batch_whole_or_not_at_all(tmp_path: Path) -> None:
    """RLIMIT_FSIZE cuts a write short as a full disk does."""
    writer = SegmentWriter(tmp_path)
    writer.commit(pack([LedgerRecord(1, b"kept")]))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (writer.size + 100, old[1]))
        with pytest.raises(LedgerFull) as full:
            writer.commit(pack([LedgerRecord(2, b"x" * 200)]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert full.value.errno == errno.EFBIG
    assert read_all(tmp_path) == ([LedgerRecord(1, b"kept")], [])
    writer.commit(pack([LedgerRecord(2, b"x" * 200)]))
    assert [r.kind for r in read_all(tmp_path)[0]] == [1, 2]
    writer.close()


def test_a_killed_writer_loses_nothing_it_has_acknowledged(tmp_path: Path) -> None:
    code = ("import sys; from pathlib import Path\n"
            "from actorium.actors.ledger.segments import LedgerRecord as Record\n"
            "from actorium.actors.ledger.segments import SegmentWriter, pack\n"
            "w = SegmentWriter(Path(sys.argv[1]))\n"
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


# --- one life after the other --------------------------------------------------------------------

def test_another_life_reads_what_was_committed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "new" / "ledger", model="m")
    fill(ledger, "abc")
    ledger.append(ADMISSION, AdmissionRecord(submit("not committed"), 9))
    ledger.close()
    again = Ledger(tmp_path / "new" / "ledger")
    assert [rid for _, rid in again.history.entries] == ["a", "b", "c"]
    assert again.history.meta is not None and again.history.meta.model == "m" and again.same_boot
    assert oct((tmp_path / "new" / "ledger").stat().st_mode)[-3:] == "700"
    again.close()


def test_a_ledger_of_which_all_was_delivered_goes_when_that_is_asked_for(tmp_path: Path) -> None:
    """Until then the next life reads it; one that is written, or not told, stays."""
    for told in (False, True, True):
        ledger = Ledger(tmp_path)
        assert [rid for _, rid in ledger.history.entries] in ([], ["a"])
        fill(ledger, "a")
        files.remove_finished(tmp_path)
        ledger.close(finished=told)
    other = Ledger(tmp_path)
    assert other.history.entries
    files.remove_finished(tmp_path)
    assert len(files.segments(tmp_path)) > 1, "somebody writes it"
    other.close(finished=True)
    files.remove_finished(tmp_path)
    assert list(tmp_path.iterdir()) == []
    files.remove_finished(tmp_path / "nowhere")


def test_one_writer(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with pytest.raises(EngineUnavailable, match="another engine writes this"):
        Ledger(tmp_path)
    ledger.close()
    Ledger(tmp_path).close()


def test_a_torn_tail_is_reported_and_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(tmp_path)
    fill(ledger, "ab")
    ledger.close()
    path = files.segments(tmp_path)[-1]
    with path.open("ab") as file:
        file.write(pack([make_record(ADMISSION, AdmissionRecord(submit("c"), 3))])[:-2])
    again = Ledger(tmp_path)
    assert len(again.history.entries) == 2 and len(again.damaged) == 1
    assert "cut short" in caplog.text
    again.close()
