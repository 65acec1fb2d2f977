"""Checkpoints whose codes of 4 bits are indices of a table (bitsandbytes' NF4 and FP4, NVFP4 and
MXFP4 of compressed-tensors and ModelOpt), and LLM.int8, written from the formats' descriptions
alone, beside twins that hold what their weights stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers_fp8 import PROJECTION, SINGLE
from helpers_stored import write_twin
from safetensors.torch import load_file
from torch import Tensor

Made = tuple[dict[str, Tensor], Tensor]
"""(a module's tensors, by the ends of their names; what its weight stands for)."""
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0]
FP4 = [0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25]
TABLES = {"nf4": NF4, "fp4": [*FP4, *(-number for number in FP4)]}


def nearest(numbers: Tensor, table: Tensor) -> Tensor:
    """u8: the index of the nearest number of a table."""
    return (numbers.unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)


def bnb_4bit(weight: Tensor, kind: str, nested: bool) -> Made:
    """Blocks of 64, across rows where these are no multiple of it."""
    table, flat = torch.tensor(TABLES[kind]), weight.float().flatten()
    blocks = torch.cat([flat, flat.new_zeros(-len(flat) % 64)]).view(-1, 64)
    largest = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32",
                             "shape": list(weight.shape)}
    extra: dict[str, Tensor] = {}
    if nested:
        offset = float(largest.mean())
        groups = torch.cat([largest - offset, largest.new_zeros(-len(largest) % 256)]).view(-1, 256)
        levels = torch.linspace(-1, 1, 256) ** 3
        outer = groups.abs().amax(1)
        small = nearest(groups / outer[:, None], levels)
        largest = (levels[small.int()] * outer[:, None]).flatten()[:len(largest)] + offset
        extra = {"weight.absmax": small.flatten()[:len(largest)], "weight.nested_absmax": outer,
                 "weight.nested_quant_map": levels}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = nearest(blocks / largest[:, None], table)
    meant = (table[codes.int()] * largest[:, None]).flatten()[:len(flat)].view(weight.shape)
    packed = codes.flatten()[:len(flat)].view(-1, 2)
    said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {"weight": (packed[:, :1] << 4 | packed[:, 1:]), "weight.absmax": largest,
            "weight.quant_map": table, f"weight.quant_state.bitsandbytes__{kind}": said,
            **extra}, meant


def bnb_8bit(weight: Tensor) -> Made:
    largest = weight.float().abs().amax(1)
    codes = (weight.float() * 127 / largest[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)
            }, codes.float() * largest[:, None] / 127


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_e2m1(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """(u8[N, K / 2], what it stands for), with these scales of groups."""
    parts = weight.float().unflatten(-1, (scales.shape[1], -1)) / scales.unsqueeze(-1)
    codes = nearest(parts.abs(), E2M1)
    wide = (E2M1[codes.int()] * parts.sign() * scales.unsqueeze(-1)).flatten(-2)
    codes = (codes | parts.signbit().to(torch.uint8) << 3).flatten(-2)
    return codes[:, ::2] | codes[:, 1::2] << 4, wide


def nvfp4(weight: Tensor, modelopt: bool) -> Made:
    whole = weight.float().abs().max() / 448 / 6
    largest = weight.float().unflatten(-1, (-1, 16)).abs().amax(-1)
    scales = (largest / 6 / whole).to(torch.float8_e4m3fn)
    packed, meant = in_e2m1(weight, scales.float() * whole)
    if modelopt:
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole,
                "input_scale": torch.tensor(0.1)}, meant
    return {"weight_packed": packed, "weight_scale": scales,
            "weight_global_scale": (1 / whole).view(1)}, meant


def mxfp4(weight: Tensor) -> Made:
    largest = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1)
    powers = largest.log2().floor() - 2
    packed, meant = in_e2m1(weight, powers.exp2())
    return {"weight_packed": packed, "weight_scale": (powers + 127).to(torch.uint8)}, meant


def float_config(layout: str, **weights: Any) -> dict[str, Any]:
    """Of compressed-tensors."""
    nv = layout.startswith("nv")
    numbers = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False,
               "strategy": "tensor_group" if nv else "group", "group_size": 16 if nv else 32}
    group = {"targets": ["Linear"], "weights": {**numbers, **weights}, "format": layout,
             "input_activations": {**numbers, "dynamic": "local" if nv else True},
             "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
            "quantization_status": "compressed", "config_groups": {"group_0": group}}


def modelopt_config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.33.0"}, "kv_cache_scheme": None,
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16},
                                          "targets": ["Linear"]}}, **fields}


def bnb_config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": False,
            "_load_in_4bit": False, "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None,
            "bnb_4bit_quant_storage": "uint8", "bnb_4bit_compute_dtype": "bfloat16", **fields}


Written = tuple[Callable[[Tensor], Made], dict[str, Any]]
"""(makes a module's tensors, quantization_config)"""
KINDS: dict[str, Written] = {
    **{kind + ", nested" * nested: (
        lambda weight, kind=kind, nested=nested: bnb_4bit(weight, kind, nested),
        bnb_config(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested))
       for kind in TABLES for nested in (False, True)},
    "int8": (bnb_8bit, bnb_config(load_in_8bit=True)),
    "nvfp4": (lambda weight: nvfp4(weight, False), float_config("nvfp4-pack-quantized")),
    "mxfp4": (mxfp4, float_config("mxfp4-pack-quantized")),
    "modelopt": (lambda weight: nvfp4(weight, True), modelopt_config()),
}


ANY_COLUMNS = dict.fromkeys(("int8", "nf4", "nf4, nested", "fp4", "fp4, nested"), 1)
"""Kinds in which a row need not be whole groups."""


def write_tables(source: Path, path: Path, twin: Path, kind: str,
                 **fields: Any) -> dict[str, Tensor]:
    """Of the checkpoint at `source` one of this kind, and its twin; what the former holds. fields:
    of its quantization_config."""
    make, config = KINDS[kind]
    tensors = load_file(source / SINGLE)
    held, wide = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if PROJECTION.search(name) is None or weight.shape[1] % ANY_COLUMNS.get(kind, 32):
            continue
        own, meant = make(weight)
        del held[name]
        held |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in own.items()}
        wide[name] = meant.to(weight.dtype)
    write_twin(source, path, held, {**config, **fields})
    write_twin(source, twin, wide)
    return held
