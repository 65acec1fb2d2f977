"""Commit before telling: the shell's hold on the ledger, full disks, what is left where."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from helpers_ledger import read_all

from actorium.actors.config.tree import Config, ModelConfig, RecoveryConfig
from actorium.actors.core import LEDGER, Context, Core, Send
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.ledger.committer import LedgerCommitter, open_ledger
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import ADMISSION, AdmissionRecord, make_record
from actorium.actors.ledger.segments import (
    LedgerFull,
    LedgerRecord,
    SegmentWriter,
    remove_finished,
)
from actorium.actors.messages import Submit
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.runtime.rundir import RunDir


class Recording(Core):
    """What a core with a ledger offers."""

    done = False

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.heard: list[str] = []
        self.kept: list[LedgerRecord] = []

    def live_records(self) -> Iterable[list[LedgerRecord]]:
        return [[record] for record in self.kept]

    def on_ledger_full(self, why: str, now: float) -> None:
        self.heard.append(why)

    def on_ledger_lost(self, why: str, now: float) -> None:
        self.heard.append(f"lost: {why}")

    def on_ledger_ok(self, now: float) -> None:
        self.heard.append("ok")


def sends(*names: str) -> list[Send]:
    """Names in capitals are records."""
    return [Send(LEDGER, LedgerRecord(9, n.encode())) if n.isupper() else Send(n, n) for n in names]


def said(passed: Iterable[Send]) -> str:
    return " ".join(send.to for send in passed)


def written(directory: Path) -> list[bytes]:
    return [payload for kind, payload in read_all(directory)[0] if kind == 9]


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(self: SegmentWriter, batch: bytes) -> None:
        raise LedgerFull(errno.ENOSPC, "the ledger takes no more: no space")

    monkeypatch.setattr(SegmentWriter, "commit", commit)


def test_records_are_committed_before_their_messages(tmp_path: Path) -> None:
    commits = LedgerCommitter(core := Recording(Ledger(tmp_path)), core.ledger)
    assert said(commits.commit(sends("a", "b"), 0.0)) == "a b"
    assert written(tmp_path) == []
    assert said(commits.commit(sends("a", "X", "Y", "b", "c"), 0.0)) == "a b c"
    assert written(tmp_path) == [b"X", b"Y"] and not core.heard
    commits.close()


def test_a_full_disk_holds_messages_back(tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    commits = LedgerCommitter(core := Recording(Ledger(tmp_path)), core.ledger)
    with monkeypatch.context() as patch:
        full(patch)
        assert said(commits.commit(sends("a", "X", "b"), 0.0)) == "a" and commits.full
        assert core.heard == ["the ledger takes no more: no space"]
        assert said(commits.commit(sends("order", "refusal"), 0.1)) == "order refusal"
        assert list(commits.retry(0.2)) == [] and commits.full
        assert written(tmp_path) == []
    core.kept = [LedgerRecord(9, b"KEPT")]
    assert said(commits.retry(0.3)) == "b" and not commits.full
    assert core.heard[1:] == ["ok"] and written(tmp_path) == [b"KEPT", b"X"]
    assert said(commits.commit(sends("Z", "c"), 0.4)) == "c"
    core.done = True
    commits.close()
    remove_finished(tmp_path)
    assert not list(tmp_path.iterdir()), "all was told: nothing is kept"


def test_what_comes_while_the_ledger_is_full_waits_behind_what_waits(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = LedgerCommitter(core := Recording(Ledger(tmp_path)), core.ledger, patience=2.0)
    with monkeypatch.context() as patch:
        full(patch)
        for number in range(5):
            assert said(commits.commit(sends("order", "X", str(number)), 10.0 + number / 2)) == \
                "order"
        assert len(core.heard) == 1, "it waits since the first of them"
    assert said(commits.retry(12.5)) == "0 1 2 3 4" and written(tmp_path) == [b"X"] * 5
    commits.close()
    with monkeypatch.context() as patch:
        commits = LedgerCommitter(core := Recording(Ledger(tmp_path / "b")), core.ledger, 2.0)
        full(patch)
        commits.commit(sends("X", "a"), 10.0)
        commits.commit(sends("Y", "b"), 11.9)
        assert said(commits.retry(12.0)) == "a b" and not commits.holding, "for 2 s in all"
    commits.close()


def test_requests_go_on_without_a_ledger_after_a_while(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = LedgerCommitter(core := Recording(Ledger(tmp_path)), core.ledger, patience=2.0)
    with monkeypatch.context() as patch:
        full(patch)
        assert said(commits.commit(sends("a", "X", "b"), 10.0)) == "a" and commits.holding
        assert list(commits.retry(11.9)) == [] and commits.holding
        assert said(commits.retry(12.1)) == "b" and not commits.holding
        assert core.heard[1:] == ["lost: the ledger takes no more: no space"]
        assert said(commits.commit(sends("c", "Y", "d"), 12.2)) == "c d"
        pauses = []
        for _ in range(8):
            assert list(commits.retry(12.3)) == [] and commits.full
            pauses.append(commits.pause)
        assert pauses == sorted(pauses) and pauses[-1] == 5.0, "each try writes all that is alive"
    core.kept = [LedgerRecord(9, b"KEPT")]
    assert said(commits.retry(13.0)) == "" and not commits.full
    assert core.heard[2:] == ["ok"] and written(tmp_path) == [b"KEPT"]
    assert said(commits.commit(sends("Z", "e"), 14.0)) == "e"
    assert written(tmp_path) == [b"KEPT", b"Z"] and commits.pause == 0.1
    commits.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOENT, errno.EACCES, errno.ESTALE])
def test_a_disk_that_fails_in_any_way_is_a_full_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Read-only from now on, or gone: the scheduler does not die of it."""
    commits = LedgerCommitter(core := Recording(Ledger(tmp_path)), core.ledger, patience=2.0)

    def fails(*_: object) -> int:
        raise OSError(number, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails)
        assert said(commits.commit(sends("a", "X", "b"), 0.0)) == "a" and commits.holding
        assert list(commits.retry(0.2)) == []
        patch.setattr(os, "open", fails)
        assert list(commits.retry(0.3)) == [] and said(commits.retry(2.1)) == "b"
    core.kept = [LedgerRecord(9, b"KEPT")]
    commits.retry(3.0)
    assert written(tmp_path) == [b"KEPT"] and core.heard[-1] == "ok"
    commits.close()


