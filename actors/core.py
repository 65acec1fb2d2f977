"""The contract between an actor's pure core and the shell that runs it (`runtime/shell.py`).

A core does no IO, reads no clock, starts no thread and draws no randomness of its own: the shell
hands it messages and the time (CLOCK_MONOTONIC seconds) and sends what it returns. So a core can be
driven by a unit test, a simulation with a virtual clock, or a benchmark, without a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.config.tree import Config
from actorium.actors.runtime.inflight_journal import InflightJournal

CLIENT = "client"
LEDGER = "ledger"
"""Where a core sends records that must be committed before what follows them is told."""
IDLE_BEAT = 0.5
"""Seconds between the heartbeats of an actor that rests."""


class Send(NamedTuple):
    """One message to send: `to` is a role ("scheduler", "worker-0", ...), `CLIENT` or `LEDGER`."""

    to: str
    message: Any
    client: bytes = b""
    """ROUTER identity, when `to` is `CLIENT`."""


class Health(NamedTuple):
    """What a heartbeat tells of a core."""

    phase: str
    step: int
    """Work done, monotonic."""
    budget: float
    """Seconds the phase may take without progress before it counts as hung."""
    gauges: dict[str, float] = {}
    detail: str = ""


class Context(NamedTuple):
    """What a role's `build` function gets."""

    config: Config
    run_dir: Path
    role: str
    epoch: int
    entropy: int
    """63 random bits for cores that need fresh seeds (drawn once, by the shell)."""


class Core:
    """An actor's logic, the base of every actor's core.

    The shell drains a burst of messages into `on_message` / `on_client`, then calls `on_wake` once
    and sends what it returns, in order. It sends to the core's own role by calling `on_message`.
    Hooks that a core does not define do nothing.
    """

    inbox: Any = None
    """Closed union of the messages that the core accepts from actors."""
    front: Any = None
    """The same from clients; None = it has none."""
    journal: InflightJournal | None = None
    """Says what the core works on, to its next incarnation and in heartbeats."""
    ledger: Any = None
    """The `Ledger` that takes what is sent to `LEDGER`; None = there is none."""
    next_sid: int = 1
    """Of a core with a ledger: the first sequence number that was never given."""

    def on_message(self, message: Any, now: float) -> None:
        """Take one message of the inbox."""
        raise NotImplementedError

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        """Take one message of the front, from the ROUTER identity `client`."""

    def on_wake(self, now: float) -> Sequence[Send]:
        """Everything to send now. Called after each burst, and at `next_timer`."""
        raise NotImplementedError

    def next_timer(self) -> float | None:
        """When to call `on_wake` though no message came; None = never."""
        return None

    def drain(self, now: float) -> None:
        """Admit nothing new; `done` becomes true when what was running has finished."""

    @property
    def done(self) -> bool:
        """What was running when `drain` was called has finished."""
        raise NotImplementedError

    def health(self) -> Health:
        """For the heartbeats."""
        raise NotImplementedError

    def on_start(self, post: Callable[..., None]) -> None:
        """Called once, before the first message. `post(call=None)` may be called from any thread:
        it runs `call` on the shell's thread, then wakes the core."""

    def on_bad_client(self, client: bytes, error_text: str) -> None:
        """A frame of this client is no message of `front`; the text is one line that names the
        field where it can."""

    def on_client_gone(self, client: bytes, now: float) -> None:
        """Something was to be sent to this client, but it is not connected, or has not read for so
        long that its backlog was dropped."""

    def on_client_slow(self, client: bytes, slow: bool, now: float) -> None:
        """The client does not read what is sent to it, which waits here; or (not slow) it has read
        all of it."""

    def on_missed(self, role: str, now: float) -> bool:
        """This actor does not read, and the backlog for it is full. True = all of it is dropped,
        and what comes until it reads again, when `on_hears` is called: then everything has to be
        told once more. False: that is a fault."""
        return False

    def on_hears(self, role: str, now: float) -> None:
        """This actor reads again; see `on_missed`."""

    def alive(self) -> Iterable[Sequence[Any]]:
        """Of a core with a ledger: the records of all that is not over, a slice at a time."""
        return ()

    def on_ledger_full(self, why: str, now: float) -> None:
        """The ledger takes no more, and what was to be told after those records waits."""

    def on_ledger_lost(self, why: str, now: float) -> None:
        """Nothing waits for the ledger any more, and what is told is not durable."""

    def on_ledger_ok(self, now: float) -> None:
        """The ledger takes records again, and what waited has gone out."""


class CoreObserver(Core):
    """A core around another core, as that one in all that a subclass does not define."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.inbox, self.front = core.inbox, core.front
        self.journal, self.ledger = core.journal, core.ledger

    @property
    def next_sid(self) -> int:  # type: ignore[override]
        """See `Core.next_sid`."""
        return self._core.next_sid

    def on_message(self, message: Any, now: float) -> None:
        self._core.on_message(message, now)

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        self._core.on_client(client, message, now)

    def on_wake(self, now: float) -> Sequence[Send]:
        return self._core.on_wake(now)

    def next_timer(self) -> float | None:
        return self._core.next_timer()

    def drain(self, now: float) -> None:
        self._core.drain(now)

    @property
    def done(self) -> bool:
        return self._core.done

    def health(self) -> Health:
        return self._core.health()

    def on_start(self, post: Callable[..., None]) -> None:
        self._core.on_start(post)

    def on_bad_client(self, client: bytes, error_text: str) -> None:
        self._core.on_bad_client(client, error_text)

    def on_client_gone(self, client: bytes, now: float) -> None:
        self._core.on_client_gone(client, now)

    def on_client_slow(self, client: bytes, slow: bool, now: float) -> None:
        self._core.on_client_slow(client, slow, now)

    def on_missed(self, role: str, now: float) -> bool:
        return self._core.on_missed(role, now)

    def on_hears(self, role: str, now: float) -> None:
        self._core.on_hears(role, now)

    def alive(self) -> Iterable[Sequence[Any]]:
        return self._core.alive()

    def on_ledger_full(self, why: str, now: float) -> None:
        self._core.on_ledger_full(why, now)

    def on_ledger_lost(self, why: str, now: float) -> None:
        self._core.on_ledger_lost(why, now)

    def on_ledger_ok(self, now: float) -> None:
        self._core.on_ledger_ok(now)
