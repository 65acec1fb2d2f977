"""What the tests' fork servers import."""

from __future__ import annotations

from actorium.actors.config.tree import Config


def preload(_config: Config) -> None:
    import helpers_runtime  # noqa: F401
