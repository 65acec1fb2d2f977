"""Ways to ask a model for what it says of a prompt's last tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers_models import Seq, Stepper, write_checkpoint
from torch import Tensor

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.registry import load_model

SIZES: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
Way = tuple[tuple[int, ...], int, int]
"""Chunks of the prompt, of which what is left is decoded; sequences beside it; rows of a decode."""


def tiny(path: Path, exact: str, device: str = "cpu", dtype: str = "bfloat16",
         architecture: str = "Qwen3ForCausalLM", **sizes: Any) -> Decoder:
    """A tiny one on Triton's kernels."""
    write_checkpoint(path, architecture, seed=2, dtype=torch.bfloat16, **SIZES | sizes)
    config = Config(model=ModelConfig(dtype=dtype),
                    device=DeviceConfig(kernels="triton", exact=exact))
    return load_model(path, config, torch.device(device), lambda *_: None)


def said(model: Decoder, prompt: list[int], last: int, way: Way) -> Tensor:
    """Logits of the last tokens of the prompt, when it is asked in this way."""
    counts, beside, q_len = way
    stepper, own = Stepper(model, 64), Seq(prompt)
    others = [Seq([7 + i] * 60) for i in range(beside)]
    if others:
        stepper.step([(other, 9 + i) for i, other in enumerate(others)])
    found = []
    for count in counts:
        found.append(stepper.step([(own, count)], others, every_row=True)[:count])
    while own.done < len(prompt):
        found.append(stepper.step([], [own, *others], q_len)[:q_len])
    return torch.cat(found)[-last:]
