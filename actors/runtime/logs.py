"""Logging of an actor: JSON lines to <run_dir>/<role>.log, and what people should see to stderr.

The file gets everything from `log_level` on and is rotated at `FILE_BYTES`. stderr gets warnings
and, if wanted, the operational lines (`OPERATION`), as text or as JSON. A thread writes to stderr,
so that a slow reader blocks nobody; if it cannot keep up, lines are dropped and counted.

No line may hold a prompt, an output or a key. Of an exception during a request only its type and
where it was raised are logged (`error_fields`), since its message may quote any of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from actorium.actors.runtime.security import private_paths as private

if TYPE_CHECKING:
    from actorium.actors.config.tree import RuntimeConfig

LOG = logging.getLogger("actorium.logs")
OPERATION = frozenset({"actorium.stats", "actorium.access", "actorium.models"})
"""Loggers of operational lines: the periodic statistics and the requests."""
FATAL = "actorium.shell"
"""The shell's logger of fatal errors, which the launcher prints."""
FILE_BYTES = 8 << 20
"""Maximum size of a log, and of its rotated predecessor."""
LINES_HELD = 2000
"""Maximum of lines that wait for stderr."""
STDERR = 2
LAST_LINES = 0.5
"""Seconds that an ending process waits for its last lines to be written."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, role, epoch, logger, message, the fields
    of a record's `fields`, and the stack of an exception."""

    def __init__(self, role: str, epoch: int) -> None:
        super().__init__()
        self._fixed = {"role": role, "epoch": epoch}

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(record.created, 6), "level": record.levelname.lower(), **self._fixed,
                "logger": record.name, "message": record.getMessage()}
        line |= {name: value for name, value in getattr(record, "fields", {}).items()
                 if name not in line}
        if record.exc_info and record.exc_info[1] is not None:
            line |= error_fields(record.exc_info[1])
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """Level, time and role, then the message: `INFO 11-22 09:30:00 [watchdog] ...`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{record.levelname} {at} [{self._role}] {record.getMessage()}"


class LogFile(logging.Handler):
    """A file that is renamed to `<role>.old.log` when it is full. faulthandler writes into it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._open()

    def _open(self) -> None:
        fd = private.open_file(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._file = open(fd, "ab", buffering=0)  # noqa: SIM115
        self._left = FILE_BYTES - self._file.tell()
        faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True)
        faulthandler.enable(file=self._file, all_threads=True)

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record).encode("utf-8", "replace") + b"\n"
        # An actor must not die of a full disk when it logs.
        with contextlib.suppress(OSError):
            if self._left < len(line):
                full = self._file
                self._path.replace(self._path.with_suffix(".old.log"))
                self._open()
                full.close()
            self._left -= len(line)
            self._file.write(line)


class Terminal(logging.Handler):
    """stderr, written by a thread that is started with the first line."""

    def __init__(self, fd: int = STDERR) -> None:
        super().__init__()
        self._fd = fd
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= LINES_HELD:
            self._dropped += 1
            return
        self._lines.put(self.format(record) + "\n")
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="stderr", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        over = False
        while not over:
            lines = [self._lines.get()]
            with contextlib.suppress(Empty):
                while len(lines) < 100:
                    lines.append(self._lines.get_nowait())
            over = None in lines
            data = "".join(line for line in lines if line is not None)
            dropped, self._dropped = self._dropped, 0
            if dropped:
                data += f"({dropped} lines were dropped: stderr did not take them)\n"
            try:
                _write_all(self._fd, data.encode("utf-8", "replace"))
            except OSError:
                return  # nobody reads it any more

    def finish(self, timeout: float = LAST_LINES) -> None:
        """Write the waiting lines, for at most `timeout` seconds."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(timeout)
            self._thread = None


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def set_up(role: str, epoch: int, run_dir: Path, settings: RuntimeConfig) -> Terminal:
    """Send this process's logging to its file and to stderr, and its stacks to the file, too, on
    SIGUSR1. The terminal is to be finished before the process ends."""
    file, terminal = LogFile(run_dir / f"{role}.log"), Terminal()
    lines = JsonFormatter(role, epoch)
    file.setFormatter(lines)
    terminal.setFormatter(lines if settings.log_format == "json" else TextFormatter(role))
    terminal.addFilter(_Shown(settings.log_stderr))
    root = logging.getLogger()
    root.handlers[:] = [file, terminal]
    root.setLevel(settings.log_level.upper())
    _log_uncaught()
    return terminal


class _Shown(logging.Filter):
    """What goes to stderr."""

    def __init__(self, operation: bool) -> None:
        """operation: the lines on the work do."""
        super().__init__()
        self._operation = operation

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name in OPERATION:
            return self._operation
        return record.levelno >= logging.WARNING and record.name != FATAL


def _log_uncaught() -> None:
    """Log exceptions of threads and destructors without their text, which Python would print."""
    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            LOG.error("a thread ends: %s", args.exc_type.__name__,
                      extra={"fields": error_fields(args.exc_value)})

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        if args.exc_value is not None:
            LOG.error("ignored: %s", args.exc_type.__name__,
                      extra={"fields": error_fields(args.exc_value)})

    threading.excepthook, sys.unraisablehook = in_thread, unraisable


def error_text(error: BaseException, quotable: bool = False) -> str:
    """Describe an exception that ends an actor: its type and its text or, if the text may quote
    what a caller has sent, its type and where it was raised.

    Errors of the system and our own quote nothing. quotable: this one does not either.
    """
    kind = type(error)
    if quotable or isinstance(error, OSError | MemoryError) or \
            kind.__module__.startswith("actorium."):
        return f"{kind.__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" \
        if frames else ""
    return f"{kind.__name__}{place}"


def error_fields(error: BaseException) -> dict[str, Any]:
    """The log fields of an exception: its type and its stack, without its message, which may quote
    what a caller has sent."""
    return {"error": type(error).__name__,
            "stack": "".join(traceback.format_tb(error.__traceback__))}
