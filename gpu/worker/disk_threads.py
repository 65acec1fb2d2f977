"""Two threads that do the scheduler's page orders: one finds and reads, since somebody waits for
that, the other writes. Steps go on meanwhile. The disk is any `PageStore`, a remote one as well.

A disk may hang. So each order has a time by which it is answered, and a third thread that sees to
it: what has not come by then is missing, and the disk is left alone for a while. A thread that
hangs touches no slot: pages go through a buffer of its own, and one that comes late is dropped.
The disk is opened by a thread too, since that looks at every file: the start waits for it no longer
than for any other order, and the worker serves without the disk until it answers."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic

import numpy as np

from actorium.actors.messages import PageAnswer, PageOrder, Reset
from actorium.gpu.step.host_pages import HostPages
from actorium.gpu.step.page_store import DONE, MISSING, PageStore

LOG = logging.getLogger("actorium.worker")
NAME_BYTES = 16
LATE = 3
"""Of `PageAnswer.outcomes`, beside those of `disk_pages`."""
WRITES_LATER = 10
"""Nobody waits for writes: they have so many times as long, since some of them make room."""
REST_S = 30.0
"""Seconds for which a disk that was too slow is left alone."""
Answer = Callable[[PageAnswer], None]
Guard = Callable[[Callable[[], None]], None]
"""Runs a thread's body and hands what it raises to the worker."""


