"""The header of a GGUF file: its metadata, and where its tensors lie.

Whoever made the file: every count and size is compared with what is left of it before anything is
read, and arrays are only walked over until they are asked for, so that reading a header takes no
more memory than its bytes. Every failure is a `BadModel` with one line that names the file.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-
endian). Standard library alone: the command line, the tokenizer and the memory plan start here.
"""

from __future__ import annotations

import math
import os
import re
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.model_files import open_file

T = TypeVar("T")
MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_HEADER = 256 << 20
"""Bytes before the tensors: the largest vocabularies take some twenty megabytes."""
MAX_ENTRIES, MAX_TENSORS = 4096, 1 << 16
MAX_KEY, MAX_NAME, MAX_DIMENSIONS = 1024, 256, 4
MAX_TEXT = 8 << 20
"""Bytes of one text: chat templates have up to some hundred thousand."""
MAX_ALIGNMENT = 1 << 16
MAX_SPLITS = 1000
MAX_SIZE = 2**31 - 1
"""Of a dimension."""
PIECE = 1 << 20
"""Bytes of the header that are read at once."""
F32, STRING, ARRAY = 6, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
           12: "d"}
"""Kinds of values as `struct` has them."""
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class BlockType(NamedTuple):
    """How a tensor's numbers lie in the file: in blocks along its rows."""

    name: str
    numbers: int
    """Of a block."""
    bytes: int


TYPES = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", 32, 18), 3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22), 7: BlockType("Q5_1", 32, 24), 8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84), 11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144), 13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66), 17: BlockType("IQ2_XS", 256, 74),
    22: BlockType("IQ2_S", 256, 82), 18: BlockType("IQ3_XXS", 256, 98),
    21: BlockType("IQ3_S", 256, 110), 19: BlockType("IQ1_S", 256, 50),
    29: BlockType("IQ1_M", 256, 56), 20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136), 34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66), 39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}
"""Those that are served, by their number."""
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0",
}
"""Names of others, for errors."""


class GgufTensor(NamedTuple):
    """A tensor in a file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    """As torch has it: the rows' length last."""
    file: Path
    start: int
    """First byte, of the file."""
    bytes: int
    factors: tuple[float, ...] = ()
    """What all its numbers are multiplied by, or those of each expert; (): by nothing."""


