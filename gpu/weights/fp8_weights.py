"""Weights of FP8 checkpoints, each brought together with its scales; and the scales of keys and
values that checkpoints have for pages in FP8.

A weight is e4m3, and beside it lies `weight_scale` (one number, or one for each row) or
`weight_scale_inv` (one for each block of 128 x 128, as in DeepSeek-V3's and Qwen3.5's checkpoints).
Both multiply. A static `input_scale` is not read, and the loader says so: each token is scaled by
its own largest number in the pass that quantises it, which costs no other pass and is never
coarser.

On a device with products in FP8 the weights of projections stay as they are, as rows that carry
their scales (`kernels.scaled_linear.pack`); all else is dequantised when it is read. With
`--quantization fp8` they stay so on any device; and those of a checkpoint that is not in FP8 are
quantised as they are read, one after the other.

Scales of keys and values are read under the names by which vLLM (`maybe_remap_kv_scale_name`),
SGLang, compressed-tensors and ModelOpt know them: one number for a layer, or one for each of its
key heads."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from actorium.actors.config.tree import STORED
from actorium.actors.errors import BadModel, shown
from actorium.gpu.families.fp8_config import BLOCK, Fp8Shape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import TensorSpec, stacks
from actorium.gpu.parallel.rank_group import ALONE, RankPlace
from actorium.gpu.weights.lazy_tensors import WeightTensors
from actorium.gpu.weights.sliced_tensors import own_heads
from actorium.kernels.scaled_linear import (
    FP8,
    dequantise_rows,
    groups,
    has_products,
    is_packed,
    pack,
    quantise_rows,
)

SUFFIXES = ("_scale_inv", "_scale")
"""Of a weight's name: that of its scales."""
INPUT_SCALES = (".input_scale", ".activation_scale", ".input_global_scale",
                ".weight_act_quant_scale")
"""What names of static scales of inputs end with."""
LOG = logging.getLogger("actorium.model")
KV_SCALES = "kv_scales"
"""Of a layer's scales, among the tensors of its attention: f32[2 * kv_heads], or f32[1] of
latents."""
KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale")
VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale")
BOTH = ("kv_scale", "attn.kv_scale")


def multiplies(device: torch.device, kernels: str) -> bool:
    """Whether these kernels (see `select_ops`) multiply in FP8 on the device."""
    if device.type == "cuda":
        return kernels != "torch" and has_products(device)
    return kernels == "triton"


def keeps(device: torch.device, kernels: str, quantization: str) -> bool:
    """Whether weights in FP8 stay so in memory. quantization: see `ModelConfig`."""
    return quantization == "fp8" or (quantization in ("auto", *STORED)
                                     and multiplies(device, kernels))


def how_served(device: torch.device, kernels: str) -> str:
    """What weights that stay in FP8 are served by, where these kernels do not multiply in FP8 on
    the device; empty where they do."""
    if multiplies(device, kernels):
        return ""
    if device.type == "cuda" and not has_products(device):
        major, minor = torch.cuda.get_device_capability(device)
        return (f"compute capability {major}.{minor} has no products in FP8 (8.9 has): weights are "
                "held in FP8 and dequantised at every product; tokens are not quantised")
    return ("products in FP8 are computed by reference, exactly and slowly: for tests and "
            "comparisons, not for speed")


