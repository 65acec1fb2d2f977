"""The shell's hold on a ledger: nothing that follows a record is sent before the record is there.

All records of a wake are committed by one write. When the disk is full, what was to follow waits
here, in order, and the core is told so; it is tried again every `RETRY` seconds. After
`recovery.ledger_patience` seconds streams go on without: what is told then is not durable, and the
core is told that, too. Once the disk takes records again, all that is alive is written anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from pathlib import Path
from time import monotonic

from actorium.actors.core import LEDGER as RECORDS
from actorium.actors.core import Context, Core, Send
from actorium.actors.errors import ActoriumError, BadConfig, EngineUnavailable
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import History
from actorium.actors.ledger.segments import LedgerFull
from actorium.actors.runtime.rundir import LEDGER

LOG = logging.getLogger("actorium.ledger")
RETRY = 0.1
LONGEST_RETRY = 5.0
"""Once nobody waits: a try writes all that is alive."""
LOOK = 1.0
"""Seconds between two looks for files that somebody has removed."""
SHORTAGES = (ENOSPC, EDQUOT, EFBIG, EIO)
"""Errors that may pass; others are of the configuration."""


class Committer:
    """Between a core and the sockets."""

    def __init__(self, core: Core, ledger: Ledger, patience: float = 2.0) -> None:
        """patience: seconds for which news wait for a ledger that takes nothing."""
        self._core, self._ledger, self._patience = core, ledger, patience
        self._held: list[Send] = []
        self.pause = RETRY
        self.full = False
        """The last commit failed: call `retry` every `pause` seconds."""
        self.lost = False
        """So did all since, for so long that news go out without."""
        self._since = self._looked = 0.0
        """When it became full; when the files were looked for."""
        if ledger.history.entries:
            ledger.history = History()  # it was read: the core holds what is needed of it
            self._try(self._compact)  # times are of this boot then

    @property
    def holds(self) -> bool:
        """News wait for the ledger."""
        return self.full and not self.lost

    def pass_on(self, sends: Sequence[Send], now: float) -> Sequence[Send]:
        """Commit the records among `sends`; returns what may be sent now, in order."""
        records = [send.message for send in sends if send.to == RECORDS]
        if not records:
            return sends
        if self.lost:
            return [send for send in sends if send.to != RECORDS]
        try:
            self._ledger.commit(records)
        except LedgerFull as error:
            first = next(i for i, send in enumerate(sends) if send.to == RECORDS)
            self.full, self._since = True, now
            self._held = [send for send in sends[first:] if send.to != RECORDS]
            why = error.strerror or str(error)
            LOG.error("%s; requests wait for it, %g s at the most", why, self._patience)
            self._core.on_ledger_full(why, now)
            return sends[:first]
        return [send for send in sends if send.to != RECORDS]

    def retry(self, now: float) -> Sequence[Send]:
        """After a failure: try again, with less on the disk if that can be had. Returns what may
        be sent now."""
        try:
            self._compact()
            self._ledger.commit()
        except LedgerFull as error:
            return self._go_on(error.strerror or str(error), now)
        held, self._held, self.full, self.lost = self._held, [], False, False
        self.pause = RETRY
        LOG.warning("the ledger takes records again")
        self._core.on_ledger_ok(now)
        return held

    def _go_on(self, why: str, now: float) -> Sequence[Send]:
        """It still takes nothing; returns what may be sent all the same."""
        if self.lost:
            self.pause = min(2 * self.pause, LONGEST_RETRY)
        elif now - self._since >= self._patience:
            self.lost = True
            LOG.error("%s; requests go on, but what they are told is not durable", why)
            self._ledger.forget_unwritten()
            self._core.on_ledger_lost(why, now)
            held, self._held = self._held, []
            return held
        return []

    def tidy(self) -> None:
        """Compact when it is time to, a slice at a time: a step that follows is late by no more
        than that."""
        if self.full:
            return
        if (now := monotonic()) - self._looked >= LOOK:
            self._looked = now
            if not self._ledger.intact:
                LOG.error("files of the ledger are gone from %s: all that is alive is written anew",
                          self._ledger.directory)
                self._try(self._write_anew)
                return
        if self._ledger.compacting:
            self._try(self._ledger.compact_some)
        elif self._ledger.grown:
            self._try(lambda: self._ledger.begin_compaction(self._core.alive, self._core.next_sid))

    def _try(self, compacting: Callable[[], None]) -> None:
        try:
            compacting()
        except LedgerFull as error:
            LOG.warning("cannot compact: %s", error.strerror)

    def _write_anew(self) -> None:
        try:
            self._compact()
        except LedgerFull:
            self._ledger.abandon()
            raise

    def _compact(self) -> None:
        self._ledger.compact(self._core.alive, self._core.next_sid)

    def close(self) -> None:
        """Give up the ledger; what it holds is forgotten if all of it was told."""
        self._ledger.close(forget=self._core.done and not self.holds)


def open_ledger(context: Context) -> Ledger | None:
    """The engine's ledger, or None where it keeps none.

    Raises `BadConfig` if the directory cannot be used or holds what is not this engine's,
    `EngineUnavailable` if another engine writes there or the disk is full. A scheduler that is
    started again in the middle of an engine's life goes on with what can be read: only another
    engine that writes there keeps it from that."""
    recovery, model = context.config.recovery, context.config.model.model
    if not (recovery.ledger and (recovery.restart or recovery.ledger_dir is not None)):
        return None
    own = recovery.ledger_dir
    directory = context.run_dir / LEDGER if own is None else Path(own).expanduser()
    again = context.epoch > 1
    try:
        ledger = Ledger(directory, model, anyway=again)
    except LedgerFull as error:
        raise _unusable(directory, error) from None
    except OSError as error:
        raise BadConfig(f"ledger_dir: {directory}: {error.strerror}",
                        "recovery.ledger_dir") from None
    except ValueError as error:
        raise BadConfig(f"ledger_dir: {error}", "recovery.ledger_dir") from None
    try:
        _forget_others(ledger, model, again)
    except BadConfig:
        ledger.close()
        raise
    return ledger


def _unusable(directory: Path, error: LedgerFull) -> ActoriumError:
    text = f"ledger_dir: {directory}: {error.strerror}"
    if error.errno in SHORTAGES:
        return EngineUnavailable(text)
    return BadConfig(text, "recovery.ledger_dir")


def _forget_others(ledger: Ledger, model: str, again: bool) -> None:
    """Requests of other models are none of ours. Raises `BadConfig` if they are not over, but for
    an engine that runs (again)."""
    entries = ledger.history.entries
    others = [key for key, entry in entries.items() if entry.model not in ("", model)]
    unfinished = [entries[key].model for key in others if not entries[key].over]
    if unfinished:
        text = (f"ledger_dir: {ledger.directory} holds {len(unfinished)} unfinished requests of "
                f"the model {unfinished[0]!r}")
        if not again:
            raise BadConfig(text, "recovery.ledger_dir")
        LOG.error("%s: they are left out", text)
    for key in others:
        ledger.history.forget(key)
