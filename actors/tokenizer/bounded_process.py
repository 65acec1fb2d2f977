"""A process that answers one frame at a time and is killed by the kernel when it takes too long.

For untrusted input to code that cannot be interrupted: the limit is processor time, so that a busy
machine changes nothing. After a kill the next frame gets a fresh process.
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
"""Seconds until a silent process is killed, on a machine that gives it no processor time."""
ENDING = 1.0
"""Seconds within which a process that has closed its pipes must exit."""
LENGTH = 4
"""Bytes of the length before each frame."""


class BoundedProcess:
    """The parent's side of the process. For one thread at a time."""

    def __init__(self, module: str, *args: str, hello: bytes = b"") -> None:
        """module: one of this package that calls `serve`; hello: a frame that each new process gets
        first and does not answer."""
        self._argv, self._hello = python(module, *args), hello
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, frame: bytes) -> bytes | None:
        """Waits for and returns the answer to a frame; None if it took too much. Raises `OSError`
        where no process can be started. A process killed from outside (SIGKILL, which none of its
        own limits sends: a user did, or the kernel was short of memory) says nothing about the
        frame, so another process is asked, once."""
        answer, killed = self._try(frame)
        return self._try(frame)[0] if killed else answer

    def _try(self, frame: bytes) -> tuple[bytes | None, bool]:
        """Returns the answer, and whether the process was killed from outside."""
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
            process.wait(ENDING)  # it exits, unless it has used up its time
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
        """Ends the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def hello() -> bytes:
    """Returns the frame that the parent sends first. Runs in the process."""
    return _read(sys.stdin.buffer) or b""


def serve(answer: Callable[[bytes], bytes], cpu_seconds: float) -> None:
    """Answers frames until the parent closes the pipe, each within so much processor time. Runs in
    the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (frame := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # its signal kills the process
        answered = answer(frame)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, answered)


def _write(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(len(frame).to_bytes(LENGTH, "little") + frame)
    pipe.flush()


def _read(pipe: IO[bytes], until: float | None = None) -> bytes | None:
    """Reads a frame; None at the end of the pipe and when the time is over."""
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
