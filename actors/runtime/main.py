"""Entry of every actor's process.

    python -m actorium.actors.runtime.main ROLE RUN_DIR EPOCH PARENT_PID [MODULE:FUNCTION]

MODULE:FUNCTION overrides what builds the role. The process dies with its parent from the first
moment; imports are kept lean, since actors start on the way to the first token.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from actorium.actors.runtime.process import die_with_parent, raise_file_limit

if TYPE_CHECKING:
    import zmq

    from actorium.actors.core import Context, Core
    from actorium.actors.runtime.client_endpoint import ClientEndpoint
    from actorium.actors.runtime.shell_extensions import ClientGate, CommitLog

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
    from pathlib import Path

    from actorium.actors.config import tree as configs
    from actorium.actors.core import Context
    from actorium.actors.runtime import logs
    from actorium.actors.runtime.roles import roles_of
    from actorium.actors.runtime.security import private_paths
    from actorium.actors.runtime.shell import run_actor
    from actorium.actors.runtime.shell_extensions import Extensions

    path = Path(run_dir)
    config = configs.load(private_paths.read_file(path / "config.json"))
    terminal = logs.set_up(role, epoch, path, config.runtime)
    entropy = int.from_bytes(os.urandom(8), "little") >> 1
    code = run_actor(partial(_build, target or roles_of(config)[role]),
                     Context(config, path, role, epoch, entropy),
                     Extensions(_open_gate, _open_commit_log))
    terminal.finish()
    return code


# --- the one place where features are put around the core and the shell ---

def _build(target: str, ctx: Context) -> Core:
    """The role's core with its observers."""
    from actorium.actors.runtime.roles import OBSERVERS

    core: Core = _load(target)(ctx)
    if ctx.role in OBSERVERS:
        core = _load(OBSERVERS[ctx.role])(core, ctx)
    if ctx.config.runtime.trace_dir is not None:
        from actorium.actors.runtime.step_events import traced

        core = traced(core, ctx)
    return core


def _open_gate(ctx: Context, context: zmq.Context[Any], front: ClientEndpoint) -> ClientGate | None:
    if ctx.config.runtime.listen is None and ctx.config.cluster.cluster_listen is None:
        return None
    from actorium.actors.runtime.security.curve_gate import open_curve_gate

    return open_curve_gate(ctx, context, front)


def _open_commit_log(ctx: Context, core: Core) -> CommitLog | None:
    if core.ledger is None:
        return None
    from actorium.actors.ledger.committer import LedgerCommitter

    return LedgerCommitter(core, core.ledger, ctx.config.recovery.ledger_patience)


def _load(target: str) -> Any:
    """The object that "module:name" stands for."""
    module, name = target.split(":")
    return getattr(import_module(module), name)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # No thread of a library, no destructor and no GPU runtime gets to delay or spoil the end.
    os._exit(code)
