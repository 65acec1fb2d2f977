"""Nemotron-H: blocks that are Mamba-2, attention, an MLP or experts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import (
    MAX_LAYERS,
    Fields,
    completed,
    decoder_shape,
    mtp_layers,
)
from actorium.gpu.families.deepseek_config import grouped_experts
from actorium.gpu.families.layer_shapes import LayerParts, MixtureNames
from actorium.gpu.families.mamba_config import MambaNames, read_mamba
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import MtpNames, layer_prefix

NEMOTRON_H: dict[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "intermediate_size": 21_504, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu",
    "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
    "conv_kernel": 4, "use_conv_bias": True, "n_routed_experts": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "layer_norm_epsilon": 1e-5,
}
"""What a config leaves out, as in transformers."""
OLD = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
       "mamba_dt_limit": "time_step_limit", "mamba_conv_bias": "use_conv_bias"}
"""What old configs call these fields."""
MAMBA = MambaNames("mamba_num_heads", "n_groups", "mamba_head_dim", "ssm_state_size",
                   "conv_kernel", "use_conv_bias", "use_bias", "layer_norm_epsilon")
EXPERTS = MixtureNames("", expert=("up_proj", "down_proj"), shared="shared_experts.",
                       stacked=("experts.up_proj", "experts.down_proj"),
                       bias="gate.e_score_correction_bias")
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
WORDS = {"linear_attention": "mamba", "full_attention": "attention",
         **{kind: kind for kind in LETTERS.values()}}
"""Kinds of blocks, as patterns and lists of them call these."""
MTP_BLOCKS = ["attention", "moe"]
"""Of the layer that drafts; others are not served, and then nothing is drafted."""
MTP_PARTS = LayerParts("mtp.layers.0.norm", "mtp.layers.0.mixer.", "", "mtp.layers.1.norm",
                       "mtp.layers.1.mixer.")


def nemotron_h(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Nemotron-H's config. A block that is a mixer, with the MLP behind it if there is
    one, is a layer here."""
    renamed = {new: raw[old] for old, new in OLD.items() if raw.get(old) is not None}
    get = Fields(completed({**raw, **renamed}, NEMOTRON_H), where)
    get.only(attention_bias=False, sliding_window=None, mlp_hidden_act="relu2",
             mamba_hidden_act="silu")
    kinds = _blocks(get)
    parts, sparse = _layers(get, kinds)
    get.raw |= {"num_hidden_layers": len(parts), "rms_norm_eps": get.float("layer_norm_epsilon")}
    shape = decoder_shape(get, dtype, ropes=(), activation="relu2")
    shape = replace(
        shape, parts=parts, mlp_bias=get.flag("mlp_bias"), gated=False,
        dense_names=EXPERTS.expert, recurrent=tuple(
            i for i, own in enumerate(parts) if own.recurrent),
        recurrence=read_mamba(get, get.int("mamba_head_dim"), MAMBA) if "mamba" in kinds else None)
    if not sparse:
        return shape
    get.only(mlp_bias=False)
    drafts = mtp_layers(get) if _mtp_blocks(get) == MTP_BLOCKS else 0
    experts, routing = grouped_experts(get, names=EXPERTS)
    latent = 0 if get.raw.get("moe_latent_size") is None else get.int("moe_latent_size")
    return replace(shape, sparse=sparse, routing=routing, mtp_layers=drafts,
                   mtp_parts=MTP_PARTS if drafts else None, experts=experts._replace(
                       shared=get.int("moe_shared_expert_intermediate_size"), latent=latent))


def nemotron_h_mtp(_: ModelShape) -> MtpNames:
    """The layer that drafts: a block with attention, and one with experts."""
    at = "mtp.layers.0."
    return MtpNames(at, f"{at}eh_proj", f"{at}enorm", f"{at}hnorm",
                    "mtp.layers.1.final_layernorm")


def _blocks(get: Fields) -> list[str]:
    """The kind of each block. Raises `BadModel`."""
    if get.raw.get("layers_block_type") is None and get.raw.get("layer_types") is not None:
        get.raw["layers_block_type"] = get.raw["layer_types"]
    return _kinds(get, "layers_block_type", "hybrid_override_pattern",
                  ["mamba", "moe", "attention", "mlp"])


def _mtp_blocks(get: Fields) -> list[str]:
    """Those of the layer that drafts."""
    return _kinds(get, "mtp_layers_block_type", "mtp_hybrid_override_pattern", MTP_BLOCKS)


def _kinds(get: Fields, listing: str, letters: str, default: list[str]) -> list[str]:
    """What a list of kinds of blocks says, or a pattern of letters. Raises `BadModel`."""
    listed, pattern = get.raw.get(listing), get.raw.get(letters)
    if listed is None and pattern is None:
        return default
    name, known = (listing, WORDS) if listed is not None else (letters, LETTERS)
    kinds = pattern if listed is None else listed
    if not isinstance(kinds, str | list) or not 0 < len(kinds) <= MAX_LAYERS or not all(
            isinstance(kind, str) and kind in known for kind in kinds):
        raise get.bad(name, f"must be made of {', '.join(known)}, got {shown(kinds)}")
    return [known[kind] for kind in kinds]


def _layers(get: Fields, kinds: Sequence[str]) -> tuple[tuple[LayerParts, ...], tuple[int, ...]]:
    """(the layers that these blocks make, those of them with experts). Raises `BadModel`."""
    layers: list[LayerParts] = []
    sparse = []
    for block, kind in enumerate(kinds):
        at = layer_prefix(block)
        norm, mixer = f"{at}norm", f"{at}mixer."
        if kind in ("mamba", "attention"):
            layers.append(LayerParts(norm, *((mixer, "") if kind == "attention" else ("", mixer))))
        elif not layers or layers[-1].mlp:
            raise get.bad("hybrid_override_pattern", f"block {block}: an MLP or experts that "
                          "follow no Mamba-2 and no attention are not supported")
        else:
            layers[-1] = layers[-1]._replace(mlp_norm=norm, mlp=mixer)
            sparse += [len(layers) - 1] if kind == "moe" else []
    return tuple(layers), tuple(sparse)
