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
    """Tell whoever runs the engine, in the format that its logs have."""
    line = f"{PREFIX}{text}" if settings.log_format == "text" else json_line(role, text)
    print(line, file=sys.stderr, flush=True)


def json_line(role: str, message: str) -> str:
    """As `logs.JsonFormatter` makes them."""
    return msgspec.json.encode({"time": round(time.time(), 6), "level": "info", "role": role,
                                "epoch": 1, "message": message}).decode()
