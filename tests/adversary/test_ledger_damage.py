"""Ledgers that were cut, changed, mixed up or taken away: what is left is told as it was, what is
missing is computed again, and nothing is told that was never so."""

from __future__ import annotations

import logging
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_ledger import batch, submit
from msgspec import Struct

from actorium.actors.config.tree import Config, ModelConfig, RecoveryConfig
from actorium.actors.core import Context
from actorium.actors.errors import BadConfig
from actorium.actors.ledger import segments as files
from actorium.actors.ledger.committer import open_ledger
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import ADMISSION, BATCH, AdmissionRecord, LedgerEntry
from actorium.actors.ledger.segments import HEAD, MAGIC
from actorium.actors.messages import SequenceEvent, Submit

MODEL = "m"
REQUESTS, STEPS = 5, 25
"""Of a life."""


class Truth(Struct):
    """What a request was told."""

    submit: Submit
    sid: int
    tokens: list[int] = []
    """Of its only choice."""
    finish: str | None = None


def write(directory: Path, seed: int, model: str = MODEL, lives: int = 3,
          requests: int = REQUESTS) -> dict[str, Truth]:
    """A ledger of some lives, each of them a segment; nothing was compacted. Some requests end with
    their last tokens, some a batch later, some never. A request's own tokens begin with its sid."""
    chance, told, live = random.Random(seed), {}, []
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    next_sid = 1
    for life in range(lives):
        most = (life + 1) * requests
        ledger = Ledger(directory, model)
        for step in range(STEPS):
            if len(told) < most and (chance.random() < 0.4 or step == 0):
                truth = Truth(submit(f"{seed}-{len(told)}"), next_sid, tokens=[])
                next_sid += 1
                told[truth.submit.rid] = truth
                live.append(truth)
                ledger.append(ADMISSION, AdmissionRecord(truth.submit, truth.sid))
            rows, events = [], []
            for truth in list(live):
                if chance.random() < 0.85:
                    new = [seed * 10_000_000 + truth.sid * 1000 + len(truth.tokens) + i
                           for i in range(chance.randint(1, 3))]
                    rows.append((truth.sid, len(truth.tokens), new))
                    truth.tokens += new
                if chance.random() < 0.05 and truth.tokens:
                    truth.finish = chance.choice(("stop", "length"))
                    events.append(SequenceEvent(truth.sid, finish_reason=truth.finish))
                    live.remove(truth)
            if rows or events:
                ledger.append(BATCH, batch(*rows, events=events))
            ledger.commit()
        ledger.close()
    return told


def tokens_of(entry: LedgerEntry) -> list[int]:
    return list(memoryview(bytes(entry.choices[0].tokens)).cast("i"))


def nothing_wrong(ledger: Ledger, told: dict[str, Truth]) -> None:
    """Every request is one that was, with the first of its tokens; one that is over has them all.
    """
    for (_, rid), entry in ledger.history.entries.items():
        truth, found = told[rid], tokens_of(entry)
        assert entry.submit == truth.submit and entry.choices[0].sid == truth.sid
        assert found == truth.tokens[:len(found)], f"{rid} has tokens that are not its own"
        finish = entry.choices[0].finish
        if finish is not None:
            assert finish.finish_reason == truth.finish
            assert found == truth.tokens, f"{rid} is over without {len(truth.tokens) - len(found)}"
    sids = [said.sid for entry in ledger.history.entries.values() for said in entry.choices]
    assert len(sids) == len(set(sids)) and all(sid < ledger.history.next_sid for sid in sids)


def goes_on(directory: Path) -> None:
    """What is appended to it now is read by the next life."""
    ledger = Ledger(directory, MODEL)
    number = ledger.history.next_sid
    ledger.append(ADMISSION, AdmissionRecord(submit("new"), number))
    ledger.append(BATCH, batch((number, 0, [1, 2]), (number, 2, [3])))
    ledger.commit()
    ledger.close()
    again = Ledger(directory, MODEL)
    assert tokens_of(again.history.entries[b"client", "new"]) == [1, 2, 3]
    again.close()


