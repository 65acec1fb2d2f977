"""Asking an engine's watchdog how its actors are, and saying it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from actorium.actors.health import bytes_of
from actorium.actors.messages import ActorStatus, GetStatus, Status
from actorium.actors.runtime.rundir import address

if TYPE_CHECKING:
    import zmq

_decode = msgspec.msgpack.Decoder(Status).decode
"""Made at import: see `actors/client/connection.py`."""
COUNTED = "restarts."
"""How the watchdog's gauges of restarts begin: "restarts.ROLE.CAUSE"."""


class FrontAsker:
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


class Asker(FrontAsker):
    """A connection to one watchdog's front."""

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
    """One question, one answer or None."""
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
    found: dict[str, dict[str, int]] = {}
    for actor in answer.actors:
        for name, count in actor.gauges.items() if actor.role == "watchdog" else ():
            if name.startswith(COUNTED):
                role, _, cause = name.removeprefix(COUNTED).rpartition(".")
                found.setdefault(role, {})[cause] = int(count)
    return found


def why_again(counts: Mapping[str, int]) -> str:
    """Restarts by cause, in a line; nothing for an actor that never was started again."""
    text = ", ".join(f"{cause} {count}" for cause, count in sorted(counts.items()))
    return f"started again: {text}" if text else ""


def device_memory(gauges: Mapping[str, float]) -> str:
    """Bytes measured beside planned, in a line; nothing for an actor that tells of none.

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
