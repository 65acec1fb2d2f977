"""Tensors of a model, written for an engine on this machine that is to take them over."""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from actorium.actors.errors import ActoriumError, InvalidRequest
from actorium.actors.runtime.rundir import TENSORS

DTYPES = {"float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2),
          "bfloat16": ("BF16", 2)}
"""By torch's and numpy's names: safetensors' name, and bytes of a number."""
ALIGNED = 8
"""Bytes that the header of a safetensors file is a multiple of."""


def write_tensors(directory: Path, tensors: Mapping[str, Any] | bytes) -> Path:
    """Writes tensors by name, of torch or numpy, or the bytes of a safetensors file, to a new file
    in an engine's run directory, which nobody else may read, and returns where it is. Raises
    `InvalidRequest` on what is no tensor of floats, and `ActoriumError` where there is no room."""
    if not tensors:
        raise InvalidRequest("weights: no tensors", "weights")
    pieces = iter((tensors,)) if isinstance(tensors, bytes) else _pieces(tensors)
    path = directory / f"tensors-{secrets.token_hex(8)}{TENSORS}"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for piece in pieces:
                file.write(piece)
    except InvalidRequest:
        path.unlink()
        raise
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ActoriumError(f"weights: {path}: {error.strerror}") from None
    return path


def _pieces(tensors: Mapping[str, Any]) -> Iterator[Any]:
    """Yields what a safetensors file of them consists of."""
    header, at = dict[str, Any](), 0
    for name, tensor in tensors.items():
        kind, size = _kind(name, tensor)
        size *= math.prod(tensor.shape)
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % ALIGNED)
    yield len(head).to_bytes(8, "little") + head
    yield from map(data_of, tensors.values())


def _kind(name: Any, tensor: Any) -> tuple[str, int]:
    """Safetensors' name of a tensor's dtype, and its bytes."""
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__))
    found = DTYPES.get(dtype.removeprefix("torch."))
    if not isinstance(name, str) or found is None:
        raise InvalidRequest(f"weights: {str(name)[:200]!r} must be a tensor of floats, is {dtype}",
                             "weights")
    return found


def data_of(tensor: Any) -> Any:
    """A tensor's numbers as bytes, in order; of torch or numpy."""
    if not str(tensor.dtype).startswith("torch."):
        return tensor.tobytes()
    # Numpy has no bfloat16. Whoever has such a tensor has imported torch.
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return whole.view(sys.modules["torch"].uint8).numpy().data
