"""What the model manager knows of each served model and of its engine, and which engines have to
end so that another one fits. Pure: no IO, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from actorium.actors.config.models_settings import FOR_GOOD
from actorium.actors.config.tree import Config
from actorium.actors.model_manager.manager_messages import ModelState, ServedModelInfo
from actorium.actors.models.model_facts import CheckpointFacts

FIRST_RETRY, LAST_RETRY = 1.0, 60.0
"""Seconds after a failed start in which further uses are refused: doubled with each failure in a
row."""
STEADY_SECONDS = 30.0
"""An engine that ends by itself earlier than that counts as a failed start."""
MAX_DEATHS, DEATHS_SECONDS = 3, 60.0
"""So many ends of an engine by itself within so many seconds are the last: its requests fail. After
those before it is started again for them."""


class CatalogEntry(NamedTuple):
    """A model that is served."""

    names: tuple[str, ...]
    """The first is the one that lists show; the others mean the same model."""
    config: Config
    """Its engine's."""
    digest: str = ""
    """Another one when its files have changed."""
    keep_alive: float = FOR_GOOD
    pinned: bool = False
    load_on_start: bool = False
    default: bool = False
    facts: CheckpointFacts = CheckpointFacts()
    """What its files say, without loading them."""

    @property
    def name(self) -> str:
        return self.names[0]


class EngineLimits(NamedTuple):
    """What all engines together may take; 0 = no limit."""

    memory: int = 0
    engines: int = 0


