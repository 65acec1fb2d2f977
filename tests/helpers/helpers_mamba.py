"""Tiny random Granite-4 hybrid checkpoints, and their config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

GRANITE = "GraniteMoeHybridForCausalLM"
BASE: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None, "rms_norm_eps": 1e-4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"], "tie_word_embeddings": False,
    "num_local_experts": 0, "num_experts_per_tok": 3, "shared_intermediate_size": 96,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 24,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 32,
    "position_embedding_type": "nope", "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.2, "logits_scaling": 2.0,
}


def granite_model(seed: int = 0, **options: Any) -> Any:
    """A random transformers model, fp32, in eval mode, with every parameter random: states that
    neither vanish nor stay, norms near their working point."""
    import transformers

    config = transformers.GraniteMoeHybridConfig(**{**BASE, **options})
    config.architectures = [GRANITE]
    torch.manual_seed(seed)
    model = transformers.GraniteMoeHybridForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.uniform_(-4.0, 0.5)
            elif name.endswith((".D", "dt_bias")):
                p.normal_(0.0, 1.0)
            elif "norm" in name:
                p.normal_(1.0, 0.15)
            else:
                p.normal_(0.0, 0.5 if "conv1d" in name else 0.08)
    return model


def write_granite(path: Path, seed: int = 0, dtype: torch.dtype = torch.float32,
                  **options: Any) -> Any:
    """Save a tiny random checkpoint in HF format at `path`; returns the transformers model."""
    model = granite_model(seed, **options).to(dtype)
    model.save_pretrained(str(path))
    return model
