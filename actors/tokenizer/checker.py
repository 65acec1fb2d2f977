"""Grammars are compiled for the first time in a process that can be killed.

Nearly all compile in milliseconds; some that are quickly written take minutes or gigabytes, in
native code that nothing interrupts. So the kernel ends the process when one of them has used its
processor time, and the next one that is asked for gets another process. What has passed here takes
as long again in the scheduler, and no longer.
"""

from __future__ import annotations

import contextlib
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import IO

import msgspec
from msgspec import Struct

from actorium.actors.errors import InvalidRequest
from actorium.actors.grammar import Vocabulary, grammar_of
from actorium.actors.params import Structured
from actorium.actors.runtime.process import python

CPU_SECONDS = 1.0
MEMORY = 4 << 30
"""Bytes of address space."""
PATIENCE = 60.0
"""Seconds until a process that does not answer, on a machine that gives it no time, is killed."""
LENGTH = 4
"""Bytes before each frame that say how long it is."""


class Verdict(Struct, array_like=True):
    """What became of a grammar: one of these."""

    grammar: str = ""
    error: str = ""


class Checker:
    """The process, as its parent sees it. For one thread at a time."""

    def __init__(self, path: Path, size: int, eos: Sequence[int]) -> None:
        """As of `Vocabulary`."""
        self._argv = python(__name__, str(path), str(size), *(str(token) for token in eos))
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, wanted: Structured) -> str:
        """As llguidance writes it. Waits. Raises `InvalidRequest` if it does not compile, or takes
        too much for that."""
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._process = subprocess.Popen(self._argv, stdin=subprocess.PIPE,
                                                       stdout=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None
        answer = None
        with contextlib.suppress(BrokenPipeError):
            _write(process.stdin, msgspec.msgpack.encode(wanted))
            answer = _read(process.stdout, monotonic() + PATIENCE)
        if answer is None:
            self.close()
            raise InvalidRequest(f"structured: the grammar takes more than {CPU_SECONDS:g} s or "
                                 f"{MEMORY >> 30} GiB to compile", "structured")
        verdict = msgspec.msgpack.decode(answer, type=Verdict)
        if verdict.error:
            raise InvalidRequest(verdict.error, "structured")
        return verdict.grammar

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def _write(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(len(frame).to_bytes(LENGTH, "little") + frame)
    pipe.flush()


def _read(pipe: IO[bytes], until: float | None = None) -> bytes | None:
    """A frame; None at the end, and when the time is over."""
    head = _take(pipe, LENGTH, until)
    return None if head is None else _take(pipe, int.from_bytes(head, "little"), until)


def _take(pipe: IO[bytes], count: int, until: float | None) -> bytes | None:
    raw = getattr(pipe, "raw", pipe)
    taken = b""
    while len(taken) < count:
        if until is not None and not select.select([raw], [], [], max(until - monotonic(), 0))[0]:
            return None
        more = raw.read(count - len(taken))
        if not more:
            return None
        taken += more
    return taken


# --- the process ----------------------------------------------------------------------------------

def main(path: str, size: str, *eos: str) -> None:
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = Vocabulary(Path(path), int(size), [int(token) for token in eos])
    while (frame := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal kills
        try:
            grammar = grammar_of(msgspec.msgpack.decode(frame, type=Structured))
            vocabulary.matcher(grammar)
            verdict = Verdict(grammar=grammar)
        except InvalidRequest as error:
            verdict = Verdict(error=error.message)
        except Exception as error:  # whatever it is, it is no grammar
            verdict = Verdict(error=f"structured: {type(error).__name__}: {error}"[:500])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    main(*sys.argv[1:])