class Original:
    """A ledger to be damaged, again and again."""

    def __init__(self, path: Path, seed: int = 1, **more: int) -> None:
        self.path, self.told = path / "whole", {}
        self.told = write(self.path, seed, **more)
        self._scratch, self._made = path, 0

    def copy(self) -> Path:
        self._made += 1
        made = self._scratch / f"copy-{self._made}"
        shutil.copytree(self.path, made)
        return made

    def forget(self, made: Path) -> None:
        shutil.rmtree(made)


@pytest.fixture
def original(tmp_path: Path) -> Original:
    found = Original(tmp_path)
    whole = Ledger(found.path, MODEL)
    nothing_wrong(whole, found.told)
    assert len(whole.history.entries) == len(found.told) and not whole.damaged
    whole.close()
    (found.path / "00000004.seg").unlink(missing_ok=True)
    return found


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged since the last call."""
    caplog.set_level(logging.WARNING)

    def since() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return since


Lines = Callable[[], list[str]]


# --- bytes ---------------------------------------------------------------------------------------

def test_cut_anywhere(original: Original, lines: Lines, tried: Callable[..., None],
                      amount: Callable[[int, int], int]) -> None:
    """At every byte of the last records, and anywhere else."""
    chance = random.Random(1)
    segments = [path.name for path in files.segments(original.path)]
    last = (original.path / segments[-1]).stat().st_size
    places = [(segments[-1], at) for at in range(last - amount(150, 1500), last)]
    for _ in range(amount(100, 3000)):
        name = chance.choice(segments)
        places.append((name, chance.randrange((original.path / name).stat().st_size)))
    for name, at in places:
        made = original.copy()
        whole = (made / name).read_bytes()
        os.truncate(made / name, at)
        lines()
        ledger = Ledger(made, MODEL)
        nothing_wrong(ledger, original.told)
        kept, end = files.unpack(whole[:at])
        torn = end < at or at < len(MAGIC)
        assert len(files.read_segment(made / name)[0]) - len(kept) == torn
        assert len(lines()) == torn, "it is said in one line"
        ledger.close()
        original.forget(made)
        tried()
    made = original.copy()
    os.truncate(made / segments[0], 500)
    goes_on(made)


@pytest.mark.mended("a request whose last tokens but one were lost counted as complete")
@pytest.mark.mended("one damaged record cost all that stood behind it in its segment")
def test_changed_anywhere(original: Original, lines: Lines, tried: Callable[..., None],
                          amount: Callable[[int, int], int]) -> None:
    """One bit, or some bytes: in lengths, sums, kinds, payloads and headers."""
    chance = random.Random(2)
    segments = files.segments(original.path)
    for _ in range(amount(200, 4000)):
        made = original.copy()
        path = made / chance.choice(segments).name
        data = bytearray(path.read_bytes())
        at = chance.choice(_places(bytes(data), chance))
        for _ in range(chance.choice((1, 1, 4, 40))):
            if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
                at += 1
        path.write_bytes(data)
        lines()
        tried()
        try:
            ledger = Ledger(made, MODEL)
        except ValueError as error:  # as far as its header says, and the record behind it
            text = str(error).removeprefix(f"{path}: ")
            assert text.startswith(("a ledger of version", "not a segment of a ledger"))
        else:
            nothing_wrong(ledger, original.told)
            assert ledger.damaged and len(lines()) == len(ledger.damaged) <= 3
            ledger.close()
        ledger = Ledger(made, MODEL, lenient=True)
        nothing_wrong(ledger, original.told)
        ledger.close()
        original.forget(made)


def _places(data: bytes, chance: random.Random) -> list[int]:
    """One of each kind of byte of a segment."""
    starts, at = [], len(MAGIC)
    while at + HEAD.size <= len(data):
        starts.append(at)
        at += HEAD.size + struct.unpack_from("<I", data, at)[0]
    at = chance.choice(starts)
    return [at, at + 1, at + 3, at + 4, at + 7, at + 8, chance.randrange(at, len(data)),
            chance.randrange(len(MAGIC)), chance.randrange(len(data))]


def test_a_damaged_record_costs_no_more_than_itself(original: Original) -> None:
    made = original.copy()
    first = files.segments(made)[0]
    data = bytearray(first.read_bytes())
    records, _ = files.unpack(bytes(data))
    at = len(MAGIC) + sum(HEAD.size + len(record.payload) for record in records[:5])
    data[at + HEAD.size + 3] ^= 4
    first.write_bytes(data)
    found, torn = files.read_segment(first)
    assert [record for record in found if record.kind != files.BREAK] == [
        *records[:5], *records[6:]]
    assert [(where.at, where.end) for where in torn] == [(at, False)]


# --- files ---------------------------------------------------------------------------------------

def _delete(made: Path, path: Path, chance: random.Random) -> None:
    path.unlink()


def _rename(made: Path, path: Path, chance: random.Random) -> None:
    path.rename(made / f"{chance.choice((7, 12, 10**8 - 1, 10**8, 10**30)):08d}.seg")


def _duplicate(made: Path, path: Path, chance: random.Random) -> None:
    free = [number for number in (4, 5, 99_999_999) if number != int(path.stem)]
    shutil.copy(path, made / f"{chance.choice(free):08d}.seg")


def _swap(made: Path, path: Path, chance: random.Random) -> None:
    other = chance.choice(files.segments(made))
    path.rename(made / "aside")
    if other != path:
        other.rename(path)
    (made / "aside").rename(other)


def _empty(made: Path, path: Path, chance: random.Random) -> None:
    os.truncate(path, 0)


def _elsewhere(made: Path, path: Path, chance: random.Random) -> None:
    path.rename(made / chance.choice(("00000001.seg~", "notes.txt", "x.seg", "-1.seg")))


@pytest.mark.mended("segments were sorted as text: from 100,000,000 on in the wrong order")
@pytest.mark.parametrize("harm", [_delete, _rename, _duplicate, _swap, _empty, _elsewhere],
                         ids=lambda harm: harm.__name__[1:])
def test_segments_mixed_up(original: Original, harm: Callable[..., None], lines: Lines,
                           tried: Callable[..., None], amount: Callable[[int, int], int]) -> None:
    chance = random.Random(harm.__name__)
    for _ in range(amount(12, 200)):
        made = original.copy()
        for _ in range(chance.choice((1, 1, 2))):
            harm(made, chance.choice(files.segments(made)), chance)
        ledger = Ledger(made, MODEL)
        nothing_wrong(ledger, original.told)
        ledger.close()
        goes_on(made)
        original.forget(made)
        tried()


def _other_user(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(path, 54321, 54321)


def _a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _a_link(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def _a_version(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(MAGIC[:-1] + b"\x05" + data[len(MAGIC):])


def _a_stranger(path: Path) -> None:
    path.write_bytes(b"Dear diary, today I was not a ledger.")


def context(ledger_dir: Path, model: str = MODEL, epoch: int = 1) -> Context:
    config = Config(model=ModelConfig(model=model),
                    recovery=RecoveryConfig(ledger_dir=str(ledger_dir)))
    return Context(config, ledger_dir.parent, "scheduler", epoch, 0)


@pytest.mark.mended("a scheduler started again gave up the engine for one file it could not read")
@pytest.mark.parametrize(("harm", "text"), [
    (_other_user, "belongs to another user"), (_a_fifo, "is no regular file"),
    (_a_directory, "is no regular file"), (_a_link, "is a symbolic link"),
    (_a_version, "a ledger of version 5"), (_a_stranger, "not a segment of a ledger")],
    ids=["user", "fifo", "directory", "link", "version", "stranger"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_no_segment_is_refused_and_left_alone(
        original: Original, harm: Callable[[Path], None], text: str, which: int,
        lines: Lines) -> None:
    """At the engine's start. A scheduler that is started again goes on with the rest."""
    made = original.copy()
    path = files.segments(made)[which]
    harm(path)
    for _ in range(2):  # nothing is held after the refusal
        with pytest.raises(BadConfig, match=text) as refused:
            open_ledger(context(made))
        assert str(path) in refused.value.message and "\n" not in refused.value.message
    lines()
    ledger = open_ledger(context(made, epoch=2))
    assert ledger is not None
    nothing_wrong(ledger, original.told)
    said = lines()
    assert text in said[0] and len(said) <= 2
    ledger.compact(lambda: [], ledger.history.next_sid)
    ledger.close(finished=True)
    files.remove_finished(made)
    assert os.path.lexists(path), "it is not ours to remove"


