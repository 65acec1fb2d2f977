"""GGUF files that are damaged, or made to harm: one line, and no more memory than the file has."""

from __future__ import annotations

import gc
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers_examples import examples
from helpers_gguf import own_cache

from actorium.actors.errors import BadModel
from actorium.actors.models.gguf_file import read_gguf
from actorium.actors.models.model_dir import resolve

__all__ = ["own_cache"]


def small(path: Path, more: Callable[[gguf.GGUFWriter], None] = lambda _: None) -> bytes:
    """A model of one layer without a tokenizer."""
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("general.tags", ["a", "bc", ""])
    writer.add_array("some.numbers", [1, 2, 3])
    more(writer)
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def refused(path: Path, data: bytes) -> str:
    """The line about a file of these bytes."""
    path.write_bytes(data)
    with pytest.raises(BadModel) as caught:
        resolve(str(path))
    assert "\n" not in str(caught.value) and str(path.parent) in str(caught.value)
    return str(caught.value)


def header(version: int = 3, tensors: int = 0, entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, shape: list[int], kind: int, offset: int) -> bytes:
    return (text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            + struct.pack("<IQ", kind, offset))


def needs_at_most(most: int, run: Callable[[], object]) -> None:
    """Fails if Python holds more bytes at any time while it runs, three times in a row: what is
    imported once, and other threads of this process, count as well, but not each time."""
    peaks: list[int] = []
    while len(peaks) < 3 and (not peaks or peaks[-1] >= most):
        gc.disable()  # the finalizers of others' garbage would count
        tracemalloc.start()
        try:
            run()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
            gc.enable()
    assert peaks[-1] < most, peaks


def read_or_refused(path: Path) -> None:
    """Reads a file, or fails if it is refused with more than a line."""
    try:
        resolve(str(path))
    except BadModel as error:
        assert "\n" not in str(error) and len(str(error)) < 1000


