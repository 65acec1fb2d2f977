"""What the kernel says of a process: CPU time and memory, and whether it could run."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """As of now; the CPU time is that of all its threads."""

    cpu_seconds: float
    resident_bytes: int


class Sight(NamedTuple):
    """What a process that says nothing looks like at a moment."""

    stopped: bool
    """By a signal: it does nothing until another one."""
    eager: bool
    """A thread of it runs, waits for a processor or for a disk: it may only be starved."""
    cpu_seconds: float


def process_of(pid: int) -> Process | None:
    """Read /proc; None when the process is gone, or a zombie."""
    fields = _stat(f"/proc/{pid}")
    return None if fields is None else Process(_cpu(fields), int(fields[21]) * _PAGE)


def sight_of(pid: int) -> Sight | None:
    """Read /proc; None when the process is gone, or a zombie."""
    fields = _stat(f"/proc/{pid}")
    if fields is None:
        return None
    return Sight(fields[0] == b"T", _eager(pid), _cpu(fields))


def sight_by_its_watcher(pid: int) -> Sight | None:
    """As `sight_of`, and eager also while another thread of this very process is: then what the
    looked-at has said may be on its way still, and a beat may lie unread at the thread that reads
    sockets. (Looked at last: that is the way of a beat.)"""
    sight = sight_of(pid)
    if sight is None or sight.eager or sight.stopped:
        return sight
    return sight._replace(eager=_eager(os.getpid(), besides=threading.get_native_id()))


def _eager(pid: int, besides: int = 0) -> bool:
    """Whether a thread of the process, but for that one, runs, wants to, or waits for a disk."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            if int(task) != besides:
                fields = _stat(f"/proc/{pid}/task/{task}")
                if fields is not None and fields[0] in (b"R", b"D"):
                    return True
    return False


def _stat(entry: str) -> list[bytes] | None:
    """The fields of its stat after the name, the state first."""
    try:
        with open(f"{entry}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if not fields or fields[0] == b"Z" else fields


def _cpu(fields: list[bytes]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS  # utime, stime
