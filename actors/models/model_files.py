"""Reading the files of a model directory, which a stranger may have made.

A file is read if it is a regular file of at most so many bytes that lies in the directory: a link
may lead to another place in it, and, from a snapshot of the HF cache, to the same repository's
`blobs`. Fifos, devices and sockets are refused without waiting for them. Every failure is a
`BadModel` with one line that names the file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from actorium.actors.errors import BadModel

MAX_JSON = 16 << 20
"""Bytes of config.json and its like: the largest ones there are have two megabytes."""
MAX_INDEX = 64 << 20
"""Bytes of a safetensors index: DeepSeek-V3's has nine megabytes."""
MAX_TOKENIZER = 256 << 20
"""Bytes of tokenizer.json: the largest ones have some 35 megabytes."""
SNAPSHOTS, REPOSITORY = "snapshots", "models--"


def read_file(path: Path, most: int) -> bytes:
    """All of the file, which has at most so many bytes. Raises `BadModel`, and `FileNotFoundError`
    where there is none."""
    fd = open_file(path, most)
    try:
        with open(fd, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise BadModel(f"model: cannot read {path}: {error.strerror}", "model") from None
    if len(data) > most:
        raise _too_large(path, most)
    return data


def check_file(path: Path, most: int | None = None) -> None:
    """Raises as `read_file`; for files that libraries open by name."""
    os.close(open_file(path, most))


def open_file(path: Path, most: int | None = None) -> int:
    """The descriptor of the file, open for reading. Raises as `read_file`."""
    try:
        # Not waiting, should it be a fifo.
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
        if most is not None and info.st_size > most:
            raise _too_large(path, most)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _within(path: Path) -> str:
    """Where the file lies, links followed. Raises `BadModel` if that is elsewhere."""
    folder, found = os.path.realpath(path.parent), os.path.realpath(path)
    roots = [folder]
    above = Path(folder).parent
    if above.name == SNAPSHOTS and above.parent.name.startswith(REPOSITORY):
        roots.append(str(above.parent))
    if not any(os.path.commonpath((root, found)) == root for root in roots):
        raise BadModel(f"model: {path} is a link that leads out of the model's directory; "
                       "put the file itself there", "model")
    return found


def _irregular(path: Path) -> BadModel:
    return BadModel(f"model: {path} is no regular file", "model")


def _too_large(path: Path, most: int) -> BadModel:
    return BadModel(f"model: {path} has more than {most:,} bytes", "model")
