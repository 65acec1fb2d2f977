"""Files that remember what was chosen by measuring: in the user's cache, where engines of the same
key find it, and in the run directory, by which all workers of one engine go: what a successor
computes again must have its predecessor's bits, whatever has become of the cache meanwhile."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from actorium.actors.runtime.rundir import NEW

LOG = logging.getLogger(__name__)
Key = dict[str, str]


class MeasuredChoice(Protocol):
    """What is remembered."""

    @property
    def key(self) -> Key:
        """What it depends on."""


T = TypeVar("T", bound=MeasuredChoice)


class ChoiceFiles(NamedTuple):
    """Where one choice is remembered."""

    key: Key
    cached: Path
    engine: Path | None
    """None outside an engine."""

    @classmethod
    def of(cls, stem: str, key: Key, cache: Path, run_dir: Path | None) -> ChoiceFiles:
        """stem: what names of the files begin with."""
        name = hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:20]
        return cls(key, cache / f"{stem}-{name}.json",
                   None if run_dir is None else run_dir / f"{stem}.json")

    def read(self, kind: type[T]) -> T | None:
        """What this engine has chosen before, whatever its key; else what the cache has; else
        None."""
        if self.engine is not None and (choice := read_choice(self.engine, None, kind)) is not None:
            return choice
        return read_choice(self.cached, self.key, kind)

    def remember(self, choice: T) -> T:
        """Writes it to the cache, whole or not at all. Returns that of another engine which was
        faster: all go by the same one. A cache that cannot be written is logged."""
        path = self.cached
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _written(path, choice) as scratch:
                try:
                    os.link(scratch, path)
                except FileExistsError:
                    if (other := read_choice(path, choice.key, type(choice))) is not None:
                        return other
                    os.replace(scratch, path)
        except OSError as error:
            LOG.warning("%s: what was measured could not be remembered: %s", path, error)
        return choice

    def keep(self, choice: T) -> None:
        """Writes it to the run directory, for the worker's successors. Raises `OSError`."""
        if self.engine is not None:
            with _written(self.engine, choice) as scratch:
                os.replace(scratch, self.engine)


def read_choice(path: Path, key: Key | None, kind: type[T]) -> T | None:
    """What this user's file says; None where there is none, or it is not what `ChoiceFiles` wrote
    for this key (None: for any)."""
    try:
        if path.stat().st_uid != os.getuid():
            return None
        choice = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        if not isinstance(error, FileNotFoundError):
            LOG.warning("%s: not read, it is measured again: %s", path, error)
        return None
    return choice if key is None or choice.key == key else None


@contextmanager
def _written(path: Path, choice: MeasuredChoice) -> Iterator[Path]:
    """A new file beside `path`, removed afterwards if it still has its first name."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=NEW)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(choice), indent=1))
        yield Path(name)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
