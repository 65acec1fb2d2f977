"""What a model's files say of it without being loaded: size, digest, family, parameters, kind of
numbers. Reads headers alone, which takes some milliseconds, and more for a large vocabulary."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.errors import BadModel
from actorium.actors.models import model_dir
from actorium.actors.models.gguf_file import gguf_files, read_gguf
from actorium.actors.models.gguf_folder import gguf_source
from actorium.actors.models.model_files import SUFFIX, open_file
from actorium.actors.models.model_names import gguf_kind

GGUF, SAFETENSORS = "gguf", "safetensors"
MAX_HEADER = 100 << 20
"""Bytes of a safetensors header, as the format has it."""
_PLAIN = {"F64", "F32", "F16", "BF16"}
"""Types of tensors whose every element is a parameter."""


class CheckpointFacts(Struct, frozen=True, kw_only=True):
    """What the files of one model say. Empty or 0 where they do not."""

    format: str = ""
    """gguf | safetensors"""
    family: str = ""
    """`model_type` of its config.json, or GGUF's general.architecture."""
    quantization: str = ""
    """Q4_K_M, AWQ, BF16."""
    parameters: int = 0
    size: int = 0
    """Bytes of the files with its weights."""
    digest: str = ""
    """Hexadecimal SHA-256 of these files' names, sizes and times, and of its config.json."""
    modified: float = 0.0
    """Of the newest of these files, Unix seconds."""


def model_facts(folder: Path) -> CheckpointFacts:
    """Returns the facts of a model's directory, as `model_dir.resolve` returns it. Raises
    `BadModel`."""
    config = model_dir.read_config(folder)
    file = gguf_source(folder)
    weights = gguf_files(file) if file is not None else sorted(folder.glob(f"*{SUFFIX}"))
    infos = {}
    for path in weights:
        with contextlib.suppress(OSError):  # a part that is not there
            infos[path] = path.stat()
    named = [f"{path.name} {info.st_size} {info.st_mtime_ns}" for path, info in infos.items()]
    text = msgspec.json.encode(config, order="sorted").decode()
    facts = _gguf_facts(file) if file is not None else _checkpoint_facts(config, list(infos))
    return msgspec.structs.replace(
        facts, size=sum(info.st_size for info in infos.values()),
        digest=hashlib.sha256("\n".join([*named, text]).encode()).hexdigest(),
        modified=max((info.st_mtime for info in infos.values()), default=0.0))


def _gguf_facts(file: Path) -> CheckpointFacts:
    header, kind = read_gguf(file), gguf_kind(file.name)
    elements = Counter[str]()
    for tensor in header.tensors.values():
        elements[tensor.type.name] += math.prod(tensor.shape)
    if kind == file.name and elements:  # the name does not say: what most weights are in
        kind = elements.most_common(1)[0][0]
    return CheckpointFacts(format=GGUF, family=header.text("general.architecture"),
                           quantization=kind, parameters=elements.total())


def _checkpoint_facts(config: dict[str, Any], files: Sequence[Path]) -> CheckpointFacts:
    text, quantised = model_dir.text_config(config), config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    types = Counter[str]()
    for file in files:
        types += _elements(file)
    # Where numbers are packed, their count is not that of the elements.
    parameters = types.total() if set(types) <= _PLAIN else 0
    numbers = types.most_common(1)[0][0] if types else ""
    return CheckpointFacts(
        format=SAFETENSORS, family=str(config.get("model_type") or text.get("model_type") or ""),
        quantization=str(method).upper() if method else numbers, parameters=parameters)


def _elements(file: Path) -> Counter[str]:
    """Returns how many elements a safetensors file has of each type. Raises `BadModel`."""
    fd = open_file(file)
    try:
        size, = struct.unpack("<Q", os.pread(fd, 8, 0))
        if size > MAX_HEADER:
            raise ValueError("the header is too long")
        header = msgspec.json.decode(os.pread(fd, size, 8), type=dict[str, dict[str, Any]])
        found = Counter[str]()
        for name, tensor in header.items():
            if name != "__metadata__":
                found[str(tensor["dtype"])] += math.prod(map(int, tensor["shape"]))
        return found
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise BadModel(f"model: {file} is no safetensors file: {error}", "model") from None
    finally:
        os.close(fd)
