"""Faults: which, when, and how they are applied to the processes of an engine.

Processes are found in /proc by their command line, which names the run directory: this works while
the watchdog, which would know them otherwise, is dead.
"""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

from msgspec import Struct

ROLES = ("worker-0", "scheduler", "detokenizer", "tokenizer", "watchdog")
PAIRS = (("worker-0", "scheduler"), ("scheduler", "detokenizer"), ("tokenizer", "detokenizer"),
         ("watchdog", "worker-0"), ("watchdog", "scheduler"))
KILL, STOP, HALT, SLOW, STARVE, FULL = "kill", "stop", "halt", "slow", "starve", "full"
"""SIGKILL; SIGSTOP (in a plan until the engine kills the process, in a trial for some seconds);
SIGSTOP until the engine kills it; stopped nine tenths of the time; the lowest priority beside
processes that want all processors; no room for the ledger, for a while."""
STOPPED = ("worker-0", "scheduler", "detokenizer", "tokenizer")
FULL_SECONDS = 1.5
MODULES = ("actorium.actors.runtime.main", "actorium.actors.cluster.replica_process")
SOFT_LIMIT = 1024
"""RLIMIT_FSIZE of a process whose disk is full: shorter than every file that matters."""


class Fault(Struct, frozen=True):
    """A fault applied `at` seconds into a run."""

    at: float
    kind: str
    roles: tuple[str, ...]
    seconds: float = FULL_SECONDS
    """Seconds for which a disk is full."""

    @property
    def name(self) -> str:
        return f"{self.kind} {'+'.join(self.roles)}"


def plan(seed: int, seconds: float, rounds: int, stops: int, pairs: Sequence[tuple[str, ...]],
         full: int) -> list[Fault]:
    """Spreads faults evenly over the time, in random order: each role is killed once per round,
    with `stops` rounds in which `STOPPED` are stopped, `pairs` killed at once, `full` times a full
    disk."""
    chance = random.Random(seed)
    whats: list[tuple[str, tuple[str, ...]]] = []
    for turn in range(max(rounds, stops)):
        part = [(KILL, (role,)) for role in ROLES] if turn < rounds else []
        part += [(STOP, (role,)) for role in STOPPED] if turn < stops else []
        chance.shuffle(part)
        whats += part
    extra = [(KILL, pair) for pair in pairs] + [(FULL, ("scheduler",))] * full
    for what in extra:
        whats.insert(chance.randrange(len(whats) + 1), what)
    step = seconds / max(len(whats), 1)
    return [Fault(round(step * (i + chance.uniform(0.05, 0.25)), 3), kind, roles)
            for i, (kind, roles) in enumerate(whats)]


class RunningActor(Struct, frozen=True):
    role: str
    pid: int
    epoch: int


def actors(run_dir: Path) -> dict[str, RunningActor]:
    """Returns the actors of the engine in a run directory, by role, without zombies. Of a cluster
    also its replicas and their actors, as INDEX/ROLE."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError, StopIteration):
                argv = (entry / "cmdline").read_bytes().decode().split("\0")
                at = next(i for i, word in enumerate(argv) if word in MODULES)
                whose, _, index = argv[at + 2].removeprefix(str(run_dir)).rpartition(".")
                if argv[at + 2].startswith(str(run_dir)) and not whose and _state(entry) != "Z":
                    role = f"{index}/{argv[at + 1]}" if index else argv[at + 1]
                    found[role] = RunningActor(role, int(entry.name), int(argv[at + 3]))
    return found


def processes_naming(text: str) -> list[int]:
    """Returns the processes with `text` in their command line, without this one and zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if text.encode() in (entry / "cmdline").read_bytes() and _state(entry) != "Z":
                    found.append(int(entry.name))
    return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]


def strike(fault: Fault, run_dir: Path) -> list[RunningActor]:
    """Applies a fault; returns the actors it hit."""
    known = actors(run_dir)
    victims = [known[role] for role in fault.roles if role in known]
    if fault.kind == FULL:
        for victim in victims:
            limit_files(victim.pid, SOFT_LIMIT)
    else:
        send([victim.pid for victim in victims],
             signal.SIGSTOP if fault.kind == STOP else signal.SIGKILL)
    return victims


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keeps so many processes running that want a processor all the time."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
               for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def limit_files(pid: int, most: int) -> None:
    """Limits the files that a process may write to so many bytes; -1 = no limit."""
    with suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if most < 0 else most, hard))


def wait_ended(pids: list[int], seconds: float) -> list[int]:
    """Waits for processes to end; returns those that have not."""
    until, alive = monotonic() + seconds, []
    for pid in pids:
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                if not poll.poll(max(0.0, until - monotonic()) * 1000):
                    alive.append(pid)
            finally:
                os.close(fd)
    return alive
