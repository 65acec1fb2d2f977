"""A whole engine with the packaged model, and where its HTTP face answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from actorium.actors.gateway import actor
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.rundir import engine_dir


class Served(NamedTuple):
    """An engine, and where it answers."""

    engine: Engine
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class Event(NamedTuple):
    """One event of a stream."""

    id: str
    data: str


@contextmanager
def serving(port: int = 0, **config: Any) -> Iterator[Served]:
    """port: 0 for one that is free."""
    with Engine("", port=port, **config) as engine:
        path = engine_dir(engine.name)
        assert not isinstance(path, str)
        where = actor.where(path)  # type: ignore[arg-type]
        assert where is not None
        yield Served(engine, where.host, where.port)
