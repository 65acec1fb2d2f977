"""Checkpoints in FP8 made of others, and twins that hold what their weights stand for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
SINGLE = "model.safetensors"
PROJECTION = re.compile(r"(proj(_\w+)?|\.w[123]|put_linear)\.weight$|experts\.\w+_proj$")
"""Of a weight, or of all experts' stacked."""


def blocks_of(weight: Tensor) -> list[tuple[int, int, Tensor]]:
    """(row, column, view) of each block of 128 x 128 of a matrix."""
    return [(i, j, weight[i * 128:(i + 1) * 128, j * 128:(j + 1) * 128])
            for i in range(-(-weight.shape[0] // 128)) for j in range(-(-weight.shape[1] // 128))]


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3, f32 scales of blocks, what both stand for in f32) of a matrix."""
    small, wide = torch.empty_like(weight, dtype=FP8), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for (i, j, own), (*_, into), (*_, back) in zip(*map(blocks_of, (weight, small, wide)),
                                                   strict=True):
        scales[i, j] = own.abs().max() / 448
        into.copy_((own / scales[i, j]).to(FP8))
        back.copy_(into.float() * scales[i, j])
    return small, scales, wide


def whole(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with one scale."""
    scale = weight.abs().max() / 448
    small = (weight / scale).to(FP8)
    return small, scale, small.float() * scale


def quantised(name: str, ignored: tuple[str, ...]) -> bool:
    """Whether FP8 checkpoints have this one's weight so."""
    return PROJECTION.search(name) is not None and not any(part in name for part in ignored)


def write_twins(source: Path, fp8: Path, twin: Path, block: bool, ignored: tuple[str, ...] = (),
                scale_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Of the checkpoint at `source` one in FP8, with blocks or without, and its twin; what the
    former holds."""
    tensors = load_file(source / SINGLE)
    stored, wide = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not quantised(name, ignored):
            continue
        each = weight.view(-1, *weight.shape[-2:])
        made = [in_blocks(own) if block else whole(own) for own in each]
        small = torch.stack([own[0] for own in made]).view(weight.shape)
        scales = torch.stack([own[1] for own in made]).to(scale_dtype)
        stored[name] = small
        stored[name + ("_scale_inv" if block else "_scale")] = (
            scales if weight.dim() == 3 else scales[0])
        if not block:
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02)
        back = small.float()
        for each, scale in zip(back.view(-1, *weight.shape[-2:]), scales, strict=True):
            for i, j, own in blocks_of(each):
                own *= (scale[i, j] if block else scale).float()
        wide[name] = back.to(weight.dtype)
    for path, own in ((fp8, stored), (twin, wide)):
        path.mkdir()
        for file in source.iterdir():
            if file.name != SINGLE:
                shutil.copy(file, path)
        save_file(own, path / SINGLE, {"format": "pt"})
    found: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    found |= {"weight_block_size": [128, 128]} if block else {}
    found |= {"modules_to_not_convert": ["lm_head", *ignored]}
    config = json.loads((fp8 / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**config, "quantization_config": found}))
    return stored


def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter loses the carry where a number rounds up to a power of two, so that 7.9
    becomes 4; from here on it rounds as the device does."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target not in (tl.float8e4nv, tl.float8e5):
            return plain(data, source, target, mode)
        wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        if target == tl.float8e4nv:
            narrow = wide.clamp(-448, 448).to(FP8)
        else:
            narrow = wide.to(torch.float8_e5m2)
        return narrow.view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
