"""Families whose layers have Mamba-2 (arXiv 2405.21060), beside attention or alone: Bamba,
Falcon-H1, and Mamba-2 itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import Fields, completed, decoder_shape
from actorium.gpu.families.layer_shapes import LayerParts, Multipliers
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import ConvShape, KdaShape, MambaShape, ScanShape
from actorium.gpu.families.tensor_specs import (
    TensorSpec,
    attention_tensors,
    conv_tensors,
    dense_tensors,
    grouped_mixture_tensors,
    kda_tensors,
    latent_tensors,
    layer_prefix,
    mamba_tensors,
    mixture_tensors,
    norm_tensors,
    scan_tensors,
)

BAMBA: dict[str, Any] = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144, "mamba_n_heads": 128,
    "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "partial_rotary_factor": 0.5,
}
"""What a config of Bamba leaves out, as in transformers."""

FALCON_H1: dict[str, Any] = {
    **BAMBA, "max_position_embeddings": 8192, "partial_rotary_factor": 1.0, "mamba_d_ssm": 1024,
    "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0, "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0, "attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0, "mamba_norm_before_gate": True,
}
"""The same of Falcon-H1. A mamba_d_ssm of null means `mamba_expand` times the hidden size."""

MAMBA2: dict[str, Any] = {
    "vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128,
    "head_dim": 64, "state_size": 128, "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4,
    "n_groups": 8, "use_conv_bias": True,
}
"""The same of Mamba-2."""


class MambaNames(NamedTuple):
    """What configs call the sizes of a Mamba-2 layer."""

    heads: str = "mamba_n_heads"
    groups: str = "mamba_n_groups"
    head_dim: str = "mamba_d_head"
    state_dim: str = "mamba_d_state"
    width: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    proj_bias: str = "mamba_proj_bias"
    norm_eps: str = "rms_norm_eps"


def bamba(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Bamba's config: attention in the layers of `attn_layer_indices`, Mamba-2 in all
    others, and an MLP in each."""
    get = Fields(completed(raw, BAMBA), where)
    shape, bias = decoder_shape(get, dtype, partial=True), get.flag("attention_bias")
    full = get.indices("attn_layer_indices", shape.layers)
    return replace(
        shape, qkv_bias=bias, o_bias=bias, mlp_bias=get.flag("mlp_bias"),
        recurrent=tuple(i for i in range(shape.layers) if i not in full),
        recurrence=bamba_mamba(get) if len(full) < shape.layers else None,
        parts=tuple(bamba_parts(i, i in full, i not in full) for i in range(shape.layers)))


