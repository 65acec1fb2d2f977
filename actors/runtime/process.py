"""Processes: death with the parent, waiting by pidfd, killing process groups, describing an exit;
and from /proc a process' CPU time, memory and whether it could run.

Run as a module, it becomes another program that dies with its parent:
`python -m actorium.actors.runtime.process PARENT_PID PROGRAM ARG...`.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from actorium.actors.runtime.memory_limits import OOM_KILLED

EXIT_DRAINED = 0
EXIT_FAULT = 1
EXIT_BAD_CONFIG = 2
EXIT_ORPHAN = 70
"""The parent had died before the child could bind its life to it."""
DRAIN_SIGNAL = signal.SIGUSR2
"""Has an actor admit nothing new, but keep running."""
NICENESS = 5
"""Of imports beside running actors."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it dies.

    Exits at once when the parent has died already. The request survives `execve` and is not
    inherited by children: whoever starts a child uses `tied` for it.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os._exit(EXIT_ORPHAN)


def raise_file_limit() -> None:
    """Raise the limit on open files, and so on connections, to what the system allows: the usual
    soft limit of 1,024 is less than a gateway's concurrent callers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """A socket of a path gets its mode from the umask at the moment when it is bound."""
    old = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(old)


def python(module: str, *args: str) -> list[str]:
    """Command line that runs a module of ours: same interpreter, nothing from the directory."""
    return [sys.executable, "-P", "-m", module, *args]


def tied(argv: list[str]) -> list[str]:
    """The command line `argv`, made to die with the calling process (with the calling thread)."""
    return python("actorium.actors.runtime.process", str(os.getpid()), *argv)


def import_gently(imports: Callable[[], None]) -> bool:
    """Runs it on a thread of low priority, which ends with it: priority that is given away cannot
    be had back. Returns whether it went well."""
    done: list[bool] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        imports()
        done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return bool(done)


def hide_arguments(words: Iterable[str]) -> None:
    """Overwrite these words in this process's command line, which every user of the machine can
    read. Does nothing where the system does not allow it."""
    def hidden(line: bytes) -> bytes:
        for word in words:
            line = re.sub(rb"(?<=[\0=])%b(?=\0)" % re.escape(os.fsencode(word)),
                          lambda match: b"*" * len(match[0]), line)
        return line

    _change_command_line(hidden)


def set_command_line(argv: Sequence[str]) -> None:
    """Show this as the process's command line. Does nothing where the system does not allow it, or
    where it is longer than the one that the process was started with."""
    new = b"".join(os.fsencode(word) + b"\0" for word in argv)
    _change_command_line(lambda line: new.ljust(len(line), b"\0"))


def _change_command_line(change: Callable[[bytes], bytes]) -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/cmdline", "rb") as file:
            line = file.read()
        with open("/proc/self/stat", "rb") as file:
            start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
        new = change(line)
        if start and end - start == len(line) == len(new) and new != line:
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                memory.seek(start)
                memory.write(new)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Meanwhile descendants whose parent dies become children of this process."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process group that `pid` leads; a gone group is no error.

    Call it before the leader is reaped: until then its pid cannot be reused.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to one process; a gone process is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_exit(pidfd: int, timeout: float) -> bool:
    """Wait, without polling, until the process behind `pidfd` is dead; False on a timeout."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout) * 1000))


def describe_exit(returncode: int) -> str:
    """Describe an exit code, minus the number of a signal, or `OOM_KILLED`."""
    if returncode == OOM_KILLED:
        return "was killed by the kernel, for want of memory"
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"was killed by {name}"


# --- what /proc says of a process --------------------------------------------------------------

class ProcessUsage(NamedTuple):
    """What a process has used; the CPU time is that of all its threads."""

    cpu_seconds: float
    resident_bytes: int


class ProcessActivity(NamedTuple):
    """The state of a process at one moment."""

    stopped: bool
    """By a signal: it does nothing until another one."""
    runnable: bool
    """A thread of it runs, waits for a processor or for a disk: it may only be starved."""
    cpu_seconds: float


def process_usage(pid: int) -> ProcessUsage | None:
    """Read /proc; None when the process is gone, or a zombie."""
    fields = _stat(f"/proc/{pid}")
    return None if fields is None else ProcessUsage(_cpu(fields), int(fields[21]) * _PAGE)


def process_started(pid: int) -> int:
    """When it was started, in the kernel's ticks since the machine's: with the pid it tells a
    process from all others. 0 = it is gone."""
    fields = _stat(f"/proc/{pid}")
    return 0 if fields is None else int(fields[19])


def processes_of_session(leader: int) -> list[int]:
    """The processes of the session that `leader` made, without those that have ended."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()
            and (fields := _stat(f"/proc/{name}")) is not None and int(fields[3]) == leader]


def process_activity(pid: int) -> ProcessActivity | None:
    """Read /proc; None when the process is gone, or a zombie."""
    fields = _stat(f"/proc/{pid}")
    if fields is None:
        return None
    return ProcessActivity(fields[0] == b"T", _runnable(pid), _cpu(fields))


def activity_seen_by_watcher(pid: int) -> ProcessActivity | None:
    """As `process_activity`, but also runnable while another thread of the calling process is: a
    heartbeat may then still be on its way, or wait at the thread that reads sockets. (That is
    looked at last, as heartbeats come that way.)"""
    activity = process_activity(pid)
    if activity is None or activity.runnable or activity.stopped:
        return activity
    return activity._replace(runnable=_runnable(os.getpid(), besides=threading.get_native_id()))


def _runnable(pid: int, besides: int = 0) -> bool:
    """Whether a thread of the process other than `besides` runs, waits for a processor, or waits
    for a disk."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            if int(task) != besides:
                fields = _stat(f"/proc/{pid}/task/{task}")
                if fields is not None and fields[0] in (b"R", b"D"):
                    return True
    return False


def _stat(entry: str) -> list[bytes] | None:
    """The fields of its `stat` after the name, the state first; None = it is gone."""
    try:
        with open(f"{entry}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if not fields or fields[0] == b"Z" else fields


def _cpu(fields: list[bytes]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS  # utime, stime


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
