"""Checkpoints whose experts are in MXFP4, and twins that hold what transformers makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from helpers_fp8 import SINGLE
from helpers_models import write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CONFIG = {"quant_method": "mxfp4", "dequantize": True, "modules_to_not_convert": [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}


def drawn(number: int, rows: int, columns: int, seed: int = 0, low: int = 118,
          high: int = 126) -> tuple[Tensor, Tensor]:
    """Blocks u8[E, N, G, 16] and scales u8[E, N, G], whose exponents are low .. high - 1."""
    gen = torch.Generator().manual_seed(seed)
    groups = columns // 32
    return (torch.randint(0, 256, (number, rows, groups, 16), generator=gen, dtype=torch.uint8),
            torch.randint(low, high, (number, rows, groups), generator=gen, dtype=torch.uint8))


def write_mxfp4(own: Path, twin: Path | None = None, **options: Any) -> None:
    """A GPT-OSS in MXFP4, and what it stands for."""
    write_checkpoint(own, "GptOssForCausalLM", **{
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, **options})
    tensors, wide = load_file(own / SINGLE), {}
    for i, name in enumerate([name for name in tensors if name.endswith("experts.gate_up_proj")
                              or name.endswith("experts.down_proj")]):
        number, columns, rows = tensors.pop(name).shape
        blocks, scales = drawn(number, rows, columns, i)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert wide[name].shape == (number, columns, rows)
    if twin is not None:
        shutil.copytree(own, twin)
        kept = {name: own for name, own in tensors.items() if own.dtype is not torch.uint8}
        save_file(kept | wide, twin / SINGLE, {"format": "pt"})
    save_file(tensors, own / SINGLE, {"format": "pt"})
    raw = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**raw, "quantization_config": CONFIG}))
