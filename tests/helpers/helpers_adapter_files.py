"""Adapters for tests: PEFT's folders with small random matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
PREFIX = "base_model.model."


def adapter_tensors(seed: int = 0, rank: int = 4, inputs: int = 8, outputs: int = 16,
                    modules: tuple[str, ...] = MODULES) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the matrices of each module, by their names in the file."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for module in modules:
        tensors[f"{PREFIX}{module}.lora_A.weight"] = draw.standard_normal(
            (rank, inputs)).astype(np.float32)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = draw.standard_normal(
            (outputs, rank)).astype(np.float32)
    return tensors


def write_adapter(folder: Path, tensors: dict[str, np.ndarray[Any, Any]] | None = None,
                  **config: Any) -> Path:
    """Writes an adapter, and returns its folder. config: fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none",
              "target_modules": ["q_proj", "down_proj"],
              "base_model_name_or_path": "org/base"} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(adapter_tensors() if tensors is None else tensors,
              folder / "adapter_model.safetensors")
    return folder