class GgufFile:
    """What a model's header says; of a model in several files, all of them."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, GgufTensor],
                 buffer: bytearray) -> None:
        self.path, self.tensors = path, tensors
        self._metadata, self._buffer = metadata, buffer

    def bad(self, key: str, why: str) -> BadModel:
        """An error that names a key of the metadata."""
        return _bad(self.path, f"{key}: {why}")

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def number(self, key: str, default: int | None = None) -> int:
        """A number from 0 on. Raises `BadModel`, also if it is missing and there is no default."""
        value = self._metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
            raise self.bad(key, f"must be a number from 0 to {MAX_SIZE}, got {_seen(value)}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) \
                or not math.isfinite(value):
            raise self.bad(key, f"must be a finite number, got {_seen(value)}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, f"must be true or false, got {_seen(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self._metadata.get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, f"must be a text, got {_seen(value)}")
        return value

    def texts(self, key: str, maximum: int) -> list[str]:
        """An array of at most so many texts; bytes that are no UTF-8 become U+FFFD."""
        own = self._array(key, maximum)
        if own.kind != STRING:
            raise self.bad(key, "must be an array of texts")
        buffer, at, found = self._buffer, own.start, []
        for _ in range(own.length):
            size = int.from_bytes(buffer[at:at + 8], "little")
            found.append(buffer[at + 8:at + 8 + size].decode("utf-8", "replace"))
            at += 8 + size
        return found

    def numbers(self, key: str, maximum: int) -> list[Any]:
        """An array of at most so many numbers."""
        own = self._array(key, maximum)
        if own.kind == STRING:
            raise self.bad(key, "must be an array of numbers")
        data = array(SCALARS[own.kind].replace("?", "b"))
        assert data.itemsize == struct.calcsize("<" + data.typecode)
        data.frombytes(self._buffer[own.start:own.start + own.length * data.itemsize])
        return data.tolist()

    def same(self, key: str, default: int | None = None) -> int:
        """A number that may stand there once for each layer; then all must be equal, but for layers
        in which it is 0, as those are that have no such part."""
        if not self.is_array(key):
            return self.number(key, default)
        found = set(self.numbers(key, MAX_ENTRIES))
        count = next(iter(found - {0} or found), None)
        if len(found - {0}) > 1 or not isinstance(count, int) or not 0 <= count <= MAX_SIZE:
            raise self.bad(key, "layers that differ in it are not served")
        return count

    def reals(self, key: str, count: int) -> list[GgufTensor]:
        """An array of so many numbers in F32, each as a tensor of one number. Raises `BadModel`."""
        own = self._array(key, count)
        if own.kind != F32 or own.length != count:
            raise self.bad(key, f"must be {count} numbers in F32")
        return [GgufTensor(key, TYPES[0], (1,), self.path, own.start + 4 * i, 4)
                for i in range(count)]

    def is_array(self, key: str) -> bool:
        """Whether there is an array."""
        return isinstance(self._metadata.get(key), GgufArray)

    def _array(self, key: str, maximum: int) -> GgufArray:
        own = self._metadata.get(key)
        if not isinstance(own, GgufArray):
            raise self.bad(key, f"must be an array, got {_seen(own)}")
        if own.length > maximum:
            raise self.bad(key, f"has {own.length} entries, more than {maximum}")
        return own


class GgufArray(NamedTuple):
    """Where an array lies in a header."""

    kind: int
    """Of its entries: STRING or one of SCALARS."""
    length: int
    start: int


def read_gguf(path: Path) -> GgufFile:
    """The header of the file; of a model in several files (name-00001-of-00003.gguf, whichever is
    named) that of the first, with the tensors of all. Raises `BadModel`."""
    first, *others = gguf_files(path)
    whole = _read(first)
    count = whole.number("split.count", 1)
    if count > 1 and count != 1 + len(others):
        raise whole.bad("split.count", f"{count} files, and this one's name is not that of the "
                        f"first of them: NAME-00001-of-{count:05}.gguf")
    for file in others:
        for name, tensor in _read(file).tensors.items():
            if name in whole.tensors:
                raise _bad(file, f"tensor {shown(name)} lies in an earlier file, too")
            whole.tensors[name] = tensor
    return whole


def read_tensor(tensor: GgufTensor) -> bytes:
    """The bytes of a small tensor. Raises `BadModel`."""
    fd = open_file(tensor.file)
    try:
        found = os.pread(fd, tensor.bytes, tensor.start)
    except OSError as error:
        raise _bad(tensor.file, error.strerror or str(error)) from None
    finally:
        os.close(fd)
    if len(found) < tensor.bytes:
        raise _bad(tensor.file, f"ends within tensor {shown(tensor.name)}")
    return found


def gguf_files(path: Path) -> list[Path]:
    """All files of the model, the first of them first."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    stem, _, count = found.groups()
    if not 1 <= int(count) <= MAX_SPLITS:
        raise _bad(path, f"{int(count)} files are no model's")
    return [path.with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]


def _read(path: Path) -> GgufFile:
    try:
        fd = open_file(path)
    except FileNotFoundError:
        raise BadModel(f"model: no such file: {path}", "model") from None
    try:
        return _Header(path, fd).read()
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from None
    finally:
        os.close(fd)


def _bad(path: Path, why: str) -> BadModel:
    text = "".join(c if c.isprintable() else "?" for c in why)
    return BadModel(f"model: {path}: {text}", "model")


def _seen(value: Any) -> str:
    if value is None:
        return "nothing"
    return "an array" if isinstance(value, GgufArray) else str(shown(value))


