"""What a store of pages below the host's memory must do, and the header that each page has there.

A store keeps pages by name, for ever or until it has no room. It may lose any page at any time:
what is not there is computed again. It must never give another page than the one that was written,
which the checksums in the header see to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from struct import Struct
from typing import Protocol

HEADER = Struct("<8s16s16sQII")
"""Magic, namespace, name, bytes of the page, CRC-32 of them, CRC-32 of the header before it."""
MAGIC = b"ACTPAGE1"
MISSING, DONE, CORRUPT = 0, 1, 2


class PageStore(Protocol):
    """The pages of one namespace: a hash of all that a page's bits depend on beside its tokens.
    A name is the scheduler's hash of salt and tokens. Methods run on threads that only wait for the
    store, one reads and one writes; each raises nothing. One that hangs is left alone for a while
    (`DiskThreads`)."""

    pages: int
    """Known to be there, for the metrics."""
    held_bytes: int

    def holds(self, name: bytes) -> bool:
        """Whether there is a page of this name."""

    def read(self, name: bytes, into: memoryview) -> tuple[int, int]:
        """Reads a page into a buffer of its size: (DONE, its CRC-32), (MISSING, 0) or (CORRUPT, 0),
        after which it is removed. What the buffer has after the latter two means nothing."""

    def write(self, name: bytes, page: memoryview, crc: int) -> bool:
        """Writes a page, whole or not at all, with the checksum that it has had since it left the
        device. False: it is not there now."""

    def wipe(self) -> None:
        """Removes every page of this namespace."""


def header_of(namespace: bytes, name: bytes, size: int, crc: int) -> bytes:
    """Of a page of so many bytes with this checksum."""
    head = HEADER.pack(MAGIC, namespace, name, size, crc, 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little")


def checked_page(header: bytes, namespace: bytes, name: bytes, page: memoryview,
                 crc32: Callable[[memoryview], int]) -> int | None:
    """The page's CRC-32; None where it is not what its header says, or not this one."""
    magic, space, own, size, crc, of_header = HEADER.unpack(header)
    right = (of_header == zlib.crc32(header[:-4]) and magic == MAGIC and own == name
             and space == namespace and size == len(page) and crc32(page) == crc)
    return crc if right else None
