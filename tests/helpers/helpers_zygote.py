"""Engines and command lines of tests, forked off one process that has imported what all actors
need: importing it anew takes 3 s of a processor an engine.

    python helpers_zygote.py FD PAD

serves at the socket FD. Every engine under `real_starts` starts from scratch, as it does outside,
and so does each command line that a test starts without `ForkedPython`.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from importlib import import_module
from time import monotonic, sleep
from typing import Any, NoReturn

from actorium.actors.launcher import children
from actorium.actors.launcher.children import ForkedProcess
from actorium.actors.runtime.fork_server import GO, READY, REQUEST_BYTES
from actorium.actors.runtime.process import adopting_orphans, python, set_command_line

ACTOR, JOB = children.MAIN, "actorium.actors.launcher.engine"
PAD = "-" * 200
"""Room for the command lines of what is forked."""
PIPE_ENDS = slice(10, 16)
"""Among the arguments of `Popen._execute_child`: of stdin, stdout and stderr, two each."""


class ForkedLauncher(ForkedProcess):
    """What `Engine` knows of its launcher, as a `subprocess.Popen` has it."""

    def __init__(self, pid: int, stdin: int) -> None:
        super().__init__(pid)
        self.stdin = os.fdopen(stdin, "wb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else monotonic() + timeout
        while until is not None and self.poll() is None:
            if monotonic() > until:
                raise subprocess.TimeoutExpired("launcher", timeout or 0.0)
            sleep(0.01)
        if self.returncode is None:
            self.returncode = super().wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Forks:
    """The near end of a process that forks others, which become children of this one."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()
        """Engines may be started by several threads."""
        self._asked = 0

    def fork(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """Its pid. request, fds: see `Become`. Raises `OSError`."""
        wait, go = os.pipe2(os.O_CLOEXEC)
        try:
            with self._lock, adopting_orphans():
                self._asked += 1
                asked = json.dumps([self._asked, request]).encode()
                socket.send_fds(self._control, [asked], [wait, *fds])
                answer = b""
                while not answer.startswith(b"%d " % self._asked):
                    # a test's time may have ended before the answer to the one before came
                    if not (answer := self._control.recv(32)):
                        raise OSError("the process that forks is gone")
            if not (pid := int(answer.split()[1])):
                raise OSError("nothing was forked")
            os.write(go, GO)
            return pid
        finally:
            os.close(wait)
            os.close(go)


@functools.cache
def zygote() -> Forks:
    """The process that forks for this one, and ends with it."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen([sys.executable, "-P", __file__, str(theirs.fileno()), PAD],
                         pass_fds=(theirs.fileno(),))
    if control.recv(len(READY)) != READY:
        raise RuntimeError("engines cannot be forked: the process that would has ended")
    return Forks(control)


def launcher(argv: Sequence[str], report_fd: int) -> ForkedLauncher:
    """As `Engine` starts one: with what this process has for output, environment and folder."""
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    request = {"words": argv[argv.index(JOB) + 1:-1], "environ": dict(os.environ),
               "folder": os.getcwd()}
    try:
        return ForkedLauncher(zygote().fork(request, [theirs, 1, 2, report_fd]), ours)
    finally:
        os.close(theirs)


class ForkedPython(subprocess.Popen[bytes]):
    """`python WORDS` with this environment, forked: -m with a module that has a `main`, or -c."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], **pipes: Any) -> None:
        """pipes: stdin, stdout and stderr, as `Popen` takes them."""
        self._request = {"words": [*words], "environ": {**env}, "folder": os.getcwd()}
        super().__init__([sys.executable, *words], **pipes)

    def _execute_child(self, *given: Any) -> None:
        """As `Popen` calls it."""
        ends = given[PIPE_ENDS]
        theirs = (ends[0], ends[3], ends[5])
        try:
            self.pid = zygote().fork(self._request, [own if fd == -1 else fd
                                                     for own, fd in enumerate(theirs)])
            self._child_created = True
        finally:
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


# --- the far end ---

def main(control: socket.socket) -> None:
    """Import, then fork launchers for as long as anybody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from actorium.actors.config.tree import Config
    from actorium.actors.runtime.roles import GATEWAY, MEDIA, PRELOADS, ROLES

    for target in PRELOADS.values():
        module, name = target.split(":")
        getattr(import_module(module), name)(Config())
    built = (target.split(":")[0] for target in (*ROLES.values(), GATEWAY, MEDIA))
    for module in (ACTOR, JOB, "actorium.actors.launcher.launcher", *built):
        import_module(module)
    gc.collect()
    gc.freeze()
    control.send(READY)
    _serve(control, _become_launcher)


Become = Callable[[dict[str, Any], list[int]], int]
"""What a fork runs with a request and its descriptors; returns its exit code."""


def _serve(control: socket.socket, become: Become) -> None:
    """Fork until nobody asks any more. Each fork leads a group of its own, and begins when who
    asked knows its pid."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, REQUEST_BYTES * 4, 8)
        if not data:
            return
        told, tell = os.pipe()
        number, request = json.loads(data)
        if not (between := os.fork()):
            _leave_a_child(control, become, request, fds, tell)
        os.close(tell)
        pid = os.read(told, 32)
        os.waitpid(between, 0)  # from here on who asked is its parent
        control.send(b"%d %d" % (number, int(pid or 0)))
        for fd in (told, *fds):
            os.close(fd)


def _leave_a_child(control: socket.socket, become: Become, request: dict[str, Any],
                   fds: list[int], tell: int) -> NoReturn:
    try:
        if pid := os.fork():
            os.setpgid(pid, pid)
            os.write(tell, b"%d" % pid)
            os._exit(0)
        os.close(tell)
        control.close()
        code = 1
        try:
            if os.read(fds[0], 1) == GO:
                os.close(fds[0])
                code = become(request, fds[1:])
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    finally:
        os._exit(1)


def _become_launcher(request: dict[str, Any], fds: list[int]) -> int:
    """An engine's launcher, which has a descriptor for its report, or a `ForkedPython`."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environ"])
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in own if path and path not in sys.path]
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        near.close()
        for fd in fds[3:]:
            os.close(fd)
        _serve_actors(far)
    far.close()
    forks, start = Forks(near), children.start

    def forked(argv: list[str], kept: Sequence[int] = (), secrets: Set[str] = frozenset()) -> Any:
        """`children.start`."""
        if argv[:-5] != python(ACTOR) or secrets:
            return start(argv, kept, secrets)
        return ForkedProcess(forks.fork({"words": argv[-5:]}))

    children.start = forked  # type: ignore[assignment]
    words = request["words"]
    if fds[3:]:
        words.append(str(fds[3]))
        set_command_line(python(JOB, *words))
        return int(import_module(JOB).main(words))
    set_command_line([sys.executable, *words])
    how, what, *sys.argv[1:] = words
    try:
        if how == "-m":
            return int(import_module(what).main())
        exec(what, {"__name__": "__main__"})
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def _serve_actors(control: socket.socket) -> NoReturn:
    """Of one launcher, whose standard output is not theirs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in children.SECRETS:
        os.environ.pop(name, None)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    try:
        _serve(control, _become_actor)
    finally:
        os._exit(0)


def _become_actor(request: dict[str, Any], _fds: list[int]) -> int:
    words = request["words"]
    set_command_line(python(ACTOR, *words))
    return int(import_module(ACTOR).main(words))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
