"""Qwen3-Next, Qwen3.5 (dense and sparse), and Qwen3-MoE, which has attention alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import Fields, decoder_shape, mtp_layers, read_experts
from actorium.gpu.families.layer_shapes import ExpertShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import DeltaShape
from actorium.gpu.families.tensor_specs import (
    ATTENTION,
    MtpNames,
    TensorSpec,
    attention_tensors,
    delta_tensors,
    layer_mlp_tensors,
    norm_tensors,
)


class QwenFamily(NamedTuple):
    """An architecture of this kind."""

    recurrent: bool
    shared: bool
    normalised: bool | None
    """None = the config's norm_topk_prob says."""
    defaults: dict[str, Any]
    """What a config leaves out (transformers' config classes)."""
    windowed: bool = False
    """A window, where `use_sliding_window` switches it on, is that of all layers."""


_DELTA = {
    "head_dim": 256, "num_attention_heads": 16, "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "partial_rotary_factor": 0.25,
}
_NEXT = {
    **_DELTA, "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 48, "num_key_value_heads": 2, "decoder_sparse_step": 1,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
}
_DENSE = {
    **_DELTA, "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 32, "num_key_value_heads": 4, "num_experts": 0,
}
_SPARSE = {
    **_DELTA, "vocab_size": 248_320, "hidden_size": 2048, "intermediate_size": 512,
    "num_hidden_layers": 40, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
}
_MOE = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
    "max_position_embeddings": 32_768, "decoder_sparse_step": 1, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
}
_DENSE_FAMILY = QwenFamily(True, False, None, _DENSE)
_SPARSE_FAMILY = QwenFamily(True, True, True, _SPARSE)
HYBRIDS = {
    "Qwen3NextForCausalLM": QwenFamily(True, True, None, _NEXT),
    "Qwen3_5ForCausalLM": _DENSE_FAMILY,
    "Qwen3_5ForConditionalGeneration": _DENSE_FAMILY,
    "Qwen3_5MoeForCausalLM": _SPARSE_FAMILY,
    "Qwen3_5MoeForConditionalGeneration": _SPARSE_FAMILY,
    "Qwen3MoeForCausalLM": QwenFamily(False, False, None, _MOE, True),
    "Qwen3VLMoeForConditionalGeneration": QwenFamily(False, False, True, {}),
}
"""The architectures read here. Of those with images the text part alone is served, but for
Qwen3-VL, whose reader is `qwen_vl_config`."""


def qwen_hybrid(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of these configs; of those with images the text part is served."""
    architectures = raw["architectures"]
    family = HYBRIDS[architectures[0]]
    get = Fields({**_text_part(raw, family.defaults), "architectures": architectures}, where)
    shape = decoder_shape(get, dtype, partial=True)
    if get.flag("use_sliding_window"):
        if not family.windowed:
            raise get.bad("use_sliding_window", "is not supported for this architecture")
        shape = replace(shape, windows=(get.int("sliding_window", 4096),) * shape.layers)
    bias = get.flag("attention_bias")
    shape = replace(shape, qkv_bias=bias, o_bias=bias, qk_norm=True,
                    sparse=sparse_layers(get, shape.layers), experts=_experts(get, family),
                    mtp_layers=mtp_layers(get))
    if not family.recurrent:
        return shape
    linear, delta = _linear_layers(get, shape.layers), _delta(get)
    return replace(shape, norm_plus_one=True, output_gate=True,
                   recurrent=linear, recurrence=delta if linear else None)


def hybrid_layer(s: ModelShape, i: int, at: str) -> list[TensorSpec]:
    """Tensors of a layer: attention or GatedDeltaNet, and an MLP or experts."""
    specs = norm_tensors(at, s, s.layer_norms.names)
    if i in s.recurrent and isinstance(s.recurrence, DeltaShape):
        specs += delta_tensors(f"{at}linear_attn.", s.recurrence, s.hidden)
    else:
        specs += attention_tensors(f"{at}{ATTENTION}", s)
    return specs + layer_mlp_tensors(at, s, i)


def qwen_mtp(_: ModelShape) -> MtpNames:
    """The layer that drafts."""
    return MtpNames("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding",
                    "mtp.pre_fc_norm_hidden", "mtp.norm")


def _text_part(raw: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model, complete."""
    nested = raw.get("text_config")
    if isinstance(nested, dict):
        kept = {key: raw[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings")
                if raw.get(key)}
        raw = {**kept, **nested}
    given = {key: value for key, value in raw.items() if value is not None}
    if "num_experts" not in given and "num_local_experts" in given:
        given["num_experts"] = given["num_local_experts"]
    return {**defaults, **given}


def _linear_layers(get: Fields, layers: int) -> tuple[int, ...]:
    """Layers of `layer_types` "linear_attention"; by default all but every fourth."""
    known = ("linear_attention", "full_attention")
    if get.raw.get("layer_types") is None:
        every = get.int("full_attention_interval", 4)
        kinds = [known[(i + 1) % every == 0] for i in range(layers)]
    else:
        kinds = get.kinds("layer_types", known, layers)
    if known[1] not in kinds:
        raise get.bad("layer_types", "a model without full_attention is not supported")
    return tuple(i for i, kind in enumerate(kinds) if kind == known[0])


def _delta(get: Fields) -> DeltaShape:
    """Raises `BadModel` naming the field that is wrong."""
    shape = DeltaShape(
        get.int("linear_num_key_heads"), get.int("linear_num_value_heads"),
        get.int("linear_key_head_dim"), get.int("linear_value_head_dim"),
        get.int("linear_conv_kernel_dim"))
    if shape.value_heads % shape.key_heads:
        raise get.bad("linear_num_key_heads",
                      f"{shape.key_heads} does not divide {shape.value_heads} value heads")
    if shape.width < 2:
        raise get.bad("linear_conv_kernel_dim", f"must be at least 2, got {shape.width}")
    return shape


def sparse_layers(get: Fields, layers: int) -> tuple[int, ...]:
    """Layers with experts: every `decoder_sparse_step`-th, but those of `mlp_only_layers`."""
    if not get.raw.get("num_experts"):
        return ()
    every, dense = get.int("decoder_sparse_step", 1), get.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise get.bad("mlp_only_layers", f"must be a list of layers, got {shown(dense)}")
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % every == 0)


def _experts(get: Fields, family: QwenFamily) -> ExpertShape | None:
    """Raises `BadModel` naming the field that is wrong."""
    if not get.raw.get("num_experts"):
        return None
    normalised = family.normalised
    if normalised is None:
        normalised = get.flag("norm_topk_prob")
    return read_experts(
        get, "num_experts", get.int("moe_intermediate_size"), normalised,
        get.int("shared_expert_intermediate_size") if family.shared else 0)
