"""What comes behind a model's rows where prompts are pooled: dense layers, and the length that
vectors get, or the head that makes scores. In float32, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from actorium.actors.errors import BadModel
from actorium.actors.models.pooling_shape import DenseShape, NormShape, PoolingShape
from actorium.actors.params import ResolvedPooling
from actorium.gpu.weights.lazy_tensors import WeightTensors, materialised
from actorium.gpu.weights.safetensors_reader import checkpoint_files, unreadable

_ACTIVATIONS = {"none": lambda x: x, "tanh": torch.tanh, "relu": torch.relu,
                "gelu": functional.gelu, "sigmoid": torch.sigmoid,
                "softmax": lambda x: x.softmax(-1)}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A dense layer with its weights."""

    activation: str
    weight: Tensor
    """f32[rows, columns]"""
    bias: Tensor | None = None
    norm: Callable[[Tensor], Tensor] = field(default=_ACTIVATIONS["none"], kw_only=True)
    """Of what the activation gives."""

    def forward(self, x: Tensor) -> Tensor:
        """f32[n, columns] -> f32[n, rows]"""
        return self.norm(_ACTIVATIONS[self.activation](
            functional.linear(x, self.weight, self.bias)))


class Pooler:
    """Makes vectors and scores of rows behind the final norm."""

    def __init__(self, shape: PoolingShape, dense: list[DenseLayer],
                 head: list[DenseLayer]) -> None:
        self.shape, self._dense, self._head = shape, dense, head

    def finish(self, rows: Tensor, pooling: ResolvedPooling) -> Tensor:
        """[n, hidden] of pooled rows -> f32[n, width], vectors or scores."""
        x, vectors = rows.float(), pooling.task in ("embed", "token_embed")
        for layer in self._dense if vectors else self._head:
            x = layer.forward(x)
        if not vectors:
            return _ACTIVATIONS[self.shape.activation](x) if pooling.activation else x
        if pooling.dimensions:
            x = x[:, :pooling.dimensions]
        return functional.normalize(x, dim=-1) if pooling.activation else x


def load_pooler(shape: PoolingShape, path: Path, device: torch.device,
                tensors: WeightTensors) -> Pooler:
    """path: of the checkpoint; tensors: those of its own folder, of which the head's are taken out.
    Raises `BadModel`."""
    def taken(shape: DenseShape | NormShape) -> list[Tensor]:
        return [materialised(tensors.pop(f"{shape.name}.{part}")) for part, _ in shape.tensors]

    def normed(norm: NormShape | None) -> Callable[[Tensor], Tensor]:
        if norm is None:
            return _ACTIVATIONS["none"]
        weight, *bias = taken(norm)
        return partial(functional.layer_norm, normalized_shape=(norm.width,), weight=weight,
                       bias=bias[0] if bias else None, eps=norm.eps)

    head = [DenseLayer(layer.activation, *taken(layer), norm=normed(layer.norm))
            for layer in shape.head]
    return Pooler(shape, [_dense(layer, path / layer.folder, device) for layer in shape.dense],
                  head)


def _dense(layer: DenseShape, folder: Path, device: torch.device) -> DenseLayer:
    """A dense layer that lies in a folder of its own."""
    tensors: dict[str, Tensor] = {}
    for file in checkpoint_files(folder):
        try:
            tensors |= load_file(folder / file)
        except SafetensorError as error:
            raise unreadable(folder / file, error) from None
    parts: list[Tensor] = []
    for part, size in layer.tensors:
        name = f"{layer.name}.{part}"
        if name not in tensors or tensors[name].shape != size:
            raise BadModel(f"{folder}: {name}: must be there, of shape {list(size)}")
        parts.append(tensors[name].to(device, torch.float32))
    return DenseLayer(layer.activation, *parts)
