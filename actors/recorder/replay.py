"""Replaying a recording: a fresh core gets the input of the recorded one, and plans as it did."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorium.actors.config import tree as configs
from actorium.actors.core import Context
from actorium.actors.ledger.records import LedgerHistory
from actorium.actors.messages import StepPlan
from actorium.actors.recorder.recorder import FORCED, STUCK, parse_forced, plan_checksum
from actorium.actors.recorder.recording import (
    SUFFIXES,
    BadRecording,
    RecordedTurn,
    Recording,
    decode,
    latest_of,
)
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.recovery.recovery_log import PriorRun

MAX_MEMBER = 1 << 30


class ReplayedTurn(NamedTuple):
    """A turn, the plans that the fresh core made of it, and whether they equal the recorded ones.
    """

    turn: RecordedTurn
    plans: list[StepPlan]
    same: bool
    error: str = ""
    """What the fresh core raised."""


class AnyGrammar:
    """A vocabulary whose grammars allow everything: plans do not depend on masks, and a recording
    has the tokens that were sampled with them."""

    error = ""
    consumed = size = 0

    def knows(self, grammar: str) -> bool:
        """All of them."""
        return True

    def compile(self, grammar: str) -> AnyGrammar:
        """Returns itself: nothing is compiled."""
        return self

    def keep(self, grammar: str, compiled: AnyGrammar) -> None:
        """Does nothing: there is nothing to cache."""

    def matcher(self, grammar: str) -> AnyGrammar:
        """Returns itself: it has no position."""
        return self

    def accept(self, tokens: Sequence[int]) -> bool:
        """Accepts all tokens."""
        return True

    def forced(self) -> list[int]:
        """Returns nothing: a recording says what was forced."""
        return []

    def bytes_of(self, token: int) -> bytes:
        """Returns nothing: tokens have no text."""
        return b""

    def first_of(self, text: bytes) -> NDArray[np.uint32]:
        """Returns a mask, which nobody reads."""
        return np.ones(1, np.uint32)

    def masks(self, wanted: Sequence[tuple[Any, Sequence[int]]]) -> list[list[Any]]:
        """Returns no masks: a replay needs none."""
        return [[] for _ in wanted]


def load_recording(path: Path) -> Recording:
    """Reads a recording: one of its files (the other one is looked for beside it), or a crash
    report that contains them. Raises `BadRecording`, naming the file."""
    try:
        if path.name.endswith(".tar.gz"):
            recordings = list(_members(path))
        else:
            recordings = [decode(path.read_bytes(), str(path)), *_siblings(path)]
    except (OSError, tarfile.TarError, EOFError) as error:
        raise BadRecording(f"cannot read {path}: {error}") from None
    if not recordings:
        raise BadRecording(f"{path} holds no recording")
    return latest_of(recordings)


def _siblings(path: Path) -> Iterator[Recording]:
    for suffix in SUFFIXES:
        other = path.with_suffix(suffix)
        if other != path and other.exists():
            yield decode(other.read_bytes(), str(other))


def _members(path: Path) -> Iterator[Recording]:
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(SUFFIXES) and member.size <= MAX_MEMBER:
                file = archive.extractfile(member) or io.BytesIO()
                yield decode(file.read(), f"{path}: {member.name}")


def replay(recording: Recording, until: int | None = None) -> Iterator[ReplayedTurn]:
    """Replay the turns of a complete recording, up to the first one that plans a step beyond
    `until`. Raises `BadRecording` if it is not complete."""
    if not recording.complete:
        raise BadRecording("the recording begins in mid-life")
    core = fresh_core(recording)
    for turn in recording.turns:
        replayed = _replay_turn(core, turn)
        if until is not None and any(plan.step > until for plan in replayed.plans):
            return
        yield replayed


def _replay_turn(core: SchedulerCore, turn: RecordedTurn) -> ReplayedTurn:
    plans: list[StepPlan] = []
    try:
        for event in turn.events:
            if event.message is not None:
                core.on_message(event.message, event.now)
            elif event.call == STUCK:
                core.masks.mark_stuck(core.state, map(int, event.args),
                                                  "it is recorded so")
            elif event.call == FORCED:
                core.masks.forced_before = parse_forced(event.args)
            else:
                getattr(core, event.call)(*event.args, event.now)
        if turn.now is not None:
            plans = [send.message for send in core.on_wake(turn.now)
                     if isinstance(send.message, StepPlan)]
    except Exception as error:  # the point of a replay is to see it again
        return ReplayedTurn(turn, plans, turn.now is None, f"{type(error).__name__}: {error}")
    same = turn.now is not None and [plan_checksum(plan) for plan in plans] == turn.plans
    return ReplayedTurn(turn, plans, same)


def fresh_core(recording: Recording) -> SchedulerCore:
    """A scheduler as the recorded one was at its beginning."""
    header = recording.header
    context = Context(configs.load(header.config), Path("/nonexistent"), header.role, header.epoch,
                      header.entropy)
    if header.initial is None:
        return SchedulerCore(context, load=AnyGrammar)
    history = LedgerHistory()
    history.next_sid, history.activity = header.initial.next_sid, header.initial.activity
    history.adapters = header.initial.adapters
    for record in header.initial.requests:
        history.restore(record)
    return SchedulerCore(context, PriorRun(history, header.initial.same_boot, header.initial.now),
                         AnyGrammar)
