"""Write-ahead commits for the actor shell: no message is sent before the records ahead of it are in
the ledger.

All records of a wake are committed by one write. When the disk is full, the messages after them
wait here, in order, and the core is notified; the write is tried again every `RETRY` seconds. After
`recovery.ledger_patience` seconds streams go on without it: what is sent then is not durable, and
the core is notified of that, too. Once the disk takes records again, all that is alive is written
anew.
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
from actorium.actors.ledger.records import LedgerHistory
from actorium.actors.ledger.segments import LedgerFull
from actorium.actors.runtime.rundir import LEDGER

LOG = logging.getLogger("actorium.ledger")
RETRY = 0.1
LONGEST_RETRY = 5.0
"""Seconds between tries once nobody waits: each writes all that is alive."""
CHECK_FILES = 1.0
"""Seconds between two checks that no file was removed."""
SHORTAGES = (ENOSPC, EDQUOT, EFBIG, EIO)
"""Errors that may pass; others are the configuration's."""


class LedgerCommitter:
    """Stands between a core and its sockets."""

    def __init__(self, core: Core, ledger: Ledger, patience: float = 2.0) -> None:
        """patience: seconds for which messages wait for a ledger that takes no records."""
        self._core, self._ledger, self._patience = core, ledger, patience
        self._held: list[Send] = []
        self.pause = RETRY
        self.full = False
        """The last commit failed: call `retry` every `pause` seconds."""
        self.lost = False
        """All commits failed for so long that messages are sent without."""
        self._full_since = self._checked_at = 0.0
        """When it became full; when the files were last checked."""
        if ledger.history.entries:
            ledger.history = LedgerHistory()  # the core has what it needs of it
            self._try(self._compact)  # so that all times are of this boot

    @property
    def holding(self) -> bool:
        """Messages wait for the ledger."""
        return self.full and not self.lost

    def commit(self, sends: Sequence[Send], now: float) -> Sequence[Send]:
        """Commit the records among `sends`; returns the messages that may be sent now, in order."""
        records = [send.message for send in sends if send.to == RECORDS]
        if not records:
            return sends
        if self.lost:
            return [send for send in sends if send.to != RECORDS]
        first = next(i for i, send in enumerate(sends) if send.to == RECORDS)
        if self.full:  # behind those that wait
            self._ledger.add(records)
            self._held += [send for send in sends[first:] if send.to != RECORDS]
            return sends[:first]
        try:
            self._ledger.commit(records)
        except LedgerFull as error:
            self.full, self._full_since = True, now
            self._held = [send for send in sends[first:] if send.to != RECORDS]
            why = error.strerror or str(error)
            LOG.error("%s; requests wait for it, %g s at the most", why, self._patience)
            self._core.on_ledger_full(why, now)
            return sends[:first]
        return [send for send in sends if send.to != RECORDS]

    def retry(self, now: float) -> Sequence[Send]:
        """Try again after a failure, with less on the disk if possible. Returns the messages that
        may be sent now."""
        try:
            self._compact()
            self._ledger.commit()
        except LedgerFull as error:
            return self._still_full(error.strerror or str(error), now)
        held, self._held, self.full, self.lost = self._held, [], False, False
        self.pause = RETRY
        LOG.warning("the ledger takes records again")
        self._core.on_ledger_ok(now)
        return held

    def _still_full(self, why: str, now: float) -> Sequence[Send]:
        """Returns the messages that may be sent all the same."""
        if self.lost:
            self.pause = min(2 * self.pause, LONGEST_RETRY)
        elif now - self._full_since >= self._patience:
            self.lost = True
            LOG.error("%s; requests go on, but what they are told is not durable", why)
            self._ledger.discard_batch()
            self._core.on_ledger_lost(why, now)
            held, self._held = self._held, []
            return held
        return []

    def maintain(self) -> None:
        """Compact when it is time to, a slice at a time: a step is late by no more than a slice."""
        if self.full:
            return
        if (now := monotonic()) - self._checked_at >= CHECK_FILES:
            self._checked_at = now
            if not self._ledger.intact:
                LOG.error("files of the ledger are gone from %s: all that is alive is written anew",
                          self._ledger.directory)
                self._try(self._rewrite)
                return
        if self._ledger.compacting:
            self._try(self._ledger.compact_slice)
        elif self._ledger.needs_compaction:
            self._try(lambda: self._ledger.begin_compaction(self._core.live_records,
                                                            self._core.next_sid))

    def _try(self, compacting: Callable[[], None]) -> None:
        try:
            compacting()
        except LedgerFull as error:
            LOG.warning("cannot compact: %s", error.strerror)

    def _rewrite(self) -> None:
        try:
            self._compact()
        except LedgerFull:
            self._ledger.abandon()
            raise

    def _compact(self) -> None:
        self._ledger.compact(self._core.live_records, self._core.next_sid)

    def close(self) -> None:
        """Close the ledger, and mark its files if all that they hold was sent."""
        self._ledger.close(finished=self._core.done and not self.holding)


def open_ledger(context: Context) -> Ledger | None:
    """The engine's ledger, or None where it keeps none.

    Raises `BadConfig` if the directory cannot be used or holds another engine's requests,
    `EngineUnavailable` if another engine writes there or the disk is full. A scheduler that is
    restarted within an engine's life goes on with what can be read, unless another engine writes
    there."""
    recovery, model = context.config.recovery, context.config.model.model
    if not (recovery.ledger and (recovery.restart or recovery.ledger_dir is not None)):
        return None
    ledger_dir = recovery.ledger_dir
    directory = context.run_dir / LEDGER if ledger_dir is None else Path(ledger_dir).expanduser()
    again = context.epoch > 1
    try:
        ledger = Ledger(directory, model, lenient=again)
    except LedgerFull as error:
        raise _unusable(directory, error) from None
    except OSError as error:
        raise BadConfig(f"ledger_dir: {directory}: {error.strerror}",
                        "recovery.ledger_dir") from None
    except ValueError as error:
        raise BadConfig(f"ledger_dir: {error}", "recovery.ledger_dir") from None
    try:
        _drop_other_models(ledger, model, again)
    except BadConfig:
        ledger.close()
        raise
    return ledger


def _unusable(directory: Path, error: LedgerFull) -> ActoriumError:
    text = f"ledger_dir: {directory}: {error.strerror}"
    if error.errno in SHORTAGES:
        return EngineUnavailable(text)
    return BadConfig(text, "recovery.ledger_dir")


def _drop_other_models(ledger: Ledger, model: str, again: bool) -> None:
    """Forget requests of other models. Raises `BadConfig` if any is unfinished, unless the engine
    runs already (again)."""
    entries = ledger.history.entries
    others = [key for key, entry in entries.items() if entry.model not in ("", model)]
    unfinished = [entries[key].model for key in others if not entries[key].finished]
    if unfinished:
        text = (f"ledger_dir: {ledger.directory} holds {len(unfinished)} unfinished requests of "
                f"the model {unfinished[0]!r}")
        if not again:
            raise BadConfig(text, "recovery.ledger_dir")
        LOG.error("%s: they are left out", text)
    for key in others:
        ledger.history.forget(key)