class ScalePairs:
    """Weights and scales as they come out of the files, in any order."""

    def __init__(self, names: Sequence[str], shape: Fp8Shape) -> None:
        """names: of all weights."""
        self.shape = shape
        self.of_scales = {name + suffix: name for name in names for suffix in SUFFIXES}
        """Name of a weight by that of its scales."""
        self._weights: dict[str, Tensor] = {}
        self._scales: dict[str, tuple[str, Tensor]] = {}

    def offer(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """(name, weight, its scales or None) of what is complete with this one. The scales:
        f32, broadcast to [..., N, groups(K)]. Raises `BadModel`."""
        if name in self.of_scales:
            self._scales[self.of_scales[name]] = name, tensor
            name = self.of_scales[name]
        elif tensor.dtype is FP8:
            self._weights[name] = tensor
        else:
            yield name, tensor, None
        if name in self._weights and name in self._scales:
            weight = self._weights.pop(name)
            yield name, weight, spread(*self._scales.pop(name), weight.shape, self.shape.block)

    def check(self) -> None:
        """Raises `BadModel` where a weight's scales did not come."""
        for name in self._weights:
            raise BadModel(f"tensor {name}{SUFFIXES[not self.shape.block]} is missing, the scales "
                           f"of {name}")


def spread(name: str, scales: Tensor, shape: Sequence[int], block: int) -> Tensor:
    """The scales of a weight of this shape, f32[..., N, groups(K)], or with a 1 for N, K or both.

    scales: one; one for each matrix of a stack; one for each row; or one for each block.
    Raises `BadModel`.
    """
    *lead, rows, columns = shape
    if not scales.is_floating_point():
        raise BadModel(f"tensor {name} is {scales.dtype}, not a float type")
    wide, found = scales.float(), list(scales.shape)
    if not bool(((wide >= 0) & wide.isfinite()).all()):
        raise BadModel(f"tensor {name} holds a scale that is negative or not a finite number")
    if block and found == [*lead, -(-rows // block), groups(columns)]:
        return wide.repeat_interleave(block, -2)[..., :rows, :]
    if scales.numel() == 1:
        return wide.view(*[1] * len(shape))
    if found in ([*lead, rows], [*lead, rows, 1]):
        return wide.view(*lead, rows, 1)
    if lead and found in (lead, [*lead, 1, 1]):
        return wide.view(*lead, 1, 1)
    wanted = [*lead, -(-rows // block), groups(columns)] if block else [*lead, rows, 1]
    raise BadModel(f"tensor {name} has shape {found}, a weight of {list(shape)} asks for "
                   f"{wanted} or one scale")


def level(found: WeightTensors, specs: Iterable[TensorSpec], dtype: torch.dtype) -> None:
    """Dequantise, in place, weights that are served as one product with others that are not in
    FP8."""
    for stack in stacks(specs):
        names = [spec.name for spec in stack]
        packed = {name: own for name in names
                  if isinstance(own := found[name], Tensor) and is_packed(own)}
        if len(packed) < len(names) and not any(s.projection and s.projection.mixed for s in stack):
            found.update((name, dequantise_rows(own, dtype)) for name, own in packed.items())


def quantised(weight: Tensor, shape: Fp8Shape) -> Tensor:
    """The weight in FP8, as a checkpoint has it, packed: [N, K] -> u8 rows."""
    if shape.online:
        return pack(*quantise_rows(weight))
    rows, columns = weight.shape
    wide = weight.float()
    if shape.block:
        padded = wide.new_zeros((-(-rows // BLOCK) * BLOCK, groups(columns) * BLOCK))
        padded[:rows, :columns] = wide
        most = padded.view(-(-rows // BLOCK), BLOCK, -1, BLOCK).abs().amax((1, 3))
    else:
        most = wide.abs().amax().view(1, 1)
    scales = (most / torch.finfo(FP8).max).clamp_(min=torch.finfo(torch.float32).tiny)
    own = spread("", scales, weight.shape, shape.block)
    each = own.repeat_interleave(BLOCK, -1)[:, :columns] if shape.block else own
    return pack((wide / each).to(FP8), own)


# --- Keys and values -----------------------------------------------------------------------------

class CacheScales:
    """Scales as they come out of a checkpoint's files, in any order."""

    def __init__(self, modules: Sequence[str], shape: ModelShape, dtype: str,
                 place: RankPlace = ALONE) -> None:
        """modules: what the names of each attention layer's tensors begin with; shape: of the whole
        model; dtype: the name of the pages'; place: of the rank whose heads' scales are wanted."""
        self.modules, self.dtype, self.place = modules, dtype, place
        layers = [i for i in shape.attention_layers if shape.owns_kv(i)]
        self.shapes = {module: shape.of_layer(i) for module, i in zip(
            modules, [*layers, shape.layers], strict=False)}
        """Of each module's layer; behind all others of one that drafts."""
        kinds = {"k": KEYS + (BOTH if shape.latent else ()), "v": VALUES, "kv": BOTH}
        self.names = {f"{module}{name}": (module, kind) for module in modules
                      for kind, names in kinds.items() for name in names}
        self._found: dict[tuple[str, str], Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """One of `names`. Raises `BadModel`."""
        shape = self.shapes[self.names[name][0]]
        sizes = sorted({1, 1 if shape.latent else shape.kv_heads})
        if not tensor.is_floating_point() or tensor.numel() not in sizes:
            raise BadModel(f"tensor {name} is {tensor.dtype} {shown(list(tensor.shape))}, scales of"
                           f" a KV cache are {' or '.join(map(str, sizes))} floating point numbers")
        wide = tensor.detach().float().flatten()
        # Of smaller numbers the reciprocal is infinite.
        if not bool(((wide >= torch.finfo(torch.float32).tiny) & wide.isfinite()).all()):
            raise BadModel(f"tensor {name} holds a scale that is not a positive, finite number")
        self._found[self.names[name]] = wide

    def layers(self, where: Path, device: torch.device) -> dict[str, Tensor]:
        """The scales of each layer that has any, by name; one line of the log says of how many. Of
        keys and values that have none of their own, those of the other."""
        done = {}
        for module in self.modules:
            both = self._found.get((module, "kv"))
            keys = self._found.get((module, "k"), both)
            values = self._found.get((module, "v"), both)
            keys, values = values if keys is None else keys, keys if values is None else values
            if keys is not None and values is not None:
                shape = self.shapes[module]
                parts = [keys] if shape.latent else [
                    own.expand(shape.kv_heads) for own in (keys, values)]
                own = own_heads(torch.cat(parts), shape, self.place)
                done[f"{module}{KV_SCALES}"] = own.to(device)
        if len(done) < len(self.modules):
            LOG.warning("%s: KV cache in %s: the checkpoint has scales of %d of %d attention layers"
                        ", the others' are 1", where, self.dtype, len(done), len(self.modules))
        else:
            LOG.info("%s: KV cache in %s, scaled as the checkpoint says", where, self.dtype)
        return done
