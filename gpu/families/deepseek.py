"""DeepSeek-V3: latent attention, experts chosen by groups, layers that draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.gpu.families.base import base_shape
from actorium.gpu.families.config_fields import Fields
from actorium.gpu.families.mla_shape import (
    attention_scale,
    complete,
    deepseek_experts,
    latent_shape,
    sparse_from,
)
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.mtp_shape import mtp_layers


def deepseek(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of DeepSeek-V3's config."""
    get = Fields(complete(raw), where)
    latent, shape = latent_shape(get), base_shape(get, dtype)
    sparse, bias = sparse_from(get, shape.layers), get.flag("attention_bias")
    experts, routing = deepseek_experts(get)
    return replace(
        shape, latent=latent, attention_scale=attention_scale(latent, get), qkv_bias=bias,
        o_bias=bias, sparse=sparse, experts=experts, routing=routing,
        mtp_layers=mtp_layers(get))
