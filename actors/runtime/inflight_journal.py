"""The in-flight journal: which requests an actor works on at the moment, written where the actor's
death does not reach, so that its next incarnation knows which request killed it and refuses it.

The journal is a small file in the run directory, mapped into memory: a write is a copy of 16 bytes,
and the kernel keeps it when the process is killed. A request's name stands there while the actor
does something for it that may go wrong. Names are hashes: no prompt, key or id is ever written.

The next incarnation judges what it finds:

- One name, and the actor was killed as hung (`mark_hung`): convicted.
- One name that was there at an earlier death as well: convicted. A single death proves nothing,
  since anybody may kill a process at any moment; two during the same request do.
- Otherwise all names found are suspects. Where many requests are worked on at once (a batch,
  threads), suspects are worked on alone from then on, so that a second death has one name.

A suspect that finishes is acquitted. Convicts are refused with `quarantined`, also when their
clients send them again or the ledger resumes them; the last `CONVICTS` are remembered.

What this means for restarts (`watchdog.supervisor`): a conviction forgives the actor all its
restarts, so n requests that kill it cost 2 n deaths (n if it hangs) and never end the engine. An
actor that dies whatever it works on does end it. If it dies during innocent requests that are not
worked on again, none is convicted, and of `SUSPECTS_EACH` such deaths one counts as any other: the
engine ends after `SUSPECTS_EACH * (max_restarts + 1)` of them within a window. If every request
kills it, `streak` grows with each conviction, since only a request that finishes resets it, and
from `supervisor.BROKEN` on a conviction forgives nothing.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from time import monotonic

from actorium.actors.errors import EngineUnavailable, Quarantined
from actorium.actors.runtime.security import private_paths as private

LOG = logging.getLogger("actorium.journal")
SUFFIX = ".journal"
NAME = 16
"""Bytes of a name."""
PLACES = 8
"""Places of the journal: 0 is the loop's; the others are for threads."""
MAX_NAMES = 255
"""Maximum of names at place 0; each other place has one."""
SUSPECTS, CONVICTS = 64, 2048
"""Numbers that are kept; the oldest are dropped."""
THREAD_FACTOR = 9.0
"""A thread may take so many times as long as the loop, since no other request waits for it."""
NOBODY = bytes(NAME)
PROCESS_FAULTS = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)
"""Exceptions that are no request's: those that ask the process to end, and want of memory, which
meets whoever is worked on. The process ends, and like any other death it has to happen twice during
one request before that is blamed. An `OSError` is the machine's: the request is refused, for now.
All others are failures of a request, also those that are no `Exception`: a panic of Rust code is a
`BaseException`, and how deep a recursion goes is the request's doing."""

_HUNG = struct.Struct("<d")
_COUNTS = struct.Struct("<QQQQ")
_PLACE = struct.Struct("<dB")
_HEADS = _HUNG.size + _COUNTS.size
_NAMES = _HEADS + 16 * PLACES
_SUSPECTS = _NAMES + NAME * (MAX_NAMES + PLACES - 1)
_CONVICTS = _SUSPECTS + NAME * SUSPECTS
SIZE = _CONVICTS + NAME * CONVICTS
Buffer = bytearray | mmap.mmap


