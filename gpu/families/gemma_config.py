"""Gemma 4: layers with full attention have heads of their own and, perhaps, keys for values; the
last layers may read an earlier layer's pages; experts may stand beside the dense MLP; each token
may give every layer an input by itself. Of models with images and sound the text part is served."""

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
    read_rope,
)
from actorium.gpu.families.layer_shapes import FullHeads, MixtureNames, RopeShape, TokenInputs
from actorium.gpu.families.llama_config import FULL, SANDWICH_NORMS, SLIDING, rounded
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_specs import (
    ATTENTION,
    TensorSpec,
    attention_tensors,
    dense_tensors,
    linear_tensors,
    mixture_tensors,
    norm_tensors,
)

GEMMA4: dict[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "max_position_embeddings": 131_072, "tie_word_embeddings": True, "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
}
"""What a config leaves out."""
ROPES = {SLIDING: {"rope_theta": 1e4},
         FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}
ROUTER = "router."
EXPERTS_IN, DENSE_OUT, EXPERTS_OUT = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1",
                                      "post_feedforward_layernorm_2")
PER_LAYER = "per_layer_config"
"""Of layers, by their number: what transformers makes of the fields of full attention."""


def gemma4(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Gemma 4's config."""
    get = _text(raw, where, GEMMA4)
    get.only(hidden_activation="gelu_pytorch_tanh")
    if get.raw.get("use_bidirectional_attention") not in (None, "vision"):
        raise get.bad("use_bidirectional_attention", "only null and vision (of images alone) are "
                      f"supported, got {shown(get.raw['use_bidirectional_attention'])}")
    kinds = _kinds(get)
    ropes = _ropes(get)
    shape = decoder_shape(get, dtype, ropes=ropes, activation="gelu")
    bias, window = get.flag("attention_bias"), get.int("sliding_window")
    sources = _sources(get, kinds)
    shared = sources and get.flag("use_double_wide_mlp")
    size = get.raw["hidden_size_per_layer_input"] and get.int("hidden_size_per_layer_input")
    cap = get.raw.get("final_logit_softcapping")
    experts = read_experts(
        get, "num_experts", get.int("moe_intermediate_size"), True, each="top_k_experts",
        names=MixtureNames("", f"{ROUTER}proj"), activation="gelu", beside=True,
    ) if get.flag("enable_moe_block") else None
    return replace(
        shape, windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        full_heads=_full_heads(get, kinds, shape), qkv_bias=bias, o_bias=bias, qk_norm=True,
        value_norm=True, attention_scale=1.0, layer_norms=SANDWICH_NORMS, kv_sources=sources,
        shared_intermediate=2 * shape.intermediate if shared else 0,
        embed_scale=rounded(shape.hidden**0.5, shape.dtype), experts=experts,
        logit_cap=get.float("final_logit_softcapping") if cap is not None else 0.0,
        token_inputs=TokenInputs(get.int("vocab_size_per_layer_input"), size) if size else None)


def _text(raw: dict[str, Any], where: Path, defaults: dict[str, Any]) -> Fields:
    """The config of the text part, complete."""
    nested, prefix = raw.get("text_config"), ""
    if isinstance(nested, dict):
        kept = {key: raw[key] for key in ("dtype", "torch_dtype") if raw.get(key)}
        raw, prefix = {**kept, **nested, "architectures": raw["architectures"]}, "text_config."
    return Fields(completed(raw, defaults), where, prefix)


def _kinds(get: Fields) -> list[str]:
    """Of each layer; by default every sixth has full attention. That of the last one has it."""
    layers = get.layers()
    if get.raw.get("layer_types") is None:
        kinds = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(layers)]
    else:
        kinds = list(get.kinds("layer_types", (SLIDING, FULL), layers))
    return [*kinds[:-1], FULL]


