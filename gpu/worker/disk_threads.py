"""Two threads that do the scheduler's page orders: one finds and reads, since somebody waits for
that, the other writes. Steps go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from actorium.actors.messages import PageAnswer, PageOrder
from actorium.gpu.step.disk_pages import DONE, MISSING, DiskPages
from actorium.gpu.step.host_pages import HostPages

NAME_BYTES = 16
Answer = Callable[[PageAnswer], None]
Guard = Callable[[Callable[[], None]], None]
"""Runs a thread's body and tells the worker of what it raises."""


class DiskThreads:
    """Moves pages between host slots and files. Slots are the scheduler's: it gives none of an
    order's to anything else before the answer."""

    def __init__(self, disk: DiskPages, host: HostPages, worker: int, rank: int) -> None:
        """worker: its epoch."""
        self._disk, self._host, self._worker, self._rank = disk, host, worker, rank
        self._epoch = 0
        self._reads: SimpleQueue[PageOrder] = SimpleQueue()
        self._writes: SimpleQueue[PageOrder] = SimpleQueue()
        self._turns = threading.Lock(), threading.Lock()
        """Held by each thread while it touches a slot."""
        self._answer: Answer

    def start(self, answer: Answer, guarded: Guard) -> None:
        """answer: called from the threads."""
        self._answer = answer
        for queue, turn, name in ((self._reads, self._turns[0], "disk reads"),
                                  (self._writes, self._turns[1], "disk writes")):
            threading.Thread(target=guarded, name=name, daemon=True,
                             args=(lambda queue=queue, turn=turn: self._work(queue, turn),)).start()

    def submit(self, order: PageOrder) -> None:
        """Queue an order."""
        (self._reads if order.verb in ("find", "read") else self._writes).put(order)

    def reset(self, epoch: int) -> None:
        """Another scheduler has taken over: orders of the one before touch no slot any more once
        this returns."""
        with self._turns[0], self._turns[1]:
            self._epoch = epoch

    def _work(self, queue: SimpleQueue[PageOrder], turn: threading.Lock) -> None:
        while True:
            order = queue.get()
            found = self._do(order, turn)
            if order.epoch == self._epoch:
                self._answer(PageAnswer(order.epoch, self._worker, self._rank, order.ticket,
                                        found=found, pages=self._disk.pages,
                                        disk_bytes=self._disk.bytes))

    def _do(self, order: PageOrder, turn: threading.Lock) -> bytes:
        names = [order.names[at:at + NAME_BYTES] for at in range(0, len(order.names), NAME_BYTES)]
        if order.verb == "find":
            return bytes(DONE if self._disk.holds(name) else MISSING for name in names)
        if order.verb == "wipe":
            self._disk.wipe()
            return b""
        found = bytearray(len(names))
        for i, (name, slot) in enumerate(zip(names, np.frombuffer(order.slots, np.int32).tolist(),
                                             strict=True)):
            with turn:
                if order.epoch != self._epoch:
                    break
                found[i] = self._read(name, slot) if order.verb == "read" else \
                    self._disk.write(name, self._host.rows[slot].data, int(self._host.sums[slot]))
        return bytes(found)

    def _read(self, name: bytes, slot: int) -> int:
        found, crc = self._disk.read(name, self._host.rows[slot].data)
        if found == DONE:
            self._host.sums[slot] = crc
        return found


