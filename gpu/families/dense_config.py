"""Readers of decoders that differ from Llama in single points: Phi-3 and Phi-4 (fused projections,
longrope)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import Fields, completed
from actorium.gpu.families.llama_config import mistral
from actorium.gpu.families.model_shape import ModelShape

PHI3: dict[str, Any] = {
    "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}
"""What a config of Phi-3 leaves out, as in transformers."""


def phi3(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of Phi-3, Phi-3.5 and Phi-4: a window, if there is one, is that of all
    layers, and the one scaling of ropes is longrope."""
    get = Fields(completed(raw, PHI3), where)
    shape = mistral(get.raw, where, dtype)
    kind = shape.ropes[0].kind
    if kind not in ("default", "longrope"):
        raise get.bad("rope_scaling", f"must be longrope, got {shown(kind)}")
    return shape
