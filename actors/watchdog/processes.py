"""What the kernel says of a process: CPU time and memory."""

from __future__ import annotations

import os
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """As of now; the CPU time is that of all its threads."""

    cpu_seconds: float
    resident_bytes: int


def process_of(pid: int) -> Process | None:
    """Read /proc; None when the process is gone, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] == b"Z":
        return None
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS  # utime, stime
    return Process(cpu, int(fields[21]) * _PAGE)
