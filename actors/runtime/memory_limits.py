"""Limits of memory that a process is under by its control groups, and whether the kernel has killed
for them.

Groups lie in each other: the smallest limit of all that a process is in counts. With version 1 of
the kernel's interface they are those of the `memory` hierarchy, with version 2 there is but one; a
machine may have both. Groups outside of a container are not seen, and their limits not known. Only
the standard library is imported: the launcher uses this before anything heavy.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

LIMITS = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
"""By the type of the file system: what has a limit. Above memory.high a group is made to wait for
memory until it stands still, which helps nobody."""
KILLS = {"cgroup2": "memory.events", "cgroup": "memory.oom_control"}
"""What counts those that were killed, in a line `oom_kill N`."""
NO_LIMIT = 1 << 60
"""Version 1 has a number of about 2^63 where there is none."""
EVERY = 1.0
"""Seconds after which a kill that was counted is looked at again, and once more is forgotten."""
OOM_KILLED = -1024 - signal.SIGKILL
"""Stands for -SIGKILL, as an exit status, where it was the kernel, for want of memory."""


class MemoryLimit(NamedTuple):
    """The limit that counts."""

    bytes: int
    file: Path
    """Where it is set."""

    @property
    def text(self) -> str:
        return f"{self.bytes:,} bytes, {self.file}"


def groups(proc: Path = Path("/proc/self")) -> Iterator[tuple[str, Path]]:
    """(type of the file system, directory) of each group that the process is in, from its own
    outwards; those of version 1 that have to do with memory. proc: of the process."""
    with contextlib.suppress(OSError, ValueError):
        path_of = dict(_groups_of(proc))
        for line in (proc / "mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            _, _, _, root, where, *_ = before.split()
            kind, _, options = after.split()[:3]
            if kind not in path_of or kind == "cgroup" and "memory" not in options.split(","):
                continue
            top, path = Path(where), PurePosixPath(path_of[kind])
            # A container may see its own group alone, mounted as if it was the outermost one.
            inner = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
            directory = top / inner
            yield kind, directory
            yield from ((kind, each) for each in directory.parents if each.is_relative_to(top))


def _groups_of(proc: Path) -> Iterator[tuple[str, str]]:
    for line in (proc / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield "cgroup2", path
        elif "memory" in controllers.split(","):
            yield "cgroup", path


def memory_limit(proc: Path = Path("/proc/self")) -> MemoryLimit | None:
    """The smallest limit of all groups that a process is in; None: there is none."""
    limits = []
    for kind, directory in groups(proc):
        for name in LIMITS[kind]:
            with contextlib.suppress(OSError, ValueError):  # "max", or no such file
                if (limit := int((directory / name).read_text())) < NO_LIMIT:
                    limits.append(MemoryLimit(limit, directory / name))
    return min(limits, default=None)


def available_memory(proc: Path = Path("/proc/self")) -> int:
    """Bytes of memory that there are: of the machine, or what the process may use of it."""
    limit = memory_limit(proc)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return machine if limit is None else min(machine, limit.bytes)


class OomKills:
    """Tells a child that the kernel killed for want of memory from one that others did: the group's
    count of such kills has grown meanwhile. Children are in the group of their parent."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        innermost: dict[str, Path] = {}
        for kind, directory in groups(proc):
            innermost.setdefault(kind, directory)
        self._files = [directory / KILLS[kind] for kind, directory in innermost.items()]
        self._seen = self._before = self._count()
        self._look_at = 0.0

    def look(self, now: float) -> None:
        """Call it now and then: a kill of which no child has died for so long was of somebody else
        in the group. now: CLOCK_MONOTONIC seconds."""
        if now >= self._look_at:
            self._look_at = now + EVERY
            self._seen = max(self._seen, self._before)
            self._before = self._count()

    def status(self, status: int) -> int:
        """The exit status of a child that has just been reaped, as it is told: `OOM_KILLED` for
        -SIGKILL where a kill was counted that no other child's death was for."""
        if status != -signal.SIGKILL:
            return status
        killed = self._count() > self._seen
        self._seen += killed
        return OOM_KILLED if killed else status

    def _count(self) -> int:
        count = 0
        for file in self._files:
            with contextlib.suppress(OSError, ValueError):
                lines = (line.split() for line in file.read_text().splitlines())
                count += sum(int(words[1]) for words in lines
                             if len(words) == 2 and words[0] == "oom_kill")
        return count
