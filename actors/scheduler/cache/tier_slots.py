"""Books of the host's slots: each is free, holds what its name says, is being read into, or waits
without a name for its last reader."""

from __future__ import annotations

from collections import Counter, OrderedDict

from actorium.actors.scheduler.cache.page_allocator import AccountingError

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
        self._free = list(range(count - 1, -1, -1))
        self._uses: Counter[int] = Counter()
        """Copies under way, by slot."""
        self._loose: set[int] = set()
        """In use, without a name."""

    @property
    def spare(self) -> int:
        """Slots that can be had without waiting, as far as nobody uses them."""
        return len(self._free) + (len(self.clean) if self._disk else len(self.held))

    def touch(self, name: bytes) -> bool:
        """Whether a name is held; it is the most recently used now."""
        if name not in self.held:
            return False
        self.held.move_to_end(name)
        return True

    def take(self, at_once: bool = False) -> int | None:
        """A slot for the caller's use, without a name; the least recently used one that may go
        where none is free. at_once: rather one that is not on the disk yet than none: what has been
        used last is worth more. None: each is in use, or not on the disk yet."""
        if self._free:
            slot = self._free.pop()
        else:
            found = self._oldest(at_once)
            if found is None:
                return None
            slot = self.held.pop(found)
            self.unwritten += self._disk and found not in self.clean
            self.clean.discard(found)
            self.evicted += 1
        self._uses[slot] = 1
        self._loose.add(slot)
        return slot

    def _oldest(self, at_once: bool) -> bytes | None:
        """The name that goes next; see `take`."""
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
        """A slot in use gets a name, which none has."""
        self._loose.remove(slot)
        self.held[name] = slot

    def use(self, slot: int) -> None:
        """It stays as it is until `done`."""
        self._uses[slot] += 1

    def done(self, slot: int) -> None:
        """A use has ended."""
        self._uses[slot] -= 1
        if not self._uses[slot]:
            del self._uses[slot]
            if slot in self._loose:
                self._loose.remove(slot)
                self._free.append(slot)

    def drop(self, name: bytes) -> None:
        """What it holds is not wanted any more; its slot is free after its last use."""
        slot = self.held.pop(name)
        self.clean.discard(name)
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
