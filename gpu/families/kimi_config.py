"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the
others, and experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import Fields
from actorium.gpu.families.deepseek_config import completed_latent, latent_decoder
from actorium.gpu.families.layer_shapes import NOPE, LayerParts, MixtureNames, Routing
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import KdaShape
from actorium.gpu.families.tensor_specs import layer_prefix

KIMI_LINEAR: dict[str, Any] = {
    "vocab_size": 163_840, "hidden_size": 2304, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32,
    "n_shared_experts": 1, "routed_scaling_factor": 2.446, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-5,
    "q_lora_rank": None, "n_routed_experts": 256, "linear_head_dim": 128, "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4, "first_k_dense_replace": 1, "model_max_length": 1_048_576,
}
"""What a config leaves out, as in transformers."""
OLD = {"num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob",
       "num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts",
       "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts"}
"""What configs call these fields."""
LINEAR = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
          "short_conv_kernel_size": "linear_conv_kernel_dim"}
"""The same of fields of `linear_attn_config`."""
EXPERTS = MixtureNames("", expert=("w1", "w3", "w2"), shared="shared_experts.",
                       bias="gate.e_score_correction_bias")
FULL, RECURRENT = "full_attention", "linear_attention"


def kimi_linear(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Kimi Linear's config."""
    linear = raw.get("linear_attn_config") or {}
    if not isinstance(linear, dict):
        raise Fields(raw, where).bad("linear_attn_config", f"must be an object, got "
                                     f"{shown(linear)}")
    named = {new: raw[old] for old, new in OLD.items() if raw.get(old) is not None}
    named |= {new: linear[old] for old, new in LINEAR.items() if linear.get(old) is not None}
    get = Fields(completed_latent({**raw, **named}, KIMI_LINEAR), where)
    shape = replace(latent_decoder(get, dtype, Routing(), EXPERTS), ropes=(NOPE,), mtp_layers=0)
    kda = KdaShape(get.int("linear_num_heads"), get.int("linear_head_dim"),
                   get.int("linear_conv_kernel_dim"))
    if kda.width < 2:
        raise get.bad("linear_conv_kernel_dim", f"must be at least 2, got {kda.width}")
    if raw.get("mlp_layer_types") is not None:
        kinds = get.kinds("mlp_layer_types", ("sparse", "dense"), shape.layers)
        shape = replace(shape, sparse=tuple(
            i for i, kind in enumerate(kinds) if kind == "sparse"))
    full = _full(get, linear, shape.layers)
    recurrent = tuple(i for i in range(shape.layers) if i not in full)
    return replace(shape, recurrent=recurrent, recurrence=kda if recurrent else None,
                   parts=tuple(_parts(i, i in full) for i in range(shape.layers)))


def _full(get: Fields, linear: dict[str, Any], layers: int) -> frozenset[int]:
    """The layers with attention. Raises `BadModel`."""
    if get.raw.get("layer_types") is not None:
        kinds = get.kinds("layer_types", (RECURRENT, FULL), layers)
        return frozenset(i for i, kind in enumerate(kinds) if kind == FULL)
    if "full_attn_layers" not in linear:
        return frozenset(range(4, layers, 4))
    listed = Fields(linear, get.where, "linear_attn_config.")
    # They are counted from 1.
    return frozenset(i - 1 for i in listed.indices("full_attn_layers", layers + 1) if i)


def _parts(i: int, attends: bool) -> LayerParts:
    at = layer_prefix(i)
    mixer = f"{at}self_attn."
    return LayerParts(f"{at}input_layernorm", mixer if attends else "", "" if attends else mixer,
                      f"{at}post_attention_layernorm", f"{at}mlp.")
