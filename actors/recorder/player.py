"""Playing a recording: a fresh core hears what the recorded one heard, and plans as it did."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from actorium.actors.config import tree as configs
from actorium.actors.core import Context
from actorium.actors.ledger.records import LedgerEntry, LedgerHistory, SequenceOutput
from actorium.actors.messages import StepPlan
from actorium.actors.recorder.recorder import STUCK, checksum
from actorium.actors.recorder.tape import SUFFIXES, BadTape, Past, Recording, Turn, join, read

if TYPE_CHECKING:
    from actorium.actors.scheduler.core import SchedulerCore

MAX_MEMBER = 1 << 30


class Played(NamedTuple):
    """A turn, the plans that it led to this time, and whether they are those of then."""

    turn: Turn
    plans: list[StepPlan]
    same: bool
    error: str = ""
    """What the core raised."""


class Anything:
    """A vocabulary whose grammars allow everything: plans do not depend on what masks say, and a
    recording tells what came of them."""

    error = ""
    consumed = 0

    def knows(self, grammar: str) -> bool:
        """All of them."""
        return True

    def compile(self, grammar: str) -> Anything:
        """There is nothing to do."""
        return self

    def keep(self, grammar: str, compiled: Anything) -> None:
        """It is kept."""

    def matcher(self, grammar: str) -> Anything:
        """It is in the same place all the time."""
        return self

    def take(self, tokens: Sequence[int]) -> bool:
        """All are allowed."""
        return True

    def masks(self, wanted: Sequence[tuple[Any, Sequence[int]]]) -> list[list[Any]]:
        """None are needed."""
        return [[] for _ in wanted]


def load(path: Path) -> Recording:
    """Read a recording: one of its files (the other one is looked for beside it), or a crash
    report that holds them. Raises `BadTape`, naming the file."""
    try:
        if path.name.endswith(".tar.gz"):
            recordings = list(_members(path))
        else:
            recordings = [read(path.read_bytes(), str(path)), *_siblings(path)]
    except (OSError, tarfile.TarError, EOFError) as error:
        raise BadTape(f"cannot read {path}: {error}") from None
    if not recordings:
        raise BadTape(f"{path} holds no recording")
    return join(recordings)


def _siblings(path: Path) -> Iterator[Recording]:
    for suffix in SUFFIXES:
        other = path.with_suffix(suffix)
        if other != path and other.exists():
            yield read(other.read_bytes(), str(other))


def _members(path: Path) -> Iterator[Recording]:
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(SUFFIXES) and member.size <= MAX_MEMBER:
                file = archive.extractfile(member) or io.BytesIO()
                yield read(file.read(), f"{path}: {member.name}")


def play(recording: Recording, until: int | None = None) -> Iterator[Played]:
    """Play the turns of a recording that begins with the actor's life, up to the first one that
    plans a step beyond `until`. Raises `BadTape` for one that begins later."""
    if not recording.whole:
        raise BadTape("the recording begins in mid-life")
    core = fresh_core(recording)
    for turn in recording.turns:
        played = _play(core, turn)
        if until is not None and any(plan.step > until for plan in played.plans):
            return
        yield played


def _play(core: SchedulerCore, turn: Turn) -> Played:
    plans: list[StepPlan] = []
    try:
        for event in turn.events:
            if event.message is not None:
                core.on_message(event.message, event.now)
            elif event.call == STUCK:
                core.structured_output.mark_stuck(core.state, map(int, event.args),
                                                  "it is recorded so")
            else:
                getattr(core, event.call)(*event.args, event.now)
        if turn.now is not None:
            plans = [send.message for send in core.on_wake(turn.now)
                     if isinstance(send.message, StepPlan)]
    except Exception as error:  # the point of a replay is to see it again
        return Played(turn, plans, turn.now is None, f"{type(error).__name__}: {error}")
    same = turn.now is not None and [checksum(plan) for plan in plans] == turn.plans
    return Played(turn, plans, same)


def fresh_core(recording: Recording) -> SchedulerCore:
    """A scheduler as it was when the recorded life began."""
    from actorium.actors.scheduler.core import SchedulerCore

    header = recording.header
    context = Context(configs.load(header.config), Path("/nonexistent"), header.role, header.epoch,
                      header.entropy)
    if header.past is None:
        return SchedulerCore(context, load=Anything)
    from actorium.actors.scheduler.recovery import recovery_log as recovery

    return SchedulerCore(context, recovery.PriorRun(_history(header.past), header.past.same_boot,
                                                    header.past.now), Anything)


def _history(past: Past) -> LedgerHistory:
    history = LedgerHistory()
    history.next_sid = past.next_sid
    for kept in past.kept:
        choices = [SequenceOutput(c.sid, bytearray(c.tokens), c.cached_tokens, [], [], c.finish)
                   for c in kept.choices]
        history.entries[kept.submit.client, kept.submit.rid] = LedgerEntry(kept.submit, choices)
    return history
