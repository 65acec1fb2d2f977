"""What the tests' fork servers import."""

from __future__ import annotations

import sys

from actorium.actors.config.tree import Config


def preload(_config: Config) -> None:
    import helpers_runtime  # noqa: F401


def preload_until_told(_config: Config) -> None:
    """Takes until its standard input ends."""
    print("preloading", flush=True)
    sys.stdin.read()
