"""The scales of keys and values that a checkpoint has for pages in FP8.

What is read are the names under which vLLM (`maybe_remap_kv_scale_name`), SGLang,
compressed-tensors and ModelOpt know them: one number for a layer, or one for each of its key heads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from actorium.actors.errors import BadModel, shown
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.parallel.rank_types import ALONE, RankPlace
from actorium.gpu.weights.sliced_tensors import own_heads

LOG = logging.getLogger("actorium.model")
NAME = "kv_scales"
"""Of a layer's scales, among the tensors of its attention: f32[2 * kv_heads], or f32[1] of
latents."""
KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale")
VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale")
BOTH = ("kv_scale", "attn.kv_scale")


class CacheScales:
    """Scales as they come out of a checkpoint's files, in any order."""

    def __init__(self, modules: Sequence[str], shape: ModelShape, dtype: str,
                 place: RankPlace = ALONE) -> None:
        """modules: what the names of each attention layer's tensors begin with; shape: of the whole
        model; dtype: the name of the pages'; place: of the rank whose heads' scales are wanted."""
        self.modules, self.dtype, self.shape, self.place = modules, dtype, shape, place
        self.heads = 0 if shape.latent else shape.kv_heads
        kinds = {"k": KEYS + (BOTH if shape.latent else ()), "v": VALUES, "kv": BOTH}
        self.names = {f"{module}{name}": (module, kind) for module in modules
                      for kind, names in kinds.items() for name in names}
        self._found: dict[tuple[str, str], Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """One of `names`. Raises `BadModel`."""
        sizes = sorted({1, self.heads or 1})
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
                parts = [own.expand(self.heads) for own in (keys, values)] if self.heads else [keys]
                own = own_heads(torch.cat(parts), self.shape, self.place)
                done[f"{module}{NAME}"] = own.to(device)
        if len(done) < len(self.modules):
            LOG.warning("%s: KV cache in %s: the checkpoint has scales of %d of %d attention layers"
                        ", the others' are 1", where, self.dtype, len(done), len(self.modules))
        else:
            LOG.info("%s: KV cache in %s, scaled as the checkpoint says", where, self.dtype)
        return done
