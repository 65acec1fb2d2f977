"""The files that weights are read from: a checkpoint, and files of tensors in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

from actorium.actors.errors import BadModel, shown
from actorium.actors.messages import WeightsSource
from actorium.gpu.families.tensor_names import Renames, plain_name
from actorium.gpu.weights.safetensors_reader import Wanted, stored

HEAD = 1 << 16
"""Bytes of each file that are read, from its begin and from its end."""
DIGEST_BYTES = 16


class WeightFiles(NamedTuple):
    """A checkpoint, and safetensors files whose tensors take the place of its own."""

    path: Path
    over: tuple[Path, ...] = ()
    """A later file goes before an earlier one."""

    def digest(self, served: Path) -> bytes:
        """Of all files by name, size, time of change, begin and end; empty where they are those of
        the checkpoint `served` alone. Raises `BadModel`."""
        if self.path == served and not self.over:
            return b""
        made = blake2b(digest_size=DIGEST_BYTES)
        try:
            for file in [*sorted(self.path.iterdir()), *self.over]:
                if file.is_file():
                    made.update(file_digest(file))
        except OSError as error:
            raise BadModel(f"{error.filename}: {error.strerror}") from None
        return made.digest()


def files_of(source: WeightsSource, served: Path) -> WeightFiles:
    """Those that a message names; served: the checkpoint that the engine is configured with."""
    return WeightFiles(Path(source.path) if source.path else served, tuple(map(Path, source.over)))


def file_digest(file: Path, times: bool = True) -> bytes:
    """Of its name, size, time of change if `times`, begin and end."""
    found = file.stat()
    made = blake2b(f"{file.name} {found.st_size} {found.st_mtime_ns if times else ''}".encode())
    with file.open("rb") as own:
        made.update(own.read(HEAD))
        own.seek(max(0, found.st_size - HEAD))
        made.update(own.read(HEAD))
    return made.digest()


class Precedence:
    """Which file a tensor is taken from, where several have it."""

    def __init__(self, over: Sequence[Path], renames: Renames = ()) -> None:
        """over: as `WeightFiles.over`. Raises `BadModel` where one cannot be read."""
        self._over, self._renames = over, renames
        self._file = {plain_name(own.name, renames): file for file in over
                      for own in stored(file)}

    def wanted(self, wanted: Wanted) -> Wanted:
        """The same question, which only the file that counts is asked; of a file in front, every
        tensor must be wanted, or `ignored`."""
        if not self._over:
            return wanted

        def asks(file: Path, name: str, dtype: torch.dtype, shape: Sequence[int]) -> bool:
            first = self._file.get(plain_name(name, self._renames), file)
            return first == file and wanted(file, name, dtype, shape)

        return asks

    def check(self, unread: Sequence[str], ignored: Callable[[str], object]) -> None:
        """Raises `BadModel` where a file in front has a tensor that no part of the model reads."""
        for name in unread:
            if name in self._file and not ignored(name):
                raise BadModel(f"{self._file[name]}: tensor {shown(name)}: no part of the model "
                               "reads one of this name")

    @property
    def needed(self) -> tuple[Path, ...]:
        """The files in front that some tensor is taken from."""
        return tuple(file for file in self._over if file in self._file.values())
