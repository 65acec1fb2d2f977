"""Pages as files: named by what they hold, checked when they are read, the oldest evicted first.

    DIR/pages.lock                held while somebody makes room
    DIR/<namespace>/<xx>/<name>   a page: `HEADER`, then its bytes

The namespace is a hash of everything that a page's bits depend on beside its tokens (the model, its
dtypes, the kernels, the rank, ...); the name is the scheduler's hash of salt and tokens. So equal
paths mean equal contents, and several engines may share a directory without talking to each other:
a file appears whole, by a rename, or not at all, and one that another engine removes while it is
read stays readable. The time of last use is the file's modification time.

A file is not forced to the disk: after a power cut it may be short or hold rubbish, which its
checksums find like any other damage.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, time
from typing import NamedTuple

from actorium.actors.runtime.security.private_paths import check_directory
from actorium.gpu.step.page_store import (
    CORRUPT,
    DONE,
    HEADER,
    MISSING,
    checked_page,
    header_of,
)

LOG = logging.getLogger("actorium.worker")
BLOCK = 4096
"""A file is counted in whole ones."""
SPARE = 16
"""Room is made until a sixteenth of the bound is free; the directory is looked at anew each time
that this engine has written so much."""
LOCK = "pages.lock"
"""Not "lock", as in an engine's run directory, by which a launcher knows those that a killed engine
has left, and removes them: a cache may lie beside them."""
STALE_S = 600.0
"""Age of a half-written file that nobody writes any more."""
SAY_EVERY_S = 60.0
"""Seconds between two lines in the log about a disk that fails."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskPage(NamedTuple):
    """A file, as a look at the directory finds it."""

    used_ns: int
    bytes: int
    path: str


