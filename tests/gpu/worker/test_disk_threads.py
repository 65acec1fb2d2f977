"""The threads that move pages to and from a disk, above all of one that hangs."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from actorium.actors.messages import PageAnswer, PageOrder, Reset
from actorium.gpu.step.disk_pages import DiskPages
from actorium.gpu.step.host_pages import HostPages
from actorium.gpu.step.page_store import DONE, MISSING
from actorium.gpu.worker import disk_threads
from actorium.gpu.worker.disk_threads import LATE, DiskThreads, OpeningDisk

SLOTS, WIDTH, TIMEOUT, WORKER = 8, 4096, 0.3, 3


class HangingPages(DiskPages):
    """A disk that does not answer while its gate is closed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 1 << 24, b"n" * 16)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def _hang(self) -> None:
        self.entered.set()
        assert self.gate.wait(60)

    def holds(self, name: bytes) -> bool:
        self._hang()
        return super().holds(name)

    def read(self, name: bytes, into: memoryview) -> tuple[int, int]:
        self._hang()
        return super().read(name, into)

    def write(self, name: bytes, page: memoryview, crc: int) -> bool:
        self._hang()
        return super().write(name, page, crc)


class Moved:
    """The threads, their slots, and what they have answered."""

    def __init__(self, directory: Path, gate: threading.Event | None = None) -> None:
        """gate: the disk is not opened before it is."""
        self.disk, self._gate = HangingPages(directory), gate
        self.opening = OpeningDisk(str(directory), lambda: self._opened(directory), TIMEOUT)
        self.host = HostPages([[torch.zeros(1, 4, WIDTH, dtype=torch.uint8)]], SLOTS * WIDTH)
        self.threads = DiskThreads(self.opening, self.host, WORKER, 0, TIMEOUT)
        self.answers: list[PageAnswer] = []
        self.failed: list[BaseException] = []
        self._came = threading.Condition()
        self.threads.start(self._on_answer, lambda body: body())
        self.threads.submit(Reset(1, WORKER))

    def _opened(self, directory: Path) -> HangingPages:
        assert self._gate is None or self._gate.wait(60)
        return self.disk

    def _on_answer(self, answer: PageAnswer) -> None:
        with self._came:
            self.answers.append(answer)
            self._came.notify()

    def order(self, ticket: int, verb: str, names: range, slots: range = range(0),
              epoch: int = 1) -> None:
        self.threads.submit(PageOrder(
            epoch, ticket, verb, b"".join(map(name_of, names)),  # type: ignore[arg-type]
            np.array(slots, np.int32).tobytes()))

    def wait_for_answer(self, ticket: int, patience: float = 10.0) -> list[int]:
        with self._came:
            assert self._came.wait_for(
                lambda: any(a.ticket == ticket for a in self.answers), patience), "no answer"
            (answer,) = [a for a in self.answers if a.ticket == ticket]
            return list(answer.outcomes)

    def fill(self) -> list[bytes]:
        """Writes a page of each slot; returns them."""
        pages = [np.random.default_rng(slot).bytes(WIDTH) for slot in range(SLOTS)]
        for slot, page in enumerate(pages):
            self.host.rows[slot] = np.frombuffer(page, np.uint8)
            self.host.sums[slot] = zlib.crc32(page)
        self.order(1, "write", range(SLOTS), range(SLOTS))
        assert self.wait_for_answer(1) == [DONE] * SLOTS
        self.host.rows[:] = 0
        return pages


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moved]:
    monkeypatch.setattr(disk_threads, "REST_S", 0.5)
    made = Moved(tmp_path / "pages")
    yield made
    made.disk.gate.set()


def test_pages_go_and_come_back(moved: Moved) -> None:
    pages = moved.fill()
    moved.order(2, "find", range(SLOTS + 1))
    assert moved.wait_for_answer(2) == [DONE] * SLOTS + [MISSING]
    moved.order(3, "read", range(SLOTS), range(SLOTS - 1, -1, -1))
    assert moved.wait_for_answer(3) == [DONE] * SLOTS
    assert [row.tobytes() for row in moved.host.rows] == pages[::-1]
    assert moved.host.sums.tolist() == [zlib.crc32(page) for page in pages[::-1]]
    moved.order(4, "wipe", range(0))
    assert moved.wait_for_answer(4) == []
    moved.order(5, "find", range(2))
    assert moved.wait_for_answer(5) == [MISSING] * 2


