"""Gemma 3n and 4, of which the text part is served. In both the last layers may read an earlier
layer's pages, and each token may give every layer an input by itself. Gemma 3n: hidden states in
several streams. Gemma 4: layers with full attention have heads of their own and, perhaps, keys for
values; experts may stand beside the dense MLP."""

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
from actorium.gpu.families.layer_shapes import (
    AltUpShape,
    FullHeads,
    MixtureNames,
    RopeShape,
    TokenInputs,
)
from actorium.gpu.families.llama_config import (
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    ropes_by_type,
    rounded,
)
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
GEMMA3N: dict[str, Any] = {
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384,
    "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "max_position_embeddings": 32_768, "tie_word_embeddings": True, "sliding_window": 512,
    "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256, "altup_active_idx": 0, "altup_correct_scale": True,
    "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
}
"""The same of Gemma 3n."""
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
    kinds = [*_kinds(get, 6)[:-1], FULL]
    shape = decoder_shape(get, dtype, ropes=_ropes(get), activation="gelu")
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


def gemma3n(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Gemma 3n's config. Layers have one width of MLP; each fifth one full attention
    where `layer_types` is left out, and the first ten of more than ten sparse gates where
    `activation_sparsity_pattern` is."""
    get = _text(raw, where, GEMMA3N)
    get.only(hidden_activation="gelu_pytorch_tanh")
    if get.raw.get("use_bidirectional_attention"):
        raise get.bad("use_bidirectional_attention", "is not supported")
    if isinstance(widths := get.raw["intermediate_size"], list):
        if len(widths) != get.layers() or len(set(map(str, widths))) != 1:
            raise get.bad("intermediate_size", f"only one width for all {get.layers()} layers is "
                          f"supported, got {shown(widths)}")
        get.raw["intermediate_size"] = widths[0]
    kinds = _kinds(get, 5)
    ropes = ropes_by_type(get, get.float("rope_theta", 1e6), get.float("rope_local_base_freq", 1e4))
    shape = decoder_shape(get, dtype, ropes=ropes, activation="gelu")
    bias, window, streams = (get.flag("attention_bias"), get.int("sliding_window"),
                             get.int("altup_num_inputs", maximum=64))
    if (active := get.raw["altup_active_idx"]) not in range(streams):
        raise get.bad("altup_active_idx", f"must be below {streams}, got {shown(active)}")
    altup = AltUpShape(streams, active, get.flag("altup_correct_scale"), get.int("laurel_rank"),
                       _sparsity(get, shape.layers))
    given = TokenInputs(get.int("vocab_size_per_layer_input"),
                        get.int("hidden_size_per_layer_input"))
    return replace(
        shape, windows=tuple(window if kind == SLIDING else 0 for kind in kinds), qkv_bias=bias,
        o_bias=bias, qk_norm=True, value_norm=True, attention_scale=1.0,
        layer_norms=SANDWICH_NORMS, kv_sources=_sources(get, kinds), altup=altup,
        embed_scale=rounded(shape.hidden**0.5, shape.dtype), token_inputs=given,
        logit_cap=get.float("final_logit_softcapping"))


def _sparsity(get: Fields, layers: int) -> tuple[float, ...]:
    """Of each layer, the share of its gates that are cut off."""
    listed = get.raw.get("activation_sparsity_pattern")
    if listed is None:
        return tuple(0.95 if layers > 10 and i < 10 else 0.0 for i in range(layers))
    if not isinstance(listed, list) or len(listed) != layers or not all(
            isinstance(share, int | float) and 0 <= share < 1 for share in listed):
        raise get.bad("activation_sparsity_pattern", f"must list {layers} numbers from 0 to less "
                      f"than 1, got {shown(listed)}")
    return tuple(map(float, listed))


def _text(raw: dict[str, Any], where: Path, defaults: dict[str, Any]) -> Fields:
    """The config of the text part, complete."""
    nested, prefix = raw.get("text_config"), ""
    if isinstance(nested, dict):
        kept = {key: raw[key] for key in ("dtype", "torch_dtype") if raw.get(key)}
        raw, prefix = {**kept, **nested, "architectures": raw["architectures"]}, "text_config."
    return Fields(completed(raw, defaults), where, prefix)


def _kinds(get: Fields, every: int) -> list[str]:
    """Of each layer; by default every so many have full attention."""
    layers = get.layers()
    if get.raw.get("layer_types") is None:
        return [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    return list(get.kinds("layer_types", (SLIDING, FULL), layers))


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


def gemma_layer(s: ModelShape, i: int, at: str) -> list[TensorSpec]:
    """Tensors of a layer of Gemma 3n or 4."""
    own = s.of_layer(i)
    missing = ["v_proj"] if own.keys_as_values else []
    if not s.owns_kv(i):
        missing = ["k_proj", "v_proj", "k_norm"]
    specs = [
        *(spec for spec in attention_tensors(f"{at}{ATTENTION}", own)
          if spec.name.split(".")[-2] not in missing),
        *dense_tensors(f"{at}mlp.", s.hidden, own.intermediate),
        *norm_tensors(at, s, s.layer_norms.names)]
    if s.altup is None:
        specs.append(TensorSpec(f"{at}layer_scalar", (1,)))
    else:
        specs += altup_tensors(at, s, s.altup)
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


def altup_tensors(at: str, s: ModelShape, a: AltUpShape) -> list[TensorSpec]:
    """What a layer of Gemma 3n has beside attention, MLP and a token's own input."""
    altup, low = f"{at}altup.", f"{at}laurel."
    return [TensorSpec(f"{altup}correct_output_scale", (s.hidden,)),
            TensorSpec(f"{altup}prediction_coefs.weight", (a.streams**2, a.streams)),
            TensorSpec(f"{altup}correction_coefs.weight", (a.streams, a.streams)),
            TensorSpec(f"{altup}modality_router.weight", (a.streams, s.hidden)),
            *norm_tensors(altup, s, ["router_norm"]),
            *linear_tensors(f"{low}linear_left", a.rank, s.hidden),
            *linear_tensors(f"{low}linear_right", s.hidden, a.rank),
            *norm_tensors(low, s, ["post_laurel_norm"])]
