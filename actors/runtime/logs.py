"""Logging of an actor: JSON lines to <run_dir>/<role>.log, warnings in plain text to stderr."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
from pathlib import Path

import msgspec


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, role, epoch, logger, message, stack."""

    def __init__(self, role: str, epoch: int) -> None:
        super().__init__()
        self._fixed = {"role": role, "epoch": epoch}

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(record.created, 6), "level": record.levelname.lower(), **self._fixed,
                "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up(role: str, epoch: int, run_dir: Path, level: str) -> None:
    """Send this process's logging to its file, and its stacks, too, on SIGUSR1."""
    file = open(run_dir / f"{role}.log", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    handler = logging.StreamHandler(file)
    handler.setFormatter(JsonFormatter(role, epoch))
    plain = logging.StreamHandler(sys.stderr)
    plain.setLevel(logging.WARNING)
    plain.setFormatter(logging.Formatter(f"actorium {role}: %(message)s"))
    # A stack belongs into the file; people get one line.
    plain.addFilter(lambda record: not record.exc_info)
    root = logging.getLogger()
    root.handlers[:] = [handler, plain]
    root.setLevel(level.upper())
    # The root logger keeps the file open for the life of the process.
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)
