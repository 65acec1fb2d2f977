"""`actorium flush-cache`."""

from __future__ import annotations

import json

from msgspec import Struct

from actorium.tools.cli.flags import parse
from actorium.tools.cli.ps import name_first

ABOUT = """Let a running engine forget every cached prefix that no running sequence holds."""


class FlushOptions(Struct, frozen=True, kw_only=True):
    """How to say what was freed."""

    json: bool = False
    """An object, {"pages": freed, "kept": still held}, instead of a sentence."""


def run(_command: str, argv: list[str]) -> int:
    """Entry of the command. Raises `EngineUnavailable`, `DeadlineExceeded`."""
    parsed = parse("actorium flush-cache [NAME]", name_first(argv), FlushOptions, ABOUT,
                   model=False)
    runtime = parsed.config.runtime
    from actorium.actors.client.client import Client

    with Client(runtime.name, run_dir=runtime.run_dir) as client:
        found = client.flush_cache()
    if parsed.options.json:
        print(json.dumps(found))
    else:
        print(f"{found['pages']} pages freed, {found['kept']} cached pages still held")
    return 0
