"""A process that answers one frame at a time, and that the kernel ends when it takes too long.

For work in code that nothing interrupts, on what anyone may send: it is bounded by processor time,
so that a busy machine changes nothing. The next one that is asked gets another process.
"""

from __future__ import annotations

import contextlib
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from time import monotonic
from typing import IO

from actorium.actors.runtime.process import python

MEMORY = 4 << 30
"""Bytes of address space."""
PATIENCE = 60.0
"""Seconds until a process that does not answer, on a machine that gives it no time, is killed."""
ENDING = 1.0
"""Seconds in which a process that has closed its pipes is gone."""
LENGTH = 4
"""Bytes before each frame that say how long it is."""


class BoundedProcess:
    """The process, as its parent sees it. For one thread at a time."""

    def __init__(self, module: str, *args: str, hello: bytes = b"") -> None:
        """module: of ours, which calls `serve`; hello: a frame that is sent to each process first,
        and not answered."""
        self._argv, self._hello = python(module, *args), hello
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, frame: bytes) -> bytes | None:
        """The answer; None if it took too much. Waits. Raises `OSError` where no process can be
        had. One that was killed from outside (SIGKILL, which no limit of its own sends: somebody
        did, or the kernel was short of memory) says nothing of the frame: another one is asked, a
        single time."""
        answer, killed = self._try(frame)
        return self._try(frame)[0] if killed else answer

    def _try(self, frame: bytes) -> tuple[bytes | None, bool]:
        """The answer, and whether the process was killed from outside."""
        process = self.process
        if process is None or process.poll() is not None:
            process = self._fresh()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            _write(process.stdin, frame)
            answer = _read(process.stdout, monotonic() + PATIENCE)
            if answer is not None:
                return answer, False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)  # it is over, unless it has used up its time
        killed = process.returncode == -signal.SIGKILL
        self.close()
        return None, killed

    def _fresh(self) -> subprocess.Popen[bytes]:
        self.close()
        process = self.process = subprocess.Popen(self._argv, stdin=subprocess.PIPE,
                                                  stdout=subprocess.PIPE)
        if self._hello:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                _write(process.stdin, self._hello)
        return process

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def hello() -> bytes:
    """In the process: the frame that its parent sends first."""
    return _read(sys.stdin.buffer) or b""


def serve(answer: Callable[[bytes], bytes], cpu_seconds: float) -> None:
    """In the process: answer until nobody asks any more. Every answer may take so much processor
    time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (frame := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # its signal kills
        told = answer(frame)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, told)


def _write(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(len(frame).to_bytes(LENGTH, "little") + frame)
    pipe.flush()


def _read(pipe: IO[bytes], until: float | None = None) -> bytes | None:
    """A frame; None at the end, and when the time is over."""
    head = _take(pipe, LENGTH, until)
    return None if head is None else _take(pipe, int.from_bytes(head, "little"), until)


def _take(pipe: IO[bytes], count: int, until: float | None) -> bytes | None:
    raw = getattr(pipe, "raw", pipe)
    taken = bytearray()
    while len(taken) < count:
        if until is not None and not select.select([raw], [], [], max(until - monotonic(), 0))[0]:
            return None
        more = raw.read(count - len(taken))
        if not more:
            return None
        taken += more
    return bytes(taken)
