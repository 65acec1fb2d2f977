"""Files of JSON lines: read with a bound, worked on several at once, and written so that who is
killed can go on behind the last whole line."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

MAX_LINE_BYTES = 32 << 20
MAX_HELD_BYTES = 64 << 20
"""Of lines that are worked on at once."""
_PART = 1 << 20
Item = TypeVar("Item")
Result = TypeVar("Result")


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines that are not blank; of one beyond `MAX_LINE_BYTES`, so much that it is too
    long."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        whole = line
        while len(whole) > MAX_LINE_BYTES and not whole.endswith(b"\n"):
            whole = file.readline(MAX_LINE_BYTES + 1)
            if not whole:
                break
        if line.strip():
            yield line


async def in_order(items: Iterable[Item], work: Callable[[Item], Awaitable[Result]], window: int,
                   size: Callable[[Item], int] = lambda _: 0) -> AsyncGenerator[Result, None]:
    """Yields the results in the items' order. At most `window` items are worked on at any moment,
    and of more than one at most `MAX_HELD_BYTES`, by `size`. What `work` raises ends all."""
    pending: deque[tuple[asyncio.Future[Result], int]] = deque()
    held = 0
    try:
        for item in items:
            pending.append((asyncio.ensure_future(work(item)), size(item)))
            held += pending[-1][1]
            del item  # a long line must not outlive its work
            await asyncio.sleep(0)
            while pending and (len(pending) >= window or held > MAX_HELD_BYTES
                               or pending[0][0].done()):
                held -= pending[0][1]
                yield await pending.popleft()[0]
        while pending:
            yield await pending.popleft()[0]
    finally:
        for task, _ in pending:
            task.cancel()
        await asyncio.gather(*(task for task, _ in pending), return_exceptions=True)


class ResultFile:
    """A file of results, one a line, that one process at a time appends to. Closed by `close`.

    The lock ends with the process. A line is whole if it ends with a line feed: half a line, which
    a killed process has left, is cut off.
    """

    def __init__(self, path: Path) -> None:
        """Raises `OSError`; `BlockingIOError` while another process writes it."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.lines = self.bytes = 0
        """Of results that it has."""
        self.last = b""
        """The last of them."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.close()
            raise

    def resume(self) -> None:
        """Counts the results of an earlier process. Raises `OSError`."""
        self.lines = self.bytes = 0
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for line in file:
                if line.endswith(b"\n"):
                    self.lines, self.bytes, self.last = self.lines + 1, self.bytes + len(line), line
        os.ftruncate(self._fd, self.bytes)

    def append(self, line: bytes) -> None:
        """Writes a result. Raises `OSError`; then the file ends as before."""
        try:
            rest = memoryview(line + b"\n")
            while rest:
                rest = rest[os.pwrite(self._fd, rest, self.bytes + len(line) + 1 - len(rest)):]
        except OSError:
            os.ftruncate(self._fd, self.bytes)
            raise
        self.lines, self.bytes = self.lines + 1, self.bytes + len(line) + 1

    def read(self) -> Iterator[bytes]:
        """Yields its lines, each with its end."""
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            yield from file

    def sync(self) -> None:
        """Returns when the disk has it."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
