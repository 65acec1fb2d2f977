"""Random weights in the place of a checkpoint's: `--load-format dummy`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from actorium.gpu.families.tensor_specs import TensorSpec, held_format
from actorium.gpu.families.weight_formats import GroupedShape
from actorium.gpu.weights.dtypes import tensor_dtype
from actorium.gpu.weights.fp8_weights import level, quantised
from actorium.gpu.weights.lazy_tensors import LazyTensor, WeightTensors
from actorium.gpu.weights.loader import Fp8, Progress
from actorium.gpu.weights.online_quantisation import quantised_lazily
from actorium.gpu.weights.sliced_tensors import RankSlices
from actorium.kernels.scaled_linear import dequantise_rows


def random_tensors(
    specs: Sequence[TensorSpec], dtype: torch.dtype, device: torch.device, seed: int,
    progress: Progress, fp8: Fp8 | None = None, grouped: GroupedShape | None = None,
    slices: RankSlices = RankSlices(),
) -> WeightTensors:
    """Random weights (norms near 1, the rest normal with deviation 0.02), equal for equal seeds on
    one kind of device: where they are to lie they are drawn. Those in 4 to 8 bits are made of what
    the others would be. slices: see `read_tensors`; ranks draw alike, and each takes its part."""
    gen = torch.Generator(device).manual_seed(seed)
    tensors: WeightTensors = {}
    for spec in specs:
        whole = spec._replace(shape=slices.shapes.get(spec.name, spec.shape))
        block, form = _block(whole, tensor_dtype(spec, dtype), gen), held_format(grouped, spec)
        drawn = slices.lazily(spec.name, LazyTensor(block.dtype, partial(_random, whole, block)))
        if form is not None:
            tensors[spec.name] = quantised_lazily(drawn.read, form, device)
            continue
        tensor = drawn.read()
        if grouped is None and fp8 and spec.projection and fp8.shape.covers(spec.module):
            tensor = quantised(tensor, fp8.shape)
            tensor = tensor if fp8.keep else dequantise_rows(tensor, dtype)
        tensors[spec.name] = tensor
    if grouped is None:
        level(tensors, specs, dtype)
    progress("dummy", 1, 1)
    return tensors


def _block(spec: TensorSpec, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """Large matrices repeat a block of 2**22 values: drawing billions would take minutes."""
    block = torch.empty(min(spec.size, 1 << 22), device=gen.device)
    return block.normal_(0.0, 0.02, generator=gen).to(dtype)


def _random(spec: TensorSpec, block: Tensor) -> Tensor:
    size, flat = spec.size, block
    if size > len(block):
        flat = block.new_empty(size)
        whole = size // len(block) * len(block)
        flat[:whole].view(-1, len(block)).copy_(block)
        flat[whole:] = block[:size - whole]
    tensor = flat.view(spec.shape)
    return tensor + 1 if spec.name.endswith("norm.weight") else tensor
