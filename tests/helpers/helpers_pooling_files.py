"""Files of sentence-transformers beside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TYPE = "sentence_transformers.models"


def write_modules(path: Path, mode: str, dense: tuple[int, ...] = (), normalize: bool = True,
                  **pooling: Any) -> list[tuple[Tensor, Tensor]]:
    """Writes the files of sentence-transformers beside a checkpoint of 64 hidden numbers; mode: as
    its Pooling has it; dense: widths of layers behind it, whose weights are returned."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalize]
    (path / "modules.json").write_text(json.dumps([
        {"idx": i, "name": str(i), "path": "" if kind == "Transformer" else f"{i}_{kind}",
         "type": f"{TYPE}.{kind}"} for i, kind in enumerate(kinds)]))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({
        "word_embedding_dimension": 64, **{f"pooling_mode_{name}": name == mode for name in (
            "cls_token", "mean_tokens", "max_tokens", "lasttoken")}, **pooling}))
    columns, made = 64, []
    for i, rows in enumerate(dense, 2):
        folder = path / f"{i}_Dense"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({
            "in_features": columns, "out_features": rows, "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh"}))
        weight, bias = torch.randn(rows, columns) / 8, torch.randn(rows)
        save_file({"linear.weight": weight, "linear.bias": bias}, folder / "model.safetensors")
        made.append((weight, bias))
        columns = rows
    return made
