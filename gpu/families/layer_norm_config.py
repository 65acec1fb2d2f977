"""Readers of decoders with LayerNorms, or MLPs without a gate, or both.

- StarCoder2, Nemotron, Jais 2, Persimmon: as Llama with these.
- Command R and Command A (Cohere): attention and MLP side by side, after one norm; NoPE layers.
- StableLM, Phi, GPT-NeoX, GPT-J, Falcon: side by side, or in turn; a part of each head is rotated.
- GPT-2, GPTBigCode (StarCoder), OPT: learned positions.
- BLOOM, MPT, and some of Falcon: no positions; scores fall with distance (ALiBi).
- OLMo: norms without weights.
- Arcee, Apertus: RMS norms, no gate.
- Helium: RMS norms and a gate; the rotated pairs lie side by side.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import Fields, completed, decoder_shape
from actorium.gpu.families.layer_shapes import NOPE, LayerNorms
from actorium.gpu.families.llama_config import layer_windows
from actorium.gpu.families.model_shape import ModelShape

TANH, ERF = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), ("gelu", "gelu_python")
ACTIVATIONS = {**dict.fromkeys(TANH, "gelu"), **dict.fromkeys(ERF, "gelu_erf"), "relu": "relu",
               "relu2": "relu2", "silu": "silu", "swish": "silu", "xielu": "xielu"}
"""What configs call the activations of MLPs without a gate."""
ONE_NORM = LayerNorms(mlp="")
"""Of layers whose attention and MLP take the same rows."""
STARCODER2: dict[str, Any] = {
    "vocab_size": 49_152, "hidden_size": 3072, "intermediate_size": 12_288,
    "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True,
    "tie_word_embeddings": True,
}
"""What a config of StarCoder2 leaves out, as in transformers."""
COHERE: dict[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "logit_scale": 0.0625,
    "num_hidden_layers": 40, "num_attention_heads": 64, "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""What one of Command R or Command A leaves out."""

STABLELM: dict[str, Any] = {
    "vocab_size": 50_304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}
