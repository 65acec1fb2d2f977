"""Faults drawn from a seed: which, to whom, at which point of the load, and how long.

Pure, but for the checks of what this machine allows. A seed names one endless order of faults, of
which a run takes as many as it has time for: a long run begins as a short one of the same seed.
What a machine does not allow is drawn all the same, and skipped by name, so that the others stay
where they are.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations, permutations
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from actorium.actors.runtime.memory_limits import LIMITS, groups
from actorium.tools.chaos.running_trials import ACTORS, LAUNCHER

Who = tuple[tuple[str, ...], ...]
ALONE: Who = tuple((role,) for role in ACTORS)
TWO: Who = tuple(combinations(ACTORS, 2))
ORDERED: Who = tuple(permutations(ACTORS, 2))
SCHEDULER: Who = (("scheduler",),)
TOKENS = (60, 600)
"""Tokens that clients get between the end of a fault and the next one."""
SECONDS = (0.3, 2.0)
FAKETIME = "libfaketimeMT.so.1"
LIBRARIES = ("/usr/lib/x86_64-linux-gnu/faketime", "/usr/lib/aarch64-linux-gnu/faketime",
             "/usr/lib64/faketime", "/usr/lib/faketime", "/usr/local/lib/faketime")


def faketime() -> Path | None:
    """Returns the library that moves a process's wall clock."""
    return next((path for folder in LIBRARIES if (path := Path(folder) / FAKETIME).is_file()), None)


def _possible() -> str:
    return ""


def _without_faketime() -> str:
    return "" if faketime() else f"there is no {FAKETIME} (Debian's package faketime)"


def _without_mounts() -> str:
    return "" if os.geteuid() == 0 else "only root can mount a small tmpfs"


@contextmanager
def memory_group(more: int) -> Iterator[Path]:
    """Yields a control group whose processes get no more than so many bytes of memory: the
    directory that their ids are written to. Raises `OSError` where this machine has none to give.
    """
    kind, inside = next(iter(groups()), ("", Path()))
    if not kind:
        raise OSError("no control group of memory is mounted")
    group = inside / f"actorium-chaos-{os.getpid()}"
    group.mkdir()
    try:
        (group / LIMITS[kind][0]).write_text(str(more))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended
                (inside / "cgroup.procs").write_text(pid)
        group.rmdir()


def _without_groups() -> str:
    try:
        with memory_group(1 << 30):
            return ""
    except OSError as error:
        return f"no control group can be made: {error}"


class FaultKind(NamedTuple):
    """A row of the table."""

    name: str
    who: Who
    about: str
    why_not: Callable[[], str] = _possible
    """Returns why this machine does not allow it; empty = it does."""


KINDS = (
    FaultKind("kill", ALONE, "SIGKILL"),
    FaultKind("kill-two", TWO, "SIGKILL to two at once"),
    FaultKind("kill-again", ALONE, "killed, and its successor as soon as it runs"),
    FaultKind("kill-recovery", ORDERED, "killed, and another one while it recovers"),
    FaultKind("kill-often", ALONE, "killed six times in five seconds"),
    FaultKind("hang", tuple((role,) for role in ACTORS if role != "watchdog"),
              "SIGSTOP, until the engine kills it"),
    FaultKind("pause", (*ALONE, (LAUNCHER,)), "SIGSTOP, then SIGCONT"),
    FaultKind("slow", ALONE, "stopped nine tenths of the time"),
    FaultKind("starve", ALONE, "the lowest priority, beside processes that want all processors"),
    FaultKind("disk-full", SCHEDULER, "no file may grow (RLIMIT_FSIZE)"),
    FaultKind("disk-full-long", SCHEDULER, "the same, for longer than requests wait for it"),
    FaultKind("disk-filled", SCHEDULER, "the ledger's file system is filled", _without_mounts),
    FaultKind("ledger-cut", SCHEDULER, "killed, and the last bytes of its ledger are cut off"),
    FaultKind("ledger-removed", SCHEDULER, "the ledger's files are removed while it runs"),
    FaultKind("memory", ALONE, "no more address space (RLIMIT_AS)"),
    FaultKind("memory-group", ALONE, "a control group with a little more memory than it has: the "
              "kernel kills it when it wants more", _without_groups),
    FaultKind("files", ALONE, "no more descriptors (RLIMIT_NOFILE)"),
    FaultKind("clock", ((),), "the wall clock jumps, by up to a day", _without_faketime),
    FaultKind("disk-slow", SCHEDULER, "writes that take long", lambda: (
        "writes of the ledger end in the page cache, which no limit of this kernel slows down")),
    FaultKind("network", ((),), "links that break", lambda: (
        "an engine's actors are linked by unix sockets, which no namespace cuts; the row nodes and "
        "tests/engine/test_cluster_nodes.py break links by tcp, the latter in namespaces")))
BY_NAME = {kind.name: kind for kind in KINDS}


class DrawnFault(Struct, frozen=True):
    number: int
    kind: str
    roles: tuple[str, ...]
    after: int
    """Tokens that clients have got since the fault before was over."""
    seconds: float
    amount: float
    """In [0, 1): how much, of what a kind has to choose; see `drawn_rows`."""

    def __str__(self) -> str:
        who = "+".join(self.roles) or "engine"
        return (f"{self.number}: {self.kind} {who} after {self.after} tokens, {self.seconds:g} s, "
                f"{self.amount:g}")


def draw(seed: int) -> Iterator[DrawnFault]:
    """Yields the faults of a seed, without end: each kind once, in random order, then each once
    more."""
    chance, number = random.Random(seed), 0
    while True:
        kinds = list(KINDS)
        chance.shuffle(kinds)
        for kind in kinds:
            number += 1
            yield DrawnFault(number, kind.name, chance.choice(kind.who), chance.randint(*TOKENS),
                             round(chance.uniform(*SECONDS), 2), round(chance.random(), 4))


def skipped() -> dict[str, str]:
    """Returns the kinds that this machine does not allow, and why."""
    return {kind.name: why for kind in KINDS if (why := kind.why_not())}
