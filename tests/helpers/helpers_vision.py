"""Tiny random Qwen2.5-VL and Qwen3-VL checkpoints, written by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers_configs import TOWER_3, TOWER_25

IMAGE, VIDEO, START, END = 190, 191, 192, 193
"""Ids of the placeholders, and of what stands around them."""
KINDS = {"2.5": "Qwen2_5_VL", "3": "Qwen3VL", "3-moe": "Qwen3VLMoe"}


def vl_model(kind: str, tower: dict[str, Any] | None = None, seed: int = 0, **text: Any) -> Any:
    """A random transformers model of `KINDS`, fp32, in eval mode, no parameter of which is 0 or 1
    throughout. tower, text: fields of its configs."""
    import transformers

    whole: dict[str, Any] = {
        "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [2, 3, 3]}}
    if kind != "2.5":
        whole["head_dim"] = 16
    if kind == "3-moe":
        whole |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "mlp_only_layers": [1]}
    outer = {name: text.pop(name) for name in ("tie_word_embeddings",) if name in text}
    vision = {**(TOWER_25 if kind == "2.5" else TOWER_3), **(tower or {})}
    config = getattr(transformers, f"{KINDS[kind]}Config")(
        text_config={**whole, **text}, vision_config=vision, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END, **outer)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{KINDS[kind]}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            norm = "norm" in name and name.endswith("weight") or "ln_q" in name
            p.normal_(1.0 if norm else 0.0, 0.15)
    return model


def write_vl(path: Path, kind: str, **options: Any) -> Any:
    """Save such a model at `path`; returns it."""
    model = vl_model(kind, **options)
    model.save_pretrained(str(path))
    return model


def pixels_of(grids: Sequence[Sequence[int]], seed: int = 3, width: int = 96) -> torch.Tensor:
    """Random patches for these grids; width: 3 * 2 * 4 * 4, as the towers of `helpers_configs`."""
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
