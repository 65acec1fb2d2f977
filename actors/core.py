"""The contract between an actor's pure core and the shell that runs it (`runtime/shell.py`).

A core does no IO, reads no clock, starts no thread and draws no randomness of its own: the shell
hands it messages and the time (CLOCK_MONOTONIC seconds) and sends what it returns. So a core can be
driven by a unit test, a simulation with a virtual clock, or a benchmark, without a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from actorium.actors.config.tree import Config

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


class Core(Protocol):
    """An actor's logic. `inbox` and `front` are the closed unions it accepts (front may be None).

    The shell drains a burst of messages into `on_message` / `on_client`, then calls `on_wake` once
    and sends what it returns, in order. It sends to the core's own role by calling `on_message`.

    A core may have these as well; the shell calls them where they exist:

    - `on_start(post)`: once, before the first message. `post(call=None)` may be called from any
      thread: it runs `call` on the shell's thread, then wakes the core.
    - `on_bad_client(client: bytes, error_text: str)`: a frame of this client is no message of
      `front`; the text is one line that names the field where it can.
    - `on_client_gone(client: bytes, now: float)`: something was to be sent to this client, but it
      is not connected, or has not read for so long that its backlog was dropped.
    - `on_client_slow(client: bytes, slow: bool, now: float)`: the client does not read what is sent
      to it, which waits here; or (not slow) it has read all of it.
    - `on_missed(role: str, now: float) -> bool`: this actor does not read, and the backlog for it
      is full. True = all of it is dropped, and what comes until it reads again, when
      `on_hears(role, now)` is called: then everything has to be told once more. False, or no such
      hook: that is a fault.
    - `docket`: the `Docket` that says what it works on, to its next incarnation and in heartbeats.
    - `ledger`: the `Ledger` that takes what is sent to `LEDGER`, and what `commit.Recorder` lists:
      among it `on_ledger_full(why: str, now: float)`: the ledger takes no more, and what was to be
      told after those records waits; `on_ledger_lost(why: str, now: float)`: nothing waits for it
      any more, and what is told is not durable; `on_ledger_ok(now)`: it takes records again, and
      what waited has gone out.
    """

    inbox: Any
    front: Any

    def on_message(self, message: Any, now: float) -> None:
        """Take one message of the inbox."""

    def on_client(self, client: bytes, message: Any, now: float) -> None:
        """Take one message of the front, from the ROUTER identity `client`."""

    def on_wake(self, now: float) -> Sequence[Send]:
        """Everything to send now. Called after each burst, and at `next_timer`."""

    def next_timer(self) -> float | None:
        """When to call `on_wake` though no message came; None = never."""

    def drain(self, now: float) -> None:
        """Admit nothing new; `done` becomes true when what was running has finished."""

    @property
    def done(self) -> bool: ...

    def health(self) -> Health: ...
