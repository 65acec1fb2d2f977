"""`actorium serve`: an engine in the foreground."""

from __future__ import annotations

import threading
from pathlib import Path

from actorium.actors import models
from actorium.tools.cli.flags import NoOptions, parse
from actorium.tools.cli.progress import StartUp, watch

ABOUT = """Start an engine and keep it running until SIGTERM or Ctrl-C, which drain it.
Exit codes: 0 drained, 1 a fault, 2 a bad configuration."""


def run(_command: str, argv: list[str]) -> int:
    """Run the launcher in this process, and tell what happens until the engine is ready."""
    config = parse("actorium serve [MODEL]", argv, NoOptions, ABOUT).config
    models.resolve(config.model.model)
    from actorium.actors.launcher import Launcher

    over = threading.Event()

    def started(run_dir: Path) -> None:
        show = StartUp(config)
        threading.Thread(target=watch, args=(run_dir, show, over), daemon=True).start()

    try:
        return Launcher(config, started=started).run()
    finally:
        over.set()
