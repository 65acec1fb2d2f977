"""Reading the files of a model directory, which may be hostile.

A file is read if it is a regular file of bounded size in the directory: a link may lead to another
place in it, and, from a snapshot of the HF cache, to the same repository's `blobs` or to those that
all repositories of the cache share. Fifos, devices and sockets are refused without waiting for
them. Every failure is a `BadModel` with one line that names the file.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from actorium.actors.errors import BadModel

MAX_JSON = 16 << 20
"""Bytes of config.json and the like: the largest published ones have two megabytes."""
MAX_INDEX = 64 << 20
"""Bytes of a safetensors index: DeepSeek-V3's has nine megabytes."""
MAX_TOKENIZER = 256 << 20
"""Bytes of tokenizer.json: the largest published ones have some 35 megabytes."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Ends of names of files that are never read."""
LFS_POINTER = b"version https://git-lfs.github.com/"
"""How a file begins that a clone without Git LFS has instead of a large one."""
LFS_BYTES = 1024
"""Bytes of the largest of them."""
SNAPSHOTS, REPOSITORY, BLOBS = "snapshots", "models--", "blobs"


def read_file(path: Path, max_bytes: int) -> bytes:
    """The file's bytes. Raises `BadModel`, and `FileNotFoundError` where there is none."""
    fd = open_file(path, max_bytes)
    try:
        with open(fd, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise BadModel(f"model: cannot read {path}: {error.strerror}", "model") from None
    if len(data) > max_bytes:
        raise _too_large(path, max_bytes)
    return data


def check_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise as `read_file` does; for files that libraries open by name."""
    os.close(open_file(path, max_bytes))


def open_file(path: Path, max_bytes: int | None = None) -> int:
    """A file descriptor, open for reading. Raises as `read_file`."""
    try:
        # Without waiting, should it be a fifo.
        fd = os.open(_within(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENXIO:
            raise _irregular(path) from None
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadModel(f"model: cannot read {path}: {why}", "model") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise _irregular(path)
        if max_bytes is not None and info.st_size > max_bytes:
            raise _too_large(path, max_bytes)
        if info.st_size < LFS_BYTES and os.pread(fd, len(LFS_POINTER), 0) == LFS_POINTER:
            raise BadModel(f"model: {path} is a pointer of Git LFS, not the file itself: `git lfs "
                           "pull` in its folder fetches it", "model")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _within(path: Path) -> str:
    """The path with links followed. Raises `BadModel` if it leads out of the directory."""
    folder, found = os.path.realpath(path.parent), os.path.realpath(path)
    roots = [folder]
    for above in list(Path(folder).parents)[:2]:  # a snapshot, or a folder in one
        if above.name == SNAPSHOTS and above.parent.name.startswith(REPOSITORY):
            roots += [str(above.parent), str(above.parent.parent / BLOBS)]
    if not any(os.path.commonpath((root, found)) == root for root in roots):
        raise BadModel(f"model: {path} is a link that leads out of the model's directory; "
                       "put the file itself there", "model")
    return found


def _irregular(path: Path) -> BadModel:
    return BadModel(f"model: {path} is no regular file", "model")


def _too_large(path: Path, max_bytes: int) -> BadModel:
    return BadModel(f"model: {path} has more than {max_bytes:,} bytes", "model")


# --- which files of a folder or a repository hold the weights ---

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
_PART = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})\.safetensors")
_MAX_PARTS = 10_000


def unindexed_files(names: Iterable[str]) -> list[str]:
    """The safetensors files of a checkpoint without an index: model.safetensors, or else the parts
    of the only one that is in parts (all that there should be), or the only file of another name.
    [] where there is none, or more than one could be meant."""
    own = sorted(name for name in names if name.endswith(SUFFIX) and "/" not in name)
    if SINGLE in own:
        return [SINGLE]
    series = {(found[1], found[3]) for name in own if (found := _PART.fullmatch(name))}
    if len(series) == 1:
        (stem, count), = series
        if 1 <= int(count) <= _MAX_PARTS:
            return [f"{stem}-{i:0{len(count)}}-of-{count}{SUFFIX}"
                    for i in range(1, int(count) + 1)]
    return own if len(own) == 1 and not series else []
