"""Tiny random Nemotron-H checkpoints with the layer that drafts, and that layer as an oracle."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from helpers_models import write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

NEMOTRON = "NemotronHForCausalLM"
SMALL: dict[str, Any] = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12,
    "conv_kernel": 3, "n_routed_experts": 6, "moe_intermediate_size": 32, "n_group": 1,
    "moe_shared_expert_intermediate_size": 64, "num_experts_per_tok": 2, "topk_group": 1,
    "moe_latent_size": 32, "layer_norm_epsilon": 1e-5,
}


class NemotronMtp:
    """The layer of Nemotron-H, of which transformers has the blocks: one with attention, and one
    with experts, the two last ones of a model."""

    def __init__(self, whole: Any) -> None:
        self.model, self.blocks = whole.model, list(whole.model.layers)[-2:]
        torch.manual_seed(7)
        self.extra = {name: torch.randn(shape) * 0.15 + ("norm" in name) for name, shape in (
            ("0.eh_proj", (64, 128)), ("0.enorm", (64,)), ("0.hnorm", (64,)),
            ("1.final_layernorm", (64,)))}
        self._project_to_logits = whole.lm_head

    def forward_layer(self, _: int, hidden: Tensor, positions: Tensor, mask: None,
                      input_ids: Tensor) -> Tensor:
        def normed(rows: Tensor, name: str) -> Tensor:
            return torch.nn.functional.rms_norm(rows, (64,), self.extra[name], 1e-5)

        token = normed(self.model.embeddings(input_ids), "0.enorm")
        rows = torch.cat((token, normed(hidden, "0.hnorm")), -1) @ self.extra["0.eh_proj"].T
        n = rows.shape[1]
        causal = torch.full((n, n), -math.inf).triu(1)[None, None]
        for block in self.blocks:
            rows = block(rows, attention_mask=causal, position_ids=positions)
        return normed(rows, "1.final_layernorm")


def write_nemotron(path: Path, **options: Any) -> tuple[Any, NemotronMtp]:
    """A checkpoint of all blocks but the last two, which are those of the layer that drafts."""
    trunk = ["mamba", "moe", "attention", "mamba", "mlp"]
    whole = write_checkpoint(path, NEMOTRON, 3, layers_block_type=[*trunk, "attention", "moe"],
                             **{**SMALL, **options})
    mtp, file = NemotronMtp(whole), path / "model.safetensors"
    tensors = {f"mtp.layers.{name}.weight": weight for name, weight in mtp.extra.items()}
    for name, weight in load_file(file).items():
        for i in (0, 1):
            name = re.sub(rf"^(model|backbone)\.layers\.{len(trunk) + i}\.", f"mtp.layers.{i}.",
                          name)
        tensors[name] = weight
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({
        **config, "layers_block_type": trunk, "num_hidden_layers": len(trunk),
        "num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}))
    whole.model.layers = whole.model.layers[:-2]
    whole.model.norm = whole.model.norm_f
    return whole, mtp
