"""Books of the host's slots and of the worker's disk below them.

A slot is free, holds what its name says, is being read into, or waits without a name for its last
reader. Of the disk nothing is remembered: another engine may add and remove pages. It is asked page
by page, when a sequence begins to wait.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from actorium.actors.messages import PageAnswer, PageOrder
from actorium.actors.scheduler.cache.page_allocator import AccountingError
from actorium.actors.scheduler.cache.prefix_search import CacheEntry

LOOKED_AT = 512
"""Slots, oldest first, among which one that may be taken is looked for."""


class TierSlots:
    """`count` slots. With a disk below, one whose content is not there yet is kept until it is, as
    long as others are to be had."""

    def __init__(self, count: int, disk: bool) -> None:
        self.count, self._disk = count, disk
        self.evicted = self.unwritten = 0
        """Contents given up for others; those of them that the disk has not got before."""
        self.held: OrderedDict[bytes, int] = OrderedDict()
        """By name, least recently used first."""
        self.clean: set[bytes] = set()
        """Names held that the disk has, too, or will never have."""
        self.on_gone: Callable[[bytes], None] = _nobody
        """Called with each name that is held no longer."""
        self._free = list(range(count - 1, -1, -1))
        self._uses: Counter[int] = Counter()
        """Copies under way, by slot."""
        self._loose: set[int] = set()
        """In use, without a name."""

    @property
    def spare(self) -> int:
        """Slots that can be had without waiting, unless they are in use."""
        return len(self._free) + (len(self.clean) if self._disk else len(self.held))

    def touch(self, name: bytes) -> bool:
        """Returns whether a name is held; it is the most recently used now."""
        if name not in self.held:
            return False
        self.held.move_to_end(name)
        return True

    def take(self, at_once: bool = False) -> int | None:
        """Returns a slot for the caller's use, without a name; the least recently used one that may
        go where none is free. at_once: rather one that is not on the disk yet than none: what has
        been used last is worth more. None: each is in use, or not on the disk yet."""
        if self._free:
            slot = self._free.pop()
        else:
            found = self._oldest(at_once)
            if found is None:
                return None
            slot = self.held.pop(found)
            self.unwritten += self._disk and found not in self.clean
            self.clean.discard(found)
            self.on_gone(found)
            self.evicted += 1
        self._uses[slot] = 1
        self._loose.add(slot)
        return slot

    def _oldest(self, at_once: bool) -> bytes | None:
        """Returns the name that goes next; see `take`."""
        unwritten = None
        for name, _ in zip(self.held, range(LOOKED_AT), strict=False):
            if self.held[name] in self._uses:
                continue
            if not self._disk or name in self.clean:
                return name
            unwritten = unwritten or name
            if at_once and not self.clean:
                break
        return unwritten if at_once else None

    def put(self, name: bytes, slot: int) -> None:
        """Gives a slot in use a name, which none has."""
        self._loose.remove(slot)
        self.held[name] = slot

    def use(self, slot: int) -> None:
        """Keeps a slot as it is until `done`."""
        self._uses[slot] += 1

    def done(self, slot: int) -> None:
        """Ends a use of a slot."""
        self._uses[slot] -= 1
        if not self._uses[slot]:
            del self._uses[slot]
            if slot in self._loose:
                self._loose.remove(slot)
                self._free.append(slot)

    def drop(self, name: bytes) -> None:
        """Drops a name; its slot is free after its last use."""
        slot = self.held.pop(name)
        self.clean.discard(name)
        self.on_gone(name)
        if slot in self._uses:
            self._loose.add(slot)
        else:
            self._free.append(slot)

    def audit(self) -> None:
        """Raises `AccountingError`."""
        if sorted([*self._free, *self.held.values(), *self._loose]) != [*range(self.count)]:
            raise AccountingError(
                f"of {self.count} host slots {sorted(self.held.values())} are held, "
                f"{sorted(self._free)} free and {sorted(self._loose)} in use without a name")
        idle = [slot for slot in self._loose if slot not in self._uses]
        if idle or not self.clean <= self.held.keys():
            raise AccountingError(f"host slots {idle} have neither name nor use, and "
                                  f"{len(self.clean - self.held.keys())} names are clean of none")


def _nobody(_name: bytes) -> None:
    """Tells nobody."""


CLEAN_SHARE = 4
"""Slots are written ahead of their eviction until one in so many can be had at once."""
WRITES = 64
"""Most pages that are on their way to the disk at a time."""


@dataclass(slots=True, eq=False)
class DiskQuery:
    """What the disk has of a waiting sequence's prefix, as far as its answers have come."""

    start: int
    """Index of the first page that it asked for."""
    present: set[bytes] = field(default_factory=set)
    """First names of the entries that are there."""
    tickets: set[int] = field(default_factory=set)
    """Orders that it waits for."""