def name_of(*parts: bytes) -> bytes:
    """The name (a hash) of the request that these parts identify."""
    digest = blake2b(digest_size=NAME)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class InflightJournal:
    """See the module. Each place belongs to one thread, all else to the loop's thread."""

    def __init__(self, buffer: Buffer | None = None, budget: float = 10.0,
                 actor: str = "actor") -> None:
        """buffer: `SIZE` bytes, zeros or the previous incarnation's; default: own memory.
        budget: seconds that the loop may be busy with one request. actor: its name, for errors."""
        self._buffer: Buffer = bytearray(SIZE) if buffer is None else buffer
        self.budget, self._actor = budget, actor
        self._heads = [_HEADS + 16 * place for place in range(PLACES)]
        self._at = [_NAMES] + [_NAMES + NAME * (MAX_NAMES + place - 1)
                               for place in range(1, PLACES)]
        self._counts = [head + 8 for head in self._heads]
        self.deaths, self.convictions, self.streak, self.failures = \
            _COUNTS.unpack_from(self._buffer, _HUNG.size)
        self._suspects = self._read(_SUSPECTS, SUSPECTS)
        self._convicts = self._read(_CONVICTS, CONVICTS)
        self._judge()

    # --- while the actor lives ---

    def put(self, name: bytes, place: int = 0) -> None:
        """This request is worked on from now on, and nothing else at that place."""
        at = self._at[place]
        self._buffer[at:at + NAME] = name
        _PLACE.pack_into(self._buffer, self._heads[place], monotonic(), 1)

    def put_all(self, names: Sequence[bytes]) -> None:
        """The loop works on all of these at once. (Only the first `MAX_NAMES` are written.)"""
        joined = b"".join(names[:MAX_NAMES])
        self._buffer[_NAMES:_NAMES + len(joined)] = joined
        _PLACE.pack_into(self._buffer, _HEADS, monotonic(), len(joined) // NAME)

    def turn_to(self, name: bytes) -> None:
        """Names the request worked on, as `put`, but keeps the start time of the last `put`."""
        self._buffer[_NAMES:_NAMES + NAME] = name

    def clear(self, place: int = 0) -> None:
        """Nothing is worked on at that place."""
        self._buffer[self._counts[place]] = 0

    def convicted(self, name: bytes) -> bool:
        """Whether the request is to be refused."""
        return name in self._convicts

    def suspected(self, name: bytes) -> bool:
        """Whether the request is to be worked on alone."""
        return name in self._suspects

    @property
    def quiet(self) -> bool:
        """Whether `finished` has nothing to do: there are no suspects, and a request has finished
        since the last conviction."""
        return not (self._suspects or self.streak)

    def finished(self, name: bytes) -> None:
        """The request has finished."""
        if self.streak:
            self.streak = 0
            self._write_counts()
        if name in self._suspects:
            del self._suspects[name]
            self._write(_SUSPECTS, SUSPECTS, self._suspects)

    def convict(self, name: bytes) -> None:
        """The request has left the actor in a state in which it cannot continue: the next
        incarnation must not try it again."""
        self._quarantine(name)
        self._write_counts()

    def failed(self, error: BaseException, rid: str = "") -> Quarantined | EngineUnavailable:
        """The error for the client of a request that has raised `error`; the actor lives on.
        Neither it nor the log has the exception's text, which may hold a prompt. Raises `error`
        itself if it is one of `PROCESS_FAULTS`."""
        if isinstance(error, PROCESS_FAULTS):
            raise error
        from actorium.actors.runtime.logs import error_fields

        if isinstance(error, OSError):
            LOG.error("request %s is refused: %s", rid or "of a thread", type(error).__name__,
                      extra={"fields": error_fields(error)})
            return EngineUnavailable(f"the {self._actor} cannot work on this request now: "
                                     f"{error.strerror or type(error).__name__}")
        self.failures += 1
        self._write_counts()
        LOG.error("request %s is quarantined: %s", rid or "of a thread", type(error).__name__,
                  extra={"fields": error_fields(error)})
        return Quarantined(f"the {self._actor} failed on this request ({type(error).__name__}); it "
                           "is not tried again")

    def refusal(self, rid: str) -> Quarantined:
        """The error for the client of a convict."""
        LOG.error("request %s is quarantined: an incarnation of the %s has died of it", rid,
                  self._actor)
        return Quarantined(f"the {self._actor} died each time it worked on this request; it is not "
                           "tried again")

    def overdue(self, now: float) -> tuple[float, float] | None:
        """(seconds spent, seconds allowed) of a request that takes too long; None if none does. May
        be called from any thread."""
        for place in range(PLACES):
            since, count = _PLACE.unpack_from(self._buffer, self._heads[place])
            if count and now - since > self._allowed(place):
                return now - since, self._allowed(place)
        return None

    def gauges(self) -> dict[str, float]:
        """Counts for the heartbeat; empty until something has happened."""
        if not (self.deaths or self.convictions or self.failures):
            return {}
        return {"journal_deaths": float(self.deaths), "journal_streak": float(self.streak),
                "journal_convictions": float(self.convictions),
                "journal_quarantined": float(self.convictions + self.failures)}

    # --- what the previous incarnation has left ---

    def _judge(self) -> None:
        (hung_at,) = _HUNG.unpack_from(self._buffer, 0)
        named = {place: each for place in range(PLACES) if (each := self._names(place))}
        for place in range(PLACES):
            self.clear(place)
        _HUNG.pack_into(self._buffer, 0, 0.0)
        if not named:
            return
        guilty = self._hung(named, hung_at) if hung_at else None
        if guilty is None:
            names: dict[bytes, None] = {name: None for each in named.values() for name in each}
            again = [name for name in names if name in self._suspects]
            if len(again) == 1:
                guilty = again[0]
            else:
                self._suspects.update(names)
                self._trim(self._suspects, SUSPECTS)
                self.deaths += 1
                LOG.warning("died while it worked on %d request%s", len(names),
                            "s" if len(names) != 1 else "")
        if guilty is not None:
            LOG.error("a request that it died of is refused from now on")
            self._quarantine(guilty)
        self._write(_SUSPECTS, SUSPECTS, self._suspects)
        self._write_counts()

    def _hung(self, named: dict[int, list[bytes]], hung_at: float) -> bytes | None:
        """The request that kept the actor from going on, if it was one."""
        def spent(place: int) -> float:
            (since, _) = _PLACE.unpack_from(self._buffer, self._heads[place])
            return float(hung_at - since) / self._allowed(place)

        place = max(named, key=spent)
        return named[place][0] if len(named[place]) == 1 and spent(place) >= 0.5 else None

    def _quarantine(self, name: bytes) -> None:
        self._suspects.pop(name, None)
        self._convicts[name] = None
        self._trim(self._convicts, CONVICTS)
        self.convictions += 1
        self.streak += 1
        self._write(_CONVICTS, CONVICTS, self._convicts)

    def _names(self, place: int) -> list[bytes]:
        count, at = self._buffer[self._counts[place]], self._at[place]
        names = (bytes(self._buffer[at + NAME * i:at + NAME * (i + 1)]) for i in range(count))
        return [name for name in names if name != NOBODY]

    def _allowed(self, place: int) -> float:
        return self.budget * THREAD_FACTOR if place else self.budget

    # --- the file ---

    @staticmethod
    def _trim(names: dict[bytes, None], limit: int) -> None:
        while len(names) > limit:
            del names[next(iter(names))]

    def _read(self, at: int, limit: int) -> dict[bytes, None]:
        """Names in order (a dict is an ordered set)."""
        data = bytes(self._buffer[at:at + NAME * limit])
        names = (data[NAME * i:NAME * (i + 1)] for i in range(limit))
        return {name: None for name in names if name != NOBODY}

    def _write(self, at: int, limit: int, names: dict[bytes, None]) -> None:
        self._buffer[at:at + NAME * limit] = b"".join(names).ljust(NAME * limit, b"\0")

    def _write_counts(self) -> None:
        _COUNTS.pack_into(self._buffer, _HUNG.size, self.deaths, self.convictions, self.streak,
                          self.failures)


def open_journal(run_dir: Path, role: str, budget: float) -> InflightJournal:
    """The role's journal as its last incarnation left it; without a usable file, one in memory."""
    actor = role.partition("-")[0]
    try:
        fd = private.open_file(run_dir / f"{role}{SUFFIX}", os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, SIZE)  # a page that the disk lacks would be a SIGBUS
            return InflightJournal(mmap.mmap(fd, SIZE), budget, actor)
        finally:
            os.close(fd)
    except (OSError, private.UnsafePath) as error:
        LOG.warning("no journal: %s", error)
        return InflightJournal(None, budget, actor)


def acquit_all(run_dir: Path, role: str) -> None:
    """Note that the role's process, which has ended, did not end for what it was working on."""
    try:
        fd = private.open_file(run_dir / f"{role}{SUFFIX}", os.O_WRONLY)
    except (OSError, private.UnsafePath):
        return
    try:
        for place in range(PLACES):
            os.pwrite(fd, b"\0", _HEADS + 16 * place + 8)
    finally:
        os.close(fd)


def mark_hung(run_dir: Path, role: str) -> None:
    """Note that the role's process is about to be killed because it makes no progress."""
    try:
        fd = private.open_file(run_dir / f"{role}{SUFFIX}", os.O_WRONLY)
    except (OSError, private.UnsafePath):
        return
    try:
        os.pwrite(fd, _HUNG.pack(monotonic()), 0)
    finally:
        os.close(fd)
