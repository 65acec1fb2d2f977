"""The contract between an actor's pure core and the shell that runs it (`runtime/shell.py`).

A core does no IO, reads no clock, starts no thread and draws no random numbers: the shell hands it
messages and the time (CLOCK_MONOTONIC seconds) and sends what it returns. So a unit test, a
simulation with a virtual clock or a benchmark can drive a core without a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from actorium.actors.config.tree import Config
from actorium.actors.messages import MAX_CLIENT_MESSAGE_BYTES

if TYPE_CHECKING:
    from actorium.actors.runtime.inflight_journal import InflightJournal

CLIENT = "client"
LEDGER = "ledger"
"""Receiver of records that must be committed before the messages after them are sent."""
IDLE_HEARTBEAT = 0.5
"""Seconds between the heartbeats of an actor that has nothing to do."""


class Send(NamedTuple):
    """One message to send. `to` is a role ("scheduler", "tokenizer", ...), `CLIENT` or `LEDGER`;
    "worker-0" stands for every rank of the worker."""

    to: str
    message: Any
    client: bytes = b""
    """ROUTER identity, when `to` is `CLIENT`."""


class Health(NamedTuple):
    """What a heartbeat reports about a core."""

    phase: str
    step: int
    """Work done so far; never falls."""
    budget: float
    """Seconds the phase may take without progress before it counts as hung."""
    gauges: dict[str, float] = {}
    detail: str = ""


class Context(NamedTuple):
    """The argument of a role's `build` function."""

    config: Config
    run_dir: Path
    role: str
    epoch: int
    entropy: int
    """63 random bits, drawn once by the entry point, for cores that need fresh seeds."""


class Core:
    """An actor's logic: the base class of every actor's core.

    The shell hands a burst of messages to `on_message` and `on_client`, then calls `on_wake` once
    and sends what it returns, in order. A message that a core sends to its own role comes back by
    `on_message`. Hooks that a core does not define do nothing.
    """

    inbox: Any = None
    """Closed union of the messages that the core accepts from actors."""
    client_inbox: Any = None
    """Closed union of the messages that it accepts from clients; None = it has no clients."""
    client_inbox_bytes = MAX_CLIENT_MESSAGE_BYTES
    """Bytes of the largest of them."""
    journal: InflightJournal | None = None
    """The requests in progress, for the next incarnation and for heartbeats."""
    ledger: Any = None
    """The `Ledger` that stores what is sent to `LEDGER`; None = there is none."""
    next_sid: int = 1
    """The first sequence number that was never given (cores with a ledger)."""

    def on_message(self, message: Any, now: float) -> None:
        """Handle one message of the inbox."""
        raise NotImplementedError

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        """Handle one message of the front, from the ROUTER identity `client`."""

    def on_wake(self, now: float) -> Sequence[Send]:
        """Return everything to send now. Called after each burst, and at `next_timer`."""
        raise NotImplementedError

    def next_timer(self) -> float | None:
        """When to call `on_wake` even if no message comes; None = never."""
        return None

    def drain(self, now: float) -> None:
        """Admit nothing new; `done` becomes true when running work has finished."""

    @property
    def done(self) -> bool:
        """Whether all work that ran when `drain` was called has finished."""
        raise NotImplementedError

    def health(self) -> Health:
        """What the heartbeats report."""
        raise NotImplementedError

    def on_start(self, post: Callable[..., None]) -> None:
        """Called once, before the first message. `post(call=None)` may be called from any thread:
        it runs `call` on the shell's thread, then wakes the core."""

    def on_bad_client(self, client: bytes, error_text: str) -> None:
        """A client sent a frame that is no message of `client_inbox`. The text is one line, with
        the name of the field if possible."""

    def on_client_lost(self, client: bytes, now: float) -> None:
        """A message could not be delivered: the client is not connected, or read so slowly that its
        backlog was dropped."""

    def on_client_slow(self, client: bytes, slow: bool, now: float) -> None:
        """The client has stopped reading and messages for it wait; or, with `slow` false, it
        has caught up."""

    def on_peer_stuck(self, role: str, now: float) -> bool:
        """An actor does not read, and the backlog for it is full. Return True to drop the backlog
        and all messages until `on_peer_back`, after which everything has to be sent again; False
        makes it a fault of this actor."""
        return False

    def on_peer_back(self, role: str, now: float) -> None:
        """The actor of `on_peer_stuck` reads again."""

    def live_records(self) -> Iterable[Sequence[Any]]:
        """The ledger records of every unfinished request, in slices (cores with a ledger)."""
        return ()

    def on_ledger_full(self, why: str, now: float) -> None:
        """The ledger accepts no records; messages that follow the refused ones wait."""

    def on_ledger_lost(self, why: str, now: float) -> None:
        """Messages no longer wait for the ledger: what they report is not durable."""

    def on_ledger_ok(self, now: float) -> None:
        """The ledger accepts records again, and what waited has been sent."""


if TYPE_CHECKING:
    _CoreInterface = Core
else:
    _CoreInterface = object


class CoreObserver(_CoreInterface):
    """A core that wraps another one: what a subclass does not define is that one's."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)
