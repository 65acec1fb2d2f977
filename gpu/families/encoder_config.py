"""Readers of encoders, whose tokens attend to both sides, and which embed and classify.

- BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet: learned positions, norms behind the
  sums; MPNet's scores depend on distance, too.
- Nomic BERT, GTE: rotated, with a gate.
- ModernBERT: rotated, with a gate, norms before what they are for; windows in most layers.
- EuroBERT: Llama, but for that.

The tensors of all of them are those of `causal_layer`, once `tensor_names.ENCODER` has named them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from actorium.actors.errors import shown
from actorium.actors.models.encoders import attends_to_both_sides
from actorium.actors.models.model_classes import UNUSED_POSITIONS
from actorium.actors.models.model_dir import text_config
from actorium.gpu.families.decoder_config import ConfigReader, Fields, completed, decoder_shape
from actorium.gpu.families.layer_norm_config import activation_of
from actorium.gpu.families.layer_shapes import LayerNorms
from actorium.gpu.families.llama_config import layer_windows, llama, ropes_by_type
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.tensor_names import ENCODER, Renames
from actorium.gpu.families.tensor_names import ROBERTA as ROBERTA_NAMES

NORMS = LayerNorms("post_attention_layernorm", "post_mlp_layernorm")
"""What norms behind the sums are called."""
BERT: dict[str, Any] = {
    "vocab_size": 30_522, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "hidden_act": "gelu", "max_position_embeddings": 512,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12,
}
"""What a config of BERT leaves out, as in transformers."""
ROBERTA = {**BERT, "vocab_size": 50_265}
"""The same of RoBERTa and its kin."""
BUCKETS = 32
"""Of distances, of MPNet, whatever its config says."""
DISTILBERT = {**BERT, "activation": "gelu"}
"""The same of DistilBERT."""
DISTILBERT_FIELDS = {"hidden_size": "dim", "num_hidden_layers": "n_layers",
                     "num_attention_heads": "n_heads", "intermediate_size": "hidden_dim",
                     "hidden_act": "activation"}
"""What its configs call these fields."""
NOMIC = {**BERT, "vocab_size": 30_528, "hidden_act": "silu", "max_position_embeddings": 2048,
         "rope_theta": 1000.0}
"""The same of Nomic BERT."""
NOMIC_FIELDS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads":
                "n_head", "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
                "layer_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base"}
"""What its configs call these fields where the checkpoint's own code is to run it."""
NOMIC_ONLY: dict[str, Any] = {
    "prenorm": False, "use_rms_norm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "activation_function": "swiglu", "moe_every_n_layers": 0, "num_experts": 0,
}
"""What such a config may say of these alone."""
GTE = {**BERT, "vocab_size": 250_048, "max_position_embeddings": 8192, "type_vocab_size": 1,
       "rope_theta": 160_000.0}
"""The same of GTE."""
MODERNBERT: dict[str, Any] = {
    "vocab_size": 50_368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
    "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192,
    "norm_eps": 1e-5, "local_attention": 128, "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0,
}
"""The same of ModernBERT."""