@pytest.mark.parametrize("verb", ["find", "read"])
def test_who_waits_for_a_disk_that_hangs_is_answered_in_time(moved: Moved, verb: str) -> None:
    """And so is everybody behind: at once, while it is left alone, and while it hangs."""
    moved.fill()
    moved.disk.gate.clear()
    began = time.monotonic()
    moved.order(2, verb, range(4), range(4 if verb == "read" else 0))
    moved.order(3, verb, range(4, 6), range(4, 6) if verb == "read" else range(0))
    assert moved.wait_for_answer(2) == [LATE] * 4 and moved.wait_for_answer(3) == [LATE] * 2
    assert time.monotonic() - began > TIMEOUT
    for ticket in (4, 5):
        moved.order(ticket, verb, range(4), range(4 if verb == "read" else 0))
        assert [a.ticket for a in moved.answers][-1] == ticket, "at once"
        assert moved.wait_for_answer(ticket) == [MISSING] * 4
        time.sleep(0.6)  # longer than the rest: it hangs all the same


def test_a_page_that_comes_late_is_dropped_and_the_disk_is_used_again(moved: Moved) -> None:
    pages = moved.fill()
    moved.disk.gate.clear()
    moved.order(2, "read", range(4), range(4))
    assert moved.wait_for_answer(2) == [LATE] * 4
    moved.host.rows[:] = 7  # the slots are another page's by now
    moved.disk.gate.set()
    time.sleep(0.2)
    assert (moved.host.rows == 7).all() and not any(lane.hangs for lane in moved.threads._lanes)
    moved.order(3, "read", range(4), range(4))
    assert moved.wait_for_answer(3) == [MISSING] * 4, "it is left alone for a while"
    time.sleep(0.5)
    moved.order(4, "read", range(4), range(4))
    assert moved.wait_for_answer(4) == [DONE] * 4
    assert [row.tobytes() for row in moved.host.rows[:4]] == pages[:4]
    assert len(moved.answers) == 4, "each order once"


def test_what_had_come_before_it_hung_is_kept(moved: Moved) -> None:
    pages, count = moved.fill(), [0]
    hang = moved.disk._hang

    def third() -> None:
        count[0] += 1
        if count[0] == 3:
            moved.disk.gate.clear()
        hang()

    moved.disk._hang = third  # type: ignore[method-assign]
    moved.order(2, "read", range(4), range(4))
    assert moved.wait_for_answer(2) == [DONE, DONE, LATE, LATE]
    assert [row.tobytes() for row in moved.host.rows[:2]] == pages[:2]


