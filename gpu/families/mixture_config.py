"""Models whose layers have attention and a mixture of experts: Mixtral."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.gpu.families.decoder_config import Fields, read_experts
from actorium.gpu.families.llama_config import mistral
from actorium.gpu.families.model_shape import MixtureNames, ModelShape

MIXTRAL: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
}
"""What a config leaves out (transformers' `MixtralConfig`)."""


def mixtral(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Mixtral's config: Mistral's, with experts in every layer."""
    raw = {**MIXTRAL, **raw}
    experts = read_experts(
        get := Fields(raw, where), "num_local_experts", get.int("intermediate_size"), True,
        names=MixtureNames("block_sparse_moe.", expert=("w1", "w3", "w2"), stacked=()))
    shape = mistral(raw, where, dtype)
    return replace(shape, experts=experts, sparse=tuple(range(shape.layers)))
