"""What the kernel says of a process: CPU time and memory, and whether it could run."""

from __future__ import annotations

import contextlib
import os
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
    states = {fields[0]}
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            of_thread = _stat(f"/proc/{pid}/task/{task}")
            if of_thread is not None:
                states.add(of_thread[0])
    return Sight(fields[0] == b"T", not states.isdisjoint((b"R", b"D")), _cpu(fields))


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
