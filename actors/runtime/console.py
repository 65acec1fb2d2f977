"""Lines on stderr of processes that have no logging of their own: the launcher, the command line.

Only light modules are imported: the launcher uses this before its actors are on their way.
"""

from __future__ import annotations

import sys
import time

import msgspec

from actorium.actors.config.tree import RuntimeConfig

PREFIX = "actorium: "


def print_notice(text: str, settings: RuntimeConfig, role: str = "launcher") -> None:
    """Print a line for whoever runs the engine, in the format of its logs."""
    line = f"{PREFIX}{text}" if settings.log_format == "text" else json_line(role, text)
    print(line, file=sys.stderr, flush=True)


def json_line(role: str, message: str) -> str:
    """A line as `logs.JsonFormatter` formats it."""
    return msgspec.json.encode({"time": round(time.time(), 6), "level": "info", "role": role,
                                "epoch": 1, "message": message}).decode()
