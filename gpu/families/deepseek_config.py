"""Latent attention, and experts chosen by groups: DeepSeek-V2, DeepSeek-V3 with layers that draft,
V3.2 with its indexer, and GLM-4.7-Flash and GLM-5, which are like these."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import MAX_INT, Fields, decoder_shape, mtp_layers
from actorium.gpu.families.layer_shapes import (
    ExpertShape,
    IndexShape,
    LatentShape,
    MixtureNames,
    Routing,
)
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import (
    ATTENTION,
    MtpNames,
    TensorSpec,
    index_tensors,
    latent_tensors,
    layer_mlp_tensors,
    layer_prefix,
    norm_tensors,
)

DEEPSEEK: dict[str, Any] = {
    "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "norm_topk_prob": True, "max_position_embeddings": 4096, "rope_interleave": True,
    "q_lora_rank": 1536,
}
"""What a config leaves out (transformers' `DeepseekV3Config`). A q_lora_rank of null means that
queries are projected at once."""
DEEPSEEK_V2: dict[str, Any] = {
    "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008,
    "moe_intermediate_size": 1407, "num_hidden_layers": 32, "num_attention_heads": 32,
    "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "first_k_dense_replace": 0, "q_lora_rank": 1536, "topk_method": "greedy",
}
"""The same of DeepSeek-V2."""
GLM4_MOE_LITE: dict[str, Any] = {
    "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
    "n_shared_experts": 1, "n_routed_experts": 64, "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "q_lora_rank": 768, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1,
}
"""The same of GLM-4.7-Flash."""
INDEXER: dict[str, Any] = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
"""The same of DeepSeek-V3.2's indexer."""
FULL, SHARED = "full", "shared"
"""What `indexer_types` says of layers with and without an indexer."""
GLM_MOE_DSA: dict[str, Any] = {
    **DEEPSEEK, **INDEXER, "index_n_heads": 32,
    "vocab_size": 154_880, "hidden_size": 6144, "intermediate_size": 12_288,
    "num_hidden_layers": 78, "num_attention_heads": 64, "q_lora_rank": 2048, "v_head_dim": 256,
    "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
}
"""The same of GLM-5."""
NAMES = MixtureNames(shared="shared_experts.", bias="gate.e_score_correction_bias")


def completed_latent(raw: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The config with all it leaves out. What it calls a head's width is that of the rotated part,
    and there are as many key heads as heads."""
    whole = {**defaults, **{name: value for name, value in raw.items()
                            if value is not None or name == "q_lora_rank"}}
    return {**whole, "head_dim": whole["qk_rope_head_dim"],
            "num_key_value_heads": whole["num_attention_heads"]}


def deepseek(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of DeepSeek-V3's config."""
    return latent_decoder(Fields(completed_latent(raw, DEEPSEEK), where), dtype)


def deepseek_v2(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of DeepSeek-V2 and its Lite: experts are chosen by probabilities, which
    are not normalised, among all of them or (`group_limited_greedy`) those of the groups with the
    best."""
    get = Fields({**completed_latent(raw, DEEPSEEK_V2), "rope_interleave": True}, where)
    get.only(norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1, mlp_bias=False)
    method = get.raw["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise get.bad("topk_method", f"must be greedy or group_limited_greedy, got {shown(method)}")
    if method == "greedy":
        get.raw |= {"n_group": 1, "topk_group": 1}
    shape = latent_decoder(get, dtype, Routing(softmax=True, best=1), NAMES._replace(bias=""))
    return replace(shape, mtp_layers=0)


def glm4_moe_lite(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of GLM-4.7-Flash: DeepSeek-V3's layers."""
    drafts = {"num_nextn_predict_layers": raw.get("num_mtp_layers", 1)}
    return _listed(Fields(completed_latent(raw, {**GLM4_MOE_LITE, **drafts}), where), dtype)


def deepseek_v32(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of DeepSeek-V3.2's config: DeepSeek-V3 with an indexer."""
    defaults = {**DEEPSEEK, **INDEXER, "max_position_embeddings": 163_840}
    get = Fields({**completed_latent(raw, defaults), "rope_interleave": True}, where)
    return _indexed(get, _listed(get, dtype), False, ())


def glm_moe_dsa(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of GLM-5's config: layers without an indexer attend to what the one before them
    chose."""
    get = Fields({**completed_latent(raw, GLM_MOE_DSA), "rope_interleave": True}, where)
    shape = _listed(get, dtype)
    return _indexed(get, shape, True, _sharing(get, shape.layers))


def _indexed(get: Fields, shape: ModelShape, interleaved: bool,
             shared: tuple[int, ...]) -> ModelShape:
    """With the indexer that the config tells of. Raises `BadModel`."""
    index = IndexShape(get.int("index_topk"), get.int("index_n_heads"), get.int("index_head_dim"),
                       interleaved, shared)
    assert shape.latent is not None
    get.int("q_lora_rank")  # its queries are made of that latent
    if index.dim < shape.latent.rope:
        raise get.bad("index_head_dim", f"{index.dim} is less than the {shape.latent.rope} numbers "
                      "that are rotated (qk_rope_head_dim)")
    return replace(shape, index=index)


def _sharing(get: Fields, layers: int) -> tuple[int, ...]:
    """Layers without an indexer: those listed, or by a pattern of letters, or all but each
    `index_topk_freq`-th. Raises `BadModel`."""
    raw, name = get.raw, "indexer_types"
    if raw.get(name) is None and (pattern := raw.get("index_topk_pattern")) is not None:
        name = "index_topk_pattern"
        if isinstance(pattern, str):
            raw[name] = [{"F": FULL, "S": SHARED}.get(own, own) for own in pattern]
    if raw.get(name) is not None:
        kinds = get.kinds(name, (FULL, SHARED), layers)
    else:
        name = "index_topk_freq"
        every = raw.get("index_topk_freq", 1)
        offset = raw.get("index_skip_topk_offset", 2)
        for field, value in ((name, every), ("index_skip_topk_offset", offset)):
            if type(value) is not int or not 0 <= value <= MAX_INT:
                raise get.bad(field, f"must be a number of layers, got {shown(value)}")
        kinds = [SHARED if max(i - offset + 1, 0) % max(every, 1) else FULL for i in range(layers)]
    if kinds[0] == SHARED:
        raise get.bad(name, "the first layer has none before it whose tokens it could share")
    return tuple(i for i, kind in enumerate(kinds) if kind == SHARED)


def _listed(get: Fields, dtype: str) -> ModelShape:
    """Experts in the layers that `mlp_layer_types` call sparse, by default in those behind the
    dense ones."""
    shape = latent_decoder(get, dtype)
    if get.raw.get("mlp_layer_types") is None:
        return shape
    kinds = get.kinds("mlp_layer_types", ("sparse", "dense"), shape.layers)
    return replace(shape, sparse=tuple(i for i, kind in enumerate(kinds) if kind == "sparse"))


def latent_decoder(get: Fields, dtype: str, kind: Routing = Routing(),
                   names: MixtureNames = NAMES) -> ModelShape:
    """A decoder with latent attention and experts chosen by groups; see `grouped_experts`."""
    latent, shape = _latent(get), decoder_shape(get, dtype)
    sparse, bias = layers_behind(get, shape.layers), get.flag("attention_bias")
    experts, routing = grouped_experts(get, kind, names)
    return replace(
        shape, latent=latent, attention_scale=_attention_scale(latent, get), qkv_bias=bias,
        o_bias=bias, sparse=sparse, experts=experts, routing=routing,
        mtp_layers=mtp_layers(get))


def deepseek_layer(s: ModelShape, i: int, at: str) -> list[TensorSpec]:
    """Tensors of a layer: latent attention, and an MLP or experts."""
    assert s.latent is not None
    index = index_tensors(f"{at}{ATTENTION}", s, s.latent) if s.index_layers([i]) else []
    return [*norm_tensors(at, s), *latent_tensors(f"{at}{ATTENTION}", s, s.latent), *index,
            *layer_mlp_tensors(at, s, i)]


def deepseek_mtp(s: ModelShape) -> MtpNames:
    """The layer that drafts: one behind the others. The copies of embedding and head that it may
    have are not read."""
    at = layer_prefix(s.layers)
    return MtpNames(at, f"{at}eh_proj", f"{at}enorm", f"{at}hnorm", f"{at}shared_head.norm")


def _latent(get: Fields) -> LatentShape:
    """Raises `BadModel` naming the field that is wrong."""
    query_rank = get.raw.get("q_lora_rank")
    shape = LatentShape(
        0 if query_rank is None else get.int("q_lora_rank"), get.int("kv_lora_rank"),
        get.int("qk_nope_head_dim"), get.int("qk_rope_head_dim"), get.int("v_head_dim"),
        get.flag("rope_interleave", True))
    if shape.rope % 2:
        raise get.bad("qk_rope_head_dim", f"must be even, got {shape.rope}")
    return shape


def _attention_scale(latent: LatentShape, get: Fields) -> float:
    """On the product of query and key; longer contexts by yarn make it larger (mscale_all_dim)."""
    rope = get.raw.get("rope_parameters") or get.raw.get("rope_scaling") or {}
    scale = latent.query ** -0.5
    if not isinstance(rope, dict):
        raise get.bad("rope_scaling", "must be an object")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    r = Fields(rope, get.where, "rope_scaling.")
    if kind == "default" or not rope.get("mscale_all_dim") or r.float("factor") <= 1:
        return scale
    grown = 0.1 * r.float("mscale_all_dim") * math.log(r.float("factor")) + 1.0
    return scale * grown * grown


def grouped_experts(get: Fields, kind: Routing = Routing(), names: MixtureNames = NAMES,
                    ) -> tuple[ExpertShape, Routing]:
    """The mixture of these fields, of whose routing `kind` has what they do not say. Raises
    `BadModel` naming the field that is wrong."""
    count, chosen = get.int("n_routed_experts"), get.int("num_experts_per_tok")
    groups, open_groups = get.int("n_group"), get.int("topk_group")
    size = get.int("moe_intermediate_size")
    if count % groups or count // groups < kind.best:
        raise get.bad("n_group", f"{groups} groups of {count} experts: each must have the same "
                      f"number, {kind.best} at least")
    if open_groups > groups:
        raise get.bad("topk_group", f"{open_groups} is more than {groups} groups")
    if chosen > open_groups * (count // groups):
        raise get.bad("num_experts_per_tok", f"{chosen} is more than the "
                      f"{open_groups * (count // groups)} experts of {open_groups} groups")
    experts = ExpertShape(count, chosen, size, get.int("n_shared_experts") * size,
                          get.flag("norm_topk_prob"), names=names)
    return experts, kind._replace(groups=groups, chosen_groups=open_groups,
                                  factor=get.float("routed_scaling_factor"))


def layers_behind(get: Fields, layers: int,
                  name: str = "first_k_dense_replace") -> tuple[int, ...]:
    """Layers with experts: all but so many of the first."""
    dense = get.raw.get(name)
    if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense <= MAX_INT:
        raise get.bad(name, f"must be a number of layers, got {shown(dense)}")
    return tuple(range(dense, layers))
