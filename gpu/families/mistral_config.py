"""Mistral 3 and what is in it: a Mistral, a Ministral 3, whose queries grow with their position, or
a Mistral 4, which has latent attention and experts as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import ConfigReader, Fields, rope_field
from actorium.gpu.families.deepseek_config import NAMES, completed_latent, latent_decoder
from actorium.gpu.families.layer_shapes import QueryScaling, Routing
from actorium.gpu.families.llama_config import mistral
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.text_parts import text_part

MINISTRAL3: dict[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144,
}
"""What a config of Ministral 3 leaves out, as in transformers."""
MISTRAL4: dict[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288,
    "moe_intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 32,
    "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
    "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 64, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
    "first_k_dense_replace": 0, "norm_topk_prob": True, "rope_interleave": True,
    "max_position_embeddings": 1_048_576,
}
"""The same of Mistral 4."""
YARN = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
"""Their ropes where a config names none, beside the numbers of each."""


def ministral3(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Ministral 3's config: Mistral's, and `query_scaling`."""
    get = Fields({**MINISTRAL3, **raw}, where)
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        get.raw["rope_parameters"] = {**YARN, "rope_theta": 1e6, "factor": 16.0,
                                      "original_max_position_embeddings": 16_384}
    return replace(mistral(get.raw, where, dtype), query_scaling=query_scaling(get))


def mistral4(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Mistral 4's config: DeepSeek-V3's layers, with probabilities for scores and no bias
    on them, and `query_scaling`."""
    get = Fields(completed_latent(raw, MISTRAL4), where)
    name = rope_field(get)
    rope = get.raw.get(name) or {**YARN, "rope_theta": 1e4, "factor": 128.0,
                                 "original_max_position_embeddings": 8192}
    if not isinstance(rope, dict):
        raise get.bad(name, "must be an object")
    turned, width = get.int("qk_rope_head_dim"), get.int("qk_nope_head_dim")
    share = Fields(rope, where, f"{name}.").float("partial_rotary_factor",
                                                  turned / (turned + width))
    if int((turned + width) * share) != turned:
        raise get.bad(f"{name}.partial_rotary_factor", f"must be {turned} of {turned + width} "
                      f"dimensions, got {shown(share)}")
    get.raw[name] = {**rope, "partial_rotary_factor": None}
    shape = latent_decoder(get, dtype, Routing(softmax=True), NAMES._replace(bias=""))
    return replace(shape, query_scaling=query_scaling(get))


def query_scaling(get: Fields) -> QueryScaling | None:
    """How queries grow beyond the length that the model was trained on before its rope was scaled,
    where the rope's `llama_4_scaling_beta` says so."""
    name = rope_field(get)
    rope = Fields(get.raw[name], get.where, f"{name}.")
    if not rope.raw.get("llama_4_scaling_beta"):
        return None
    return QueryScaling(rope.float("llama_4_scaling_beta"),
                        rope.int("original_max_position_embeddings"))


TEXTS: dict[str, tuple[ConfigReader, str]] = {
    "mistral": (mistral, ""), "ministral3": (ministral3, ""),
    "mistral4": (mistral4, "Mistral4ForCausalLM")}
"""By the `model_type` of the text part: its reader, and the class whose layers it has, if it is not
Mistral 3's own."""


def mistral3(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of Mistral 3, of which the text part is served."""
    if not isinstance(raw.get("text_config"), dict):
        raise Fields(raw, where).bad("text_config", "must be an object, "
                                     f"got {shown(raw.get('text_config'))}")
    text = text_part(raw)
    kind = text.get("model_type", "mistral")
    if kind not in TEXTS:
        raise Fields(text, where, "text_config.").bad(
            "model_type", f"must be one of {', '.join(TEXTS)}, got {shown(kind)}")
    read, name = TEXTS[kind]
    shape = read(text, where, dtype)
    return replace(shape, architecture=name or shape.architecture)