def falcon_h1(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Falcon-H1's config: attention and Mamba-2 side by side in each layer."""
    get = Fields(completed(raw, FALCON_H1), where)
    shape, bias = decoder_shape(get, dtype), get.flag("attention_bias")
    whole = "mamba_d_ssm" in raw and raw["mamba_d_ssm"] is None
    norm = "before" if get.flag("mamba_norm_before_gate") else "after"
    mamba = bamba_mamba(get, "" if whole else "mamba_d_ssm")._replace(
        out_bias=get.flag("projectors_bias"), norm=norm if get.flag("mamba_rms_norm") else "none")
    return replace(
        shape, qkv_bias=bias, o_bias=bias, mlp_bias=get.flag("mlp_bias"),
        embed_scale=get.float("embedding_multiplier"), logit_scale=get.float("lm_head_multiplier"),
        recurrent=tuple(range(shape.layers)), recurrence=mamba, multipliers=_multipliers(get),
        parts=tuple(bamba_parts(i, True, True) for i in range(shape.layers)))


def mamba2(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Mamba-2's config: no attention and no MLP in any layer."""
    get = Fields(completed(raw, MAMBA2), where)
    shape, heads = unattended(get, dtype, get.float("layer_norm_epsilon")), get.int("num_heads")
    head_dim, inner = get.int("head_dim"), get.int("expand") * shape.hidden
    if heads * head_dim != inner:
        raise get.bad("num_heads", f"{heads} heads of {head_dim} are not expand * hidden_size, "
                      f"{inner}")
    mamba = read_mamba(get, head_dim, MambaNames(
        "num_heads", "n_groups", "head_dim", "state_size", "conv_kernel", "use_conv_bias",
        "use_bias", "layer_norm_epsilon"))
    return replace(shape, recurrence=mamba)


def unattended(get: Fields, dtype: str, eps: float) -> ModelShape:
    """A decoder of recurrent layers alone. The keys and values that it has nowhere are as narrow as
    they can be: see `ModelShape.groups`."""
    get = Fields({**get.raw, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2,
                  "intermediate_size": 1, "rms_norm_eps": eps}, get.where)
    shape = decoder_shape(get, dtype, ropes=())
    return replace(
        shape, heads=0, recurrent=tuple(range(shape.layers)),
        parts=tuple(LayerParts(f"{layer_prefix(i)}norm", "", f"{layer_prefix(i)}mixer.")
                    for i in range(shape.layers)))


def _multipliers(get: Fields) -> Multipliers:
    z, x, b, c, dt = get.floats("ssm_multipliers", 5)
    return Multipliers(
        get.float("attention_in_multiplier"), get.float("key_multiplier"),
        get.float("attention_out_multiplier"), get.float("ssm_in_multiplier"), (z, x, b, c, dt),
        get.float("ssm_out_multiplier"), *get.floats("mlp_multipliers", 2))


def bamba_parts(i: int, attends: bool, recurs: bool) -> LayerParts:
    """Those of the i-th layer, as Bamba's checkpoints call them."""
    at = layer_prefix(i)
    return LayerParts(f"{at}input_layernorm", f"{at}self_attn." if attends else "",
                      f"{at}mamba." if recurs else "", f"{at}pre_ff_layernorm",
                      f"{at}feed_forward.")


def parted_layer(s: ModelShape, i: int, at: str) -> list[TensorSpec]:
    """Tensors of a layer that has the parts that `s.parts` says. at: is theirs to name."""
    parts = s.parts_of(i)
    specs = norm_tensors("", s, [name for name in (parts.norm, parts.mlp_norm) if name])
    if parts.attention and s.latent is not None:
        specs += latent_tensors(parts.attention, s, s.latent)
    elif parts.attention:
        specs += attention_tensors(parts.attention, s)
    if parts.recurrent and isinstance(s.recurrence, KdaShape):
        specs += kda_tensors(parts.recurrent, s.recurrence, s.hidden)
    if parts.recurrent and isinstance(s.recurrence, MambaShape):
        specs += mamba_tensors(parts.recurrent, s.recurrence, s.hidden)
    if parts.recurrent and isinstance(s.recurrence, ConvShape):
        specs += conv_tensors(parts.recurrent, s.recurrence, s.hidden)
    if parts.recurrent and isinstance(s.recurrence, ScanShape):
        specs += scan_tensors(parts.recurrent, s.recurrence, s.hidden)
    if parts.mlp and s.has_experts(i) and s.experts:
        mixture = grouped_mixture_tensors if s.routing else mixture_tensors
        specs += mixture(parts.mlp, s.hidden, s.experts)
    elif parts.mlp:
        specs += dense_tensors(parts.mlp, s.hidden, s.intermediate, s.mlp_bias, s.dense_names)
    return specs


# --- Mamba-2 -------------------------------------------------------------------------------------

def bamba_mamba(get: Fields, size: str = "") -> MambaShape:
    """Of Bamba, and those whose fields are called alike. size: field of the width of all heads
    together; "": `mamba_expand` times the hidden size. Raises `BadModel`."""
    inner = get.int(size) if size else get.int("mamba_expand") * get.int("hidden_size")
    heads, auto = get.int("mamba_n_heads"), get.raw.get("mamba_d_head") == "auto"
    head_dim = max(1, inner // heads) if auto else get.int("mamba_d_head")
    if heads * head_dim != inner:
        raise get.bad("mamba_n_heads", f"{heads} heads of {head_dim} are not "
                      f"{size or 'mamba_expand * hidden_size'}, {inner}")
    return read_mamba(get, head_dim)


def read_mamba(get: Fields, head_dim: int, names: MambaNames = MambaNames()) -> MambaShape:
    """A Mamba-2 layer. Raises `BadModel` naming the field that is wrong."""
    heads, groups = get.int(names.heads), get.int(names.groups)
    if heads % groups:
        raise get.bad(names.groups, f"{groups} does not divide {heads} heads")
    width, bias = get.int(names.width), get.flag(names.proj_bias)
    if width < 2:
        raise get.bad(names.width, f"must be at least 2, got {width}")
    return MambaShape(heads, groups, head_dim, get.int(names.state_dim), width,
                      get.flag(names.conv_bias), bias, time_limit(get),
                      get.float(names.norm_eps, 1e-6), out_bias=bias)


def time_limit(get: Fields) -> tuple[float, float]:
    """`time_step_limit`; JSON has no infinity, so that transformers writes it as an object."""
    found = get.raw.get("time_step_limit", (0.0, math.inf))
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise get.bad("time_step_limit", f"must be two numbers, got {shown(found)}")
    low, high = (_number(value) for value in found)
    if low is None or high is None or not 0 <= low <= high or high == 0:
        raise get.bad("time_step_limit", "must be two numbers, the least "
                      f"first, got {shown(found)}")
    return low, high


def _number(value: Any) -> float | None:
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
