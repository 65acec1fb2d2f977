"""Granite-4 hybrid: Mamba-2 and attention layers, an MLP for all tokens, and experts beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.base import Ropes, base_shape, one_for_all, positions
from actorium.gpu.families.config_fields import Fields
from actorium.gpu.families.mamba_shape import (
    granite_experts,
    granite_fields,
    mamba_layers,
    mamba_shape,
)
from actorium.gpu.families.model_shape import ModelShape


def granite(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of these configs.

    What each layer gives is multiplied by `residual_multiplier`, r, before it is added. The same
    without a product at every layer: hidden states are kept divided by r, so are the embeddings,
    and a norm takes no notice but for its epsilon, which is then that over r * r.
    """
    get = Fields(granite_fields(raw), where)
    shape = base_shape(get, dtype, ropes=_ropes(get))
    residual, bias = get.float("residual_multiplier"), get.flag("attention_bias")
    experts = granite_experts(get)
    return replace(
        shape, intermediate=get.int("shared_intermediate_size"), qkv_bias=bias, o_bias=bias,
        norm_eps=shape.norm_eps / residual**2,
        attention_scale=get.float("attention_multiplier"),
        embed_scale=get.float("embedding_multiplier") / residual,
        logit_scale=1 / get.float("logits_scaling"),
        recurrent=mamba_layers(get, shape.layers), recurrence=mamba_shape(get),
        experts=experts, sparse=tuple(range(shape.layers)) if experts else ())


def _ropes(get: Fields) -> Ropes:
    kind = get.raw.get("position_embedding_type")
    if kind == "rope":
        return one_for_all(get)
    if kind not in (None, "nope"):
        raise get.bad("position_embedding_type", f"must be rope or nope, got {shown(kind)}")
    return (), positions(get)
