"""Entry of every actor's process.

    python -m actorium.actors.runtime.main ROLE RUN_DIR EPOCH PARENT_PID [MODULE:FUNCTION]

MODULE:FUNCTION overrides what builds the role. The process dies with its parent from the first
moment; imports are kept lean, since actors start on the way to the first token.
"""

from __future__ import annotations

import os
import signal
import sys

from actorium.actors.runtime.process import die_with_parent, raise_file_limit

RECORDED = "scheduler"
USAGE = ("usage: python -m actorium.actors.runtime.main ROLE RUN_DIR EPOCH PARENT_PID "
         "[MODULE:FUNCTION]")


def main(argv: list[str]) -> int:
    """Run one actor; returns the exit code of the process."""
    if len(argv) not in (4, 5) or not (argv[2].isdecimal() and argv[3].isdecimal()):
        print(USAGE, file=sys.stderr)
        return 2
    role, run_dir, epoch, parent = argv[:4]
    die_with_parent(int(parent))
    # Ctrl-C reaches the launcher, which decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    raise_file_limit()
    return _run(role, run_dir, int(epoch), argv[4] if len(argv) == 5 else None)


def _run(role: str, run_dir: str, epoch: int, target: str | None) -> int:
    from importlib import import_module
    from pathlib import Path

    from actorium.actors.config import tree as configs
    from actorium.actors.core import Context, Core
    from actorium.actors.runtime import logs
    from actorium.actors.runtime.roles import roles_of
    from actorium.actors.runtime.security import private_paths as private
    from actorium.actors.runtime.shell import run_actor

    path = Path(run_dir)
    config = configs.load(private.read_file(path / "config.json"))
    terminal = logs.set_up(role, epoch, path, config.runtime)
    module, function = (target or roles_of(config)[role]).split(":")

    def build(ctx: Context) -> Core:
        core: Core = getattr(import_module(module), function)(ctx)
        if role == RECORDED:
            from actorium.actors.scheduler.observed import observed

            core = observed(core, ctx)
        if config.runtime.trace_dir is not None:
            from actorium.actors.runtime.step_events import traced

            core = traced(core, ctx)
        return core

    entropy = int.from_bytes(os.urandom(8), "little") >> 1
    code = run_actor(build, Context(config, path, role, epoch, entropy))
    terminal.finish()
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # No thread of a library, no destructor and no GPU runtime gets to delay or spoil the end.
    os._exit(code)
