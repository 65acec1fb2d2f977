"""`actorium serve`: an engine in the foreground."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
from msgspec import Struct

from actorium.actors.config.models_settings import serves_models
from actorium.actors.config.tree import Config
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.models import model_dir as models
from actorium.actors.models.obtain import with_model_path
from actorium.actors.runtime.roles import serves_http
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import StartUp, watch

PORT = 8000
ABOUT = """Start an engine and keep it running until SIGTERM or Ctrl-C, which drain it. It answers
OpenAI's HTTP API at port 8000 of this machine alone (--host, --port, --uds, --no-http). Actors that
die or hang are started again, and every stream goes on (--no-restart: the first death ends all).
With --models-dir or --models it serves several models, each with an engine that is started when a
request asks for it. With --ledger-dir it goes on with what the engine before left unfinished there,
and says so.
Exit codes: 0 drained, 1 a fault (also: an actor that died more than --max-restarts times within
--restart-window seconds of work), 2 a bad configuration or model."""


class ServeOptions(Struct, frozen=True, kw_only=True):
    """How to serve."""

    http: bool = True
    """Answer HTTP; off = only clients of the SDK are served."""


def configured(parsed: Parsed[ServeOptions]) -> Config:
    """Serves HTTP at the usual port unless it is off or has its own; progress goes to stderr."""
    gateway = parsed.config.gateway
    if not parsed.options.http:
        gateway = msgspec.structs.replace(gateway, port=None, uds=None)
    elif not serves_http(gateway):
        gateway = msgspec.structs.replace(gateway, port=PORT)
    runtime = msgspec.structs.replace(parsed.config.runtime, log_stderr=True)
    return msgspec.structs.replace(parsed.config, gateway=gateway, runtime=runtime)


def run(_command: str, argv: list[str]) -> int:
    """Runs the launcher in this process and reports progress until the engine is ready."""
    config = configured(parse("actorium serve [MODEL]", argv, ServeOptions, ABOUT,
                              checks=[check_machine]))
    if not serves_models(config.models):
        config = with_model_path(config)
        models.resolve(config.model.model)
    from actorium.actors.launcher.launcher import Launcher

    over = threading.Event()

    def started(run_dir: Path) -> None:
        show = StartUp(config)
        threading.Thread(target=watch, args=(run_dir, show, over), daemon=True).start()

    try:
        return Launcher(config, started=started).run()
    finally:
        over.set()
