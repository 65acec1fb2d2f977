"""Checkpoints in AWQ, GPTQ, HQQ, torchao's, auto-round's and compressed-tensors' integer formats,
written from the formats' descriptions alone, beside twins that hold what their weights stand for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers_fp8 import PROJECTION, SINGLE
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = NDArray[Any]


class Kind(NamedTuple):
    """A way to store weights."""

    layout: str
    """awq, gptq, gptq_v2, pack-quantized, int-quantized, torchao, hqq or auto-round."""
    bits: int = 4
    group: int = 32
    """-1: a row."""
    symmetric: bool = False
    ordered: bool = False
    """Columns belong to groups at random, in all weights of so many columns alike: those that share
    an input are quantised in one order."""
    apart: bool = False
    """In each weight in another way."""

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says of it."""
        if self.layout == "awq":
            return {"quant_method": "awq", "bits": self.bits, "group_size": self.group,
                    "zero_point": not self.symmetric, "version": "gemm",
                    "modules_to_not_convert": None}
        if self.layout.startswith("gptq"):
            return {"quant_method": "gptq", "bits": self.bits, "group_size": self.group,
                    "sym": self.symmetric, "desc_act": self.ordered, "lm_head": False,
                    "checkpoint_format": self.layout, "static_groups": False}
        if self.layout == "torchao":
            group = {"_type": "PerGroup", "_data": {"group_size": self.group}}
            return {"quant_method": "torchao", "quant_type": {"default": {
                "_type": "IntxWeightOnlyConfig", "_version": 2, "_data": {
                    "granularity": group if self.group > 0 else {"_type": "PerAxis", "_data": {}},
                    "weight_dtype": {"_type": "torch.dtype", "_data": f"int{self.bits}"},
                    "mapping_type": {"_type": "MappingType", "_data":
                                     "SYMMETRIC" if self.symmetric else "ASYMMETRIC"}}}}}
        if self.layout == "hqq":
            return {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {
                "weight_quant_params": {"nbits": self.bits, "channel_wise": True, "axis": 1,
                                        "group_size": self.group if self.group > 0 else None}}}
        if self.layout == "auto-round":
            return {"quant_method": "auto-round", "bits": self.bits, "group_size": self.group,
                    "sym": self.symmetric, "data_type": "int",
                    "packing_format": "auto_round:auto_gptq",
                    "block_name_to_quantize": "model.layers"}
        return {"quant_method": "compressed-tensors", "format": self.layout, "ignore": ["lm_head"],
                "quantization_status": "compressed", "config_groups": {"group_0": self.scheme()}}

    def scheme(self, *targets: str) -> dict[str, Any]:
        """A group of compressed-tensors' config."""
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric,
                   "strategy": "channel" if self.group < 0 else "group", "dynamic": False,
                   "group_size": None if self.group < 0 else self.group,
                   "actorder": "group" if self.ordered else None}
        tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                  "dynamic": True}
        return {"targets": list(targets) or ["Linear"], "weights": weights,
                "input_activations": tokens if self.layout == "int-quantized" else None,
                "output_activations": None, "format": self.layout}


class Stored(NamedTuple):
    """A weight in numbers."""

    codes: Array
    """[N, K], 0 to 2**bits - 1"""
    scales: Array
    """f16[N, G]"""
    zeros: Array
    """[N, G]"""
    groups: Array
    """[K], of each column"""

    @property
    def meant(self) -> Tensor:
        """f32[N, K]"""
        least = self.codes - self.zeros[:, self.groups]
        return torch.from_numpy((least * self.scales.astype(np.float32)[:, self.groups]
                                 ).astype(np.float32))


