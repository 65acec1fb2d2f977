"""The shell's hold on a ledger: nothing that follows a record is sent before the record is there.

All records of a wake are committed by one write. When the disk is full, what was to follow waits
here, in order, and the core is told so; it is tried again every `RETRY` seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from actorium.actors.core import LEDGER as RECORDS
from actorium.actors.core import Context, Send
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import History
from actorium.actors.ledger.segments import LedgerFull, Record
from actorium.actors.runtime.rundir import LEDGER

LOG = logging.getLogger("actorium.ledger")
RETRY = 0.1


class Recorder(Protocol):
    """What a core with a ledger offers (see `core.Core`)."""

    ledger: Ledger | None
    next_sid: int

    def alive(self) -> Iterable[Sequence[Record]]: ...

    def on_ledger_full(self, why: str, now: float) -> None: ...

    def on_ledger_ok(self, now: float) -> None: ...

    @property
    def done(self) -> bool: ...


class Committer:
    """Between a core and the sockets."""

    def __init__(self, core: Recorder, ledger: Ledger) -> None:
        self._core, self._ledger = core, ledger
        self._held: list[Send] = []
        self.pause = RETRY
        self.full = False
        """The last commit failed: call `retry` every `pause` seconds."""
        if ledger.history.entries:
            ledger.history = History()  # it was read: the core holds what is needed of it
            self._try(self._compact)  # times are of this boot then

    def pass_on(self, sends: Sequence[Send], now: float) -> Sequence[Send]:
        """Commit the records among `sends`; returns what may be sent now, in order."""
        records = [send.message for send in sends if send.to == RECORDS]
        if not records:
            return sends
        try:
            self._ledger.commit(records)
        except LedgerFull as error:
            first = next(i for i, send in enumerate(sends) if send.to == RECORDS)
            self.full = True
            self._held = [send for send in sends[first:] if send.to != RECORDS]
            why = error.strerror or str(error)
            LOG.error("%s; requests wait until it does", why)
            self._core.on_ledger_full(why, now)
            return sends[:first]
        return [send for send in sends if send.to != RECORDS]

    def retry(self, now: float) -> Sequence[Send]:
        """After a failure: try again, with less on the disk if that can be had. Returns what may
        be sent now."""
        try:
            self._compact()
            self._ledger.commit()
        except LedgerFull:
            return []
        held, self._held, self.full = self._held, [], False
        LOG.warning("the ledger takes records again")
        self._core.on_ledger_ok(now)
        return held

    def tidy(self) -> None:
        """Compact when it is time to, a slice at a time: a step that follows is late by no more
        than that."""
        if self.full:
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

    def _compact(self) -> None:
        self._ledger.compact(self._core.alive, self._core.next_sid)

    def close(self) -> None:
        """Give up the ledger; what it holds is forgotten if all of it was told."""
        self._ledger.close(forget=self._core.done and not self.full)


def committer(core: Any) -> Committer | None:
    """For a core that has a ledger."""
    ledger = getattr(core, "ledger", None)
    return None if ledger is None else Committer(core, ledger)


def open_ledger(context: Context) -> Ledger | None:
    """The engine's ledger, or None where it keeps none. Raises `BadConfig` if the directory cannot
    be used, `EngineUnavailable` if another engine writes there or the disk is full."""
    recovery, model = context.config.recovery, context.config.model.model
    if not (recovery.ledger and (recovery.restart or recovery.ledger_dir is not None)):
        return None
    own = recovery.ledger_dir
    directory = context.run_dir / LEDGER if own is None else Path(own).expanduser()
    try:
        ledger = Ledger(directory, model)
    except LedgerFull as error:
        raise EngineUnavailable(f"ledger_dir: {directory}: {error.strerror}") from None
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else str(error)
        raise BadConfig(f"ledger_dir: {directory}: {text}", "recovery.ledger_dir") from None
    history = ledger.history
    unfinished = sum(not entry.over for entry in history.entries.values())
    if history.meta is not None and history.meta.model != model and unfinished:
        ledger.close()
        raise BadConfig(f"ledger_dir: {directory} holds {unfinished} unfinished requests of the "
                        f"model {history.meta.model!r}", "recovery.ledger_dir")
    return ledger
