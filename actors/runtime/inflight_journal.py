"""What an actor works on just now, written where its death does not reach: so that the next
incarnation knows which request killed it, and refuses that one instead of dying of it again.

A journal is a small file in the run directory, mapped into memory: a write is a copy of 16 bytes,
and the kernel keeps it when the process is killed. A request's name stands there while the actor
does for it what might go wrong. Names are hashes: no prompt, key or id is ever written.

Who reads it next judges:

- One name, and the actor was killed as hung (`mark_hung`): convicted. The clock has said so.
- A name that was there at an earlier death, too, and no other one of which that is true: convicted.
  One death proves nothing, since anybody may kill a process at any moment; two in the same
  request's hands do.
- Else all names that stand there are suspects. Where many requests are worked on at once (a batch,
  threads), suspects are worked on by themselves from then on, so that a second death has one name.

A suspect that gets to its end is acquitted. Convicts are refused with `quarantined`, also when
their clients send them again or the ledger has them run again; the last `CONVICTS` are remembered.

What this means for restarts (`watchdog.supervisor`): a conviction absolves the actor of its deaths,
so n requests that kill it when they are worked on cost 2 n deaths (n where it hangs) and never end
the engine. Not so an actor that dies whatever it works on. If it dies with innocents in its hands
that are not worked on again, nobody is convicted, and of `SUSPECTS_EACH` such deaths one counts as
any other: the engine ends after `SUSPECTS_EACH * (max_restarts + 1)` of them within a window. If
all that it works on kills it, `streak` grows with each conviction, being set back only by a request
that gets to its end, and from `supervisor.BROKEN` on a conviction absolves of nothing.
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

from actorium.actors.errors import Quarantined
from actorium.actors.runtime.security import private_paths as private

LOG = logging.getLogger("actorium.journal")
SUFFIX = ".journal"
NAME = 16
"""Bytes of a name."""
PLACES = 8
"""0 is the loop's; the others are for threads."""
MOST = 255
"""Names at place 0; at the others there is one."""
SUSPECTS, CONVICTS = 64, 2048
"""Kept; the oldest are forgotten."""
ASIDE = 9.0
"""By how much longer a thread may take, for which nobody waits, than the loop."""
NOBODY = bytes(NAME)
ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Not the failure of a request, but somebody's wish. All others are failures: a panic of Rust code
is a BaseException and no Exception."""

_HUNG = struct.Struct("<d")
_COUNTS = struct.Struct("<IIII")
_PLACE = struct.Struct("<dB")
_HEADS = _HUNG.size + _COUNTS.size
_NAMES = _HEADS + 16 * PLACES
_SUSPECTS = _NAMES + NAME * (MOST + PLACES - 1)
_CONVICTS = _SUSPECTS + NAME * SUSPECTS
SIZE = _CONVICTS + NAME * CONVICTS
Buffer = bytearray | mmap.mmap


def name_of(*parts: bytes) -> bytes:
    """The name of what these parts identify."""
    digest = blake2b(digest_size=NAME)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class InflightJournal:
    """See the module. One thread a place; the rest is for the loop's thread."""

    def __init__(self, buffer: Buffer | None = None, budget: float = 10.0,
                 actor: str = "actor") -> None:
        """buffer: of `SIZE` bytes, zeros or what the incarnation before has left; default: nothing
        that outlives this object. budget: seconds that the loop may be busy with one request.
        actor: whose it is, for errors."""
        self._buffer: Buffer = bytearray(SIZE) if buffer is None else buffer
        self.budget, self._actor = budget, actor
        self._heads = [_HEADS + 16 * place for place in range(PLACES)]
        self._at = [_NAMES] + [_NAMES + NAME * (MOST + place - 1) for place in range(1, PLACES)]
        self._counts = [head + 8 for head in self._heads]
        self.deaths, self.convictions, self.streak, self.failures = \
            _COUNTS.unpack_from(self._buffer, _HUNG.size)
        self._suspects = self._read(_SUSPECTS, SUSPECTS)
        self._convicts = self._read(_CONVICTS, CONVICTS)
        self._judge()

    # --- while it lives ---

    def put(self, name: bytes, place: int = 0) -> None:
        """This is worked on from now on, and nothing else at that place."""
        at = self._at[place]
        self._buffer[at:at + NAME] = name
        _PLACE.pack_into(self._buffer, self._heads[place], monotonic(), 1)

    def put_all(self, names: Sequence[bytes]) -> None:
        """All of these are, at once, by the loop. (Of more than `MOST` the first are told.)"""
        joined = b"".join(names[:MOST])
        self._buffer[_NAMES:_NAMES + len(joined)] = joined
        _PLACE.pack_into(self._buffer, _HEADS, monotonic(), len(joined) // NAME)

    def turn_to(self, name: bytes) -> None:
        """As `put` after a `put` for another one a moment ago: its time counts from then."""
        self._buffer[_NAMES:_NAMES + NAME] = name

    def clear(self, place: int = 0) -> None:
        """Nothing is worked on at that place."""
        self._buffer[self._counts[place]] = 0

    def convicted(self, name: bytes) -> bool:
        """It is to be refused."""
        return name in self._convicts

    def suspected(self, name: bytes) -> bool:
        """It is to be worked on by itself."""
        return name in self._suspects

    @property
    def quiet(self) -> bool:
        """Nobody is suspected, and the actor has got something done since the last conviction:
        `finished` has nothing to do."""
        return not (self._suspects or self.streak)

    def finished(self, name: bytes) -> None:
        """It has got to its end."""
        if self.streak:
            self.streak = 0
            self._write_counts()
        if name in self._suspects:
            del self._suspects[name]
            self._write(_SUSPECTS, SUSPECTS, self._suspects)

    def convict(self, name: bytes) -> None:
        """It has left the actor in a state in which it cannot go on: the next incarnation is not to
        try it again."""
        self._condemn(name)
        self._write_counts()

    def failed(self, error: BaseException, rid: str = "") -> Quarantined:
        """A request has raised: what its client is to be told. The actor lives on. Neither that nor
        the log has the exception's text, which may hold a prompt. Raises the error itself if it
        is one of `ENDS`."""
        if isinstance(error, ENDS):
            raise error
        self.failures += 1
        self._write_counts()
        from actorium.actors.runtime.logs import error_fields

        LOG.error("request %s is quarantined: %s", rid or "of a thread", type(error).__name__,
                  extra={"fields": error_fields(error)})
        return Quarantined(f"the {self._actor} failed on this request ({type(error).__name__}); it "
                           "is not tried again")

    def refusal(self, rid: str) -> Quarantined:
        """What the client of a convict is to be told."""
        LOG.error("request %s is quarantined: an incarnation of the %s has died of it", rid,
                  self._actor)
        return Quarantined(f"the {self._actor} died each time it worked on this request; it is not "
                           "tried again")

    def overdue(self, now: float) -> tuple[float, float] | None:
        """(seconds that it takes already, seconds that it may) of what takes too long. From any
        thread."""
        for place in range(PLACES):
            since, count = _PLACE.unpack_from(self._buffer, self._heads[place])
            if count and now - since > self._allowed(place):
                return now - since, self._allowed(place)
        return None

    def gauges(self) -> dict[str, float]:
        """For the heartbeat: nothing as long as nothing has happened."""
        if not (self.deaths or self.convictions or self.failures):
            return {}
        return {"journal_deaths": float(self.deaths), "journal_streak": float(self.streak),
                "journal_convictions": float(self.convictions),
                "journal_quarantined": float(self.convictions + self.failures)}

    # --- what the one before has left ---

    def _judge(self) -> None:
        (hung_at,) = _HUNG.unpack_from(self._buffer, 0)
        found = {place: each for place in range(PLACES) if (each := self._names(place))}
        for place in range(PLACES):
            self.clear(place)
        _HUNG.pack_into(self._buffer, 0, 0.0)
        if not found:
            return
        guilty = self._hung(found, hung_at) if hung_at else None
        if guilty is None:
            names: dict[bytes, None] = {name: None for each in found.values() for name in each}
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
            self._condemn(guilty)
        self._write(_SUSPECTS, SUSPECTS, self._suspects)
        self._write_counts()

    def _hung(self, found: dict[int, list[bytes]], hung_at: float) -> bytes | None:
        """Who kept it from going on, if that was one request."""
        def spent(place: int) -> float:
            (since, _) = _PLACE.unpack_from(self._buffer, self._heads[place])
            return float(hung_at - since) / self._allowed(place)

        place = max(found, key=spent)
        return found[place][0] if len(found[place]) == 1 and spent(place) >= 0.5 else None

    def _condemn(self, name: bytes) -> None:
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
        return self.budget * ASIDE if place else self.budget

    # --- the file ---

    @staticmethod
    def _trim(names: dict[bytes, None], most: int) -> None:
        while len(names) > most:
            del names[next(iter(names))]

    def _read(self, at: int, most: int) -> dict[bytes, None]:
        """In order, as a set that keeps it."""
        data = bytes(self._buffer[at:at + NAME * most])
        names = (data[NAME * i:NAME * (i + 1)] for i in range(most))
        return {name: None for name in names if name != NOBODY}

    def _write(self, at: int, most: int, names: dict[bytes, None]) -> None:
        self._buffer[at:at + NAME * most] = b"".join(names).ljust(NAME * most, b"\0")

    def _write_counts(self) -> None:
        _COUNTS.pack_into(self._buffer, _HUNG.size, self.deaths, self.convictions, self.streak,
                          self.failures)


def open_journal(run_dir: Path, role: str, budget: float) -> InflightJournal:
    """The role's, with what its last incarnation has left. Where no file can be had it outlives
    nothing."""
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


def mark_hung(run_dir: Path, role: str) -> None:
    """The role's process is about to be killed, since it does not get on."""
    try:
        fd = private.open_file(run_dir / f"{role}{SUFFIX}", os.O_WRONLY)
    except (OSError, private.UnsafePath):
        return
    try:
        os.pwrite(fd, _HUNG.pack(monotonic()), 0)
    finally:
        os.close(fd)
