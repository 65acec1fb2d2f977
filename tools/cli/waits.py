"""What commands wait for: said on stderr once it takes long, and never without an end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actorium.actors.config.tree import RuntimeConfig
from actorium.actors.errors import EngineUnavailable
from actorium.actors.runtime.rundir import engine_dir, is_running

NOTICE_SECONDS = 1.0
"""Of waiting, after which a line says so."""


@contextmanager
def told_wait(what: str, seconds: float) -> Iterator[None]:
    """Says what is waited for within, and how long at the most, unless it comes at once."""
    line = f"actorium: waiting for {what}, at most {seconds:g} s"
    notice = threading.Timer(NOTICE_SECONDS,
                             lambda: print(line, file=sys.stderr, flush=True))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def running_dir(runtime: RuntimeConfig) -> Path:
    """The run directory of the engine of that name. Raises `EngineUnavailable` where none runs:
    nobody says that one is about to."""
    path = engine_dir(runtime.name, runtime.run_dir)
    if not is_running(path):
        raise EngineUnavailable(f"no engine named {runtime.name!r} is running", "name")
    return path
