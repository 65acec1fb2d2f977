"""What a launcher does about `actorium upgrade`, until the other version's takes its place."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actorium.actors.launcher.handover import (
    HandedOver,
    UpgradeCheck,
    UpgradeOutcome,
    execute,
    memory_of,
    write_outcome,
)
from actorium.actors.launcher.stopping import SIGNALS
from actorium.actors.messages import Upgrade


class UpgradeOrders:
    """Has the other version look at the launcher's state while the engine runs on, and then hands
    the process over to it."""

    def __init__(self, run_dir: Path, poll: Any, why_not: Callable[[], str],
                 state: Callable[[Upgrade], HandedOver], say: Callable[[str], None]) -> None:
        """poll: hand `on_readable` the descriptors that it reports; why_not: why the engine cannot
        be upgraded now, empty = it can; state: what the other version gets; say: prints a line."""
        self._run_dir, self._poll = run_dir, poll
        self._why_not, self._state, self._say = why_not, state, say
        self._check: UpgradeCheck | None = None
        """Of the upgrade under way."""

    def on_order(self, order: Upgrade) -> None:
        """Begins the check."""
        why = self._why_not() if self._check is None else "another upgrade is under way"
        if not why:
            try:
                self._check = UpgradeCheck(order, self._state(order), self._poll)
            except OSError as error:
                why = f"{order.python}: {error.strerror}"
        self._write(order, "refused" if why else "under way", why)

    def on_readable(self, fd: int) -> None:
        """`fd` is readable; one that is not of this object is passed over."""
        check = self._check
        if check is None or fd != check.fd:
            return
        self._check = None
        refusal = check.refusal()
        # A signal that comes from now on waits until the other launcher handles it.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        why = refusal or self._why_not() or self._hand_over(check.order)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._write(check.order, "refused", why)

    def _hand_over(self, order: Upgrade) -> str:
        """Becomes the other version's launcher; returns why that is not possible."""
        state = self._state(order)
        self._say(f"upgrade: {order.python} takes over")
        try:
            execute(order.python, memory_of(state), [sys.executable], state.descriptors)
        except OSError as error:
            return f"{order.python}: {error.strerror}"
        raise AssertionError("not reached")

    def _write(self, order: Upgrade, state: str, why: str) -> None:
        with contextlib.suppress(OSError):
            write_outcome(self._run_dir, UpgradeOutcome(order.id, state, why))

    def close(self) -> None:
        """The engine ends: nobody asks for a check's answer any more."""
        if self._check is not None:
            self._check.end()
