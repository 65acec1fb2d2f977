"""Step events: each actor's records of its steps, for `actorium trace`.

With `runtime.trace_dir` set, an actor writes fixed-size records into a file of its own, a ring that
keeps the last ones. The file is mapped into memory: a record costs under a microsecond, no system
call, and outlives the process. Times are CLOCK_MONOTONIC nanoseconds, the same for all processes of
a machine. Without it nothing is opened and nothing is asked at run time (`traced` gives back the
core as it is).
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import msgspec

from actorium.actors.core import Context, Core, CoreObserver, Send
from actorium.actors.messages import StepPlan, StepResult, TokenBatch
from actorium.actors.runtime.security import private_paths as private

PLAN, RESULT, TAKEN, LAUNCH, DEVICE, HARVEST, SENT, TEXT, LATE = range(1, 10)
KINDS = {PLAN: "plan", RESULT: "result", TAKEN: "taken", LAUNCH: "launch", DEVICE: "device",
         HARVEST: "harvest", SENT: "sent", TEXT: "text", LATE: "late"}
"""plan: a wake of the scheduler in which the plan was made; result: its result entered there;
taken: the plan has come to the worker; launch: queued on the device; device: run there; harvest:
its result fetched; sent: its result sent; text: its tokens in the detokenizer; late: on the device,
while the step was still being queued."""
LOG = logging.getLogger("actorium.trace")
RECORDS = 1 << 16
"""Kept of each actor: some ten minutes of steps of 20 ms, 2.6 MB."""
MAGIC = b"actevnt2"
SUFFIX = ".events"
_HEADER = struct.Struct("<8sII")
_RECORD = struct.Struct("<QqqQIII")


class BadEvents(ValueError):
    """A file that is none of these; one line."""


class StepEvent(NamedTuple):
    """One record. Times in nanoseconds."""

    kind: int
    epoch: int
    """The scheduler's: steps are numbered anew in each."""
    step: int
    begin: int
    end: int
    value: int
    """plan, taken, launch, device: sequences that decode in the step; text: sequences."""


class EventLabel(msgspec.Struct, frozen=True):
    """Whose records a file holds."""

    engine: str
    role: str
    epoch: int
    part: str
    pid: int


class Track(NamedTuple):
    """What a file holds."""

    label: EventLabel
    events: list[StepEvent]
    """In the order of writing."""
    lost: int
    """Records before them that were overwritten."""


class StepEventFile:
    """The file that one actor (or one part of it) writes. Any thread may add."""

    def __init__(self, path: Path, label: EventLabel, records: int = RECORDS) -> None:
        """Raises `OSError`."""
        head = msgspec.json.encode(label)
        self._base, self._records = _HEADER.size + len(head), records
        size = self._base + records * _RECORD.size
        fd = private.open_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.posix_fallocate(fd, 0, size)  # a page that the disk lacks would be a SIGBUS
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        _HEADER.pack_into(self._map, 0, MAGIC, records, len(head))
        self._map[_HEADER.size:self._base] = head
        self._next = count().__next__  # one call, so no two threads get the same

    def add(self, kind: int, epoch: int, step: int, begin: int, end: int, value: int = 0) -> None:
        """Write one record over the oldest."""
        number = self._next()
        _RECORD.pack_into(self._map, self._base + number % self._records * _RECORD.size, number + 1,
                          begin, end, step, value, kind, epoch)


def open_events(ctx: Context, part: str = "") -> StepEventFile | None:
    """The file of an actor, or of a part of it that has its own thread; None where none is wanted.

    Raises `OSError` if it cannot be made, but for an actor that is started again, which logs it and
    writes nothing.
    """
    runtime = ctx.config.runtime
    if runtime.trace_dir is None:
        return None
    where = Path(runtime.trace_dir)
    names = [runtime.name, ctx.role, str(ctx.epoch), *([part] if part else [])]
    label = EventLabel(runtime.name, ctx.role, ctx.epoch, part, os.getpid())
    try:
        where.mkdir(parents=True, exist_ok=True)
        return StepEventFile(where / (".".join(names) + SUFFIX), label)
    except OSError as error:
        if ctx.epoch == 1:
            raise
        LOG.warning("no trace: %s", error)
        return None


def read_events(path: Path) -> Track:
    """What a file holds; it may still be written. Raises `BadEvents` and `OSError`."""
    data = path.read_bytes()
    if len(data) < _HEADER.size or data[:8] != MAGIC:
        raise BadEvents(f"{path}: not a file of events")
    _, records, head = _HEADER.unpack_from(data)
    base = _HEADER.size + head
    if len(data) != base + records * _RECORD.size:
        raise BadEvents(f"{path}: it is cut short")
    try:
        label = msgspec.json.decode(data[_HEADER.size:base], type=EventLabel)
    except msgspec.MsgspecError as error:
        raise BadEvents(f"{path}: {error}") from None
    rows = sorted(r for r in _RECORD.iter_unpack(data[base:]) if r[0] and r[5] in KINDS)
    events = [StepEvent(kind, epoch, step, begin, end, value)
              for _, begin, end, step, value, kind, epoch in rows]
    return Track(label, events, rows[0][0] - 1 if rows else 0)


# --- around a core -------------------------------------------------------------------------------

TRACED: dict[str, tuple[dict[type, int], dict[type, int]]] = {
    "scheduler": ({StepResult: RESULT}, {StepPlan: PLAN}),
    "worker": ({StepPlan: TAKEN}, {StepResult: SENT}),
    "detokenizer": ({TokenBatch: TEXT}, {})}
"""Role (without its rank) -> kinds of the messages that it takes, and of those that it sends."""


def traced(core: Core, ctx: Context) -> Core:
    """The core, with its steps written down where that is wanted. Raises `OSError`."""
    role = ctx.role.split("-")[0]
    events = open_events(ctx) if role in TRACED else None
    return core if events is None else TracedCore(core, events, *TRACED[role],
                                                  null_worker=ctx.config.device.null_worker)


class TracedCore(CoreObserver):
    """A core whose steps are written down."""

    def __init__(self, core: Core, events: StepEventFile, taken: dict[type, int],
                 sent: dict[type, int], null_worker: bool) -> None:
        """taken, sent: as of `TRACED`; null_worker: it runs a plan as it takes it."""
        super().__init__(core)
        self._events, self._taken, self._sent = events, taken, sent
        self._null = null_worker

    def on_message(self, message: Any, now: float) -> None:
        kind = self._taken.get(type(message))
        begin = monotonic_ns()
        self._core.on_message(message, now)
        if kind is None:
            return
        end, value = monotonic_ns(), _rows(message)
        for each in (TAKEN, LAUNCH, DEVICE) if kind == TAKEN and self._null else (kind,):
            self._events.add(each, message.epoch, message.step, begin, end, value)

    def on_wake(self, now: float) -> Sequence[Send]:
        begin = monotonic_ns()
        sends = self._core.on_wake(now)
        end = monotonic_ns()
        for send in sends:
            message, kind = send.message, self._sent.get(type(send.message))
            if kind is not None:
                self._events.add(kind, message.epoch, message.step,
                                 end if kind == SENT else begin, end, _rows(message))
        return sends


def decodes(plan: StepPlan) -> int:
    """Sequences that decode in it."""
    return len(plan.decode) // 4


def _rows(message: StepPlan | StepResult | TokenBatch) -> int:
    """The sequences of an event's message, as of `StepEvent.value`."""
    if isinstance(message, StepPlan):
        return decodes(message)
    return len(message.counts) if isinstance(message, TokenBatch) else 0