def bert(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of BERT's config."""
    return _learned(raw, where, _read(raw, where, dtype, BERT))


def roberta(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of the config of RoBERTa, XLM-RoBERTa and CamemBERT."""
    Fields(raw, where).only(pad_token_id=UNUSED_POSITIONS - 1)  # positions begin behind it
    return _learned(raw, where, _read(raw, where, dtype, ROBERTA))


def mpnet(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of MPNet's config."""
    raw = completed(raw, {"vocab_size": 30_527, "relative_attention_num_buckets": BUCKETS})
    get = Fields(raw, where)
    get.only(pad_token_id=UNUSED_POSITIONS - 1, relative_attention_num_buckets=BUCKETS)
    shape = _learned(raw, where, _read(raw, where, dtype, ROBERTA))
    return replace(shape, token_types=0, distance_buckets=BUCKETS)


def distilbert(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of DistilBERT's config."""
    shape = _read({**raw, "layer_norm_eps": 1e-12}, where, dtype, DISTILBERT, DISTILBERT_FIELDS)
    return replace(_learned(raw, where, shape), token_types=0)


def nomic_bert(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of Nomic BERT's config, as transformers writes it, or as its own code does."""
    Fields(raw, where).only(**NOMIC_ONLY)
    fields = NOMIC_FIELDS if raw.get("n_embd") is not None else {}
    shape = _read(raw, where, dtype, NOMIC, fields)
    return replace(shape, gated=True, qkv_bias=False, o_bias=False, mlp_bias=False)


def gte(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of GTE's config, as transformers writes it, or as its own code does (`NewModel`)."""
    Fields(raw, where).only(position_embedding_type="rope", layer_norm_type="layer_norm",
                            pack_qkv=True, logn_attention_scale=False)
    shape = _read(raw, where, dtype, GTE)
    return replace(shape, gated=True, mlp_bias=False, down_bias=True)


def modernbert(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of ModernBERT's config: windows in all but every third layer, or as `layer_types`
    say."""
    get = Fields(completed(raw, MODERNBERT) | {"num_key_value_heads": None}, where)
    every, wide = get.int("global_attn_every_n_layers"), get.int("local_attention") // 2 + 1
    get.raw["rms_norm_eps"] = get.float("norm_eps")
    shape = decoder_shape(get, dtype, activation=activation_of(get, "hidden_activation"),
                          ropes=ropes_by_type(get, get.float("global_rope_theta"),
                                              get.float("local_rope_theta")))
    windows = layer_windows(get, shape.layers, wide) or tuple(
        wide if i % every else 0 for i in range(shape.layers))
    bias, parts = get.flag("attention_bias"), ("weight", "bias")
    return replace(
        shape, bidirectional=True, windows=windows, layer_norm=True, embed_norm=True,
        first_norm=False, norm_parts=parts[:1 + get.flag("norm_bias")], qkv_bias=bias, o_bias=bias,
        mlp_bias=get.flag("mlp_bias"))


def eurobert(raw: dict[str, Any], where: Path, dtype: str) -> ModelShape:
    """Reader of EuroBERT's config."""
    return replace(llama(completed(raw, {"rms_norm_eps": 1e-5}), where, dtype), bidirectional=True)


def bidirectional(shape: ModelShape, raw: dict[str, Any], where: Path) -> ModelShape:
    """The shape of a decoder whose config says that its tokens attend to both sides
    (`is_causal: false`, `use_bidirectional_attention`). Raises `BadModel` where its layers cannot
    do so."""
    if shape.bidirectional or not attends_to_both_sides(raw, ""):
        return shape
    text = text_config(raw)
    name = "is_causal" if text.get("is_causal") is False else "use_bidirectional_attention"
    for field, wrong in (("recurrent layers", shape.recurrent), ("latents", shape.latent),
                         ("chunks", shape.chunked), ("capped scores", shape.attention_cap),
                         ("sinks", shape.sinks), ("slopes (ALiBi)", shape.alibi),
                         ("a gate behind attention", shape.output_gate),
                         ("keys of other layers", shape.kv_sources),
                         ("scaled queries", shape.query_scaling)):
        if wrong:
            raise Fields(raw, where).bad(name, f"{shown(text[name])} is not supported with {field}")
    # Gemma counts the tokens on both sides, others those on each.
    half = name != "is_causal"
    windows = tuple(own and (own // 2 if half else own) + 1 for own in shape.windows)
    return replace(shape, bidirectional=True, windows=windows, mtp_layers=0)


def _read(raw: dict[str, Any], where: Path, dtype: str, defaults: dict[str, Any],
          called: Mapping[str, str] = MappingProxyType({})) -> ModelShape:
    """An encoder of BERT's kind, as yet rotated. called: see `Fields`."""
    named = {own: raw[name] for own, name in called.items() if raw.get(name) is not None}
    get = Fields(completed({**raw, **named}, defaults), where, called=called)
    get.only(is_decoder=False, add_cross_attention=False)
    get.raw |= {"rms_norm_eps": get.float("layer_norm_eps"), "num_key_value_heads": None,
                "tie_word_embeddings": False}
    shape = decoder_shape(get, dtype, activation=activation_of(get, "hidden_act"))
    return replace(
        shape, bidirectional=True, layer_norm=True, norm_parts=("weight", "bias"), gated=False,
        layer_norms=NORMS, post_norms=True, embed_norm=True, final_norm=False, qkv_bias=True,
        o_bias=True, mlp_bias=True, token_types=get.raw["type_vocab_size"] and get.int(
            "type_vocab_size"))


def _learned(raw: dict[str, Any], where: Path, shape: ModelShape) -> ModelShape:
    """The same with learned positions in the place of rotation."""
    Fields(raw, where).only(position_embedding_type="absolute")
    return replace(shape, ropes=(), learned_positions=shape.max_model_len)


READERS: dict[str, tuple[ConfigReader, Renames]] = {
    "Bert": (bert, ENCODER), "DistilBert": (distilbert, ENCODER),
    **dict.fromkeys(("Roberta", "XLMRoberta", "Camembert"), (roberta, ROBERTA_NAMES)),
    "MPNet": (mpnet, ROBERTA_NAMES), "NomicBert": (nomic_bert, ENCODER),
    **dict.fromkeys(("Gte", "New"), (gte, ENCODER)),
    "ModernBert": (modernbert, ENCODER), "EuroBert": (eurobert, ENCODER)}
"""Of `encoders.ENCODERS`: the reader of their configs, what their checkpoints call tensors."""
