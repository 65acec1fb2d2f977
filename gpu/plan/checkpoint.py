"""What the files of a checkpoint say of its size; no tensor is read."""

from __future__ import annotations

from pathlib import Path

from actorium.actors.models.model_dir import read_json
from actorium.actors.models.model_files import MAX_INDEX

INDEX = "model.safetensors.index.json"


def total_bytes(folder: Path) -> int | None:
    """Bytes of all tensors, by the safetensors index, else by the size of the one file; None where
    neither is there. Counts what is not loaded as well (vision, MTP layers).

    Raises `BadModel` on an index that is not JSON.
    """
    index = folder / INDEX
    if index.is_file():
        meta = read_json(index, most=MAX_INDEX).get("metadata")
        total = meta.get("total_size") if isinstance(meta, dict) else None
        return total if isinstance(total, int) and 0 <= total < 2**63 else None
    file = folder / "model.safetensors"
    return file.stat().st_size if file.is_file() else None
