"""`actorium version`."""

from __future__ import annotations

from actorium import __version__
from actorium.actors.errors import BadConfig


def run(_command: str, argv: list[str]) -> int:
    """Print the version; nothing else is imported."""
    if argv:
        raise BadConfig(f"{argv[0]}: unexpected argument", argv[0])
    print(__version__)
    return 0
