"""The folder of an engine's prepared images and videos: `media` in its run directory.

It lies in shared memory where that has room for it, and is then a symbolic link there, of a name
that nobody can guess. Whoever removes the run directory removes what the link names, too: also what
an engine left that was killed. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

MEDIA = "media"
SHARED_MEMORY = Path("/dev/shm")
ROWS, FACTS, NEW, SECRET = ".rows", ".facts", ".new", "secret"
"""How names of files in it end; and the name of the one that keys are made with."""
_FILE = re.compile(r"([0-9a-f]{64}(\.rows|\.facts)|secret)(\.new)?")
_FOLDER = re.compile(r"actorium-media-[0-9a-f]{32}")


def make_media_folder(run_dir: Path, need: int, shared: Path = SHARED_MEMORY) -> Path:
    """The folder, made where there is none yet. need: bytes that shared memory must have in all.
    Raises `OSError`."""
    link = run_dir / MEDIA
    if not os.path.lexists(link):
        if _size(shared) >= need:
            # The link is made first: a folder without one would be left behind by a kill.
            link.symlink_to(shared / f"actorium-media-{secrets.token_hex(16)}")
        else:
            link.mkdir(0o700)
    if link.is_symlink():
        target = Path(os.readlink(link))
        with contextlib.suppress(FileExistsError):
            target.mkdir(0o700)
        if not _is_own(target):
            raise PermissionError(f"{target} is no folder of this user's")
    return link


def is_media_folder(entry: Path) -> bool:
    """Whether an entry of a run directory is this folder, and holds nothing else."""
    if entry.name != MEDIA:
        return False
    if entry.is_symlink():
        return _FOLDER.fullmatch(Path(os.readlink(entry)).name) is not None
    return entry.is_dir() and all(_FILE.fullmatch(name) for name in os.listdir(entry))


def remove_media_folder(entry: Path) -> None:
    """Removes the folder with what is in it."""
    if not entry.is_symlink():
        _remove(entry)
        return
    target = Path(os.readlink(entry))
    if _FOLDER.fullmatch(target.name) and _is_own(target):
        _remove(target)
    entry.unlink()


def _remove(folder: Path) -> None:
    for name in os.listdir(folder):
        if _FILE.fullmatch(name):
            (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def _is_own(folder: Path) -> bool:
    try:
        info = os.lstat(folder)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _size(shared: Path) -> int:
    """Bytes that files there may take; 0 = it cannot be written."""
    try:
        stats = os.statvfs(shared)
    except OSError:
        return 0
    return stats.f_bavail * stats.f_frsize if os.access(shared, os.W_OK) else 0