def _ropes(get: Fields) -> tuple[RopeShape, RopeShape]:
    """Of the full and of the windowed layers."""
    by_type = get.raw.get("rope_parameters") or ROPES
    if not isinstance(by_type, dict):
        raise get.bad("rope_parameters", "must be an object")
    full, at = by_type.get(FULL) or ROPES[FULL], f"rope_parameters.{FULL}"
    near = read_rope(get, f"rope_parameters.{SLIDING}", by_type.get(SLIDING) or {}, 1e4)
    if not isinstance(full, dict) or full.get("rope_type") != "proportional":
        return read_rope(get, at, full, 1e6), near
    r = Fields(full, get.where, f"{get.prefix}{at}.")
    share = r.float("partial_rotary_factor", 1.0)
    if share > 1:
        raise r.bad("partial_rotary_factor", f"must be above 0 and at most 1, got {share:g}")
    return RopeShape("proportional", r.float("rope_theta", 1e6), r.float("factor", 1.0),
                     share=share), near


def _full_heads(get: Fields, kinds: list[str], shape: ModelShape) -> FullHeads:
    """Heads of the layers with full attention."""
    raw, values = get.raw, get.flag("attention_k_eq_v")
    fields: dict[str, Any] = {"head_dim": raw["global_head_dim"], "num_key_value_heads": raw.get(
        "num_global_key_value_heads") if values else None}
    if (by_layer := raw.get(PER_LAYER)) is not None:
        full = {str(i) for i, kind in enumerate(kinds) if kind == FULL}
        each = list(by_layer.values()) if isinstance(by_layer, dict) else [None]
        if each and (not isinstance(each[0], dict) or by_layer.keys() != full
                     or any(entry != each[0] for entry in each)):
            raise get.bad(PER_LAYER, "only one and the same entry for each layer with full "
                          "attention is supported, and none for others")
        fields = dict.fromkeys(fields) | dict(*each[:1])
    if unknown := fields.keys() - {"head_dim", "num_key_value_heads"}:
        raise get.bad(PER_LAYER, f"{min(unknown)} is not supported")
    r = Fields(fields, get.where, get.prefix, {
        "head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"})
    kv_heads = r.int("num_key_value_heads", shape.kv_heads)
    width = r.int("head_dim", shape.head_dim)
    if shape.heads % kv_heads:
        raise r.bad("num_key_value_heads", f"{kv_heads} does not divide {shape.heads} heads")
    if width % 2:
        raise r.bad("head_dim", f"must be even, got {width}")
    return FullHeads(kv_heads, width, values)


def _sources(get: Fields, kinds: list[str]) -> tuple[int, ...]:
    """Of each layer, the one whose keys and values it reads; (): its own."""
    if not get.raw.get("num_kv_shared_layers"):
        return ()
    first = len(kinds) - get.int("num_kv_shared_layers", maximum=len(kinds) - 1)
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    if missing := set(kinds[first:]) - last.keys():
        raise get.bad("num_kv_shared_layers", f"no layer before the last {len(kinds) - first} has "
                      f"{min(missing)}")
    return tuple(i if i < first else last[kind] for i, kind in enumerate(kinds))


def gemma4_layer(s: ModelShape, i: int, at: str) -> list[TensorSpec]:
    """Tensors of a layer of Gemma 4."""
    own = s.of_layer(i)
    missing = ["v_proj"] if own.keys_as_values else []
    if not s.owns_kv(i):
        missing = ["k_proj", "v_proj", "k_norm"]
    specs = [
        *(spec for spec in attention_tensors(f"{at}{ATTENTION}", own)
          if spec.name.split(".")[-2] not in missing),
        *dense_tensors(f"{at}mlp.", s.hidden, own.intermediate),
        *norm_tensors(at, s, s.layer_norms.names), TensorSpec(f"{at}layer_scalar", (1,))]
    if (given := s.token_inputs) is not None:
        specs += [*linear_tensors(f"{at}per_layer_input_gate", given.size, s.hidden),
                  *linear_tensors(f"{at}per_layer_projection", s.hidden, given.size),
                  *norm_tensors(at, s, ["post_per_layer_input_norm"])]
    if s.experts is not None:
        specs += [TensorSpec(f"{at}{ROUTER}scale", (s.hidden,)),
                  TensorSpec(f"{at}{ROUTER}per_expert_scale", (s.experts.number,)),
                  *mixture_tensors(at, s.hidden, s.experts),
                  *norm_tensors(at, s, [EXPERTS_IN, DENSE_OUT, EXPERTS_OUT])]
    return specs
