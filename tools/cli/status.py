"""Asking an engine's watchdog how its actors are, and saying it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from actorium.actors.gauges import bytes_of
from actorium.actors.messages import ActorStatus, GetStatus, Status
from actorium.actors.runtime.rundir import address

_decode = msgspec.msgpack.Decoder(Status).decode
"""Made at import: see `actors/client/connection.py`."""
COUNTED = "restarts."
"""How the watchdog's gauges of restarts begin: "restarts.ROLE.CAUSE"."""


class Asker:
    """A connection to one watchdog's front. Use it from one thread; close it."""

    def __init__(self, run_dir: Path) -> None:
        import zmq

        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 5)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.connect(address(run_dir, "watchdog.front"))

    def ask(self, timeout: float) -> Status | None:
        """Its answer to a question asked now; None when it has not answered in `timeout` s."""
        import zmq

        rid = uuid.uuid4().hex
        deadline = _Deadline(timeout)
        try:
            self._socket.send(msgspec.msgpack.encode(GetStatus(rid)), zmq.NOBLOCK)
        except zmq.Again:
            return None
        while self._socket.poll(deadline.left_ms()):
            status: Status = _decode(self._socket.recv())
            if status.rid == rid:
                return status
        return None

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class _Deadline:
    def __init__(self, timeout: float) -> None:
        from time import monotonic

        self._now = monotonic
        self._at = monotonic() + timeout

    def left_ms(self) -> int:
        return max(0, int((self._at - self._now()) * 1000))


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
    """Role -> how often it was started again by cause (`watchdog.metrics.DEATHS`), as the watchdog
    has counted."""
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
