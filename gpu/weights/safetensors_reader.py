"""Safetensors files: those of a checkpoint, and their tensors, mapped into memory, or carried to a
device while more are read.

On a CPU a tensor is the file's own pages, read when they are first looked at. To a device threads
read pieces of files into pinned buffers, from which they are copied on a stream of its own: a
thread's piece is under way to the device while others read theirs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.gguf_folder import SUFFIX as GGUF_SUFFIX
from actorium.actors.models.model_dir import read_json
from actorium.actors.models.model_files import (
    INDEX,
    MAX_INDEX,
    PICKLES,
    SINGLE,
    check_file,
    unindexed_files,
)

THREADS = 8
"""One reads some 5 GB/s of the page cache, and a device takes some 50."""
PIECE = 16 << 20
"""Bytes read at once, and of each pinned buffer."""
BATCH = 512 << 20
"""Bytes of tensors that are handed over together; a larger tensor is alone."""
AHEAD = 2
"""Batches that are under way at once. What is made of tensors when they are read (their FP8) lies
beside so many batches, not beside whole files, which may be all of a checkpoint."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}
"""Safetensors' names."""
MAX_SHARDS, MAX_NAME = 10_000, 200
"""Files of a checkpoint, and characters of their names."""
Wanted = Callable[[Path, str, torch.dtype, Sequence[int]], bool]
"""Whether a file's tensor of this name, dtype and shape is wanted; raises `BadModel` on one that is
not as it should be."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    start: int
    """First byte, of the file."""
    bytes: int


def checkpoint_files(path: Path) -> dict[str, list[str] | None]:
    """Shard file names, each with the tensors the index places in it (None: whatever it holds).

    Raises `BadModel` when there is no checkpoint or a shard is missing.
    """
    if (path / INDEX).is_file():
        placed = read_json(path / INDEX, max_bytes=MAX_INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise BadModel(f"{path / INDEX}: weight_map: must map tensor names to files")
        shards: dict[str, list[str] | None] = {}
        for name, file in placed.items():
            if (not isinstance(file, str) or file in ("", ".", "..") or "/" in file
                    or len(file) > MAX_NAME or not file.isprintable()):
                raise BadModel(f"{path / INDEX}: {shown(name)}: {shown(file)} is not a file "
                               "beside it")
            names = shards.setdefault(file, [])
            assert names is not None
            names.append(name)
        if len(shards) > MAX_SHARDS:
            raise BadModel(f"{path / INDEX}: names more than {MAX_SHARDS} files")
    else:
        there = sorted(os.listdir(path))
        names = unindexed_files(there)
        if not names:
            pickled = next((name for name in there if name.endswith(PICKLES)), None)
            gguf = next((path / name for name in there if name.endswith(GGUF_SUFFIX)), None)
            raise BadModel(f"{path}: no {SINGLE}, no {INDEX}, and no one other checkpoint in "
                           f"safetensors{f'; name {gguf} itself to serve it' if gguf else ''}"
                           f"{f'; {pickled} is pickled, which is never read' if pickled else ''}")
        shards = dict.fromkeys(names)
    for file in shards:
        try:
            check_file(path / file)
        except FileNotFoundError:
            raise BadModel(f"{path / file}: a part of the checkpoint is missing") from None
    return dict(sorted(shards.items()))


def unreadable(file: Path, why: object) -> BadModel:
    """What is said of a file that is cut short, damaged, or not there."""
    return BadModel(f"{file}: not a readable safetensors file: {why}")


def stored(file: Path) -> list[StoredTensor]:
    """The tensors of a file, in the order of their bytes, after safetensors has checked its header.

    Raises `BadModel`.
    """
    try:
        with safe_open(str(file), framework="pt"):
            pass
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size))
    except (SafetensorError, OSError, ValueError) as e:
        raise unreadable(file, e) from None
    found = []
    for name, entry in header.items():
        if name != "__metadata__":
            if entry["dtype"] not in DTYPES:
                raise BadModel(f"{file}: tensor {name} is {entry['dtype']}, not a float type")
            start, end = entry["data_offsets"]
            found.append(StoredTensor(name, DTYPES[entry["dtype"]], entry["shape"],
                                      8 + size + start, end - start))
    return sorted(found, key=lambda own: own.start)


def mapped(file: Path, wanted: Wanted) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each wanted tensor, which is the file's memory. Raises `BadModel`."""
    try:
        with safe_open(str(file), framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                part = shard.get_slice(name)
                dtype = DTYPES.get(part.get_dtype(), torch.bool)
                if wanted(file, name, dtype, part.get_shape()):
                    yield name, shard.get_tensor(name)
    except (SafetensorError, OSError) as e:
        raise unreadable(file, e) from None


def read_files(files: list[Path], device: torch.device,
               wanted: Wanted) -> Iterator[tuple[Path, Iterable[tuple[str, Tensor]]]]:
    """Each file with the wanted tensors in it."""
    if device.type == "cpu":
        for file in files:
            yield file, mapped(file, wanted)
        return
    with DeviceReader(device) as reader:
        yield from by_file(reader.read(files, wanted))


def by_file(batches: Iterable[tuple[Path, list[tuple[str, Tensor]]]]
            ) -> Iterator[tuple[Path, Iterable[tuple[str, Tensor]]]]:
    """Each file with its tensors, of one batch after the other."""
    for file, group in groupby(batches, lambda batch: batch[0]):
        yield file, chain.from_iterable(_drained(tensors) for _, tensors in group)


def _drained(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each in turn, held no longer: what is made of a whole file would else lie beside it."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


class DeviceReader:
    """Reads tensors to a device. A context: leaving it ends its threads."""

    def __init__(self, device: torch.device, threads: int = THREADS, piece: int = PIECE) -> None:
        """threads: each with a buffer of `piece` bytes."""
        self.device, self.piece = device, piece
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        # A thread begins on device 0, and would make a context there. The stream's device has a
        # number, without which torch refuses to set it.
        self._pool = ThreadPoolExecutor(
            threads, "read",
            partial(torch.cuda.set_device, self._stream.device) if self._stream else None)
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(threads):
            self._free.put(torch.empty(piece, dtype=torch.uint8, pin_memory=cuda))

    def __enter__(self) -> DeviceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, files: Sequence[Path],
             wanted: Wanted) -> Iterator[tuple[Path, list[tuple[str, Tensor]]]]:
        """The wanted tensors, on the device: of each file in turn one or more batches. Raises
        `BadModel`."""
        under_way: list[TensorBatch] = []
        todo = ((file, batch) for file in files for batch in batches(
            [s for s in stored(file) if wanted(file, s.name, s.dtype, s.shape)]))
        try:
            while True:
                for file, batch in islice(todo, AHEAD - len(under_way)):
                    under_way.append(self._send(file, batch))
                if not under_way:
                    return
                yield self._arrived(under_way.pop(0))
        finally:
            for load in under_way:
                load.close()

    def _send(self, file: Path, own: list[StoredTensor]) -> TensorBatch:
        """Set their pieces going."""
        tensors = [(s, torch.empty(s.shape, dtype=s.dtype, device=self.device)) for s in own]
        ready = None
        if self._stream is not None:
            # Memory that was used before is free for others only from here on.
            ready = torch.cuda.current_stream(self.device).record_event()
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise unreadable(file, e) from None
        pieces = [self._pool.submit(self._carry, fd, s.start + at, into, ready)
                  for s, tensor in tensors if s.bytes
                  for at, into in cut(tensor.view(-1).view(torch.uint8), self.piece)]
        return TensorBatch(file, fd, [(s.name, tensor) for s, tensor in tensors], pieces)

    def _carry(self, fd: int, start: int, into: Tensor, ready: torch.cuda.Event | None) -> None:
        """A piece of a file, from this byte on, to the device; until it is there."""
        buffer = self._free.get()
        try:
            own = buffer[:len(into)]
            fill(fd, own.numpy().data, start)
            if self._stream is None or ready is None:
                into.copy_(own)
                return
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                into.copy_(own, non_blocking=True)
                there = self._stream.record_event()
            there.synchronize()
        finally:
            self._free.put(buffer)

    def _arrived(self, load: TensorBatch) -> tuple[Path, list[tuple[str, Tensor]]]:
        try:
            for piece in load.pieces:
                piece.result()
        except (OSError, EOFError) as e:
            raise unreadable(load.file, e) from None
        finally:
            load.close()
        return load.file, load.tensors


class TensorBatch(NamedTuple):
    """Tensors of a file on their way."""

    file: Path
    fd: int
    tensors: list[tuple[str, Tensor]]
    pieces: list[Future[None]]

    def close(self) -> None:
        """When no thread reads it any more."""
        for piece in self.pieces:
            if not piece.cancel():
                piece.exception()
        os.close(self.fd)


def batches(tensors: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """The same in turn, BATCH bytes together at most unless one alone is larger; one that is empty
    where there are none."""
    batch: list[StoredTensor] = []
    for own in tensors:
        if batch and sum(each.bytes for each in batch) + own.bytes > BATCH:
            yield batch
            batch = []
        batch.append(own)
    yield batch


def cut(whole: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """(place, part) of pieces of at most `size` elements."""
    for at in range(0, len(whole), size):
        yield at, whole[at:at + size]


def fill(fd: int, into: memoryview, start: int) -> None:
    """Read these bytes of a file. Raises `EOFError` where it ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], start + done)
        if not count:
            raise EOFError("it ends early")
        done += count