class _Header:
    """A place in a header that is read from its beginning on."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd, self.size = path, fd, os.fstat(fd).st_size
        self.buffer, self.at = bytearray(), 0

    def read(self) -> GgufFile:
        """All of it."""
        if self.size < 4 or bytes(self._next(4)) != MAGIC:
            raise _bad(self.path, "is no GGUF file: its first bytes are not GGUF's; fetch it again")
        version = self._number("I")
        if version and not version & 0xFFFF:
            raise _bad(self.path, "is big-endian: little-endian GGUF files are served")
        if version not in VERSIONS:
            raise _bad(self.path, f"has GGUF version {version}: versions 2 and 3 are served")
        tensors, entries = self._number("Q"), self._number("Q")
        for what, count, most in (("tensors", tensors, MAX_TENSORS),
                                  ("metadata entries", entries, MAX_ENTRIES)):
            if count > most:
                raise _bad(self.path, f"tells of {count} {what}, at most {most} are served")
        metadata = dict(self._unique("key", entries, self._entry))
        found = GgufFile(self.path, metadata, {}, self.buffer)
        alignment = found.number("general.alignment", 32)
        if alignment & alignment - 1 or not 1 <= alignment <= MAX_ALIGNMENT:
            raise found.bad("general.alignment", f"must be a power of two, got {alignment}")
        placed = dict(self._unique("tensor", tensors, self._tensor))
        start = -(-self.at // alignment) * alignment
        found.tensors.update(_placed(self.path, placed, start, self.size, alignment))
        return found

    def _unique(self, what: str, count: int,
                read: Callable[[], tuple[str, T]]) -> Iterator[tuple[str, T]]:
        seen = set()
        for _ in range(count):
            name, value = read()
            if name in seen:
                raise _bad(self.path, f"{what} {shown(name)} is there twice")
            seen.add(name)
            yield name, value

    def _entry(self) -> tuple[str, Any]:
        key = self._text("key", MAX_KEY)
        kind = self._number("I")
        if kind == STRING:
            return key, self._text(key, MAX_TEXT)
        if kind != ARRAY:
            return key, self._number(self._scalar(key, kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == ARRAY:
            raise _bad(self.path, f"{key}: arrays of arrays are not served")
        each = 8 if kind == STRING else struct.calcsize("<" + self._scalar(key, kind))
        if count * each > self.size - self.at:
            raise _bad(self.path, f"{key}: an array of {count} entries is more than the file has")
        start = self.at
        if kind == STRING:
            self._skip_texts(key, count)
        else:
            self._next(count * each)
        return key, GgufArray(kind, count, start)

    def _tensor(self) -> tuple[str, tuple[BlockType, tuple[int, ...], int]]:
        """(name, (type, shape, offset))"""
        name = self._text("tensor", MAX_NAME)
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise _bad(self.path, f"tensor {shown(name)} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if not all(1 <= size <= MAX_SIZE for size in shape):
            raise _bad(self.path, f"tensor {shown(name)} has shape {shown(list(shape))}")
        if kind not in TYPES:
            raise _bad(self.path, f"tensor {shown(name)} is of type "
                       f"{OTHER_TYPES.get(kind, kind)}: served are "
                       f"{', '.join(own.name for own in TYPES.values())}")
        own = TYPES[kind]
        if shape[-1] % own.numbers:
            raise _bad(self.path, f"tensor {shown(name)} is {own.name} with rows of {shape[-1]}, "
                       f"which are not blocks of {own.numbers}")
        return name, (own, shape, offset)

    def _scalar(self, key: str, kind: int) -> str:
        if kind not in SCALARS:
            raise _bad(self.path, f"{key}: there is no type {kind}")
        return SCALARS[kind]

    def _skip_texts(self, key: str, count: int) -> None:
        for _ in range(count):
            size = int.from_bytes(self._next(8), "little")
            if size > MAX_TEXT:
                raise _bad(self.path, f"{key}: a text of {size} bytes")
            self._next(size)

    def _number(self, kind: str) -> Any:
        if kind == "?":
            value = self._next(1)[0]
            if value > 1:
                raise _bad(self.path, f"{value} is neither true nor false")
            return bool(value)
        return struct.unpack("<" + kind, self._next(struct.calcsize("<" + kind)))[0]

    def _text(self, what: str, most: int) -> str:
        size = self._number("Q")
        if size > most:
            raise _bad(self.path, f"{shown(what)}: a text of {size} bytes")
        return self._next(size).decode("utf-8", "replace")

    def _next(self, count: int) -> bytearray:
        """So many bytes, and past them."""
        end = self.at + count
        if end > len(self.buffer):
            self._fill(end)
        found = self.buffer[self.at:end]
        self.at = end
        return found

    def _fill(self, end: int) -> None:
        if end > MAX_HEADER and end <= self.size:
            raise _bad(self.path, f"has a header of more than {MAX_HEADER:,} bytes")
        wanted = min(max(end, len(self.buffer) + PIECE), self.size)
        while end <= self.size and len(self.buffer) < wanted:
            piece = os.pread(self.fd, wanted - len(self.buffer), len(self.buffer))
            if not piece:
                break
            self.buffer += piece
        if end > len(self.buffer):
            raise _bad(self.path, "ends within its header: it is cut short or damaged")


def _placed(path: Path, found: dict[str, tuple[BlockType, tuple[int, ...], int]], start: int,
            size: int, alignment: int) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors in the order of their bytes, which lie in the file and apart."""
    end = 0
    for name, (own, shape, offset) in sorted(found.items(), key=lambda item: item[1][2]):
        if offset % alignment:
            raise _bad(path, f"tensor {shown(name)} begins at {offset}, which is not aligned to "
                       f"{alignment}")
        if offset < end:
            raise _bad(path, f"tensor {shown(name)} overlaps another one")
        count = math.prod(shape) // own.numbers * own.bytes
        end = offset + count
        if start + end > size:
            raise _bad(path, f"ends within tensor {shown(name)}: it is cut short or damaged")
        yield name, GgufTensor(name, own, shape, path, start + offset, count)
