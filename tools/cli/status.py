"""Running engines: finding one, asking its watchdog how its actors are and saying it, and waiting,
which is said on stderr once it takes long and never is without an end."""

from __future__ import annotations

import json
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from actorium.actors.config.tree import RuntimeConfig
from actorium.actors.errors import EngineUnavailable
from actorium.actors.health import bytes_of
from actorium.actors.messages import ActorStatus, GetStatus, Status
from actorium.actors.runtime.rundir import address, engine_dir, is_running

if TYPE_CHECKING:
    import zmq

NOTICE_SECONDS = 1.0
"""Seconds of waiting after which a line says so."""


@contextmanager
def announced_wait(what: str, seconds: float) -> Iterator[None]:
    """Says what is waited for within, and how long at the most, unless it comes at once."""
    line = f"actorium: waiting for {what}, at most {seconds:g} s"
    notice = threading.Timer(NOTICE_SECONDS,
                             lambda: print(line, file=sys.stderr, flush=True))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def running_dir(runtime: RuntimeConfig) -> Path:
    """Returns the run directory of the engine of that name. Raises `EngineUnavailable` if none
    runs."""
    path = engine_dir(runtime.name, runtime.run_dir)
    if not is_running(path):
        raise EngineUnavailable(f"no engine named {runtime.name!r} is running; `actorium ps` lists "
                                f"those that do, `actorium serve --name {runtime.name}` starts one",
                                "name")
    return path


_decode = msgspec.msgpack.Decoder(Status).decode
"""Made at import: see `actors/client/connection.py`."""
COUNTED = "restarts."
"""How the watchdog's gauges of restarts begin: "restarts.ROLE.CAUSE"."""


class ActorConnection:
    """A connection to the front of an actor. Use it from one thread; close it."""

    def __init__(self, run_dir: Path, role: str, sign: bytes = b"") -> None:
        """sign: how the name begins by which the actor knows this end."""
        import zmq

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 5)
        self._socket.setsockopt(zmq.IDENTITY, sign + uuid.uuid4().bytes)
        self._socket.connect(address(run_dir, f"{role}.front"))

    def send(self, message: msgspec.Struct) -> bool:
        """Whether there was room for it."""
        import zmq

        try:
            self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def answers(self, seconds: float) -> Iterator[bytes]:
        """What comes within so many seconds."""
        until = monotonic() + seconds
        while self._socket.poll(max(0, int(1000 * (until - monotonic())))):
            yield self._socket.recv()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Asker(ActorConnection):
    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, "watchdog")

    def ask(self, timeout: float) -> Status | None:
        """Its answer to a question asked now; None when it has not answered in `timeout` s."""
        rid = uuid.uuid4().hex
        if not self.send(GetStatus(rid)):
            return None
        found = map(_decode, self.answers(timeout))
        return next((status for status in found if status.rid == rid), None)


def ask(run_dir: Path, timeout: float = 1.0) -> Status | None:
    asker = Asker(run_dir)
    try:
        return asker.ask(timeout)
    finally:
        asker.close()


def about(run_dir: Path) -> dict[str, Any]:
    """What the launcher wrote of its engine: name, pid, model, ...; {} while it has not."""
    try:
        found = json.loads((run_dir / "engine.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def restarts(actor: ActorStatus) -> int:
    """How often an actor was started again."""
    return int(actor.gauges.get("restarts", 0))


def causes(answer: Status) -> dict[str, dict[str, int]]:
    """Role -> how often it was started again by cause (`metric_tables.DEATHS`), as the watchdog has
    counted."""
    counts: dict[str, dict[str, int]] = {}
    for actor in answer.actors:
        for name, count in actor.gauges.items() if actor.role == "watchdog" else ():
            if name.startswith(COUNTED):
                role, _, cause = name.removeprefix(COUNTED).rpartition(".")
                counts.setdefault(role, {})[cause] = int(count)
    return counts


def why_again(counts: Mapping[str, int]) -> str:
    """Restarts by cause, in a line; nothing for an actor that never was started again."""
    text = ", ".join(f"{cause} {count}" for cause, count in sorted(counts.items()))
    return f"started again: {text}" if text else ""


def device_memory(gauges: Mapping[str, float]) -> str:
    """Returns bytes measured beside planned, in a line; empty for an actor that reports none.

    The workspace is planned for the largest step; it is shown once a step was measured.
    """
    found = bytes_of(gauges)
    step = found.get("workspace", {})
    parts = [f"{name} {_mib(count['measured'])} ({_mib(count['planned'])})"
             for name, count in found.items()
             if count["planned"] and (name != "workspace" or count["tokens"])]
    if not parts:
        return ""
    seen = ""
    if step.get("tokens"):
        seen = f" in a step of {step['tokens']:,} tokens, {step['rows']} rows"
    return f"MiB (planned): {', '.join(parts)}{seen}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}" if count >= 10 << 20 else f"{count / 2**20:.1f}"
