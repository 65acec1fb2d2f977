"""Weights by name, from safetensors files (one, or sharded with an index) or from GGUF files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.gguf_config import GGUF
from actorium.actors.models.gguf_file import gguf_files, read_gguf
from actorium.actors.models.gguf_folder import gguf_source
from actorium.actors.models.gguf_tensors import checkpoint_tensors
from actorium.gpu.families.fp8_config import Fp8Shape
from actorium.gpu.families.ignored_tensors import unread_warning
from actorium.gpu.families.stored_weights import StoredWeights
from actorium.gpu.families.tensor_names import Renames, plain_name
from actorium.gpu.families.tensor_specs import EMBED_AND_HEAD, TensorSpec, held_format
from actorium.gpu.families.weight_formats import ONLINE, GroupedShape
from actorium.gpu.weights.dtypes import tensor_dtype
from actorium.gpu.weights.fp8_weights import (
    INPUT_SCALES,
    SUFFIXES,
    CacheScales,
    ScalePairs,
    level,
    quantised,
)
from actorium.gpu.weights.gguf_reader import gguf_tensors
from actorium.gpu.weights.lazy_tensors import (
    INPUT_ORDER,
    LazyTensor,
    WeightTensors,
    cut_lazily,
    drop_pages,
    held_rows,
)
from actorium.gpu.weights.mxfp4 import StackedExperts4
from actorium.gpu.weights.online_quantisation import quantised_lazily
from actorium.gpu.weights.safetensors_reader import checkpoint_files, read_files, unreadable
from actorium.gpu.weights.sliced_tensors import RankSlices
from actorium.gpu.weights.stored_codes import StoredModule, StoredParts, orders_beyond_plan
from actorium.gpu.weights.table_codes import TableModule
from actorium.gpu.weights.weight_files import Precedence
from actorium.kernels.grouped_rows import ROWS
from actorium.kernels.scaled_linear import dequantise, dequantise_rows, pack

Progress = Callable[[str, int, int], None]
"""(what, done, of): called once per shard, when it is read."""

LOG = logging.getLogger("actorium.model")
SCALED_INPUT = ".weight_act_pre_scale"
ADAPTER = ".lora_A."
"""Part of names in a checkpoint of an adapter."""


class Fp8(NamedTuple):
    """How the weights of an FP8 checkpoint are read."""

    shape: Fp8Shape
    keep: bool
    """Those of projections stay in FP8."""

    def quantises(self, spec: TensorSpec) -> bool:
        """Whether this tensor is quantised when it is read."""
        return (self.shape.online and spec.projection is not None
                and self.shape.covers(spec.module))


class Fused(NamedTuple):
    """How a checkpoint may have several wanted tensors in one."""

    name: str
    shape: tuple[int, ...]
    cut: Callable[[Tensor], Iterable[tuple[str, Tensor]]]
    """The wanted tensors in it, by name."""
    other: tuple[int, ...] = ()
    """Another shape in which some have it, and `cut` takes it; (): none."""


def holds(path: Path, name: str) -> bool:
    """Whether the checkpoint at `path` has a tensor of this name. Raises `BadModel`."""
    return name in tensor_names(path)


def tensor_names(path: Path, renames: Renames = ()) -> set[str]:
    """Of all tensors of the checkpoint at `path`, by `plain_name`. Raises `BadModel`."""
    if (source := gguf_source(path)) is not None:
        return {part.name for part in checkpoint_tensors(read_gguf(source))}
    tensors: set[str] = set()
    for file, placed in checkpoint_files(path).items():
        names = placed
        if names is None:
            try:
                with safe_open(str(path / file), framework="pt") as shard:
                    names = list(shard.keys())
            except (SafetensorError, OSError) as e:
                raise unreadable(path / file, e) from None
        tensors.update(plain_name(name, renames) for name in names)
    return tensors


def read_tensors(
    path: Path, specs: Sequence[TensorSpec], dtype: torch.dtype, device: torch.device,
    progress: Progress, fused: Sequence[Fused] = (), fp8: Fp8 | None = None,
    cache: CacheScales | None = None, grouped: GroupedShape | None = None,
    stored: StoredWeights | None = None, slices: RankSlices = RankSlices(), names: Renames = (),
    ignored: re.Pattern[str] | None = None, over: Sequence[Path] | None = None,
) -> WeightTensors:
    """Every wanted tensor, cast to dtype, on the device; weights of projections, where those in FP8
    are kept, as `kernels.scaled_linear.pack` has them; those in 4 to 8 bits, which `grouped` says,
    lazily as `kernels.grouped_rows.pack_rows` does; and what scales of the KV cache there are,
    where they are asked for. stored: which weights the files have as whole numbers; slices: what of
    them one rank of several has, whose `specs` these are; names: see `Architecture`; over: files in
    front of the checkpoint's (`WeightFiles`): what is read is kept in memory of its own, since all
    these files may be written anew; None: there are none, and they may not. Raises `BadModel`
    naming what is wrong, and `BadConfig` where a weight cannot be shared out."""
    intake = TensorIntake(specs, dtype, device, fused, fp8, cache, grouped, slices, names)
    intake.copies, first = over is not None, Precedence(over or (), names)
    if stored is not None:
        intake.parts = StoredParts(intake.shapes, stored, tensor_names(path, names), device)
    source = gguf_source(path)
    shards: Iterable[tuple[Path, Iterable[tuple[str, Tensor | LazyTensor]]]]
    if source is None:
        files = [*(path / file for file in checkpoint_files(path)), *(over or ())]
        # What is made of a weight when a layer takes it stays in the file until then.
        where = device if grouped is None else torch.device("cpu")
        shards = read_files(files, where, first.wanted(intake.wanted))
    elif over:
        raise BadModel(f"{over[0]}: no tensors can take the place of those of a GGUF file")
    else:
        files = gguf_files(source)
        kept = grouped is not None and grouped.source == GGUF
        shards = gguf_tensors(source, intake.wanted, dtype, device, kept)
    for done, (file, tensors) in enumerate(shards, 1):
        for name, tensor in tensors:
            try:
                intake.add(plain_name(name, names), tensor)
            except BadModel as e:
                raise BadModel(f"{file}: {e}") from None
        progress(file.name, done, len(files))
    found = intake.finish(path)
    if ignored is not None:
        first.check(intake.unread, ignored.search)
    unread = [] if ignored is None else [own for own in intake.unread if not ignored.search(own)]
    if unread:
        LOG.warning("%s: %s", path, unread_warning(unread))
    return found


class TensorIntake:
    """Tensors as they come out of files, made into those that are wanted."""

    def __init__(self, specs: Sequence[TensorSpec], dtype: torch.dtype, device: torch.device,
                 fused: Sequence[Fused], fp8: Fp8 | None, cache: CacheScales | None,
                 grouped: GroupedShape | None = None,
                 slices: RankSlices = RankSlices(), names: Renames = ()) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.cuts = {own.name: own for own in fused}
        self.shapes = {**{name: own.shape for name, own in self.cuts.items()},
                       **{spec.name: spec.shape for spec in specs}, **slices.shapes}
        self.dtype, self.device, self.fp8, self.cache = dtype, device, fp8, cache
        self.grouped, self.slices, self.names = grouped, slices, names
        self.pairs: ScalePairs | None = None
        if fp8 and not fp8.shape.online:
            self.pairs = ScalePairs(list(self.shapes), fp8.shape)
        self.parts: StoredParts | None = None
        """Of weights that the files have as whole numbers."""
        self.found: WeightTensors = {}
        self.longer: dict[str, int] = {}
        """Rows of embedding and head in the files, where they are more than the vocabulary's."""
        self.unsaid: dict[str, int] = {}
        """Weights and scales that look like FP8 in a checkpoint that does not say that it has any:
        1 for one in FP8, 2 for its scales, by the weight's name."""
        self.unread: list[str] = []
        """Names of tensors that nothing is made of."""
        self.adapter = False
        """The files hold one."""
        self.copies = False
        """Nothing that is found may be a file's own memory."""
        self.static = self.plain = 0
        """Scales of inputs that the files hold, and nobody reads; weights that are in a float type,
        and by the config are not."""

    def wanted(self, file: Path, stored: str, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        name = plain_name(stored, self.names)
        if self.pairs is not None and name in self.pairs.of_scales:
            return True
        if self.cache is not None and name in self.cache.names:
            return True
        if self.parts is not None and name in self.parts.weights:
            return True
        scaled = self.pairs is not None or self.parts is not None
        if name.endswith(SCALED_INPUT):
            raise BadModel(f"{file}: tensor {stored}: numbers by which an input is multiplied are "
                           "not supported")
        if scaled and name.endswith(INPUT_SCALES):
            self.static += 1
            return False
        self.adapter = self.adapter or ADAPTER in name
        if self.pairs is None:
            ends = next((end for end in SUFFIXES if name.endswith(end)), "")
            which = 2 if ends else int(dtype.is_floating_point and dtype.itemsize == 1)
            weight = name.removesuffix(ends)
            if which and weight in self.shapes:
                self.unsaid[weight] = self.unsaid.get(weight, 0) | which
        if name not in self.shapes:
            self.unread.append(name)
            return False
        other = self.cuts[name].other if name in self.cuts else ()
        if name in EMBED_AND_HEAD and len(shape) and shape[0] > (rows := self.shapes[name][0]):
            self.longer[name], shape = shape[0], (rows, *shape[1:])
        if tuple(shape) not in (self.shapes[name], other):
            raise BadModel(f"{file}: tensor {name} has shape {shown(list(shape))}, "
                           f"the config asks for {shown(list(self.shapes[name]))}")
        if not dtype.is_floating_point:
            raise BadModel(f"{file}: tensor {name} is {dtype}, not a float type")
        return True

    def add(self, name: str, tensor: Tensor | LazyTensor) -> None:
        """A tensor of a file. Raises `BadModel`."""
        if isinstance(tensor, LazyTensor):
            self._add_lazy(name, tensor)
        elif self.cache is not None and name in self.cache.names:
            self.cache.add(name, tensor)
        elif self.parts is not None and name in self.parts.weights:
            # What is made of a weight when a layer takes it is in the file until then.
            module = self.parts.offer(name, tensor, self.grouped is not None)
            if isinstance(module, StackedExperts4):
                self._add_stack(module)
            elif module is not None:
                self._add_module(module)
        elif self.pairs is None:
            self._add_tensor(name, tensor, None)
        else:
            for whole in self.pairs.offer(name, tensor):
                self._add_tensor(*whole)

    def _add_tensor(self, name: str, whole: Tensor, scales: Tensor | None) -> None:
        keep = scales is not None and self.fp8 is not None and self.fp8.keep
        packed = scales is not None and (keep or self.grouped is not None)
        if scales is not None:
            dtype = tensor_dtype(self.specs.get(name), self.dtype)
            whole = pack(whole, scales) if packed else dequantise(whole, scales, dtype)
        if name in self.longer:
            whole = whole[:self.shapes[name][0]]
        parts = self.cuts[name].cut(whole) if name in self.cuts else [(name, whole)]
        for part, tensor in parts:
            spec, file = self.specs[part], scales is None and self.device.type == "cpu"
            tensor = self.slices.taken(part, tensor, file and _same_memory(tensor, whole))
            dtype = tensor_dtype(spec, self.dtype)
            form = held_format(self.grouped, spec)
            if self.grouped is not None and self.grouped.source != ONLINE:
                self.plain += form is not None
                form = None
            if form is not None:
                self.found[part] = quantised_lazily(
                    partial(dequantise_rows, tensor, dtype) if packed else partial(_itself, tensor),
                    form, self.device, mapped=not packed)
            elif keep and spec.projection:
                self.found[part] = tensor.contiguous()
            elif self.fp8 and self.fp8.quantises(spec):
                self.found[part] = quantised(tensor.to(self.device), self.fp8.shape)
            else:
                tensor = dequantise_rows(tensor, dtype) if packed else tensor
                # A norm that is a mapped file's own memory would keep the whole file mapped.
                apart = tensor.dim() != 2 and self.device.type == "cpu" and (
                    self.grouped is not None or self.fp8 is not None and self.fp8.keep)
                if self.copies and tensor.dim() == 2 and self.device.type == "cpu":
                    self.found[part] = LazyTensor(dtype, partial(tensor.to, dtype),
                                                  shared=tensor.dtype is dtype)
                    continue
                own = tensor.to(device=self.device, dtype=dtype, copy=apart or self.copies)
                pages = (scales is None and own.dim() == 2 and self.device.type == "cpu"
                         and own.data_ptr() == tensor.data_ptr())
                self.found[part] = LazyTensor(
                    dtype, partial(_itself, own), mapped=True) if pages else own
                if apart:
                    drop_pages(tensor)

    def _add_module(self, module: StoredModule | TableModule) -> None:
        name = f"{module.module}.weight"
        if self.grouped is None:
            spec = self.specs.get(name)
            self._add_tensor(name, module.dense(tensor_dtype(spec, self.dtype)), None)
            return
        rows = self._cut(name, LazyTensor(ROWS, module.rows))
        dtype = tensor_dtype(self.specs.get(name), self.dtype)
        dense = self._cut(name, LazyTensor(dtype, partial(module.dense, dtype)))
        for (part, own), (_, wide) in zip(rows, dense, strict=True):
            held = module.even and held_format(self.grouped, self.specs[part]) is not None
            self.found[part] = self.slices.lazily(part, own if held else wide)
            if held and module.order is not None:
                self.slices.check_order(part)
                name = f"{self.specs[part].module}{INPUT_ORDER}"
                self.found[name] = module.order.to(self.device)

    def _add_stack(self, stack: StackedExperts4) -> None:
        own = self.cuts[stack.name]
        names = [name for name, _ in own.cut(torch.empty(own.shape, device="meta"))]
        for name, rows, wide in stack.experts(names):
            spec = self.specs[name]
            if held_format(self.grouped, spec) is None:
                rows = _cast(wide, tensor_dtype(spec, self.dtype))
            self.found[name] = self.slices.lazily(name, rows)

    def _cut(self, name: str, whole: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        """The wanted tensors in one, by name."""
        own = self.cuts.get(name)
        return cut_lazily(whole, own.shape, own.cut) if own else [(name, whole)]

    def _add_lazy(self, name: str, tensor: LazyTensor) -> None:
        if tensor.dtype is ROWS:
            self.add_rows(name, tensor)
            return
        for part, each in self._cut(name, tensor):
            self._add_dense(part, self.slices.lazily(part, each))

    def _add_dense(self, name: str, tensor: LazyTensor) -> None:
        """A tensor that is to be read later, in a float type."""
        spec = self.specs[name]
        form = held_format(self.grouped, spec)
        if form is not None:
            self.found[name] = quantised_lazily(tensor.read, form, self.device)
        elif self.fp8 and self.fp8.quantises(spec):
            self.found[name] = quantised(tensor.read(), self.fp8.shape)
        else:
            self.found[name] = _cast(tensor, tensor_dtype(spec, self.dtype))

    def add_rows(self, name: str, rows: LazyTensor) -> None:
        """A weight, or several in one, that a file has in 4 to 8 bits: see `lazy_tensors`."""
        for part, each in self._cut(name, rows):
            spec = self.specs[part]
            self.found[part] = self.slices.lazily(
                part, held_rows(spec, each, self.grouped, tensor_dtype(spec, self.dtype)))

    def finish(self, path: Path) -> WeightTensors:
        """What is wanted, by name. Raises `BadModel` where some of it did not come."""
        if self.pairs is not None:
            try:
                self.pairs.check()
            except BadModel as e:
                raise BadModel(f"{path}: {e}") from None
        for name, which in self.unsaid.items():
            if which == 3:
                raise BadModel(f"{path}: tensor {name} is in FP8 and has scales beside it, and the "
                               "config has no quantization_config that says so")
        missing = [name for name in self.specs if name not in self.found]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            why = ": the files hold an adapter, which must be merged first" * self.adapter
            raise BadModel(f"{path}: tensor {missing[0]} is missing{more}{why}")
        for name, rows in self.longer.items():
            LOG.warning("%s: %s has %d rows, of which the first %d (vocab_size) are served", path,
                        name, rows, self.shapes[name][0])
        if self.grouped is None:
            level(self.found, self.specs.values(), self.dtype)
        beyond = orders_beyond_plan(self.found, self.specs.values())
        if beyond:
            LOG.warning("%s: weights of one product have their columns in different orders "
                        "(g_idx): %d are held, of 8 bytes a column, that the plan does not count",
                        path, beyond)
        if self.plain:
            LOG.warning("%s: %d weights are not quantised, though the config says so: they stay as "
                        "they are, and take more memory than was planned", path, self.plain)
        if self.static:
            kept = (self.grouped is not None
                    or self.fp8 is not None and self.fp8.keep)
            LOG.warning("%s: %d static scales of inputs are not used: %s", path, self.static,
                        "each token is scaled by its own largest number" if kept
                        else "nothing is multiplied in FP8 or INT8 here")
        if self.cache is not None:
            self.found.update(self.cache.layers(path, self.device))
        return self.found


def _cast(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    return LazyTensor(dtype, lambda: tensor.read().to(dtype))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
