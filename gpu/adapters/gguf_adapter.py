"""What the modules of an adapter in a GGUF file are called in a checkpoint, and how rows of B lie
there."""

from __future__ import annotations

import re

from torch import Tensor

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.gguf_families import family
from actorium.actors.models.gguf_file import GgufFile
from actorium.actors.models.gguf_names import QKV

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def module_names(file: GgufFile, module: str) -> tuple[str, ...]:
    """Names of the checkpoint's modules whose rows this one has, one behind the other. Raises
    `BadModel`."""
    own, layer = family(file), _LAYER.fullmatch(module)
    name = None if layer is None else own.layer.get(layer[2])
    if layer is None or name is None:
        raise BadModel(f"{shown(module)} cannot have an adapter: served are linear modules of "
                       "layers, not experts, embeddings or heads")
    weight = f"{layer[2]}.weight"
    if weight in own.changes or weight in own.tiled:
        raise BadModel(f"{shown(module)} is not served from a GGUF file, where its rows lie in "
                       "another order: take PEFT's folder")
    names = (name,) if isinstance(name, str) else name
    return tuple(f"model.layers.{layer[1]}.{each}" for each in names)


def as_in_checkpoint(file: GgufFile, module: str, b: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Rows of B, [N, rank], of one of the checkpoint's modules; queries and keys of some families
    lie in pairs of rows in the file."""
    each = heads if module.endswith(QKV[0]) else kv_heads if module.endswith(QKV[1]) else 0
    if not family(file).permuted or not each:
        return b
    return b.unflatten(0, (each, -1, 2)).transpose(1, 2).flatten(0, 2)
