"""Entry of every actor's process.

    python -m actorium.actors.runtime.main ROLE RUN_DIR EPOCH PARENT_PID [MODULE:FUNCTION
        [GO READY]]

MODULE:FUNCTION overrides what builds the role. GO and READY are pipes: the process imports all it
needs, says so at READY, and begins when it reads a byte at GO. The process dies with its parent
from the first moment; imports are kept lean, since actors start on the way to the first token.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from actorium.actors.plugins.entry_points import NONE
from actorium.actors.runtime.process import (
    EXIT_ORPHAN,
    die_with_parent,
    import_gently,
    raise_file_limit,
)

if TYPE_CHECKING:
    from actorium.actors.core import Context, Core

USAGE = ("usage: python -m actorium.actors.runtime.main ROLE RUN_DIR EPOCH PARENT_PID "
         "[MODULE:FUNCTION [GO READY]]")


def main(argv: list[str]) -> int:
    """Run one actor; returns the exit code of the process."""
    if len(argv) not in (4, 5, 7) or not (argv[2].isdecimal() and argv[3].isdecimal()):
        print(USAGE, file=sys.stderr)
        return 2
    role, run_dir, epoch, parent = argv[:4]
    die_with_parent(int(parent))
    # Ctrl-C reaches the launcher, which decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    raise_file_limit()
    if len(argv) == 7 and not _prepared(role, run_dir, argv[4], int(argv[5]), int(argv[6])):
        return EXIT_ORPHAN
    return _run(role, run_dir, int(epoch), argv[4] if len(argv) > 4 else None)


def _prepared(role: str, run_dir: str, target: str, go: int, ready: int) -> bool:
    """Imports what the role needs, and waits. Returns whether it may begin."""
    from actorium.actors.runtime.fork_server import GO

    import_gently(partial(_import, run_dir, target))
    os.close(ready)
    allowed = os.read(go, 1) == GO
    os.close(go)
    return allowed


def _import(run_dir: str, target: str) -> None:
    from pathlib import Path

    from actorium.actors.runtime.fork_server import import_preloads
    from actorium.actors.runtime.roles import PRELOADS

    if target in PRELOADS:
        import_preloads(Path(run_dir), PRELOADS[target])
    else:
        import_module(target.partition(":")[0])


def _run(role: str, run_dir: str, epoch: int, target: str | None) -> int:
    from pathlib import Path

    from actorium.actors.config import tree as configs
    from actorium.actors.core import Context
    from actorium.actors.runtime import logs
    from actorium.actors.runtime.roles import roles_of
    from actorium.actors.runtime.security import private_paths
    from actorium.actors.runtime.shell import Shell

    path = Path(run_dir)
    config = configs.load(private_paths.read_file(path / "config.json"))
    terminal = logs.set_up(role, epoch, path, config.runtime)
    entropy = int.from_bytes(os.urandom(8), "little") >> 1
    shell = Shell(Context(config, path, role, epoch, entropy))
    code = shell.run(partial(_build, target or roles_of(config)[role]))
    terminal.finish()
    return code


def _build(target: str, ctx: Context) -> Core:
    """The role's core, which writes its steps down where that is wanted."""
    from actorium.actors.runtime.roles import reads_formats

    if ctx.config.runtime.plugins != NONE and reads_formats(ctx.role):
        from actorium.actors.plugins.parser_plugins import add_formats

        add_formats(ctx.config.runtime.plugins)
    module, name = target.split(":")
    core: Core = getattr(import_module(module), name)(ctx)
    if ctx.config.runtime.trace_dir is not None:
        from actorium.actors.runtime.step_events import traced

        core = traced(core, ctx)
    return core


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # No thread of a library, no destructor and no GPU runtime gets to delay or spoil the end.
    os._exit(code)
