"""Weights by name: from safetensors files (one, or sharded with an index) or at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actorium.actors.errors import BadModel
from actorium.gpu.shape import read_json

Progress = Callable[[str, int, int], None]
"""(what, done, of): called once per shard, when it is read."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NESTED = (("language_model.model.", "model."), ("model.language_model.", "model."),
          ("language_model.lm_head.", "lm_head."))
"""Where checkpoints of text and images have their language model, and what it is called alone."""


@dataclass(frozen=True, slots=True)
class Want:
    """A tensor that the model needs: its name in the checkpoint and its shape."""

    name: str
    shape: tuple[int, ...]
    wide: bool = False
    """Kept in float32, whatever the model's dtype."""


class Fused(NamedTuple):
    """How a checkpoint may have several wanted tensors in one."""

    name: str
    shape: tuple[int, ...]
    cut: Callable[[Tensor], Iterable[tuple[str, Tensor]]]
    """The wanted tensors in it, by name."""


def checkpoint_files(path: Path) -> dict[str, list[str] | None]:
    """Shard file names, each with the tensors the index places in it (None: whatever it holds).

    Raises `BadModel` when there is no checkpoint or a shard is missing.
    """
    if (path / INDEX).is_file():
        placed = read_json(path / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise BadModel(f"{path / INDEX}: weight_map: must map tensor names to files")
        shards: dict[str, list[str] | None] = {}
        for name, file in placed.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise BadModel(f"{path / INDEX}: {name}: {file!r} is not a file beside it")
            names = shards.setdefault(file, [])
            assert names is not None
            names.append(name)
    elif (path / SINGLE).is_file():
        shards = {SINGLE: None}
    else:
        raise BadModel(f"{path}: no {SINGLE} and no {INDEX}")
    for file in shards:
        if not (path / file).is_file():
            raise BadModel(f"{path / file}: shard named in {INDEX} is missing")
    return dict(sorted(shards.items()))


def holds(path: Path, name: str) -> bool:
    """Whether the checkpoint at `path` has a tensor of this name. Raises `BadModel`."""
    for file, placed in checkpoint_files(path).items():
        names = placed
        if names is None:
            try:
                with safe_open(str(path / file), framework="pt") as shard:
                    names = list(shard.keys())
            except (SafetensorError, OSError) as e:
                raise BadModel(f"{path / file}: not a readable safetensors file: {e}") from None
        if any(_plain(stored) == name for stored in names):
            return True
    return False


def read_tensors(
    path: Path, wants: list[Want], dtype: torch.dtype, device: torch.device, progress: Progress,
    fused: Sequence[Fused] = (),
) -> dict[str, Tensor]:
    """Every wanted tensor, cast to dtype, on the device. Raises `BadModel` naming what is wrong."""
    shapes = {want.name: want.shape for want in wants}
    dtypes = {want.name: torch.float32 if want.wide else dtype for want in wants}
    cuts = {own.name: own for own in fused}
    known = {**{name: own.shape for name, own in cuts.items()}, **shapes}
    shards = checkpoint_files(path)
    found: dict[str, Tensor] = {}
    for done, file in enumerate(shards, 1):
        for stored, whole in _read_shard(path / file, known):
            parts = cuts[stored].cut(whole) if stored in cuts else [(stored, whole)]
            for name, tensor in parts:
                found[name] = tensor.to(device=device, dtype=dtypes[name])
        progress(file, done, len(shards))
    missing = [name for name in shapes if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise BadModel(f"{path}: tensor {missing[0]} is missing{more}")
    return found


def _read_shard(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(str(file), framework="pt") as shard:
            for stored in shard.keys():  # noqa: SIM118 (not a dict)
                name = _plain(stored)
                if name not in shapes:
                    continue
                tensor = shard.get_tensor(stored)
                if tuple(tensor.shape) != shapes[name]:
                    raise BadModel(
                        f"{file}: tensor {name} has shape {list(tensor.shape)}, "
                        f"the config asks for {list(shapes[name])}")
                if not tensor.is_floating_point():
                    raise BadModel(f"{file}: tensor {name} is {tensor.dtype}, not a float type")
                yield name, tensor
    except (SafetensorError, OSError) as e:
        raise BadModel(f"{file}: not a readable safetensors file: {e}") from None


def _plain(name: str) -> str:
    """The name that the tensor has in a checkpoint of the language model alone."""
    for nested, plain in NESTED:
        if name.startswith(nested):
            return plain + name[len(nested):]
    return name


def random_tensors(
    wants: list[Want], dtype: torch.dtype, device: torch.device, seed: int, progress: Progress
) -> dict[str, Tensor]:
    """Random weights (norms near 1, the rest normal with deviation 0.02), equal for equal seeds."""
    gen = torch.Generator().manual_seed(seed)
    found = {want.name: _random(want, dtype, gen).to(device) for want in wants}
    progress("dummy", 1, 1)
    return found


def _random(want: Want, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """Large matrices repeat a block of 2**22 values: drawing billions would take minutes."""
    size = 1
    for n in want.shape:
        size *= n
    block = torch.empty(min(size, 1 << 22)).normal_(0.0, 0.02, generator=gen)
    block = block.to(torch.float32 if want.wide else dtype)
    flat = block if size == block.numel() else block.repeat(-(-size // block.numel()))[:size]
    tensor = flat.view(want.shape)
    return tensor + 1 if want.name.endswith("norm.weight") else tensor
