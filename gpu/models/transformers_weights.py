"""The weights of a class of transformers: from plain checkpoints by transformers' own loader; from
those that are stored in FP8 or in codes by ours, which reads linear layers as it does those of our
own classes, and gives transformers the rest.

In the place of a linear layer's stored weight transformers gets one number in its shape, and the
layer what was read (`stored`). What lies in another kind of layer, experts in one
tensor above all, is dequantised when it is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadModel
from actorium.actors.models.model_dir import read_config
from actorium.gpu.families.fp8_config import MXFP4, NAME, Fp8Shape, fp8_shape
from actorium.gpu.families.ignored_tensors import unread_warning
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.quant_config import stored_weights
from actorium.gpu.families.stored_weights import (
    AWQ,
    BNB_INT8,
    GPTQ,
    GPTQ_V2,
    INTEGERS,
    MXFP4_PACKED,
    NVFP4,
    NVFP4_MODELOPT,
    PACKED,
    StoredWeights,
)
from actorium.gpu.families.tensor_names import plain_name
from actorium.gpu.families.tensor_specs import Projection, TensorSpec
from actorium.gpu.families.weight_formats import ONLINE
from actorium.gpu.models.transformers_trace import PAGED, Trace, error_line, register
from actorium.gpu.parallel.rank_group import RankPlace
from actorium.gpu.parallel.rank_slices import Span, TensorSlice
from actorium.gpu.weights.fp8_weights import INPUT_SCALES, SUFFIXES, keeps
from actorium.gpu.weights.lazy_tensors import INPUT_ORDER, LazyTensor, WeightTensors, materialised
from actorium.gpu.weights.loader import Fp8, Progress, read_tensors
from actorium.gpu.weights.safetensors_reader import StoredTensor, checkpoint_files, mapped
from actorium.gpu.weights.safetensors_reader import stored as stored_tensors
from actorium.gpu.weights.sliced_tensors import RankSlices
from actorium.gpu.weights.stored_codes import PARTS
from actorium.kernels.scaled_linear import FP8

LOG = logging.getLogger("actorium.model")
STRIPPED = ("auto_map", "attn_implementation", "experts_implementation", "transformers_weights",
            NAME)
"""Fields of a config that transformers is not given."""
WEIGHT = ".weight"
SHAPES: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    AWQ: lambda rows, columns, bits: (columns * 8, rows),
    **dict.fromkeys((GPTQ, GPTQ_V2), lambda rows, columns, bits: (columns, rows * 32 // bits)),
    PACKED: lambda rows, columns, bits: (rows, columns * 32 // bits),
    **dict.fromkeys((INTEGERS, BNB_INT8), lambda rows, columns, bits: (rows, columns)),
    **dict.fromkeys((NVFP4, NVFP4_MODELOPT, MXFP4_PACKED),
                    lambda rows, columns, bits: (rows, columns * 2)),
}
"""By layout: the shape of a weight whose codes lie in a tensor of (rows, columns)."""


class StoredRows(NamedTuple):
    """A linear layer's weight that files have in FP8 or in codes."""

    weight: Tensor | LazyTensor
    """As `TorchOps.linear` takes it: rows of codes, or of FP8; or dequantised."""
    order: Tensor | None
    """See `lazy_tensors`."""


class _Deferred:
    """Stands for a tensor until transformers' loader asks for it."""

    def __init__(self, tensor: Tensor | LazyTensor) -> None:
        self.tensor = tensor

    def __getitem__(self, _: Any) -> Tensor:
        return materialised(self.tensor)


class StoredCheckpoint(NamedTuple):
    """How a checkpoint has the weights that it has in FP8 or in codes."""

    codes: StoredWeights | None
    fp8: Fp8 | None
    opened: bool
    """All are dequantised when they are read."""
    device: torch.device
    """Where weights are to lie."""

    @property
    def fp8_shape(self) -> Fp8Shape | None:
        """Which weights stay in FP8, if any do."""
        return self.fp8.shape if self.fp8 is not None and self.fp8.keep else None

    def read(self, path: Path, files: Mapping[str, StoredTensor], trace: Trace, place: RankPlace,
             dtype: torch.dtype, progress: Progress) -> WeightTensors:
        """The weights that are stored so, by `plain_name`: of linear layers as our products take
        them, a rank's part; of others dequantised. files: the tensors, by the same. Raises
        `BadModel` and `BadConfig`."""
        linears = {plain_name(f"{name}{WEIGHT}", ()): own for name, own in trace.linears.items()}
        specs, wholes, slices = [], {}, {}
        for name, shape in self._weights(files):
            own = linears.get(name)
            whole = own.shape if own is not None else shape
            if whole is None:
                continue  # transformers finds it missing
            spec = TensorSpec(name, whole)
            if own is not None and trace.products:
                spec = TensorSpec(name, whole, projection=Projection(name))
                if (across := own.across) is not None:
                    each = whole[across] // place.size
                    span = Span(place.rank * each, (place.rank + 1) * each, each)
                    wholes[name], slices[name] = whole, TensorSlice(across, (span,))
                    spec = spec._replace(shape=tuple(
                        each if i == across else count for i, count in enumerate(whole)))
            specs.append(spec)
        grouped = None if self.codes is None or self.opened else self.codes.held(specs)
        return read_tensors(path, specs, dtype, self.device, progress, (), self.fp8, None, grouped,
                            self.codes, RankSlices(wholes, slices))

    def _weights(self, files: Mapping[str, StoredTensor]
                 ) -> Iterator[tuple[str, tuple[int, ...] | None]]:
        """(name, shape, None where files do not say it) of each weight that is stored so."""
        for name, own in files.items():
            if own.dtype is FP8 and any(name + end in files for end in SUFFIXES):
                yield name, tuple(own.shape)
            module, _, end = name.rpartition(".")
            how = self.codes.of(module) if self.codes else None
            if how is not None and end == PARTS[how.layout][0] and not (
                    f".{end}" == WEIGHT and own.dtype.is_floating_point):
                of_codes, size = SHAPES.get(how.layout), own.shape
                yield f"{module}{WEIGHT}", of_codes(size[0], size[1], how.bits) if (
                    of_codes and len(size) == 2) else None


