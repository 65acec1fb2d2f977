"""Granite 3, Llama with multipliers, and its MoE; and Granite-4 hybrid: Mamba-2 and attention
layers, an MLP for all tokens, and experts beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import (
    Fields,
    completed,
    decoder_shape,
    read_experts,
    shared_rope,
)
from actorium.gpu.families.layer_shapes import ExpertShape, MixtureNames, RopeShape
from actorium.gpu.families.mamba_config import bamba_mamba
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import MambaShape
from actorium.gpu.families.tensor_specs import (
    ATTENTION,
    TensorSpec,
    attention_tensors,
    linear_tensors,
    mamba_tensors,
    mixture_tensors,
    norm_tensors,
)

GRANITE: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
"""What a config of Granite 3 leaves out, as in transformers."""
MOE: dict[str, Any] = {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2}
"""What one of Granite 3 MoE leaves out, as in transformers."""
HYBRID: dict[str, Any] = {
    **MOE, "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
    "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_conv_bias": True, "mamba_proj_bias": False,
}
"""What one of Granite-4 hybrid leaves out (transformers' GraniteMoeHybridConfig)."""
EXPERTS = MixtureNames("block_sparse_moe.", "router.layer",
                       stacked=("input_linear.weight", "output_linear.weight"))
RECURRENT, FULL = ("mamba", "linear_attention"), ("attention", "full_attention")
"""Names of the two kinds of layers: the checkpoints' own, and transformers'."""


def granite(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Granite 3's config; its layers are Llama's."""
    get = Fields(completed(raw, GRANITE), where)
    return replace(_multiplied(get, decoder_shape(get, dtype)), mlp_bias=get.flag("mlp_bias"))


def granite_moe(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Granite 3 MoE's config: experts in every layer, chosen as Mixtral's are."""
    get = Fields(completed(raw, MOE), where)
    shape = _multiplied(get, decoder_shape(get, dtype))
    experts = read_experts(get, "num_local_experts", shape.intermediate, True, names=EXPERTS)
    return replace(shape, experts=experts, sparse=tuple(range(shape.layers)))


def granite_moe_shared(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of Granite 3 MoE with an MLP for all tokens, where its size is not 0."""
    shape, get = granite_moe(raw, where, dtype), Fields(raw, where)
    if not raw.get("shared_intermediate_size"):
        return shape
    shared = get.int("shared_intermediate_size")
    assert shape.experts is not None
    return replace(shape, intermediate=shared, experts=shape.experts._replace(
        shared=shared, shared_gate=False))


def granite_hybrid(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Granite-4 hybrid's config."""
    get = Fields(completed(raw, HYBRID), where)
    shape = _multiplied(get, decoder_shape(get, dtype, ropes=_ropes(get)))
    experts, recurrent, mamba = _experts(get), _mamba_layers(get, shape.layers), bamba_mamba(get)
    return replace(
        shape, intermediate=get.int("shared_intermediate_size"),
        recurrent=recurrent, recurrence=mamba if recurrent else None,
        experts=experts, sparse=tuple(range(shape.layers)) if experts else ())


def _multiplied(get: Fields, shape: ModelShape) -> ModelShape:
    """The shape with the biases and multipliers of all Granites.

    What each layer gives is multiplied by `residual_multiplier`, r, before it is added. The same
    without a product at every layer: hidden states are kept divided by r, so are the embeddings,
    and a norm takes no notice but for its epsilon, which is then that over r * r.
    """
    residual, bias = get.float("residual_multiplier"), get.flag("attention_bias")
    return replace(
        shape, qkv_bias=bias, o_bias=bias, norm_eps=shape.norm_eps / residual**2,
        attention_scale=get.float("attention_multiplier"),
        embed_scale=get.float("embedding_multiplier") / residual, stream_scale=residual,
        scales_given=True, logit_scale=1 / get.float("logits_scaling"))


def granite_hybrid_layer(s: ModelShape, i: int, at: str) -> list[TensorSpec]:
    """Tensors of a layer: attention or Mamba-2, and an MLP with or without experts."""
    specs = norm_tensors(at, s)
    if i in s.recurrent and isinstance(s.recurrence, MambaShape):
        specs += mamba_tensors(f"{at}mamba.", s.recurrence, s.hidden)
    else:
        specs += attention_tensors(f"{at}{ATTENTION}", s)
    if s.experts:
        specs += mixture_tensors(at, s.hidden, routed_alone(s.experts))
        if not s.experts.shared:
            return specs
    return [*specs,
            *linear_tensors(f"{at}shared_mlp.input_linear", 2 * s.intermediate, s.hidden,
                            segments=(s.intermediate, s.intermediate)),
            *linear_tensors(f"{at}shared_mlp.output_linear", s.hidden, s.intermediate)]


def routed_alone(s: ExpertShape) -> ExpertShape:
    """The mixture without the expert that all tokens share: that one is the MLP beside it."""
    return s._replace(shared=0)


def _ropes(get: Fields) -> tuple[RopeShape, ...]:
    kind = get.raw.get("position_embedding_type")
    if kind == "rope":
        return (shared_rope(get),)
    if kind not in (None, "nope"):
        raise get.bad("position_embedding_type", f"must be rope or nope, got {shown(kind)}")
    return ()


def _mamba_layers(get: Fields, layers: int) -> tuple[int, ...]:
    """The recurrent ones, as `layer_types` (once `layers_block_type`) say. Raises `BadModel`."""
    name = "layer_types" if "layer_types" in get.raw else "layers_block_type"
    kinds = get.kinds(name, (RECURRENT[0], FULL[0], *RECURRENT, *FULL), layers)
    if not set(kinds) & set(FULL):
        raise get.bad(name, f"a model without {FULL[0]} layers is not supported")
    return tuple(i for i, kind in enumerate(kinds) if kind in RECURRENT)


def _experts(get: Fields) -> ExpertShape | None:
    """None where `num_local_experts` is 0. Raises `BadModel` naming the field that is wrong."""
    if get.raw["num_local_experts"] == 0:
        return None
    return read_experts(get, "num_local_experts", get.int("intermediate_size"), True,
                        get.int("shared_intermediate_size"), shared_gate=False, names=EXPERTS)
