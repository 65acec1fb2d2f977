"""Starts workers again by forking them off a process that has imported their libraries
(`runtime/fork_server.py`), once the engine has been ready. Without it, or where it does not answer,
they start from scratch as ever.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from actorium.actors.config.tree import Config
from actorium.actors.launcher.children import start
from actorium.actors.runtime.fork_server import GO, READY
from actorium.actors.runtime.process import adopting_orphans, kill_group, python
from actorium.actors.runtime.roles import PRELOADS

PATIENCE = 2.0
"""Seconds to wait for a fork: on a machine whose processors all are taken ten times over it takes
0.1 s, and a start from scratch many seconds."""
SETTLE = 3.0
"""Seconds after which the imports begin: the engine that has just come up has better things to do,
and one that ends by then needs none of it."""
PAD = "-" * 64
"""Room for what an actor's command line has and the server's has not."""


class ForkedProcess:
    """An adopted child; a `StartedProcess`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkedStarts:
    """The launcher's end of the fork server."""

    def __init__(self, settle: float = SETTLE, patience: float = PATIENCE) -> None:
        """settle: `SETTLE`, patience: `PATIENCE`, of another engine than a real one."""
        self._settle, self._patience = settle, patience
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._words: list[str] = []
        """The server's: run directory, and what it imports. Empty = there is to be none."""

    # Each of these is one of the launcher's hooks.

    def on_up(self, config: Config, run_dir: Path, roles: Mapping[str, str]) -> None:
        targets = [PRELOADS[built] for built in roles.values() if built in PRELOADS]
        if (targets and not self._words and config.recovery.restart
                and config.recovery.fork_server != "off"):
            self._words = [str(run_dir), targets[0]]
            self._start()

    def fork(self, words: Sequence[str]) -> ForkedProcess | None:
        if not self._words or PRELOADS.get(words[-1]) != self._words[-1] or not self.answers():
            return None
        assert self._control is not None
        wait, go = os.pipe2(os.O_CLOEXEC)
        try:
            with adopting_orphans():
                socket.send_fds(self._control, [json.dumps(words).encode()], [wait])
                pid = int(self._control.recv(32) or 0)
            if not pid:
                raise OSError("the fork server is gone, or has no room")
            os.write(go, GO)
            return ForkedProcess(pid)
        except OSError:  # what it may have forked ends, since nobody lets it begin
            self._start()
            return None
        finally:
            os.close(wait)
            os.close(go)

    def after_end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            kill_group(self._server.pid)
            self._server.wait()
        self._server = self._control = None

    def _start(self) -> None:
        """A new server, ready some seconds later."""
        self.after_end()
        self._ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(self._patience)
        words = [str(os.getpid()), str(theirs.fileno()), str(self._settle), *self._words, PAD]
        with theirs:
            self._server = start(python("actorium.actors.runtime.fork_server", *words),
                                 (theirs.fileno(),))

    def answers(self) -> bool:
        """Whether its imports are done. One that has ended is replaced."""
        assert self._control is not None
        if not self._ready and select.select([self._control], [], [], 0)[0]:
            try:
                self._ready = self._control.recv(len(READY)) == READY
            except OSError:
                self._ready = False
            if not self._ready:
                self._start()
        return self._ready
