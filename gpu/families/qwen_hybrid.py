"""Qwen3-Next, Qwen3.5 (dense and sparse), and Qwen3-MoE, which has attention alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.base import base_shape, one_for_all
from actorium.gpu.families.config_fields import Fields
from actorium.gpu.families.hybrid_shape import (
    HYBRIDS,
    delta_shape,
    expert_shape,
    linear_layers,
    sparse_layers,
    text_part,
)
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.mtp_shape import mtp_layers


def qwen_hybrid(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of these configs; of those with images the text part is served."""
    architectures = raw["architectures"]
    family = HYBRIDS[architectures[0]]
    get = Fields({**text_part(raw, family.defaults), "architectures": architectures}, where)
    shape = base_shape(get, dtype, ropes=one_for_all(get, partial=family.recurrent))
    if get.flag("use_sliding_window"):
        raise get.bad("use_sliding_window", "is not supported for this architecture")
    bias = get.flag("attention_bias")
    shape = replace(shape, qkv_bias=bias, o_bias=bias, qk_norm=True,
                    sparse=sparse_layers(get, shape.layers), experts=expert_shape(get, family),
                    mtp_layers=mtp_layers(get))
    if not family.recurrent:
        return shape
    return replace(shape, norm_plus_one=True, output_gate=True,
                   rotary_dim=_rotary_dim(get, shape.head_dim),
                   recurrent=linear_layers(get, shape.layers), recurrence=delta_shape(get))


def _rotary_dim(get: Fields, head_dim: int) -> int:
    found = get.raw.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise get.bad("rope_parameters", "must be an object")
    name = "rope_parameters.partial_rotary_factor"
    share = found.get("partial_rotary_factor") or get.float("partial_rotary_factor", 0.25)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise get.bad(name, f"must be above 0 and at most 1, got {shown(share)}")
    if int(head_dim * share) % 2 or int(head_dim * share) < 2:
        raise get.bad(name, f"{share} of {head_dim} dimensions is no even number")
    return int(head_dim * share)