def test_missing_files_are_rewritten(tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory, a segment or its lock: nobody else may take the place."""
    monkeypatch.setattr("actorium.actors.ledger.committer.CHECK_FILES", 0.0)
    where = tmp_path / "ledger"
    commits = LedgerCommitter(core := Recording(Ledger(where)), core.ledger)
    core.kept = [LedgerRecord(9, b"KEPT")]
    for turn in range(3):
        commits.commit(sends("X", "a"), 0.0)
        if turn:
            shutil.rmtree(where)
        else:
            next(where.glob("*.seg")).unlink()
        commits.maintain()
        assert written(where) == [b"KEPT"], "and what was told is in it"
        with pytest.raises(EngineUnavailable, match="another engine writes this"):
            Ledger(where)
    shutil.rmtree(where)
    where.write_text("a file")
    commits.maintain()
    assert said(commits.commit(sends("Y", "b"), 0.0)) == "" and commits.holding
    where.unlink()
    assert said(commits.retry(0.1)) == "b" and written(where) == [b"KEPT", b"Y"]
    commits.close()


def test_compaction_when_it_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = LedgerCommitter(core := Recording(Ledger(tmp_path, segment_bytes=300)), core.ledger)
    core.kept = [LedgerRecord(9, b"KEPT")]
    commits.commit(sends(*["X" * 50] * 3), 0.0)
    commits.maintain()
    assert len(written(tmp_path)) == 3, "not yet"
    commits.commit(sends(*["X" * 50] * 3), 0.0)
    with monkeypatch.context() as patch:
        full(patch)
        commits.maintain()
        commits.maintain()
    assert len(written(tmp_path)) == 6, "it could not, and nothing is lost"
    assert said(commits.commit(sends(*["X" * 50] * 6), 0.0)) == ""
    commits.maintain()
    commits.commit(sends("Y"), 0.0)
    for _ in range(10):
        commits.maintain()
    assert written(tmp_path) == [b"Y", b"KEPT"], "what comes meanwhile stays as it is"
    commits.close()
    assert written(tmp_path) == [b"Y", b"KEPT"], "it was not done: what is unfinished stays"


def test_a_disk_that_is_full_in_the_middle_of_a_compaction(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = LedgerCommitter(core := Recording(Ledger(tmp_path, segment_bytes=300)), core.ledger)
    core.kept = [LedgerRecord(9, b"KEPT %d" % number) for number in range(100)]
    commits.commit(sends(*["X" * 50] * 6), 0.0)
    for _ in range(3):
        commits.maintain()
    assert core.ledger.compacting and len(written(tmp_path)) == 6 + 2 * 32
    with monkeypatch.context() as patch:
        full(patch)
        commits.commit(sends("Z", "z"), 0.0)
        commits.maintain()
        assert list(commits.retry(0.1)) == [] and commits.full
    assert said(commits.retry(0.2)) == "z"
    assert written(tmp_path) == [*[b"KEPT %d" % number for number in range(100)], b"Z"]
    for _ in range(20):
        commits.maintain()
    assert len(list(tmp_path.glob("*.seg"))) == 1
    commits.close()


def context(run_dir: Path, ledger_dir: Path | None = None, model: str = "m",
            **recovery: bool) -> Context:
    directory = None if ledger_dir is None else str(ledger_dir)
    config = Config(model=ModelConfig(model=model),
                    recovery=RecoveryConfig(ledger_dir=directory, **recovery))
    return Context(config, run_dir, "scheduler", 1, 0)


def test_where_the_ledger_is(tmp_path: Path) -> None:
    never = open_ledger(context(tmp_path, restart=False))
    assert never is None, "nothing is started again: nobody reads it"
    assert open_ledger(context(tmp_path, ledger=False)) is None
    own = context(tmp_path, tmp_path / "own", restart=False)
    for ledger, where in ((open_ledger(context(tmp_path)), tmp_path / "ledger"),
                          (open_ledger(own), tmp_path / "own")):
        assert ledger is not None and ledger.directory == where
        with pytest.raises(EngineUnavailable, match="another engine writes"):
            Ledger(where)
        ledger.close()


def test_a_ledger_of_another_model(tmp_path: Path) -> None:
    submit = Submit("r", b"c", b"\0\0\0\0", 1, ResolvedParams(max_tokens=1), TextParams(), seed=1)
    ledger = open_ledger(context(tmp_path, tmp_path / "own", "one"))
    assert ledger is not None
    ledger.append(ADMISSION, AdmissionRecord(submit, 1))
    ledger.commit()
    ledger.close()
    with pytest.raises(BadConfig, match="own holds 1 unfinished requests of the model 'one'"):
        open_ledger(context(tmp_path, tmp_path / "own", "two"))
    again = open_ledger(context(tmp_path, tmp_path / "own", "one"))
    assert again is not None and not again.history.entries[b"c", "r"].finished
    again.close()


def test_an_impossible_directory_is_an_error(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig, match=r"^ledger_dir: .*file"):
        open_ledger(context(tmp_path, tmp_path / "file"))

    def roll(self: SegmentWriter) -> None:
        raise LedgerFull(errno.ENOSPC, "no space")

    monkeypatch.setattr(SegmentWriter, "roll", roll)
    with pytest.raises(EngineUnavailable, match=r"^ledger_dir: .*no space"):
        open_ledger(context(tmp_path, tmp_path / "own"))


def test_the_run_directory_goes_with_its_ledger(tmp_path: Path) -> None:
    run_dir = RunDir("e", str(tmp_path))
    ledger = open_ledger(context(run_dir.path))
    assert ledger is not None
    ledger.append(9, make_record(ADMISSION, b"x").payload)
    ledger.commit()
    ledger.close()
    run_dir.close()
    assert not run_dir.path.exists()
    (tmp_path / "e" / "ledger").mkdir(parents=True)
    (tmp_path / "e" / "ledger" / "thesis.txt").write_text("")
    with pytest.raises(BadConfig, match="'ledger', which is no engine's"):
        RunDir("e", str(tmp_path))