class ModelRecord:
    """A served model and its engine. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, entry: CatalogEntry) -> None:
        self.entry = entry
        self.listed = True
        """It is in the catalog; a model that is not any more goes when its engine has ended."""
        self.state: ModelState = "unloaded"
        self.detail = ""
        """How far a start is, or why the last one failed."""
        self.run_dir = ""
        self.memory: int | None = None
        """Bytes that its engine takes, as planned; None = not known yet."""
        self.changed = False
        """Its files have changed since its engine was started."""
        self.planning = False
        self.in_use = 0
        """Granted uses."""
        self.keep_alive = entry.keep_alive
        self.last_used = 0.0
        self.expires_at: float | None = None
        self.in_doubt_until = 0.0
        """Until then an engine that an earlier manager has started counts as in use: clients have
        not yet said which of them use it."""
        self.leaving = False
        """It gets no further uses, and ends when those that it has have ended: a use that waits
        needs its memory."""
        self.unloading = False
        """Somebody wants it to end after its last use."""
        self.failures = 0
        """Failed starts in a row."""
        self.retry_at = 0.0
        self.ready_at = 0.0
        self.deaths: list[float] = []
        """When its engine ended by itself, as far as that counts."""

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def running(self) -> bool:
        """Whether there is a process that takes memory."""
        return self.state in ("loading", "ready", "stopping")

    def busy(self, now: float) -> bool:
        return self.in_use > 0 or now < self.in_doubt_until

    def taken(self, limits: EngineLimits) -> int:
        """Bytes that count for it; of an engine whose plan is not known, all that there are."""
        return limits.memory if self.memory is None else self.memory

    def set_expiry(self, now: float) -> None:
        """Nobody uses it from now on."""
        self.last_used = now
        keep_alive = FOR_GOOD if self.entry.pinned else self.keep_alive
        if self.unloading:
            self.expires_at = now
        elif keep_alive < 0:
            self.expires_at = None
        else:
            self.expires_at = max(now + keep_alive, self.in_doubt_until)

    def fail(self, reason: str, now: float) -> None:
        """A start has failed."""
        self.state, self.detail = "failed", reason
        self.failures += 1
        self.retry_at = now + min(LAST_RETRY, FIRST_RETRY * 2.0 ** (self.failures - 1))

    def count_death(self, now: float) -> bool:
        """Its engine has ended by itself. Returns whether it may be started again for its requests.
        """
        self.deaths = [when for when in self.deaths if when > now - DEATHS_SECONDS] + [now]
        return len(self.deaths) < MAX_DEATHS

    def update(self, entry: CatalogEntry) -> None:
        """The catalog was read again."""
        if entry.digest != self.entry.digest or entry.config != self.entry.config:
            self.failures, self.retry_at, self.changed = 0, 0.0, self.running
            if not self.running:
                self.memory = None
        self.entry, self.listed = entry, True

    def end(self) -> None:
        """Its engine has ended."""
        self.state, self.detail, self.run_dir = "unloaded", "", ""
        self.expires_at, self.keep_alive = None, self.entry.keep_alive
        self.leaving = self.unloading = False
        self.in_use, self.in_doubt_until = 0, 0.0
        if self.changed:
            self.memory, self.changed = None, False

    def info(self, waiting: int, default: bool, wall_offset: float) -> ServedModelInfo:
        """For a list. wall_offset: Unix time less the monotonic clock."""
        entry = self.entry
        state = "waiting" if waiting and self.state == "unloaded" else self.state
        return ServedModelInfo(
            entry.name, list(entry.names), entry.config.model.model, state, self.detail[:4096],
            default, entry.pinned, digest=entry.digest, memory=self.memory or 0,
            run_dir=self.run_dir, in_use=self.in_use, waiting=waiting, keep_alive=self.keep_alive,
            expires_at=None if self.expires_at is None else self.expires_at + wall_offset,
            **entry.facts._asdict())


class EngineRoom(NamedTuple):
    """What has to happen before an engine fits."""

    fits: bool
    """It may be started at once."""
    victims: Sequence[ModelRecord] = ()
    """Engines that have to end, in the order in which they were used."""
    never: str = ""
    """Why it cannot fit, whoever ends."""


def room_for(wanted: ModelRecord, records: Iterable[ModelRecord], limits: EngineLimits, now: float
             ) -> EngineRoom:
    """Which engines have to end for `wanted`: the least recently used of those that nobody uses;
    where these are not enough, also some that are in use. Pinned ones stay."""
    others = [record for record in records if record.running and record is not wanted]
    need = wanted.memory or 0
    pinned = [record for record in others if record.entry.pinned]
    if why := _too_large(need, pinned, limits):
        return EngineRoom(False, never=why)

    def fits_beside(remaining: Iterable[ModelRecord]) -> bool:
        remaining = list(remaining)
        memory = need + sum(record.taken(limits) for record in remaining)
        return ((not limits.memory or memory <= limits.memory)
                and (not limits.engines or len(remaining) < limits.engines))

    if fits_beside(others):
        return EngineRoom(True)
    staying = [record for record in others if record.state != "stopping"]
    movable = sorted((record for record in staying
                      if record.state == "ready" and not record.entry.pinned),
                     key=lambda record: record.last_used)
    idle = [record for record in movable if not record.busy(now)]
    marked = [record for record in movable if record.busy(now) and record.leaving]
    others_busy = [record for record in movable if record.busy(now) and not record.leaving]
    # Those already marked come first, or two busy engines could take turns and none would end.
    for candidates in (idle, [*marked, *idle, *others_busy]):
        victims: list[ModelRecord] = []
        while not fits_beside(r for r in staying if r not in victims) and candidates:
            victims.append(candidates.pop(0))
        if fits_beside(r for r in staying if r not in victims):
            for record in reversed(victims.copy()):
                spared = [victim for victim in victims if victim is not record]
                if fits_beside(r for r in staying if r not in spared):
                    victims = spared
            return EngineRoom(False, victims)
    return EngineRoom(False)  # some still load: once they are ready they can be ended


def _too_large(need: int, pinned: Sequence[ModelRecord], limits: EngineLimits) -> str:
    kept = sum(record.memory or 0 for record in pinned)
    beside = f" beside {', '.join(record.name for record in pinned)}, pinned" if pinned else ""
    if limits.memory and need + kept > limits.memory:
        return (f"its engine takes {need:,} bytes by its plan, and {max(0, limits.memory - kept):,}"
                f" of --models-memory are left{beside}")
    if limits.engines and len(pinned) >= limits.engines:
        return f"--models-max allows {limits.engines} engines, and no further one{beside}"
    return ""