def stored_checkpoint(path: Path, config: Config, device: torch.device, shape: ModelShape
                      ) -> StoredCheckpoint | None:
    """How the checkpoint has its weights; None where all are in a float type. shape: as
    `read_shape` has it. Raises `BadModel`."""
    raw, where, grouped = read_config(path), path / "config.json", shape.grouped
    codes, scaled = stored_weights(raw, where), fp8_shape(raw, where)
    if codes is None and scaled is None:
        return None
    if codes is not None and codes.source == MXFP4:
        raise BadModel(f"{where}: {NAME}.quant_method: {MXFP4} is not served by transformers' "
                       "class (--model-impl)")
    kept = keeps(device, config.device.kernels, config.model.quantization)
    return StoredCheckpoint(codes, Fp8(scaled, kept) if scaled else None,
                            grouped is None or grouped.source == ONLINE, device)


def read_stored(kind: Any, full: Any, dtype: torch.dtype, path: Path, own: StoredCheckpoint,
                trace: Trace, place: RankPlace, progress: Progress) -> Any:
    """The model of transformers with the checkpoint's weights; linear layers whose weights are
    stored in FP8 or in codes have them as `stored`. Raises `BadModel` and `BadConfig`."""
    files: dict[str, StoredTensor] = {}
    state: dict[str, Any] = {}
    for file in checkpoint_files(path):
        files |= {plain_name(each.name, ()): each for each in stored_tensors(path / file)}
        state |= mapped(path / file, lambda _, name, dtype, shape: (
            dtype.is_floating_point and dtype.itemsize > 1))
    tensors = own.read(path, files, trace, place, dtype, progress)
    held = {}
    for name, linear in trace.linears.items() if trace.products else ():
        module = plain_name(f"{name}{WEIGHT}", ()).removesuffix(WEIGHT)
        weight = tensors.pop(f"{module}{WEIGHT}", None)
        order = tensors.pop(f"{module}{INPUT_ORDER}", None)
        if weight is not None:
            held[name] = StoredRows(weight, None if order is None else materialised(order))
            state[f"{name}{WEIGHT}"] = torch.zeros((), dtype=dtype).expand(linear.shape)
    state |= {name: _Deferred(tensor) for name, tensor in tensors.items()
              if name.endswith(WEIGHT)}
    model = read_model(kind, full, dtype, path, state)
    for name, rows in held.items():
        model.get_submodule(name).stored = rows
    return model


def read_model(kind: Any, full: Any, dtype: torch.dtype, path: Path,
               state: dict[str, Any] | None = None) -> Any:
    """The model of transformers with the checkpoint's weights, or with those of `state`. Raises
    `BadModel`."""
    try:
        model, info = kind.from_pretrained(
            None if state else str(path), config=full, dtype=dtype, attn_implementation=PAGED,
            local_files_only=True, use_safetensors=True, output_loading_info=True,
            state_dict=state)
    except Exception as error:
        raise BadModel(f"{path}: transformers cannot load it: {error_line(error)}") from error
    parts = tuple(end for ends in PARTS.values() for end in ends)
    unread = [name for name in info["unexpected_keys"] if not state or not (
        name.endswith((*SUFFIXES, *INPUT_SCALES)) or name.rpartition(".")[2] in parts)]
    if unread:
        LOG.warning("%s: %s", path, unread_warning(unread))
    if missing := sorted(info["missing_keys"]):
        raise BadModel(f"{path}: no tensor {missing[0]}"
                       + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
                       + ("; of weights that are quantised, those of linear layers are read, and "
                          "others where files say the shape of each" if state else ""))
    return model


def completed(kind: Any, path: Path) -> Any:
    """The config with all that the class adds to it. Raises `BadModel`."""
    register()
    known, raw = kind.config_class, _stripped(read_config(path))
    if raw.get("model_type") != known.model_type:  # that of a class with more than text
        raw = next((own for own in raw.values() if isinstance(own, dict)
                    and own.get("model_type") == known.model_type), raw)
    try:
        return known.from_dict(raw)
    except Exception as error:
        raise BadModel(f"{path / 'config.json'}: transformers: {error_line(error)}") from error


def _stripped(raw: dict[str, Any]) -> dict[str, Any]:
    """A config without what would say which code runs, which files are read, or in what weights
    are stored."""
    return {key: _stripped(own) if isinstance(own, dict) else own for key, own in raw.items()
            if not key.startswith("_") and key not in STRIPPED}