def test_a_write_that_hangs_gives_its_slots_back(
        moved: Moved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over when it is seen to hang: no other wait may end before."""
    threads = moved.threads
    for lane in threads._lanes:
        monkeypatch.setattr(lane, "patience", 60.0)
    pages = moved.fill()
    moved.order(2, "wipe", range(0))
    assert moved.wait_for_answer(2) == []
    for slot, page in enumerate(pages):
        moved.host.rows[slot] = np.frombuffer(page, np.uint8)
    moved.disk.gate.clear()
    moved.disk.entered.clear()
    moved.order(3, "write", range(4), range(4))
    assert moved.disk.entered.wait(60)
    with threads._changed:
        threads._writes.open[0].due = 0.0
        threads._changed.notify()
    assert moved.wait_for_answer(3) == [MISSING] * 4
    moved.host.rows[:] = 9
    moved.disk.gate.set()
    while threads._writes.doing is not None:
        time.sleep(0.01)
    with threads._changed:
        threads._rests_until = 0.0
    moved.order(4, "read", range(4), range(4))
    assert moved.wait_for_answer(4) == [DONE, *[MISSING] * 3], "what was under way is whole"
    assert moved.host.rows[0].tobytes() == pages[0]


def test_another_scheduler_does_not_wait_for_a_disk_that_hangs(moved: Moved) -> None:
    moved.fill()
    moved.disk.gate.clear()
    moved.disk.entered.clear()
    moved.order(2, "read", range(4), range(4))
    assert moved.disk.entered.wait(10)
    began = time.monotonic()
    moved.threads.reset(2)
    assert time.monotonic() - began < TIMEOUT
    moved.host.rows[:] = 7
    moved.disk.gate.set()
    moved.threads.submit(Reset(2, WORKER))
    moved.order(3, "find", range(2), epoch=2)
    assert moved.wait_for_answer(3) == [DONE] * 2
    assert (moved.host.rows == 7).all() and [a.ticket for a in moved.answers] == [1, 3]


def test_orders_come_before_the_reset_is_applied(moved: Moved) -> None:
    """They reach these threads sooner than the one that computes: what that says of the same
    scheduler takes no order back, or who waits for the answer would wait for ever."""
    moved.fill()
    moved.disk.gate.clear()
    moved.disk.entered.clear()
    moved.threads.submit(Reset(2, WORKER))
    moved.order(2, "find", range(2), epoch=2)
    assert moved.disk.entered.wait(10)
    moved.threads.reset(2)
    moved.disk.gate.set()
    assert moved.wait_for_answer(2) == [DONE] * 2
    moved.threads._rests_until = time.monotonic() + 60
    moved.threads.submit(Reset(3, WORKER))
    moved.order(3, "find", range(2), epoch=3)
    moved.threads.reset(3)
    assert moved.wait_for_answer(3) == [MISSING] * 2


def test_orders_for_another_worker_are_dropped(moved: Moved) -> None:
    """What was on its way to one that died reaches the next, whose slots are others."""
    moved.fill()
    moved.threads.reset(2)  # it has asked who is there
    moved.threads.submit(Reset(2, WORKER - 1))
    moved.order(2, "read", range(1), range(1), epoch=2)
    moved.order(3, "read", range(1), range(1), epoch=1)
    moved.threads.submit(Reset(2, WORKER))
    moved.order(4, "read", range(1), range(1), epoch=1)  # of a scheduler that is gone
    moved.order(5, "read", range(2), range(2, 4), epoch=2)
    assert moved.wait_for_answer(5) == [DONE] * 2 and not moved.host.rows[0].any()
    assert [answer.ticket for answer in moved.answers] == [1, 5]


def test_a_disk_that_hangs_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             caplog: pytest.LogCaptureFixture) -> None:
    """The worker starts without it, and uses it once it is there."""
    gate, began = threading.Event(), time.monotonic()
    moved = Moved(tmp_path / "pages", gate)
    assert TIMEOUT <= time.monotonic() - began < 10
    assert "does not answer" in caplog.text and not moved.opening.opened
    moved.order(11, "read", range(3), range(3))
    moved.order(12, "write", range(3), range(3))
    assert moved.wait_for_answer(11) == [MISSING] * 3 and moved.wait_for_answer(12) == [MISSING] * 3
    assert moved.opening.pages == moved.opening.disk_bytes == 0
    monkeypatch.setattr(moved.threads, "_rests_until", 0.0)
    moved.order(13, "find", range(3))
    assert moved.wait_for_answer(13) == [LATE] * 3  # it still hangs, and rests again
    gate.set()
    assert moved.opening.holds(name_of(1)) is False  # waits until it is opened
    assert "the disk answers" in caplog.text
    while moved.threads._reads.doing is not None:
        time.sleep(0.01)
    monkeypatch.setattr(moved.threads, "_rests_until", 0.0)
    moved.fill()
    moved.order(14, "find", range(SLOTS))
    assert moved.wait_for_answer(14) == [DONE] * SLOTS and moved.opening.pages == SLOTS


def test_a_disk_that_cannot_be_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In time the start is refused; later it is too late for that, and nothing is there."""
    def refused() -> DiskPages:
        raise PermissionError(13, "others may look into it")

    with pytest.raises(PermissionError):
        OpeningDisk(str(tmp_path), refused, 10.0)
    gate = threading.Event()

    def late() -> DiskPages:
        assert gate.wait(60)
        return refused()

    disk = OpeningDisk(str(tmp_path), late, 0.05)
    gate.set()
    assert disk.holds(name_of(1)) is False and disk.opened
    assert disk.read(name_of(1), memoryview(bytearray(WIDTH))) == (MISSING, 0)
    assert disk.write(name_of(1), memoryview(bytes(WIDTH)), 0) is False
    disk.wipe()
    assert disk.pages == disk.disk_bytes == 0 and "cannot be used" in caplog.text