"""What one of StableLM leaves out."""
PHI: dict[str, Any] = {
    "vocab_size": 51_200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "num_attention_heads": 32, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
"""What one of Phi-1, Phi-1.5 or Phi-2 leaves out."""
NEMOTRON: dict[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 6144, "intermediate_size": 24_576,
    "num_hidden_layers": 32, "num_attention_heads": 48, "hidden_act": "relu2", "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
"""What one of Nemotron leaves out."""
OLMO: dict[str, Any] = {
    "vocab_size": 50_304, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32,
}
"""What one of the first OLMo leaves out."""
NEOX: dict[str, Any] = {
    "vocab_size": 50_432, "hidden_size": 6144, "intermediate_size": 24_576,
    "num_hidden_layers": 44, "num_attention_heads": 64, "hidden_act": "gelu",
    "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "rotary_emb_base": 10_000,
    "use_parallel_residual": True, "attention_bias": True,
}
"""What one of GPT-NeoX leaves out."""
PERSIMMON: dict[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 4096, "intermediate_size": 16_384,
    "num_hidden_layers": 36, "num_attention_heads": 64, "hidden_act": "relu2",
    "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "qk_layernorm": True,
}
"""What one of Persimmon leaves out."""
JAIS2: dict[str, Any] = {
    "vocab_size": 150_272, "hidden_size": 3328, "intermediate_size": 26_624,
    "num_hidden_layers": 32, "num_attention_heads": 26, "hidden_act": "relu2",
    "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True,
}
"""What one of Jais 2 leaves out."""
GPT_FIELDS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads":
              "n_head", "max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}
"""What configs of the GPTs call these fields."""
GPT2: dict[str, Any] = {
    "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "tie_word_embeddings": True,
}
"""What one of GPT-2 leaves out."""
BIGCODE = {**GPT2, "activation_function": "gelu_pytorch_tanh", "multi_query": True}
"""The same of GPTBigCode."""
GPTJ: dict[str, Any] = {
    "vocab_size": 50_400, "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "rotary_dim": 64,
}
"""The same of GPT-J."""
OPT: dict[str, Any] = {
    "vocab_size": 50_272, "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 2048, "activation_function": "relu",
    "do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}
"""The same of OPT."""
FALCON: dict[str, Any] = {
    "vocab_size": 65_024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "layer_norm_epsilon": 1e-5, "multi_query": True, "parallel_attn": True, "activation": "gelu",
    "tie_word_embeddings": True,
}
"""The same of Falcon."""
BLOOM_FIELDS = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
"""What configs of BLOOM call these fields."""
BLOOM: dict[str, Any] = {
    "vocab_size": 250_880, "hidden_size": 64, "n_layer": 2, "n_head": 8,
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "hidden_act": "gelu_new",
}
"""The same of BLOOM."""
MPT_FIELDS = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads":
              "n_heads"}
MPT: dict[str, Any] = {
    "vocab_size": 50_368, "d_model": 2048, "n_layers": 24, "n_heads": 16,
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "hidden_act": "gelu",
}
"""The same of MPT."""
HELIUM: dict[str, Any] = {
    "vocab_size": 48_000, "hidden_size": 2560, "intermediate_size": 7040, "num_hidden_layers": 24,
    "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8,
    "rope_theta": 100_000.0,
}
"""The same of Helium."""
ARCEE: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 2560, "intermediate_size": 18_432,
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
}
"""The same of Arcee."""

APERTUS: dict[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "xielu",
    "rms_norm_eps": 1e-5, "rope_theta": 12e6,
}
"""The same of Apertus."""
APERTUS_ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


def starcoder2(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of StarCoder2's config: a window, if there is one, is that of all layers."""
    get, shape = _read(raw, where, dtype, STARCODER2, "norm_epsilon", "hidden_act")
    shape = _biased(shape, get.flag("use_bias"), get.flag("use_bias"))
    if get.raw.get("sliding_window") is None:
        return shape
    return replace(shape, windows=(get.int("sliding_window"),) * shape.layers)


def cohere(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Command R's config."""
    raw = {"rope_theta": 500_000.0, **raw}
    get, shape = _read(raw, where, dtype, COHERE, "layer_norm_eps")
    normed = get.flag("use_qk_norm")
    return replace(_cohere(get, shape), qk_norm=normed, qk_norm_by_head=normed)


def cohere2(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of Command A and R7B: windows in the layers that `layer_types` name, by
    default in all but every `sliding_window_pattern`-th; the others rotate nothing."""
    get, shape = _read(raw, where, dtype, {**COHERE, "sliding_window_pattern": 4,
                                           "sliding_window": 4096}, "layer_norm_eps")
    if raw.get("sliding_window", 0) is None:
        raise get.bad("sliding_window", "must be a positive integer, got null")
    window, every = get.int("sliding_window"), get.int("sliding_window_pattern")
    windows = layer_windows(get, shape.layers, window) or tuple(
        window if (i + 1) % every else 0 for i in range(shape.layers))
    return replace(_cohere(get, shape), windows=windows, ropes=(NOPE, *shape.ropes))


def _cohere(get: Fields, shape: ModelShape) -> ModelShape:
    shape = _biased(shape, get.flag("attention_bias"), False)
    return replace(shape, norm_parts=("weight",), layer_norms=ONE_NORM, parallel=True,
                   interleaved=True, logit_scale=get.float("logit_scale"))


def stablelm(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of StableLM's config."""
    get, shape = _read(raw, where, dtype, STABLELM, "layer_norm_eps", partial=True)
    shape, normed = _beside(get, shape), get.flag("qk_layernorm")
    return replace(shape, qkv_bias=get.flag("use_qkv_bias"), qk_norm=normed,
                   qk_norms=(shape.heads, shape.kv_heads) if normed else ())


def phi(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of Phi-1, Phi-1.5 and Phi-2."""
    get, shape = _read(raw, where, dtype, PHI, "layer_norm_eps", "hidden_act", True)
    normed = get.flag("qk_layernorm")
    return _untied(get, replace(
        _biased(shape, True, True), parallel=True, layer_norms=ONE_NORM, head_bias=True,
        qk_norm=normed, qk_norm_bias=normed))


def nemotron(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of Nemotron-4 and Minitron."""
    get, shape = _read(raw, where, dtype, NEMOTRON, "norm_eps", "hidden_act", True)
    shape = _biased(shape, get.flag("attention_bias"), get.flag("mlp_bias"))
    return replace(shape, norm_plus_one=True)


def olmo(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the first OLMo's config."""
    get, shape = _read({**raw, "norm_eps": 1e-5}, where, dtype, OLMO, "norm_eps")
    clip = 0.0 if get.raw.get("clip_qkv") is None else get.float("clip_qkv")
    return replace(_biased(shape, get.flag("attention_bias"), False), norm_parts=(), clip_qkv=clip)


def gpt_neox(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of GPT-NeoX's config (Pythia)."""
    get = Fields(completed(raw, NEOX), where, called={
        "partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"})
    own = {name: get.raw[called] for name, called in get.called.items()}
    get, shape = _read({**_of_all_heads(get.raw), **own}, where, dtype, {}, "layer_norm_eps",
                       "hidden_act", True, get.called)
    return replace(_biased(shape, get.flag("attention_bias"), True),
                   parallel=get.flag("use_parallel_residual"))


def persimmon(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Persimmon's config."""
    get, shape = _read(_of_all_heads(raw), where, dtype, PERSIMMON, "layer_norm_eps", "hidden_act",
                       True)
    normed = get.flag("qk_layernorm")
    return replace(_biased(shape, True, True), qk_norm=normed, qk_norm_bias=normed)


def jais2(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of Jais 2."""
    get, shape = _read(raw, where, dtype, JAIS2, "layer_norm_eps", "hidden_act")
    return _biased(shape, get.flag("attention_bias"), get.flag("mlp_bias"))


def gpt2(raw: dict[str, Any], where: Path, dtype: str,
         defaults: dict[str, Any] = GPT2) -> ModelShape:
    """Reader of GPT-2's config."""
    get, shape = _gpt(raw, where, dtype, defaults)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if get.raw.get(name):
            raise get.bad(name, "is not supported")
    scale = shape.attention_scale if get.flag("scale_attn_weights") else 1.0
    return replace(_biased(shape, True, True), ropes=(), attention_scale=scale,
                   learned_positions=get.int("max_position_embeddings"))


def gpt_bigcode(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of SantaCoder and the first StarCoder."""
    shape = gpt2(raw, where, dtype, BIGCODE)
    return replace(shape, kv_heads=1 if raw.get("multi_query", True) else shape.heads)


def gptj(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of GPT-J's config."""
    get, shape = _gpt(raw, where, dtype, GPTJ)
    rotary = get.int("rotary_dim", maximum=shape.head_dim)
    if rotary % 2:
        raise get.bad("rotary_dim", f"must be even, got {rotary}")
    return _untied(get, replace(
        _biased(shape, False, True), parallel=True, layer_norms=ONE_NORM, head_bias=True,
        interleaved=True, rotary_dim=rotary if rotary < shape.head_dim else 0))


def opt(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of OPT's config."""
    raw = _of_all_heads(completed(raw, OPT))
    get, shape = _read({**raw, "norm_eps": 1e-5, "intermediate_size": raw["ffn_dim"]}, where, dtype,
                       {}, "norm_eps", "activation_function", False,
                       {"intermediate_size": "ffn_dim"})
    if not get.flag("do_layer_norm_before") or get.flag("_remove_final_layer_norm"):
        raise get.bad("do_layer_norm_before", "only true is supported, with the final norm")
    if get.raw.get("word_embed_proj_dim", shape.hidden) != shape.hidden:
        raise get.bad("word_embed_proj_dim", f"must be hidden_size, {shape.hidden}")
    bias, affine = get.flag("enable_bias"), get.flag("layer_norm_elementwise_affine")
    return replace(_biased(shape, bias, bias), ropes=(),
                   norm_parts=shape.norm_parts if affine else (),
                   learned_positions=get.int("max_position_embeddings"))


def falcon(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Falcon's config."""
    raw = _of_all_heads(completed(raw, FALCON))
    size = raw.get("ffn_hidden_size") or 4 * Fields(raw, where).int("hidden_size")
    get = Fields(raw, where)
    new, beside = get.flag("new_decoder_architecture"), get.flag("parallel_attn")
    if new and not beside:
        raise get.bad("parallel_attn", "must be true with new_decoder_architecture")
    heads = get.int("num_attention_heads")
    own = get.int("num_kv_heads", heads) if new or not get.flag("multi_query") else 1
    two = new and get.int("num_ln_in_parallel_attn", 2) == 2
    get, shape = _read({**raw, "num_key_value_heads": own, "intermediate_size": size}, where, dtype,
                       {}, "layer_norm_epsilon", "activation", False,
                       {"num_key_value_heads": "num_kv_heads",
                        "intermediate_size": "ffn_hidden_size"})
    bias = get.flag("bias")
    if get.flag("alibi"):  # of which scores are multiplied by the scale, as of products
        slopes = (_as_bf16(own) * shape.attention_scale for own in alibi_slopes(shape.heads))
        shape = replace(shape, ropes=(), alibi=tuple(slopes))
    return replace(_biased(shape, bias, bias), parallel=beside,
                   layer_norms=ONE_NORM if beside and not two else shape.layer_norms)


def bloom(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of BLOOM's config."""
    raw = {key: value for key, value in raw.items() if key != "hidden_act"}
    if raw.get("n_embed") is not None:
        raw["hidden_size"] = raw["n_embed"]
    get, shape = _sloping(_named(_of_all_heads(raw), BLOOM_FIELDS, BLOOM), where, dtype,
                          BLOOM_FIELDS)
    get.only(apply_residual_connection_post_layernorm=False)
    return replace(_biased(shape, True, True), embed_norm=True)


def mpt(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of MPT's config: no biases, not even of norms."""
    raw = {key: value for key, value in raw.items() if key != "hidden_act"}
    get, shape = _sloping(_named(_of_all_heads(raw), MPT_FIELDS, MPT), where, dtype, MPT_FIELDS)
    get.only(expansion_ratio=4, no_bias=True, logit_scale=None)
    own = raw.get("attn_config") or {}
    if not isinstance(own, dict):
        raise get.bad("attn_config", f"must be an object, got {shown(own)}")
    attend = Fields(own, where, "attn_config.")
    attend.only(attn_type="multihead_attention", prefix_lm=False, qk_ln=False, alibi=True,
                alibi_bias_max=8)
    clip = attend.float("clip_qkv") if own.get("clip_qkv") else 0.0
    return replace(shape, norm_parts=("weight",), clip_qkv=clip,
                   attention_scale=attend.float("softmax_scale", shape.attention_scale))


def _sloping(raw: dict[str, Any], where: Path, dtype: str,
             called: Mapping[str, str]) -> tuple[Fields, ModelShape]:
    """A decoder without positions whose scores fall with distance."""
    size = 4 * Fields(raw, where, called=called).int("hidden_size")
    get, shape = _read({**raw, "intermediate_size": size}, where, dtype, {}, "layer_norm_epsilon",
                       "hidden_act", False, called)
    return get, replace(shape, ropes=(), alibi=alibi_slopes(shape.heads))


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """By how much the scores of each of these heads fall with each token of distance (ALiBi, arXiv
    2108.12409): from 2^(-8 / heads) to 2^-8. Of other numbers of heads than powers of two, every
    other one of the next power of two comes first.

    >>> alibi_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    whole = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return tuple(slopes if whole == heads else (slopes[1::2] + slopes[::2])[:heads])


def _as_bf16(x: float) -> float:
    """Rounded, as Falcon rounds its slopes."""
    bits = int.from_bytes(struct.pack("<f", x), "little")
    bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def helium(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Helium's config."""
    get = Fields(completed(raw, HELIUM), where)
    return replace(decoder_shape(get, dtype), qkv_bias=get.flag("attention_bias"),
                   mlp_bias=get.flag("mlp_bias"), interleaved=True)


def arcee(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of Arcee's AFM."""
    get = Fields(completed(raw, ARCEE), where)
    shape = decoder_shape(get, dtype, activation=activation_of(get, "hidden_act"))
    shape = _biased(shape, get.flag("attention_bias"), get.flag("mlp_bias"))
    return replace(shape, gated=False)


def apertus(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Apertus's config."""
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw = {**raw, "rope_parameters": APERTUS_ROPE}
    get = Fields(completed(raw, APERTUS), where)
    shape = decoder_shape(get, dtype, activation=activation_of(get, "hidden_act"))
    return replace(_biased(shape, get.flag("attention_bias"), False), gated=False, qk_norm=True,
                   layer_norms=LayerNorms("attention_layernorm", "feedforward_layernorm"))


def _gpt(raw: dict[str, Any], where: Path, dtype: str,
         defaults: dict[str, Any]) -> tuple[Fields, ModelShape]:
    """A GPT, whose fields have names of their own."""
    fields = {name: own for name, own in GPT_FIELDS.items() if own != "n_inner"}
    raw = _named(_of_all_heads(raw), fields, defaults)
    size = raw.get("n_inner") or 4 * Fields(raw, where).int("n_embd")
    return _read({**raw, "intermediate_size": size}, where, dtype, {}, "layer_norm_epsilon",
                 "activation_function", False, GPT_FIELDS)


def _named(raw: dict[str, Any], fields: Mapping[str, str], defaults: dict[str, Any]
           ) -> dict[str, Any]:
    """A config whose fields have names of their own, by these and by those of all others."""
    raw = completed({own: raw[name] for name, own in fields.items() if name in raw} | raw, defaults)
    return raw | {name: raw.get(own) for name, own in fields.items()}


def _of_all_heads(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of a class that knows heads of one kind and size alone."""
    return {name: value for name, value in raw.items()
            if name not in ("head_dim", "num_key_value_heads")}


def _beside(get: Fields, shape: ModelShape) -> ModelShape:
    """Attention and MLP side by side, after one norm, where they are."""
    beside = get.flag("use_parallel_residual")
    return replace(shape, parallel=beside, layer_norms=ONE_NORM) if beside else shape


def _untied(get: Fields, shape: ModelShape) -> ModelShape:
    if shape.tied:
        raise get.bad("tie_word_embeddings", "must be false: the head has a bias")
    return shape


def _biased(shape: ModelShape, attention: bool, mlp: bool) -> ModelShape:
    return replace(shape, qkv_bias=attention, o_bias=attention, mlp_bias=mlp)


def _read(raw: dict[str, Any], where: Path, dtype: str, defaults: dict[str, Any], eps: str,
          act: str = "", partial: bool = False,
          called: Mapping[str, str] = MappingProxyType({})) -> tuple[Fields, ModelShape]:
    """A decoder with LayerNorms. eps, act: the fields of their epsilon, and of the activation of an
    MLP without a gate ("": it has one, which is SiLU); partial: see `decoder_shape`; called: see
    `Fields`."""
    get = Fields(completed(raw, defaults), where, called=called)
    get.raw["rms_norm_eps"] = get.float(eps)
    kind = activation_of(get, act) if act else "silu"
    shape = decoder_shape(get, dtype, activation=kind, partial=partial)
    return get, replace(shape, layer_norm=True, norm_parts=("weight", "bias"), gated=not act)


def activation_of(get: Fields, field: str) -> str:
    """What a `ModelShape` calls the activation that this field names. Raises `BadModel`."""
    name = get.raw.get(field)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise get.bad(field, f"must be one of {', '.join(ACTIVATIONS)}, got {shown(name)}")
    return ACTIVATIONS[name]
