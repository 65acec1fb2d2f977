"""LFM2, dense and of experts: gated short convolutions in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.gpu.families.decoder_config import Fields, completed, decoder_shape, read_experts
from actorium.gpu.families.deepseek_config import layers_behind
from actorium.gpu.families.layer_shapes import LayerParts, MixtureNames, Routing
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import ConvShape
from actorium.gpu.families.tensor_specs import layer_prefix

LFM2: dict[str, Any] = {
    "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 128_000, "norm_eps": 1e-5, "tie_word_embeddings": True,
    "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True, "rope_theta": 1e6,
}
"""What a config of LFM2 leaves out, as in transformers."""
LFM2_MOE: dict[str, Any] = {
    **LFM2, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
    "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "use_expert_bias": True,
    "routed_scaling_factor": 1.0, "norm_topk_prob": True, "block_auto_adjust_ff_dim": False,
}
"""The same of LFM2 with experts."""
EXPERTS = MixtureNames("", expert=("w1", "w3", "w2"))
OLD = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
"""What old configs call these fields."""
CONV, FULL = "conv", "full_attention"


def lfm2(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of LFM2's config."""
    return _decoder(_fields(raw, where, LFM2), dtype)


def lfm2_moe(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of LFM2 with experts in all layers but the first `num_dense_layers`;
    their scores are sigmoids, and a bias counts when they are chosen."""
    get = _fields(raw, where, LFM2_MOE)
    shape = _decoder(get, dtype)
    sparse = layers_behind(get, shape.layers, "num_dense_layers")
    names = EXPERTS._replace(bias="expert_bias" if get.flag("use_expert_bias") else "")
    experts = read_experts(get, "num_experts", get.int("moe_intermediate_size"),
                           get.flag("norm_topk_prob"), names=names)
    return replace(
        shape, experts=experts if sparse else None, sparse=sparse,
        routing=Routing(factor=get.float("routed_scaling_factor"), added=1e-6) if sparse else None)


def _fields(raw: dict[str, Any], where: Path, defaults: dict[str, Any]) -> Fields:
    raw = {**raw, **{new: raw[old] for old, new in OLD.items() if raw.get(old) is not None}}
    return Fields(completed(raw, {**defaults, "rms_norm_eps": raw.get("norm_eps", 1e-5)}), where)


def _decoder(get: Fields, dtype: str) -> ModelShape:
    raw = get.raw
    shape = decoder_shape(get, dtype)
    if raw.get("layer_types") is None:
        full = get.indices("full_attn_idxs", shape.layers)
        if raw.get("full_attn_idxs") is None:
            full = frozenset(range(shape.layers))
        kinds = [FULL if i in full else CONV for i in range(shape.layers)]
    else:
        kinds = get.kinds("layer_types", (CONV, FULL), shape.layers)
    conv = ConvShape(shape.hidden, get.int("conv_L_cache"), get.flag("conv_bias"))
    if conv.width < 2:
        raise get.bad("conv_L_cache", f"must be at least 2, got {conv.width}")
    return replace(
        shape, intermediate=_adjusted(get), qk_norm=True, dense_names=("w1", "w3", "w2"),
        recurrent=tuple(i for i, kind in enumerate(kinds) if kind == CONV),
        recurrence=conv if CONV in kinds else None,
        parts=tuple(_parts(i, kind) for i, kind in enumerate(kinds)))


def _adjusted(get: Fields) -> int:
    """The width of the MLPs: two thirds of the field, rounded up to a multiple."""
    size, every = get.int("intermediate_size"), get.int("block_multiple_of")
    if not get.flag("block_auto_adjust_ff_dim"):
        return size
    size = int(get.float("block_ffn_dim_multiplier") * int(2 * size / 3))
    return -(-size // every) * every


def _parts(i: int, kind: str) -> LayerParts:
    at = layer_prefix(i)
    return LayerParts(f"{at}operator_norm", f"{at}self_attn." if kind == FULL else "",
                      f"{at}conv." if kind == CONV else "", f"{at}ffn_norm", f"{at}feed_forward.")