class DiskPages:
    """The pages of one namespace in a directory of at most `bound` bytes (of all namespaces). No
    method raises `OSError`: what cannot be read is not there."""

    def __init__(self, directory: Path, bound: int, namespace: bytes,
                 crc32: Callable[[memoryview], int] = zlib.crc32) -> None:
        """namespace: 16 bytes; crc32: what makes the checksums of pages. Makes the directory.
        Raises `OSError`, `UnsafePath`, and `PermissionError` where others may look into it."""
        check_directory(directory, make=True)
        self._fd = os.open(directory, _DIRECTORY)
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(self._fd)
            raise PermissionError(
                errno.EACCES, "others may look into it: it must be this user's, of mode 0700")
        self.directory, self.bound, self._namespace = directory, bound, namespace
        self._crc32 = crc32
        self._own = namespace.hex()
        self._made: set[str] = set()
        """Directories that are there."""
        self._written = 0
        """Bytes since the last look."""
        self._numbers = iter(range(1 << 62))
        self._said = -SAY_EVERY_S
        self.pages = self.held_bytes = 0
        """All that is there, as of the last look and what was written since."""
        self.evicted = 0
        """Files removed to make room."""
        os.close(os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._fd))
        self._look()

    def close(self) -> None:
        os.close(self._fd)

    def holds(self, name: bytes) -> bool:
        """Whether there is a page of this name."""
        try:
            found = os.stat(self._path(name), dir_fd=self._fd, follow_symlinks=False)
            return stat.S_ISREG(found.st_mode)
        except OSError:
            return False

    def read(self, name: bytes, into: memoryview) -> tuple[int, int]:
        """Reads a page into a buffer of its size: (DONE, its CRC-32), (MISSING, 0) or (CORRUPT, 0),
        after which it is removed. What the buffer has after the latter two means nothing."""
        path = self._path(name)
        try:
            fd = os.open(path, _READ, dir_fd=self._fd)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._say("not read", error)
            return MISSING, 0
        try:
            header = bytearray(HEADER.size)
            total = HEADER.size + len(into)
            whole = os.fstat(fd).st_size == total and _read_all(fd, [memoryview(header), into])
            if whole and (crc := checked_page(bytes(header), self._namespace, name, into,
                                              self._crc32)) is not None:
                with suppress(OSError):
                    os.utime(fd)
                return DONE, crc
        except OSError as error:
            self._say("not read", error)
            return MISSING, 0
        finally:
            os.close(fd)
        self._remove(path)
        return CORRUPT, 0

    def write(self, name: bytes, page: memoryview, crc: int) -> bool:
        """Writes a page, whole or not at all, with the checksum that it has had since it left the
        device. False: it is not there now."""
        path = self._path(name)
        with suppress(OSError):
            os.utime(path, dir_fd=self._fd, follow_symlinks=False)
            return True
        size = HEADER.size + len(page)
        if ((self.held_bytes + size > self.bound or self._written > self.bound // SPARE)
                and not self._make_room(size)):
            return False
        head = header_of(self._namespace, name, len(page), crc)
        scratch = f"{self._own}/.{os.getpid()}-{next(self._numbers)}"
        try:
            self._make(self._own)
            self._make(path.rpartition("/")[0])
            fd = os.open(scratch, _NEW, 0o600, dir_fd=self._fd)
            try:
                _write_all(fd, [memoryview(head), page])
            finally:
                os.close(fd)
            os.rename(scratch, path, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as error:
            self._made.clear()
            self._remove(scratch)
            self._say("not written", error)
            return False
        self.pages += 1
        self.held_bytes += _blocks(size)
        self._written += _blocks(size)
        return True

    def wipe(self) -> None:
        """Removes every page of this namespace."""
        for page in list(self._files(self._own)):
            self._remove(page.path)
        self._look()

    # --- room ------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        """Removes the least recently used files of all namespaces until there is room for `size`
        bytes and some more. False: another engine is at it, or it cannot be done; who wrote all the
        same would exceed the bound for as long as the other one takes."""
        try:
            lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        except OSError as error:
            self._say("no room is made", error)
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files = sorted(self._look())
            if self.held_bytes + size <= self.bound:
                return True
            goal = max(0, self.bound - self.bound // SPARE - size)
            for page in files:
                if self.held_bytes <= goal:
                    break
                self._remove(page.path)
                self.held_bytes -= page.bytes
                self.pages -= 1
                self.evicted += 1
            return True
        except OSError:  # held by another
            return False
        finally:
            os.close(lock)

    def _look(self) -> list[DiskPage]:
        """All files, by their names; what they hold is not read. Half-written ones that nobody
        writes any more are removed."""
        found, old = list[DiskPage](), (time() - STALE_S) * 1e9
        for namespace in self._names("."):
            if len(namespace) == 32:
                found += self._files(namespace)
        for page in [page for page in found if "/." in page.path and page.used_ns < old]:
            self._remove(page.path)
            found.remove(page)
        self.pages, self.held_bytes, self._written = len(found), sum(p.bytes for p in found), 0
        return found

    def _files(self, namespace: str) -> Iterator[DiskPage]:
        for name in self._names(namespace):
            inner = [name] if name.startswith(".") else [f"{name}/{n}" for n in
                                                         self._names(f"{namespace}/{name}")]
            for path in inner:
                with suppress(OSError):
                    own = os.stat(f"{namespace}/{path}", dir_fd=self._fd, follow_symlinks=False)
                    yield DiskPage(own.st_mtime_ns, _blocks(own.st_size), f"{namespace}/{path}")

    def _names(self, path: str) -> list[str]:
        try:
            fd = os.open(path, _DIRECTORY, dir_fd=self._fd)
        except OSError:
            return []
        try:
            return os.listdir(fd)
        except OSError:
            return []
        finally:
            os.close(fd)

    # --- files -----------------------------------------------------------------------------------

    def _path(self, name: bytes) -> str:
        text = name.hex()
        return f"{self._own}/{text[:2]}/{text[2:]}"

    def _make(self, path: str) -> None:
        if path not in self._made:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700, dir_fd=self._fd)
            self._made.add(path)

    def _remove(self, path: str) -> None:
        with suppress(OSError):
            os.unlink(path, dir_fd=self._fd)

    def _say(self, what: str, error: OSError) -> None:
        if monotonic() >= self._said + SAY_EVERY_S:
            self._said = monotonic()
            LOG.warning("disk_cache: %s: pages are %s: %s", self.directory, what, error.strerror)


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _read_all(fd: int, parts: list[memoryview]) -> bool:
    """Whether all of them could be filled."""
    while parts:
        count = os.readv(fd, parts)
        if not count:
            return False
        parts = _rest(parts, count)
    return True


def _write_all(fd: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _rest(parts, os.writev(fd, parts))


def _rest(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers of which the first `done` bytes are through."""
    while parts and done >= len(parts[0]):
        done -= len(parts[0])
        parts = parts[1:]
    return [parts[0][done:], *parts[1:]] if parts else []