@pytest.mark.mended("requests of another model were replayed where its segment was not the last")
@pytest.mark.parametrize("number", ["00000000.seg", "00000009.seg"])
def test_of_another_model(original: Original, number: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    told = write(other, 7, model="another", lives=1)
    made = original.copy()
    for path in files.segments(made):
        path.unlink()
    (made / "lock").unlink()
    shutil.copytree(other, made, dirs_exist_ok=True)
    mine = Ledger(made, MODEL)  # goes on with what another model has left, as nobody may
    mine.append(ADMISSION, AdmissionRecord(submit("mine"), 500))
    mine.commit()
    mine.close()
    (made / "00000001.seg").rename(made / number)
    unfinished = sum(truth.finish is None for truth in told.values())
    with pytest.raises(BadConfig, match=f"holds {unfinished} unfinished requests of the model "
                                        "'another'"):
        open_ledger(context(made))
    ledger = open_ledger(context(made, epoch=2))
    assert ledger is not None
    assert [rid for _, rid in ledger.history.entries] == ["mine"]
    ledger.close()


@pytest.mark.mended("a segment of another engine gave its tokens to our requests of those numbers")
def test_of_another_engine(original: Original, tmp_path: Path, lines: Lines,
                           tried: Callable[..., None]) -> None:
    """Any one segment of another ledger, under any name: numbers of sequences are the same in
    both."""
    other = tmp_path / "other"
    write(other, 8)
    for theirs in files.segments(other):
        for number in (0, 1, 2, 3, 4, 9):
            made = original.copy()
            path = made / f"{number:08d}.seg"
            shutil.copy(theirs, path)
            with pytest.raises(BadConfig, match="is of another ledger; remove it") as refused:
                open_ledger(context(made))
            assert str(path) in refused.value.message
            ledger = open_ledger(context(made, epoch=2))
            assert ledger is not None
            nothing_wrong(ledger, original.told)
            ledger.close()
            original.forget(made)
            tried()


def test_a_ledger_may_move(original: Original, tmp_path: Path) -> None:
    """With its lock or without; and where the lock's id was damaged."""
    for lock in (None, b"", b"\xff" * 16, b"0" * 16):
        made = original.copy()
        (made / "lock").unlink()
        if lock is not None:
            (made / "lock").write_bytes(lock)
        ledger = open_ledger(context(made))
        assert ledger is not None and len(ledger.history.entries) == len(original.told)
        ledger.close()


@pytest.mark.mended("an engine that gave up forgot answers that were finished and not read")
def test_what_was_told_is_there_until_a_clean_end(original: Original,
                                                  tried: Callable[..., None]) -> None:
    """The next engine reads it as any other, again and again, and may be killed at any moment."""
    made = original.copy()
    for told in (True, True, False, True):
        ledger = open_ledger(context(made))
        assert ledger is not None and len(ledger.history.entries) == len(original.told)
        nothing_wrong(ledger, original.told)
        ledger.close(finished=told)
        tried()
    files.remove_finished(made)
    assert list(made.iterdir()) == []


@pytest.mark.mended("after 2^31 sequences the scheduler ended, and each that read its ledger")
def test_numbers_at_the_end_of_32_bits(tmp_path: Path, tried: Callable[..., None]) -> None:
    for first in (2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**61):
        ledger = Ledger(tmp_path / str(first), MODEL)
        ledger.append(ADMISSION, AdmissionRecord(submit("r", n=3), first))
        ledger.append(BATCH, batch((first, 0, [1]), (first + 2, 0, [2, 3])))
        ledger.commit()
        ledger.close()
        again = open_ledger(context(tmp_path / str(first)))
        assert again is not None and again.history.next_sid == first + 3 and not again.damaged
        said = [len(one.tokens) // 4 for one in again.history.entries[b"client", "r"].choices]
        assert said == [1, 0, 2]
        again.close()
        tried()


@pytest.mark.parametrize("sub", ["lock", "."])
def test_a_lock_that_is_none(original: Original, sub: str) -> None:
    made = original.copy()
    shutil.rmtree(made / sub) if sub == "." else (made / sub).unlink()
    if sub == ".":
        made.write_text("a file")
    else:
        (made / sub).mkdir()
    with pytest.raises(BadConfig, match="ledger_dir: ") as refused:
        open_ledger(context(made))
    assert "\n" not in refused.value.message
    ledger = open_ledger(context(made, epoch=2))
    assert ledger is not None
    ledger.close()
