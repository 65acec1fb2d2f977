"""An engine of the command's own: started from the parsed configuration, with bars meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.models import model_dir as models
from actorium.actors.models.obtain import with_model_path
from actorium.actors.runtime.rundir import engine_dir

if TYPE_CHECKING:
    from actorium.actors.launcher.engine import Engine
    from actorium.tools.cli.start_up import StartUp


def settings_of(config: Config) -> dict[str, Any]:
    """The whole tree as keyword arguments of `Engine`, under a name of its own if none is given."""
    values: dict[str, Any] = {}
    for section in msgspec.structs.asdict(config).values():
        values |= msgspec.structs.asdict(section)
    if config.runtime.name == RuntimeConfig().name:
        values["name"] = f"batch-{os.getpid()}-{secrets.token_hex(3)}"
    return values


def for_batches(config: Config) -> Config:
    """The configuration of an engine whose streams nobody reads while they come: without a bound on
    the gap between tokens, and without a fork server, unless they are asked for."""
    scheduler, recovery = config.scheduler, config.recovery
    if scheduler.target_itl is None:
        scheduler = msgspec.structs.replace(scheduler, target_itl=0.0)
    if recovery.fork_server == "auto":
        recovery = msgspec.structs.replace(recovery, fork_server="off")
    return msgspec.structs.replace(config, scheduler=scheduler, recovery=recovery)


@contextlib.contextmanager
def own_engine(config: Config, start_up: StartUp | None = None, watched: bool = True
               ) -> Iterator[Engine]:
    """Start an engine, wait until it is ready, stop it at the end.

    On a terminal, or with `start_up`, its way to readiness is shown, unless it is not to be
    watched. Raises what `Engine` does.
    """
    from actorium.actors.launcher.engine import Engine

    config = with_model_path(config)
    models.resolve(config.model.model)
    values = settings_of(config)
    with _watched(config, values["name"], start_up) if watched else contextlib.nullcontext():
        engine = Engine(values.pop("model"), **values)
    if start_up is not None and engine.status is not None:
        start_up.show(engine.status)
    try:
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def _watched(config: Config, name: str, start_up: StartUp | None) -> Iterator[None]:
    """Look at the starting engine meanwhile, if there is anyone to show it to."""
    if start_up is None and not sys.stderr.isatty():
        yield
        return
    from actorium.tools.cli.start_up import StartUp, follow

    over = threading.Event()
    show = start_up or StartUp(config)
    run_dir = engine_dir(name, config.runtime.run_dir)
    thread = threading.Thread(target=follow, args=(run_dir, show, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
