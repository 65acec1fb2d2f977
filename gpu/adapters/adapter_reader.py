"""Reads an adapter's matrices into the host's memory, in the form in which a model's products take
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.adapter_files import AdapterFiles, AdapterModule
from actorium.actors.models.gguf_file import GgufFile, read_gguf
from actorium.actors.models.gguf_tensors import GgufPart
from actorium.gpu.adapters.adapted_layers import ModulePlace
from actorium.gpu.adapters.gguf_adapter import as_in_checkpoint, module_names
from actorium.gpu.families.tensor_names import Renames, plain_name
from actorium.gpu.weights.gguf_reader import read_part
from actorium.gpu.weights.loader import Fused
from actorium.gpu.weights.safetensors_reader import unreadable
from actorium.gpu.weights.sliced_tensors import RankSlices

ReadTensor = Callable[[str], Tensor]


class AdapterPart(NamedTuple):
    """An adapter's matrices of one module of a product, in the model's dtype."""

    product: int
    """As `module`, see `ModulePlace`."""
    module: int
    a: Tensor
    """[rank, K]"""
    b: Tensor
    """[rank, columns of the module]"""
    scale: float


class HostAdapter(NamedTuple):
    """An adapter in the host's memory."""

    digest: bytes
    parts: list[AdapterPart]


class AdapterReader:
    """Reads adapters for one rank of a model."""

    def __init__(self, places: Mapping[str, Sequence[ModulePlace]],
                 shapes: Mapping[str, tuple[int, ...]], fused: Sequence[Fused],
                 slices: RankSlices, names: Renames, dtype: torch.dtype,
                 heads: tuple[int, int]) -> None:
        """places: of the modules that can have adapters; shapes: of all tensors of the whole model;
        fused, names: how checkpoints may have and call them; heads: of queries, and of keys."""
        self.places, self.shapes, self.slices, self.names = places, shapes, slices, names
        self.fused, self.dtype, self.heads = {own.name: own for own in fused}, dtype, heads

    def read(self, files: AdapterFiles) -> HostAdapter:
        """Raises `BadModel` that names a module which the model has not, or which cannot have an
        adapter, or whose shape is another one."""
        parts: list[AdapterPart] = []
        gguf = read_gguf(files.path) if files.gguf else None
        with opened(files, gguf) as tensor:
            for name, own in files.modules.items():
                try:
                    parts += (self._module(name, own, tensor) if gguf is None else
                              self._gguf_module(gguf, name, own, tensor))
                except BadModel as error:
                    raise BadModel(f"adapter: {files.path}: {error}", "lora_path") from None
        return HostAdapter(files.digest, parts)

    def _module(self, name: str, own: AdapterModule, tensor: ReadTensor) -> Iterator[AdapterPart]:
        weight = plain_name(f"{name}.weight", self.names)
        fused = self.fused.get(weight)
        known = self.shapes.get(weight) if fused is None else fused.shape
        if known is None or len(known) != 2:
            raise BadModel(f"{shown(name)} is no linear module of the model")
        if fused is None:
            self._places(name, weight)
        turned = weight.endswith(".weight_t")
        outs, ins = reversed(known) if turned else known
        _check(name, own, outs, ins)
        a, b = tensor(own.a.name).float(), tensor(own.b.name).float()
        cut = [(weight, b)] if fused is None else fused.cut(b.t() if turned else b)
        for part, rows in cut:
            yield from self._part(name, part, a, rows, own.scale)

    def _gguf_module(self, file: GgufFile, name: str, own: AdapterModule, tensor: ReadTensor
                     ) -> Iterator[AdapterPart]:
        modules = module_names(file, name)
        for module in modules:
            self._places(name, f"{module}.weight")
        known = [self.shapes[f"{module}.weight"] for module in modules]
        _check(name, own, sum(rows for rows, _ in known), known[0][1])
        a, b = tensor(own.a.name), tensor(own.b.name)
        for module, rows in zip(modules, b.split([rows for rows, _ in known]), strict=True):
            yield from self._part(name, f"{module}.weight", a, as_in_checkpoint(
                file, module, rows, *self.heads), own.scale)

    def _part(self, name: str, weight: str, a: Tensor, b: Tensor, scale: float
              ) -> Iterator[AdapterPart]:
        own = self.slices.slices.get(weight)
        if own is not None and own.dim == 0:
            b = self.slices.taken(weight, b)
        elif own is not None:
            a = self.slices.taken(weight, a)
        for place in self._places(name, weight):
            rows = b if place.rows is None else b.index_select(0, place.rows.cpu())
            yield AdapterPart(place.product, place.module, self._held(a), self._held(rows.t()),
                              scale)

    def _places(self, name: str, weight: str) -> Sequence[ModulePlace]:
        places = self.places.get(weight.removesuffix(".weight"))
        if places is None:
            raise BadModel(f"{shown(name)} cannot have an adapter: served are those of attention, "
                           "recurrent layers and dense MLPs, not of experts, routers, embeddings "
                           "or heads")
        return places

    def _held(self, matrix: Tensor) -> Tensor:
        """In memory of its own."""
        return matrix.to(self.dtype, copy=True).contiguous()


def _check(name: str, own: AdapterModule, outs: int, ins: int) -> None:
    if own.a.shape[1] != ins or own.b.shape[0] != outs:
        raise BadModel(f"{shown(name)} takes {own.a.shape[1]} numbers and gives "
                       f"{own.b.shape[0]}, in the model it takes {ins} and gives {outs}")


@contextmanager
def opened(files: AdapterFiles, gguf: GgufFile | None) -> Iterator[ReadTensor]:
    """What reads a tensor of these files. gguf: of a GGUF file. Raises `BadModel`."""
    if gguf is not None:
        yield lambda name: read_part(GgufPart(name, gguf.tensors[name]), torch.float32, False,
                                     torch.device("cpu"))
        return
    try:
        with safe_open(str(files.weights), framework="pt") as file:
            yield file.get_tensor
    except (SafetensorError, OSError) as error:
        raise unreadable(files.weights, error) from None
