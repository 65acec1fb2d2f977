"""The fork server: a process that imports what an actor needs, once, and forks actors ever after.

    python -m actorium.actors.runtime.fork_server PARENT_PID FD SETTLE RUN_DIR MODULE:FUNCTION PAD

Importing torch is most of a worker's start: 1.4 s of a processor, which several ranks that come
back at once do not have. MODULE:FUNCTION (`preload(config)`) imports; FD is a socket at which the
launcher asks for actors (`launcher/children.py`). It begins after SETTLE seconds; PAD is room
for the actors' command lines.

A forked actor is a child of the launcher like any other, not of this process, whose death so costs
nobody anything: a process between the two ends at once, and the launcher adopts what it leaves. An
actor begins only when the launcher, who knows its pid by then, lets it; else it ends.

Only the standard library is imported before `preload`. No group of ranks, device or model is ever
opened here: what is forked shares memory with nobody but copy-on-write.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from actorium.actors.runtime.process import (
    EXIT_FAULT,
    EXIT_ORPHAN,
    die_with_parent,
    import_gently,
    python,
    set_command_line,
)

MAIN = "actorium.actors.runtime.main"
READY, GO = b"ready", b"1"
REQUEST_BYTES = 65536


def main(argv: list[str]) -> int:
    """Serve until the launcher closes its end, be it while it is to be answered; returns the exit
    code of the process."""
    parent, fd, settle = int(argv[0]), int(argv[1]), float(argv[2])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    # Actors are forked by this thread, which keeps its priority.
    if select.select([control], [], [], settle)[0] or not import_gently(
            partial(import_preloads, Path(argv[3]), argv[4])):
        return EXIT_FAULT
    gc.collect()
    gc.freeze()  # a collection in a forked actor would copy the pages of all these objects
    with suppress(BrokenPipeError, ConnectionResetError):
        control.send(READY)
        while True:
            data, fds, _, _ = socket.recv_fds(control, REQUEST_BYTES, 1)
            if not data:
                break
            control.send(b"%d" % _fork(json.loads(data), fds[0], control))
            os.close(fds[0])
    return 0


def import_preloads(run_dir: Path, target: str) -> None:
    """Imports what `target` does for the engine's configuration, and what runs actors."""
    from actorium.actors.config import tree as configs
    from actorium.actors.runtime.security import private_paths

    module, name = target.split(":")
    config = configs.load(private_paths.read_file(run_dir / "config.json"))
    getattr(import_module(module), name)(config)
    import_module(MAIN)


def _fork(words: list[str], go: int, control: socket.socket) -> int:
    """Fork an actor that waits at `go`; its pid, 0 where the system has no room for it."""
    pid_read, pid_write = os.pipe()
    try:
        between = os.fork()
        if not between:
            _leave_a_child(words, go, control, pid_write)
        os.close(pid_write)
        pid_write = -1
        pid = int(os.read(pid_read, 32) or 0)
        os.waitpid(between, 0)  # from here on the launcher is its parent
        return pid
    except OSError:
        return 0
    finally:
        os.close(pid_read)
        if pid_write >= 0:
            os.close(pid_write)


def _leave_a_child(words: list[str], go: int, control: socket.socket, pid_write: int) -> NoReturn:
    try:
        pid = os.fork()
        if not pid:
            os.close(pid_write)
            control.close()
            _become_actor(words, go)
        os.setpgid(pid, pid)
        os.write(pid_write, b"%d" % pid)
    finally:
        os._exit(0)


def _become_actor(words: list[str], go: int) -> NoReturn:
    code = EXIT_FAULT
    try:
        if os.read(go, 1) != GO:
            os._exit(EXIT_ORPHAN)
        os.close(go)
        set_command_line(python(MAIN, *words))
        code = import_module(MAIN).main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # as `main` ends, too


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
