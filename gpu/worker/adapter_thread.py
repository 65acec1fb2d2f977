"""A thread that reads adapters while steps go on. Who admits sequences looks up what it has read by
the scheduler's epoch and number, so that numbers of an older scheduler mean nothing to a newer one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

from actorium.actors.errors import BadModel
from actorium.actors.messages import AdapterAnswer, DropAdapter, LoadAdapter
from actorium.actors.models.adapter_files import read_adapter

if TYPE_CHECKING:
    from actorium.gpu.adapters.adapter_reader import AdapterReader, HostAdapter

ERROR = 4000
"""Characters of an error that are sent."""


class AdapterThread:
    """Reads adapters, each once for all schedulers that name it."""

    def __init__(self, rank: int, max_rank: int, answer: Callable[[AdapterAnswer], None]) -> None:
        """max_rank: of a module; answer: called by the thread."""
        self._rank, self._max_rank, self._answer = rank, max_rank, answer
        self._queue: SimpleQueue[LoadAdapter] = SimpleQueue()
        self._read: dict[bytes, HostAdapter] = {}
        """By digest."""
        self._lock = Lock()
        """On both tables."""
        self.known: dict[tuple[int, int], HostAdapter] = {}
        """By the scheduler's epoch and number."""
        self.reader: AdapterReader | None = None
        """None where no adapters are served."""

    def submit(self, message: LoadAdapter) -> None:
        """Queues an adapter to be read."""
        self._queue.put(message)

    def run(self) -> None:
        """The thread's body."""
        while True:
            message = self._queue.get()
            error = self._load(message)[:ERROR]
            self._answer(AdapterAnswer(message.epoch, self._rank, message.adapter.number, error))

    def drop(self, message: DropAdapter) -> None:
        """Forgets a number, and what no number stands for any more."""
        with self._lock:
            self.known.pop((message.epoch, message.number), None)
            named = {own.digest for own in self.known.values()}
            self._read = {digest: own for digest, own in self._read.items() if digest in named}

    def reset(self, epoch: int) -> None:
        """Forgets the numbers of older schedulers, not what was read for them."""
        with self._lock:
            for key in [key for key in self.known if key[0] < epoch]:
                del self.known[key]

    def _load(self, message: LoadAdapter) -> str:
        """Why the adapter cannot be served; empty: it can."""
        ref, reader = message.adapter, self.reader
        if reader is None:
            return "adapters are not served (--enable-lora)"
        with self._lock:
            own = self._read.get(ref.digest)
        if own is None:
            try:
                files = read_adapter(Path(ref.path), self._max_rank)
                if files.digest != ref.digest:
                    return f"adapter: {ref.path}: its files have changed since it was named"
                own = reader.read(files)
            except (BadModel, OSError, MemoryError) as error:
                return str(error) or "there is no memory for the adapter"
        with self._lock:
            self._read[ref.digest] = self.known[message.epoch, ref.number] = own
        return ""