class DiskTask:
    """An order until it is answered."""

    __slots__ = ("done", "due", "late", "order", "outcomes", "over")

    def __init__(self, order: PageOrder, due: float) -> None:
        """due: on the monotonic clock."""
        self.order, self.due = order, due
        self.outcomes = bytearray(len(order.names) // NAME_BYTES)
        self.done = 0
        """Names of which `outcomes` says something."""
        self.over = self.late = False
        """It was answered, or nobody waits for it any more; its time had run out."""


class DiskLane:
    """What one thread does, in order."""

    def __init__(self, name: str, patience: float, width: int) -> None:
        """patience: seconds for each order; width: of a page, in bytes."""
        self.name, self.patience = name, patience
        self.queue: SimpleQueue[DiskTask] = SimpleQueue()
        self.open: deque[DiskTask] = deque()
        """Not over, the oldest first."""
        self.doing: DiskTask | None = None
        self.page = np.zeros(width, np.uint8)
        """On its way."""

    @property
    def hangs(self) -> bool:
        """Whether the thread is still at what was given up."""
        return self.doing is not None and self.doing.late


class DiskThreads:
    """Moves pages between host slots and files. Slots are the scheduler's: it gives none of an
    order's to anything else before the answer."""

    def __init__(self, disk: OpeningDisk, host: HostPages, worker: int, rank: int,
                 timeout: float) -> None:
        """worker: its epoch; timeout: seconds within which what is read is there."""
        self._disk, self._host, self._worker, self._rank = disk, host, worker, rank
        self._epoch, self._adopted = 0, False
        """Of the scheduler that is served, and whether it has greeted this worker."""
        self._reads = DiskLane("disk reads", timeout, host.width)
        self._writes = DiskLane("disk writes", WRITES_LATER * timeout, host.width)
        self._lanes = self._reads, self._writes
        self._changed = threading.Condition()
        """Holds its lock: who touches a slot, an open task, or what is below."""
        self._looks_at = math.inf
        """When the third thread looks next."""
        self._rests_until = -math.inf if disk.opened else monotonic() + REST_S
        self._answer: Answer

    def start(self, answer: Answer, guarded: Guard) -> None:
        """answer: called from the threads, and by `submit`; it must not call back."""
        self._answer = answer
        for lane in self._lanes:
            threading.Thread(target=guarded, name=lane.name, daemon=True,
                             args=(lambda lane=lane: self._work(lane),)).start()
        threading.Thread(target=guarded, name="disk times", daemon=True,
                         args=(self._watch,)).start()

    def submit(self, message: PageOrder | Reset) -> None:
        """In the order in which they come. An order before its scheduler has greeted this worker is
        dropped: it was for the worker before, whose slots were others, or is of a scheduler that
        was replaced."""
        if isinstance(message, PageOrder):
            self._order(message)
        elif message.worker == self._worker:
            self.reset(message.epoch)
            with self._changed:
                self._adopted = self._adopted or message.epoch == self._epoch

    def _order(self, order: PageOrder) -> None:
        """Queues it; while the disk rests its answer is there at once."""
        lane = self._reads if order.verb in ("find", "read") else self._writes
        waits = order.verb != "wipe"
        with self._changed:
            if not self._adopted or order.epoch != self._epoch:
                return
            task = DiskTask(order, monotonic() + lane.patience if waits else math.inf)
            lane.open.append(task)
            if waits and (monotonic() < self._rests_until or any(own.hangs for own in self._lanes)):
                self._end(lane, task)
                return
            if task.due < self._looks_at:
                self._changed.notify()
        lane.queue.put(task)

    def reset(self, epoch: int) -> None:
        """Another scheduler has taken over: orders of the one before touch no slot any more once
        this returns. Without effect where it has adopted this worker already."""
        with self._changed:
            if epoch <= self._epoch:
                return
            self._epoch, self._adopted = epoch, False
            for lane in self._lanes:
                for task in lane.open:
                    task.over = True
                lane.open.clear()

    def _end(self, lane: DiskLane, task: DiskTask) -> None:
        """Answers, unless nobody waits any more; with the lock held."""
        if task.over:
            return
        task.over = True
        lane.open.remove(task)
        if task.order.epoch == self._epoch:
            self._answer(PageAnswer(self._epoch, self._worker, self._rank, task.order.ticket,
                                    outcomes=bytes(task.outcomes), pages=self._disk.pages,
                                    disk_bytes=self._disk.disk_bytes))

    # --- the threads that touch the disk ---------------------------------------------------------

    def _work(self, lane: DiskLane) -> None:
        while True:
            task = lane.queue.get()
            began = monotonic()
            with self._changed:
                lane.doing = task
            self._do(lane, task)
            with self._changed:
                self._end(lane, task)
                lane.doing = None
            if task.late and monotonic() - began > lane.patience:
                LOG.warning("%s: the disk answers again, after %.1f s", self._disk.where,
                            monotonic() - began)

    def _do(self, lane: DiskLane, task: DiskTask) -> None:
        verb, names = task.order.verb, task.order.names
        if verb == "wipe":
            self._disk.wipe()
            return
        slots = np.frombuffer(task.order.slots, np.int32).tolist()
        for i in range(len(task.outcomes)):
            name, found = names[i * NAME_BYTES:(i + 1) * NAME_BYTES], MISSING
            if task.over:
                return
            if verb == "find":
                found = DONE if self._disk.holds(name) else MISSING
            elif verb == "write":
                found = self._write(lane, task, name, slots[i])
            else:
                found = self._read(lane, task, name, slots[i])
            with self._changed:
                if not task.over:
                    task.outcomes[i], task.done = found, i + 1

    def _read(self, lane: DiskLane, task: DiskTask, name: bytes, slot: int) -> int:
        found, crc = self._disk.read(name, lane.page.data)
        with self._changed:
            if found == DONE and not task.over:
                self._host.rows[slot] = lane.page
                self._host.sums[slot] = crc
        return found

    def _write(self, lane: DiskLane, task: DiskTask, name: bytes, slot: int) -> int:
        with self._changed:
            if task.over:
                return MISSING
            lane.page[:] = self._host.rows[slot]
            crc = int(self._host.sums[slot])
        return DONE if self._disk.write(name, lane.page.data, crc) else MISSING

    # --- the one that looks at the clock ---------------------------------------------------------

    def _watch(self) -> None:
        with self._changed:
            while True:
                due = min((task.due for lane in self._lanes for task in lane.open),
                          default=math.inf)
                now = monotonic()
                if due <= now:
                    self._give_up(now)
                    continue
                self._looks_at = due
                self._changed.wait(None if due == math.inf else due - now)

    def _give_up(self, now: float) -> None:
        """Answers all that waits for the disk: what is not there yet is missing."""
        count = 0
        for lane in self._lanes:
            if lane.doing is not None:
                lane.doing.late = True
            for task in [task for task in lane.open if task.due < math.inf]:
                task.late = True
                if task.order.verb != "write":
                    left = len(task.outcomes) - task.done
                    task.outcomes[task.done:] = bytes([LATE]) * left
                    count += left
                self._end(lane, task)
        self._rests_until = now + REST_S
        LOG.warning("%s: the disk is too slow (%g s; disk_timeout): %d pages are computed again, "
                    "and it is left alone for %g s", self._disk.where, self._reads.patience, count,
                    REST_S)


# --- Opening the disk ----------------------------------------------------------------------------

class OpeningDisk:
    """A store while it is opened, and from then on. Methods wait for it, on the threads that touch
    it."""

    def __init__(self, where: str, make: Callable[[], PageStore], patience: float) -> None:
        """where: its flag and place, for the log; patience: seconds. Raises what `make` raises
        within that time; what it raises later is logged, and no page is there."""
        self.where, self._patience = where, patience
        self._disk: PageStore | None = None
        self._error: Exception | None = None
        self._began = monotonic()
        self._done = threading.Event()
        threading.Thread(target=self._open, args=(make,), name="disk opening", daemon=True).start()
        if not self._done.wait(patience):
            LOG.warning("%s: the disk does not answer (%g s; disk_timeout): the worker starts "
                        "without it", where, patience)
        elif self._error is not None:
            raise self._error

    def _open(self, make: Callable[[], PageStore]) -> None:
        try:
            self._disk = make()
        except Exception as error:  # the thread that waits raises it
            self._error = error
        late = monotonic() - self._began
        if late > self._patience and self._error is not None:
            LOG.error("%s: cannot be used: %s", self.where, self._error)
        elif late > self._patience:
            LOG.warning("%s: the disk answers, after %.1f s", self.where, late)
        self._done.set()

    @property
    def opened(self) -> bool:
        """Whether methods do not wait."""
        return self._done.is_set()

    @property
    def pages(self) -> int:
        """As far as is known."""
        return 0 if self._disk is None else self._disk.pages

    @property
    def disk_bytes(self) -> int:
        """As far as is known."""
        return 0 if self._disk is None else self._disk.held_bytes

    def _waited(self) -> PageStore | None:
        self._done.wait()
        return self._disk

    def holds(self, name: bytes) -> bool:
        disk = self._waited()
        return disk is not None and disk.holds(name)

    def read(self, name: bytes, into: memoryview) -> tuple[int, int]:
        disk = self._waited()
        return (MISSING, 0) if disk is None else disk.read(name, into)

    def write(self, name: bytes, page: memoryview, crc: int) -> bool:
        disk = self._waited()
        return disk is not None and disk.write(name, page, crc)

    def wipe(self) -> None:
        if (disk := self._waited()) is not None:
            disk.wipe()
