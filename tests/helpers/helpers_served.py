"""A whole engine with the packaged model, and where its HTTP API answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from actorium.actors.config.tree import Config
from actorium.actors.core import Context, Core
from actorium.actors.gateway import actor
from actorium.actors.launcher.engine import Engine
from actorium.actors.runtime.roles import roles_of
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.null import null_worker


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


AWAY = 2.0
"""Seconds for which the worker of `late_roles` is away."""


def build_late(ctx: Context) -> Core:
    """A null worker that takes a while to come back."""
    if ctx.epoch > 1:
        time.sleep(AWAY)
    return null_worker.build(ctx)


def late_roles() -> dict[str, str]:
    """An engine's with HTTP, and `build_late`."""
    config = Config()
    gateway = config.gateway.__class__(port=0)
    return roles_of(Config(gateway=gateway)) | {"worker-0": "helpers_served:build_late"}
