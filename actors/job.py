"""What an `Engine` and its launcher say to each other, as lines of JSON."""

from __future__ import annotations

from msgspec import Struct

from actorium.actors.config import Config


class Job(Struct, frozen=True):
    """What an `Engine` asks its launcher to run."""

    config: Config
    roles: dict[str, str] | None = None


class Report(Struct, frozen=True, omit_defaults=True):
    """A line of JSON from the launcher to its `Engine`: started, or failed and why."""

    event: str
    run_dir: str = ""
    code: str = ""
    message: str = ""
