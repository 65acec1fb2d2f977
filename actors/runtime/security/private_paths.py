"""Opens directories and files that only this user (or root) can have made, changed or replaced.

A directory under /tmp may be made by anyone first: connecting to a socket in it, or following a
link that lies there as a lock, would do what another user wants. So a path is walked from the root
on, each step relative to the directory that was checked before it, and nothing is trusted that
others could have put there. (What systemd calls a safe chase, and ssh its StrictModes.)

Only the standard library is imported: the client uses this, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from pathlib import Path

MAX_LINKS = 40
"""Symbolic links on the way to a directory, as the kernel allows."""
_LOOSE = stat.S_IWGRP | stat.S_IWOTH
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ROOT = 0


class UnsafePath(Exception):
    """Somebody else could have made, or could replace, what lies at a path. One line that says
    what to do."""


def open_directory(path: Path, make: bool = False, keep_links: int = 0) -> int:
    """The file descriptor (O_PATH) of a directory that is this user's or root's, as are all above
    it, none of them open to others' writing (but for directories with the sticky bit, whose entries
    others cannot replace). make: create what is missing, with mode 0700. keep_links: so many of the
    last names on the path must not be symbolic links; earlier ones may, where only this user or
    root can have made them.

    Raises `UnsafePath`, and `OSError`.
    """
    names = deque(os.path.abspath(path).split(os.sep)[1:])
    fd, current, links = os.open("/", _STEP), "/", 0
    try:
        while names:
            name = names.popleft()
            if name in ("", "."):
                continue
            _check(fd, current)
            kind = _kind(name, fd, make)
            if stat.S_ISLNK(kind.st_mode):
                links += 1
                _check_link(kind, os.path.join(current, name), len(names) < keep_links)
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                target = os.readlink(name, dir_fd=fd)
                names.extendleft(reversed(target.split(os.sep)))
                step, current = ("/", "/") if target.startswith(os.sep) else (".", current)
            else:
                step, current = name, os.path.normpath(os.path.join(current, name))
            below = os.open(step, _STEP, dir_fd=fd)
            os.close(fd)
            fd = below
        _check(fd, current)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_directory(path: Path, make: bool = False, keep_links: int = 0) -> None:
    """As `open_directory`, whose descriptor is not wanted."""
    os.close(open_directory(path, make, keep_links))


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """`os.open` of a regular file of this user or root, which is no symbolic link, by whatever name
    it has in its directory. Raises `UnsafePath` and `OSError`."""
    try:
        # Not waiting, should it be a fifo; not cut short before it is known to be ours.
        fd = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK,
                     mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafePath(f"{path} is a symbolic link; remove it") from None
        raise
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise UnsafePath(f"{path} is no regular file; remove it")
        if not _trusted(info.st_uid):
            raise UnsafePath(f"{path} belongs to another user (uid {info.st_uid}); remove it")
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_file(path: Path) -> bytes:
    """All of such a file. Raises as `open_file`."""
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read()


def read_trusted(path: Path, most: int = -1) -> bytes:
    """All of a regular file, or its first `most` bytes, that nobody but this user and root can have
    made, changed or replaced. Symbolic links are followed where only they can have made them.
    Raises `UnsafePath` and `OSError`."""
    path = Path(os.path.abspath(path))
    for _ in range(MAX_LINKS):
        check_directory(path.parent)
        info = os.lstat(path)
        if not stat.S_ISLNK(info.st_mode):
            break
        _check_link(info, str(path), False)
        path = path.parent / os.readlink(path)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK),
              "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise UnsafePath(f"{path} is no regular file")
        if not _trusted(info.st_uid):
            raise UnsafePath(f"{path} belongs to another user (uid {info.st_uid}), who could "
                             "change it; `chown` it")
        if info.st_mode & _LOOSE:
            raise UnsafePath(f"others could change {path}; `chmod go-w {path}`")
        return file.read(most)


def check_socket(path: Path) -> None:
    """Raise `UnsafePath` if there is anything but a socket of this user or root."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode) or not _trusted(info.st_uid):
        raise UnsafePath(f"{path} is no socket of this user's")


def _trusted(owner: int) -> bool:
    return owner in (ROOT, os.getuid())


def _kind(name: str, parent: int, make: bool) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # whoever was faster is looked at as well
        os.mkdir(name, 0o700, dir_fd=parent)
    return os.stat(name, dir_fd=parent, follow_symlinks=False)


def _check(fd: int, path: str) -> None:
    info = os.fstat(fd)
    if not _trusted(info.st_uid):
        raise UnsafePath(f"{path} belongs to another user (uid {info.st_uid}); remove it or choose "
                         "another directory")
    if info.st_mode & _LOOSE and not info.st_mode & stat.S_ISVTX:
        raise UnsafePath(f"others could replace what is in {path}; "
                         f"`chmod go-w {path}` or choose another directory")


def _check_link(info: os.stat_result, path: str, refused: bool) -> None:
    if refused or not _trusted(info.st_uid):
        raise UnsafePath(f"{path} is a symbolic link; remove it or choose another directory")