def stored(weight: Tensor, kind: Kind, seed: int = 0) -> Stored:
    """The weight, [N, K], rounded."""
    wide = weight.float().numpy()
    columns, top = wide.shape[1], 2**kind.bits - 1
    each = columns if kind.group < 0 else kind.group
    groups = np.arange(columns) // each
    if kind.ordered:
        groups = np.random.default_rng(seed if kind.apart else columns).permutation(groups)
    scales, zeros = [], []
    for g in range(-(-columns // each)):
        own = wide[:, groups == g]
        low, high = np.minimum(own.min(1), 0), np.maximum(own.max(1), 0)
        if kind.symmetric:
            scales.append(np.abs(own).max(1) / (top // 2))
            zeros.append(np.full(len(own), 2 ** (kind.bits - 1)))
        else:
            scales.append((high - low) / top)
            zeros.append(np.clip(np.round(-low / scales[-1]), 1, top))
    held = np.stack(scales, 1).astype(np.float16)
    zero = np.stack(zeros, 1).astype(np.int64)
    codes = np.round(wide / held.astype(np.float32)[:, groups]) + zero[:, groups]
    return Stored(np.clip(codes, 0, top).astype(np.int64), held, zero, groups)


def words(codes: Array, bits: int, order: tuple[int, ...] = ()) -> Array:
    """i32[R, ceil(C * bits / 32)]: codes of a row one after the other (or of the columns in
    `order`), lowest bits first."""
    each = 32 // bits
    padded = np.zeros((len(codes), -(-codes.shape[1] // each) * each), np.uint32)
    padded[:, :codes.shape[1]] = codes
    found = np.zeros((len(codes), padded.shape[1] // each), np.uint32)
    for i, column in enumerate(order or range(each)):
        found |= padded[:, column::each] << np.uint32(bits * i)
    return found.view(np.int32)


def tensors_of(own: Stored, kind: Kind) -> dict[str, Tensor]:
    """A module's tensors, by the ends of their names."""
    codes, scales, zeros, groups = own
    half, bits = 2 ** (kind.bits - 1), kind.bits
    found: dict[str, Array]
    if kind.layout == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        found = {"qweight": words(codes.T, 4, order), "qzeros": words(zeros.T, 4, order),
                 "scales": scales.T}
    elif kind.layout.startswith(("gptq", "auto-round")):
        less = 0 if kind.layout == "gptq_v2" else 1
        found = {"qweight": words(codes, bits).T, "scales": scales.T,
                 "qzeros": words(zeros.T - less, bits)}
        if kind.layout != "auto-round":
            found |= {"g_idx": groups.astype(np.int32)}
    elif kind.layout == "hqq":
        rows = codes.reshape(-1, codes.shape[1] // scales.shape[1]).astype(np.uint8)
        upper, lower = np.split(rows, 2) if bits == 4 else (rows, None)
        found = {"W_q": upper if lower is None else upper << 4 | lower,
                 "scale": scales.reshape(-1, 1), "zero": zeros.reshape(-1, 1).astype(np.float16),
                 "shape": np.array(codes.shape), "nbits": np.array(bits, np.int32),
                 "group_size": np.array(rows.shape[1], np.int32), "axis": np.array(1, np.int32)}
    elif kind.layout == "torchao":
        found = {"_weight_qdata": (codes - half).astype(np.int8), "_weight_scale": scales,
                 "_weight_zero_point": (zeros - half).astype(np.int8)}
    elif kind.layout == "pack-quantized":
        found = {"weight_packed": words(codes, bits), "weight_scale": scales,
                 "weight_shape": np.array(codes.shape)}
        if not kind.symmetric:
            found |= {"weight_zero_point": words(zeros.T, bits).T}
        if kind.ordered:
            found |= {"weight_g_idx": groups.astype(np.int32)}
    else:
        found = {"weight": (codes - half).astype(np.int8), "weight_scale": scales}
        if not kind.symmetric:
            found |= {"weight_zero_point": (zeros - half).astype(np.int8)}
    return {end: torch.from_numpy(np.ascontiguousarray(each)) for end, each in found.items()}


def write_stored(source: Path, path: Path, twin: Path, kind: Kind, left: tuple[str, ...] = (),
                 **fields: Any) -> dict[str, Tensor]:
    """Of the checkpoint at `source` one of this kind, and its twin; what the former holds. left: of
    names of weights that stay; fields: of its quantization_config."""
    tensors = load_file(source / SINGLE)
    held, wide = dict(tensors), dict(tensors)
    for i, (name, weight) in enumerate(sorted(tensors.items())):
        if PROJECTION.search(name) is None or any(part in name for part in left):
            continue
        own = stored(weight, kind, i)
        del held[name]
        held |= {f"{name.removesuffix('weight')}{end}": tensor
                 for end, tensor in tensors_of(own, kind).items()}
        wide[name] = own.meant.to(weight.dtype)
    write_twin(source, path, held, {**kind.config, **fields})
    write_twin(source, twin, wide)
    return held


def write_twin(source: Path, path: Path, tensors: dict[str, Tensor],
               found: dict[str, Any] | None = None) -> None:
    """A checkpoint like that at `source` with these tensors. found: its quantization_config."""
    path.mkdir()
    for file in source.iterdir():
        if file.name != SINGLE:
            shutil.copy(file, path)
    save_file({name: own.contiguous() for name, own in tensors.items()}, path / SINGLE,
              {"format": "pt"})
    if found is not None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": found}))
