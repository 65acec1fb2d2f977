"""What a launcher hands over to the one of another version, or with other flags, that takes its
place: the same process, by `execve`, so that its pid, its children and its sockets stay.

The state is JSON in a memfd. It is read by the version that is started, and never written by it:
where that goes back, the old version reads its own state once more, with `GoingBack` beside it.
So it has a version, and the last committed one is read; `GoingBack` must not change.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from actorium import __version__
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.ledger import segments
from actorium.actors.messages import WIRE, WIRES_READ, Child, Restarted, Upgrade
from actorium.actors.models.model_dir import resolve
from actorium.actors.runtime.http import connection_records
from actorium.actors.runtime.http.connection_store import StoreState
from actorium.actors.runtime.rundir import write_private

VERSION, READABLE = 1, (1,)
"""Of the state; and those that are read."""
FORMATS: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "handed-over state": (VERSION, READABLE),
    "ledger": (segments.VERSION, (*segments.OLDER, segments.VERSION)),
    "records of connections": (connection_records.VERSION, connection_records.READABLE),
    "messages to clients": (WIRE, WIRES_READ)}
"""What one version leaves to the next: the version that is written, and those that are read."""
FORMATS_WRITTEN = {name: written for name, (written, _) in FORMATS.items()}
MODULE = "actorium.actors.launcher.handed_launcher"
OUTCOME = "upgrade.json"
"""File in the run directory: the `UpgradeOutcome` of the last upgrade."""
STAMPED = 1 << 16
"""Bytes at each end of a model's file that are looked at."""
CHECK_SECONDS = 60
"""For which the other version may look at the state before the upgrade is given up."""


class HandedOver(Struct, kw_only=True):
    """A launcher's state."""

    version: int = VERSION
    formats: dict[str, int]
    release: str = __version__
    python: str = sys.executable
    """Interpreter of the launcher that hands over: where to go back."""
    upgrade: str
    """Id of the upgrade."""
    config: msgspec.Raw
    """The configuration so far, and the one from now on."""
    wanted: msgspec.Raw
    overrides: dict[str, str]
    """Role -> what builds it, where that is not what the configuration says."""
    run_dir: str
    lock: int
    """Descriptor."""
    parent: int | None = None
    """Process whose end ends the engine; and the descriptor at which it reads why."""
    report: int | None = None
    fork_servers: list[int] = []
    """Children that are no actors, and end."""
    children: list[Child] = []
    epochs: dict[str, int] = {}
    restarts: list[Restarted] = []
    store: StoreState | None = None
    started: float = 0.0
    """Unix time."""

    @property
    def descriptors(self) -> list[int]:
        """All that stay open."""
        return [self.lock, *([] if self.report is None else [self.report]),
                *([] if self.store is None else self.store.descriptors)]


class GoingBack(Struct, frozen=True):
    """The old version goes on: why, and what has changed since it handed over. If an epoch is
    there, all its actors have ended but those in `children`."""

    why: str
    epochs: dict[str, int] = {}
    descriptors: list[int] = []
    """What is left of the store's."""
    stops: int = 0
    """Requests to stop that have come since."""
    children: list[Child] = []
    """The relay, if there is one."""


class UpgradeOutcome(Struct, frozen=True, omit_defaults=True):
    """How an upgrade goes."""

    upgrade: str
    state: str
    """under way | done | refused (nothing has happened) | failed (it has gone back)"""
    why: str = ""
    release: str = ""
    ended_at: float = 0.0
    """When the actors before were ended, CLOCK_MONOTONIC seconds; 0 = not yet."""


class _Version(Struct):
    version: int


def why_unreadable(formats: Mapping[str, int]) -> str:
    """Why an engine that writes these formats cannot be upgraded to this version; empty = it can.
    """
    for name, (_, readable) in FORMATS.items():
        if formats.get(name) not in readable:
            return (f"the running engine's {name} has version {formats.get(name)}; actorium "
                    f"{__version__} reads {', '.join(map(str, readable))}")
    return ""


def model_stamp(model: str) -> str:
    """Returns what tells the files of a model from others: of each its name, its size and its ends.
    Empty = there are none."""
    digest = blake2b(digest_size=16)
    try:
        files = sorted(path for path in resolve(model).iterdir() if path.is_file())
        for path in files:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size} ".encode() + file.read(STAMPED))
                file.seek(max(0, size - STAMPED))
                digest.update(file.read(STAMPED))
    except (OSError, BadModel):
        return ""
    return digest.hexdigest()


def memory_of(state: Struct) -> int:
    """Returns the descriptor of a memfd with the state."""
    memory = os.memfd_create("handover", os.MFD_CLOEXEC)
    with open(os.dup(memory), "wb") as file:
        file.write(msgspec.json.encode(state))
    return memory


def read_state(memory: int) -> HandedOver:
    """Raises `BadConfig` if this version cannot go on with it."""
    data = os.pread(memory, os.fstat(memory).st_size, 0)
    if (version := msgspec.json.decode(data, type=_Version).version) not in READABLE:
        raise BadConfig(f"the running engine's handed-over state has version {version}; actorium "
                        f"{__version__} reads {', '.join(map(str, READABLE))}")
    state = msgspec.json.decode(data, type=HandedOver)
    if why := why_unreadable(state.formats):
        raise BadConfig(why)
    return state


def read_back(memory: int) -> GoingBack:
    """Closes it."""
    with open(memory, "rb") as file:
        file.seek(0)
        return msgspec.json.decode(file.read(), type=GoingBack)


def execute(python: str, memory: int, words: Iterable[str | int], descriptors: Iterable[int]
            ) -> None:
    """Becomes the launcher of that interpreter's version. memory: descriptor of the state; words:
    what follows it, texts and descriptors. Raises `OSError`, with nothing changed."""
    words = [memory, *words]
    kept = [*(word for word in words if isinstance(word, int)), *descriptors]
    for fd in kept:
        os.set_inheritable(fd, True)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(python, [python, "-P", "-m", MODULE, *map(str, words)])
    except OSError:
        for fd in kept:
            os.set_inheritable(fd, False)
        raise


def write_outcome(run_dir: Path, outcome: UpgradeOutcome) -> None:
    """Raises `OSError`."""
    write_private(run_dir / OUTCOME, msgspec.json.encode(outcome))


class UpgradeCheck:
    """The other version looks at the state, in a process of its own, while the engine runs on."""

    def __init__(self, order: Upgrade, state: HandedOver, poll: Any) -> None:
        """Raises `OSError` if its interpreter cannot be run."""
        self.order, self._poll = order, poll
        self._said = os.memfd_create("said", os.MFD_CLOEXEC)
        memory = memory_of(state)
        try:
            self._process = subprocess.Popen(
                [order.python, "-P", "-m", MODULE, "--check", str(memory)], pass_fds=(memory,),
                stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said)
        except OSError:
            os.close(self._said)
            raise
        finally:
            os.close(memory)
        self.fd = os.pidfd_open(self._process.pid)
        poll.register(self.fd, select.POLLIN)

    def end(self) -> None:
        """Ends it: nobody asks for the answer any more."""
        self._process.kill()
        self.refusal()

    def refusal(self) -> str:
        """Why the other version does not go on with it; empty = it does. To be called once, when
        `fd` is readable."""
        self._poll.unregister(self.fd)
        status = self._process.wait()
        said = os.pread(self._said, 1 << 16, 0).decode(errors="replace").strip().splitlines()
        os.close(self.fd)
        os.close(self._said)
        if not status:
            return ""
        return said[-1] if said else f"its launcher's check exited with code {status}"