HUGE = 2**63
HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no GGUF file"),
    "another magic": (b"GGML" + bytes(64), "no GGUF file"),
    "version 1": (header(1), "version 1"),
    "version 4": (header(4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensors without number": (header(tensors=HUGE), "tells of"),
    "entries without number": (header(entries=HUGE), "tells of"),
    "a key beyond the end": (header(entries=1) + struct.pack("<Q", 1000), "cut short"),
    "a key without end": (header(entries=1) + struct.pack("<Q", HUGE), "a text of"),
    "a text without end": (header(entries=1) + text(b"k") + struct.pack("<IQ", 8, HUGE),
                           "a text of"),
    "an array without end": (header(entries=1) + text(b"k") + struct.pack("<IIQ", 9, 5, HUGE),
                             "more than the file has"),
    "texts without end": (header(entries=1) + text(b"k") + struct.pack("<IIQ", 9, 8, HUGE),
                          "more than the file has"),
    "an array of arrays": (header(entries=1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1),
                           "arrays of arrays"),
    "a type that is none": (header(entries=1) + text(b"k") + struct.pack("<I", 77), "no type 77"),
    "neither true nor false": (header(entries=1) + text(b"k") + struct.pack("<IB", 7, 2),
                               "neither true nor false"),
    "a key twice": (header(entries=2) + 2 * (text(b"k") + struct.pack("<IB", 7, 1)), "twice"),
    "no alignment": (header(entries=1) + text(b"general.alignment") + struct.pack("<II", 4, 0),
                     "power of two"),
    "an odd alignment": (header(entries=1) + text(b"general.alignment")
                         + struct.pack("<II", 4, 48), "power of two"),
    "no dimensions": (header(1 + 2, 1) + text(b"t") + struct.pack("<I", 0) + bytes(64),
                      "0 dimensions"),
    "many dimensions": (header(3, 1) + text(b"t") + struct.pack("<I", 2**31), "dimensions"),
    "a tensor of nothing": (header(3, 1) + tensor(b"t", [0], 0, 0) + bytes(64), "has shape"),
    "a tensor of everything": (header(3, 1) + tensor(b"t", [2**62, 2**62], 0, 0) + bytes(64),
                               "has shape"),
    "a tensor beyond the end": (header(3, 1) + tensor(b"t", [1024], 0, 0) + bytes(64),
                                "ends within tensor 't'"),
    "an offset beyond the end": (header(3, 1) + tensor(b"t", [8], 0, 2**62) + bytes(64),
                                 "ends within tensor 't'"),
    "an offset that wraps": (header(3, 1) + tensor(b"t", [8], 0, 2**64 - 32) + bytes(64),
                             "ends within tensor 't'"),
    "an offset that is not aligned": (header(3, 1) + tensor(b"t", [8], 0, 4) + bytes(99),
                                      "not aligned"),
    "half a block": (header(3, 1) + tensor(b"t", [48], 2, 0) + bytes(99), "blocks of 32"),
    "a type that is not served": (header(3, 1) + tensor(b"t", [256], 41, 0) + bytes(999),
                                  "Q1_0"),
    "a type that is unknown": (header(3, 1) + tensor(b"t", [256], 999, 0) + bytes(999),
                               "type 999"),
    "tensors that overlap": (header(3, 2) + tensor(b"t", [64], 0, 0) + tensor(b"u", [8], 0, 32)
                             + bytes(999), "overlaps"),
    "a tensor twice": (header(3, 2) + 2 * tensor(b"t", [8], 0, 0) + bytes(999), "twice"),
    "no architecture": (header(), "general.architecture"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_each_damage_is_named_in_one_line(what: str, tmp_path: Path) -> None:
    data, why = HEADERS[what]
    assert why in refused(tmp_path / "m.gguf", data)


@pytest.mark.parametrize("key", ["qwen2.block_count", "qwen2.attention.head_count",
                                 "qwen2.embedding_length", "qwen2.context_length",
                                 "general.architecture"])
def test_fields_of_another_kind(key: str, tmp_path: Path) -> None:
    """A number that is a text, an array, or not there."""
    path = tmp_path / "m.gguf"
    data = small(path)
    at = data.index(text(key.encode()))
    refused(path, data.replace(text(key.encode()), text(key[:-1].encode() + b"_")))
    kind = at + 8 + len(key)
    refused(path, data[:kind] + struct.pack("<I", 6) + data[kind + 4:])


def test_names_of_many_files_and_of_none(tmp_path: Path) -> None:
    data = small(tmp_path / "one.gguf")
    assert "m-00002-of-00002.gguf: No such" in refused(tmp_path / "m-00001-of-00002.gguf",
                                                       data)
    assert "no model's" in refused(tmp_path / "m-00001-of-99999.gguf", data)
    split = small(tmp_path / "two.gguf", lambda w: w.add_uint16("split.count", 2))
    assert "split.count" in refused(tmp_path / "m.gguf", split)


def test_any_cut_and_any_byte_ends_in_a_line_or_a_model(tmp_path: Path) -> None:
    """And takes no more than twice the file's bytes."""
    path, rng = tmp_path / "m.gguf", random.Random(5)
    data = small(path)
    resolve(str(path))  # what is imported on the way takes memory once
    body = data.index(b"token_embd.weight") + 200
    for turn in range(examples(400, 1500)):
        own = bytearray(data)
        if turn % 3 == 0:
            del own[rng.randrange(len(own)):]
        for _ in range(rng.randrange(4) if turn % 3 == 0 else 1 + rng.randrange(6)):
            if own:
                own[rng.randrange(min(body, len(own)))] = rng.choice((0, 1, 127, 128, 255,
                                                                      rng.randrange(256)))
        path.write_bytes(own)
        needs_at_most(2 * len(data) + (1 << 18), lambda: read_or_refused(path))


def test_a_header_takes_no_more_memory_than_its_bytes(tmp_path: Path) -> None:
    """A file of the shortest texts, of which each would be an object of its own."""
    path, count = tmp_path / "m.gguf", 1 << 17
    path.write_bytes(header(entries=1) + text(b"k") + struct.pack("<IIQ", 9, 8, count)
                     + count * text(b"ab"))
    needs_at_most(2 * path.stat().st_size, lambda: read_gguf(path))
