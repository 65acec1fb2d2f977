"""Pages below the pool, by name: hashes of a whole prefix, so equal names mean equal pages. How far
a prefix reaches when these count as well, and which of them that takes.

What a model needs to start at the end of page e: of a group of full attention all pages before e,
of one with a window those that the window covers, of recurrent layers the checkpoint taken there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from actorium.actors.scheduler.cache.radix_cache import PrefixKey, PrefixMatch
from actorium.actors.scheduler.cache.tree_nodes import TreeNode

NAME_BYTES = 16
COPY_KIND = 1 << 16
"""`StepPlan.store` names a part of a page by kind * COPY_KIND + part."""


def page_names(key: PrefixKey, page_size: int) -> list[bytes]:
    """The name of each whole page of a prefix, chained over the salt and all tokens up to its end.
    """
    width, name, names = page_size * 4, key.salt.encode(), list[bytes]()
    for at in range(0, len(key.data) // width * width, width):
        chained = blake2b(name, digest_size=NAME_BYTES).digest()
        name = blake2b(key.data[at:at + width], digest_size=NAME_BYTES, key=chained).digest()
        names.append(name)
    return names


def part_name(name: bytes, unit: int) -> bytes:
    """Returns the name of a part of what belongs to a page's name; unit: see `COPY_KIND`."""
    if not unit:
        return name
    return blake2b(name, digest_size=NAME_BYTES, key=unit.to_bytes(4, "little")).digest()


class NodeNames:
    """Names of the pages of nodes of the tree; those of the last one are kept, since a leaf is
    often trimmed page by page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._last: tuple[TreeNode | None, int, str, list[bytes]] = (None, 0, "", [])

    def of(self, node: TreeNode) -> list[bytes]:
        """Returns the names of a node's pages, at least as many as it has."""
        start = node.end - node.size
        last, at, salt, names = self._last
        path, above = [node.key], node.parent
        while above is not None and above.parent is not None:
            path.append(above.key)
            above = above.parent
        root_salt = "" if above is None else above.salt
        if last is not node or at != start or salt != root_salt or len(names) < node.size:
            key = PrefixKey(root_salt, b"".join(reversed(path)))
            names = page_names(key, self._page_size)[start:]
            self._last = (node, start, root_salt, names)
        return names


class CacheEntry(NamedTuple):
    """A page of a group, or a checkpoint."""

    kind: int
    """Of `StepPlan.store`."""
    page: int
    """Index of its page in the prefix."""
    names: tuple[bytes, ...]
    """Of its parts."""


class PageNeeds(NamedTuple):
    """What a model keeps of a page's end."""

    reach: tuple[int, ...]
    """Per group: pages that a match needs before its end; 0 = all."""
    parts: tuple[int, ...]
    """Slots that an entry of each kind takes: a page of each group, then a checkpoint."""
    recurrent: bool

    @property
    def simple(self) -> bool:
        """Whether any run of pages can be used."""
        return not (self.recurrent or any(self.reach))

    def entry(self, kind: int, index: int, names: Sequence[bytes]) -> CacheEntry:
        """Returns an entry of a prefix; names: of its pages."""
        return CacheEntry(kind, index, tuple(part_name(names[index], kind * COPY_KIND + part)
                                        for part in range(self.parts[kind])))

    def asked(self, names: Sequence[bytes], start: int, end: int) -> list[CacheEntry]:
        """All that could be of use of the pages `start` to `end`."""
        kinds = range(len(self.parts))
        return [self.entry(kind, index, names) for index in range(start, end) for kind in kinds]


HasEntry = Callable[[CacheEntry], bool]


def longest(needs: PageNeeds, match: PrefixMatch, known: int, names: Sequence[bytes], end: int,
            page_size: int, has: HasEntry) -> list[CacheEntry]:
    """Returns what to bring back, in the order of pages, to start as late as can be and later than
    after the match; empty: there is nothing to gain. known: pages that the tree has of the prefix,
    which may be more than the match; end: pages that it may reach at most.

    The last entry that is returned gives the end: its page + 1.
    """
    start, full = match.length // page_size, [g for g, reach in enumerate(needs.reach) if not reach]
    windowed = [g for g, reach in enumerate(needs.reach) if reach]
    base = start if windowed else max(start, known)
    run: list[list[CacheEntry]] = []
    for index in range(base, end):
        entries = [needs.entry(g, index, names) for g in full]
        if not all(map(has, entries)):
            break
        run.append(entries)
    for stop in range(base + len(run), start, -1):
        beside = [needs.entry(g, index, names) for g in windowed
                  for index in range(max(0, stop - needs.reach[g]), stop)
                  if index >= start or not match.pages[g][index]]
        if needs.recurrent:
            beside.append(needs.entry(len(needs.reach), stop - 1, names))
        if all(map(has, beside)):
            pages = [entry for entries in run[:max(0, stop - base)] for entry in entries]
            return sorted(pages + beside, key=lambda entry: (entry.page, entry.kind))
    return []
