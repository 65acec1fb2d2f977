"""What a model's files say of it without being loaded: size, digest, family, parameters, kind of
numbers. Reads headers alone, which takes some milliseconds, and more for a large vocabulary."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actorium.actors.config.tree import ModelConfig
from actorium.actors.errors import BadModel
from actorium.actors.models import model_dir
from actorium.actors.models.gguf_config import gguf_config
from actorium.actors.models.gguf_file import GgufFile, gguf_files, read_gguf
from actorium.actors.models.gguf_folder import SUFFIX as GGUF_SUFFIX
from actorium.actors.models.model_classes import architecture
from actorium.actors.models.model_files import SUFFIX, open_file
from actorium.actors.models.model_names import gguf_kind
from actorium.actors.models.pooling_shape import read_pooling, served_tasks

GGUF, SAFETENSORS = "gguf", "safetensors"
MAX_HEADER = 100 << 20
"""Bytes of a safetensors header, as the format has it."""
_PLAIN = {"F64", "F32", "F16", "BF16"}
"""Types of tensors whose every element is a parameter."""


class CheckpointFacts(NamedTuple):
    """What the files of one model say. Empty or 0 where they do not."""

    size: int = 0
    """Bytes of all files."""
    modified: float = 0.0
    """Of the newest file, Unix seconds."""
    architecture: str = ""
    """Class in its config.json."""
    family: str = ""
    """`model_type` of its config.json, or GGUF's general.architecture."""
    format: str = ""
    """gguf | safetensors"""
    quantization: str = ""
    """Q4_K_M, AWQ, BF16."""
    parameters: int = 0
    context_length: int = 0
    tasks: tuple[str, ...] = ()
    """What it does: "generate", names of `params.PoolingTask`; () = not known."""


def files_digest(path: Path) -> str:
    """Returns a hexadecimal SHA-256 of the names, sizes and times of a model's files. path: its
    folder or GGUF file. Raises `BadModel`, `OSError`."""
    lines = [f"{file.name} {info.st_size} {info.st_mtime_ns}" for file, info in _stats(path)]
    return hashlib.sha256("\n".join([str(path), *lines]).encode()).hexdigest()


def model_facts(path: Path) -> CheckpointFacts:
    """Returns the facts of a model. path: its folder or GGUF file. Of files that cannot be read,
    sizes and times are known alone. Raises `BadModel`, `OSError`."""
    stats = _stats(path)
    facts = CheckpointFacts(sum(info.st_size for _, info in stats),
                            max((info.st_mtime for _, info in stats), default=0.0))
    try:
        return _gguf_facts(path, facts) if path.suffix == GGUF_SUFFIX \
            else _checkpoint_facts(path, facts)
    except BadModel:
        return facts


def _stats(path: Path) -> list[tuple[Path, os.stat_result]]:
    files = sorted(path.iterdir()) if path.is_dir() else gguf_files(path)
    return [(file, file.stat()) for file in files]


def _gguf_facts(path: Path, facts: CheckpointFacts) -> CheckpointFacts:
    header, kind = read_gguf(path), gguf_kind(path.name)
    elements = Counter[str]()
    for tensor in header.tensors.values():
        elements[tensor.type.name] += math.prod(tensor.shape)
    if kind == path.name and elements:  # the name does not say: what most weights are in
        kind = elements.most_common(1)[0][0]
    family = header.text("general.architecture", "")
    return facts._replace(family=family, format=GGUF, quantization=kind,
                          parameters=elements.total(), tasks=_tasks(path, header),
                          context_length=header.number(f"{family}.context_length", 0))


def _checkpoint_facts(folder: Path, facts: CheckpointFacts) -> CheckpointFacts:
    config = model_dir.read_config(folder)
    text, quantised = model_dir.text_config(config), config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    types = Counter[str]()
    with contextlib.suppress(BadModel):  # a start says what is wrong
        for file in sorted(folder.glob(f"*{SUFFIX}")):
            types += _elements(file)
    # Where numbers are packed, their count is not that of the elements.
    parameters = types.total() if set(types) <= _PLAIN else 0
    numbers = types.most_common(1)[0][0] if types else \
        str(text.get("torch_dtype") or text.get("dtype") or config.get("torch_dtype") or "")
    return facts._replace(
        architecture=architecture(config), format=SAFETENSORS, parameters=parameters,
        family=str(config.get("model_type") or text.get("model_type") or ""),
        quantization=str(method).upper() if method else numbers, tasks=_tasks(folder, config),
        context_length=model_dir.trained_length(config) or 0)


def _tasks(path: Path, source: dict[str, Any] | GgufFile) -> tuple[str, ...]:
    """Returns what an engine without further flags does with the model. source: its config.json, or
    the GGUF file itself."""
    try:
        config = gguf_config(source) if isinstance(source, GgufFile) else source
        pooling = read_pooling(path, config, ModelConfig())
    except BadModel:  # a start says what is wrong
        return ()
    return tuple(served_tasks(pooling))


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
