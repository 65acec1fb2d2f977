"""Interfaces of the shell's optional features: the ledger's `CommitLog`, and the `ClientGate` that
lets clients of other machines in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import zmq

from actorium.actors.core import Context, Core, Send
from actorium.actors.runtime.client_endpoint import ClientEndpoint


class ClientGate(Protocol):
    """Authenticates clients of other machines (`runtime/security/curve_gate.py`)."""

    refused: int
    """Connections refused so far."""

    @property
    def fd(self) -> int: ...

    def serve(self) -> None:
        """Call when `fd` is readable."""

    def close(self) -> None: ...


class CommitLog(Protocol):
    """Holds messages back until the records before them are stored (`ledger/committer.py`)."""

    full: bool
    """The last commit failed: call `retry` every `pause` seconds."""
    pause: float

    @property
    def holding(self) -> bool:
        """Whether messages wait for the ledger."""

    def commit(self, sends: Sequence[Send], now: float) -> Sequence[Send]:
        """Store the records among `sends`; return the messages that may be sent now."""

    def retry(self, now: float) -> Sequence[Send]:
        """Try again after a failure; return the messages that may be sent now."""

    def maintain(self) -> None: ...

    def close(self) -> None: ...


class Extensions(NamedTuple):
    """The features around a shell; None = there is none. Each function returns None where its
    feature is not wanted."""

    open_gate: Callable[[Context, zmq.Context[Any], ClientEndpoint], ClientGate | None] | None = \
        None
    open_commit_log: Callable[[Context, Core], CommitLog | None] | None = None
