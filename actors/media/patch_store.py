"""The store of prepared images and videos, files by key: written by the media actor, mapped by the
worker; the tokenizer reads their facts.

`<key in hex>.rows` is float32, little-endian, [t * h * w, 3 * temporal_patch_size * patch_size**2];
`<key in hex>.facts` is JSON. Both are written under another name and renamed, the rows last, and
rows go first: where there are rows there are facts. No numpy is needed but for rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from actorium.actors.runtime.rundir import FACTS, MEDIA, NEW, ROWS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FLOAT = 4
"""Bytes of a number."""


class MediaFacts(Struct, frozen=True):
    """What is known of an item without its patches."""

    video: bool
    grid: tuple[int, int, int]
    """Patches (t, h, w)."""
    merge_size: int = 2
    """Patches of a side that become one token."""
    row: int = 0
    """Numbers of a row."""
    seconds: float = 0.0
    """Of a video: how long a frame of patches lasts."""
    timestamps: tuple[float, ...] = ()
    """Of a video: seconds of each of its t frames of patches (`prompt_media.patch_times`)."""

    @property
    def tokens(self) -> int:
        """Placeholders in a prompt, timestamps and marks apart."""
        t, h, w = self.grid
        return t * h * w // self.merge_size ** 2

    @property
    def bytes(self) -> int:
        """Of the rows."""
        t, h, w = self.grid
        return t * h * w * self.row * FLOAT


_decode = msgspec.json.Decoder(MediaFacts).decode


def patch_folder(run_dir: Path) -> Path:
    """Where the items of an engine lie."""
    return run_dir / MEDIA


def read_facts(folder: Path, key: bytes) -> MediaFacts:
    """The facts of an item whose rows are there. Raises `FileNotFoundError`, and `ValueError` if
    the rows are not as long as the facts say."""
    try:
        facts = _decode((folder / f"{key.hex()}{FACTS}").read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"{key.hex()}{FACTS}: {error}") from None
    size = os.stat(folder / f"{key.hex()}{ROWS}").st_size
    if size != facts.bytes:
        raise ValueError(f"{key.hex()}{ROWS} has {size} bytes instead of {facts.bytes}")
    return facts


def is_stored(folder: Path, key: bytes) -> bool:
    """Whether there are rows of an item."""
    return (folder / f"{key.hex()}{ROWS}").exists()


def read_patches(folder: Path, key: bytes) -> NDArray[np.float32]:
    """The rows of an item, mapped, read-only: float32 [t * h * w, row]. They stay readable while
    they are mapped, whatever becomes of the file. Raises as `read_facts`."""
    import numpy as np

    facts = read_facts(folder, key)
    return np.memmap(folder / f"{key.hex()}{ROWS}", np.dtype("<f4"), "r",
                     shape=(facts.bytes // (FLOAT * facts.row), facts.row))


def write_patches(folder: Path, key: bytes, rows: NDArray[np.float32], facts: MediaFacts) -> None:
    """Stores an item. Raises `OSError` where there is no room, and leaves nothing behind then."""
    write_new(folder, key, rows, facts)
    publish(folder, key, key)


def write_new(folder: Path, job: bytes, rows: NDArray[np.float32], facts: MediaFacts) -> None:
    """Writes an item under a name of 32 bytes that nobody reads. Raises as `write_patches`."""
    if rows.nbytes != facts.bytes:
        raise ValueError(f"{rows.nbytes} bytes of rows, facts of {facts.bytes}")
    try:
        for suffix, data in ((FACTS, msgspec.json.encode(facts)), (ROWS, rows.data.cast("B"))):
            new = folder / f"{job.hex()}{suffix}{NEW}"
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
    except OSError:
        for suffix in (FACTS, ROWS):
            (folder / f"{job.hex()}{suffix}{NEW}").unlink(missing_ok=True)
        raise


def publish(folder: Path, job: bytes, key: bytes) -> None:
    """Gives what `write_new` wrote its key; an item of that key is replaced by its equal."""
    for suffix in (FACTS, ROWS):
        (folder / f"{job.hex()}{suffix}{NEW}").replace(folder / f"{key.hex()}{suffix}")


def remove_patches(folder: Path, key: bytes) -> None:
    """Forgets an item, if it is there."""
    for suffix in (ROWS, FACTS):
        (folder / f"{key.hex()}{suffix}").unlink(missing_ok=True)


def stored_items(folder: Path) -> Iterator[tuple[bytes, MediaFacts]]:
    """Items of an earlier life of the actor, the oldest first; unfinished files are removed."""
    for path in sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime_ns):
        if path.suffix == NEW:
            path.unlink(missing_ok=True)
        elif path.suffix == ROWS:
            key = bytes.fromhex(path.stem)
            try:
                yield key, read_facts(folder, key)
            except (OSError, ValueError):
                remove_patches(folder, key)