@dataclass(slots=True)
class OpenOrder:
    """An order that not all ranks have answered."""

    verb: str
    entries: list[CacheEntry]
    """By name, of what is read or found."""
    names: list[bytes]
    slots: list[int]
    queries: list[DiskQuery]
    waiting: set[int]
    """Ranks."""
    present: list[int]
    """1 = on all ranks so far."""


class DiskBooks:
    """Orders and their answers; `slots` are the host's, through which everything goes."""

    def __init__(self, slots: TierSlots, epoch: int, ranks: int, when: str) -> None:
        """epoch: the scheduler's; when: `Ready.disk`."""
        self.written = self.unwritten = self.read_back = self.corrupt = self.late = 0
        """Pages, since the worker started."""
        self._slots, self._epoch, self._ranks = slots, epoch, ranks
        self._ready = slots.count if when == "at once" else slots.count // CLEAN_SHARE
        """Slots that are to be had at once."""
        self._tickets = 0
        self._open: dict[int, OpenOrder] = {}
        self._out: list[PageOrder] = []
        self._dirty: OrderedDict[bytes, None] = OrderedDict()
        """Held and not on the disk, least recently used first."""
        self._writing: set[bytes] = set()
        self._reading: dict[bytes, int] = {}
        """Name -> ticket."""
        self._last: tuple[bytes, DiskQuery] | None = None
        self._held = (0, 0)
        """Pages and bytes of the directory, by rank 0."""
        self._order("find", [], [], [])  # says what is there

    # --- back ------------------------------------------------------------------------------------

    def find(self, entries: list[CacheEntry], start: int, last: bytes) -> DiskQuery:
        """Asks the disk for entries; last: the name of the prefix's last page. The choices of one
        request ask once."""
        if self._last is not None and self._last[0] == last and self._last[1].tickets:
            return self._last[1]
        query = DiskQuery(start)
        if entries:
            self._order("find", entries, [entry.names[0] for entry in entries], [], query)
        self._last = last, query
        return query

    def read(self, entries: Iterable[CacheEntry], query: DiskQuery) -> bool:
        """Begins to bring entries into slots, as far as there are some; False: none."""
        names, of, slots = list[bytes](), list[CacheEntry](), list[int]()
        for entry in entries:
            wanted = [name for name in entry.names if name not in self._slots.held]
            under_way = [name for name in wanted if name in self._reading]
            for name in under_way:
                ticket = self._reading[name]
                query.tickets.add(ticket)
                self._open[ticket].queries.append(query)
            own = [self._slots.take() for name in wanted if name not in self._reading]
            if None in own:
                for slot in own:
                    if slot is not None:
                        self._slots.done(slot)
                break
            names += [name for name in wanted if name not in self._reading]
            of += [entry] * len(own)
            slots += [slot for slot in own if slot is not None]
        if names:
            self._order("read", of, names, slots, query)
        return bool(query.tickets)

    # --- out -------------------------------------------------------------------------------------

    def add(self, name: bytes) -> None:
        """Has a name written, whose copy in its slot is confirmed."""
        if name not in self._slots.clean and name not in self._writing:
            self._dirty[name] = None

    def touch(self, name: bytes) -> None:
        if name in self._dirty:
            self._dirty.move_to_end(name)

    def _write_ahead(self) -> None:
        """Writes the least recently used ones, before their slots are needed."""
        wanted = self._ready - self._slots.spare - len(self._writing)
        names = list[bytes]()
        while self._dirty and len(names) < wanted and len(self._writing) < WRITES:
            name, _ = self._dirty.popitem(last=False)
            if name in self._slots.held:
                names.append(name)
                self._writing.add(name)
        if names:
            slots = [self._slots.held[name] for name in names]
            for slot in slots:
                self._slots.use(slot)
            self._order("write", [], names, slots)

    def wipe(self) -> None:
        """Removes all pages of this model."""
        self._dirty.clear()
        self._last = None
        for order in self._open.values():
            order.present = [0] * len(order.names)
        self._order("wipe", [], [], [])

    # --- orders ----------------------------------------------------------------------------------

    def _order(self, verb: str, entries: list[CacheEntry], names: list[bytes], slots: list[int],
               query: DiskQuery | None = None) -> None:
        self._tickets += 1
        queries = [] if query is None else [query]
        self._open[self._tickets] = OpenOrder(verb, entries, names, slots, queries,
                                              set(range(self._ranks)), [1] * len(names))
        if query is not None:
            query.tickets.add(self._tickets)
        if verb == "read":
            self._reading.update(dict.fromkeys(names, self._tickets))
        self._out.append(PageOrder(self._epoch, self._tickets, verb,  # type: ignore[arg-type]
                                   b"".join(names), np.array(slots, np.int32).tobytes()))

    def orders(self) -> Sequence[PageOrder]:
        """Takes out what is to be sent."""
        if self._dirty:
            self._write_ahead()
        out, self._out = self._out, []
        return out

    def answered(self, answer: PageAnswer) -> None:
        """Takes a rank's answer to an order: it counts when all ranks have answered."""
        order = self._open.get(answer.ticket)
        if order is None or answer.rank not in order.waiting:
            return
        order.waiting.discard(answer.rank)
        if not answer.rank:
            self._held = answer.pages, answer.disk_bytes
        for i, found in enumerate(answer.outcomes.ljust(len(order.present), b"\0")):
            self.corrupt += found == 2
            self.late += found == 3
            order.present[i] &= found == 1
        if order.waiting:
            return
        del self._open[answer.ticket]
        for query in order.queries:
            query.tickets.discard(answer.ticket)
        if order.verb == "find":
            for query in order.queries:
                query.present |= {name for name, there in
                                  zip(order.names, order.present, strict=True) if there}
        elif order.verb == "read":
            self._read(order)
        else:
            self._wrote(order)

    def _read(self, order: OpenOrder) -> None:
        for entry, name, slot, there in zip(order.entries, order.names, order.slots, order.present,
                                            strict=True):
            del self._reading[name]
            if there and name not in self._slots.held:
                self._slots.put(name, slot)
                self._slots.clean.add(name)
                self.read_back += 1
            elif not there:
                for query in order.queries:
                    query.present.discard(entry.names[0])
            self._slots.done(slot)

    def _wrote(self, order: OpenOrder) -> None:
        for name, slot, there in zip(order.names, order.slots, order.present, strict=True):
            self._writing.discard(name)
            self.written += there
            self.unwritten += not there
            if self._slots.held.get(name) == slot:
                self._slots.clean.add(name)  # also where it failed: the slot must not stay for ever
            self._slots.done(slot)

    def gauges(self) -> dict[str, float]:
        """Returns the gauges for the heartbeat."""
        return {"disk_pages": self._held[0], "disk_bytes": self._held[1],
                "disk_pages_written": self.written,
                "disk_pages_unwritten": self.unwritten + self._slots.unwritten,
                "disk_pages_hit": self.read_back, "disk_pages_corrupt": self.corrupt,
                "disk_pages_late": self.late}
