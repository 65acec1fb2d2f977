"""Readers of decoders with LayerNorms, or MLPs without a gate, or both.

- StarCoder2, Nemotron: as Llama with these.
- Command R and Command A (Cohere): attention and MLP side by side, after one norm; NoPE layers.
- StableLM, Phi, GPT-NeoX, GPT-J, Falcon: side by side, or in turn; a part of each head is rotated.
- GPT-2, GPTBigCode (StarCoder), OPT: learned positions.
- OLMo: norms without weights.
- Arcee, Apertus: RMS norms, no gate.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.decoder_config import Fields, completed, decoder_shape
from actorium.gpu.families.llama_config import layer_windows
from actorium.gpu.families.model_shape import NOPE, LayerNorms, ModelShape

TANH, ERF = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), ("gelu", "gelu_python")
ACTIVATIONS = {**dict.fromkeys(TANH, "gelu"), **dict.fromkeys(ERF, "gelu_erf"), "relu": "relu",
               "relu2": "relu2", "silu": "silu", "swish": "silu"}
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


def _biased(shape: ModelShape, attention: bool, mlp: bool) -> ModelShape:
    return replace(shape, qkv_bias=attention, o_bias=attention, mlp_bias=mlp)


def _read(raw: dict[str, Any], where: Path, dtype: str, defaults: dict[str, Any], eps: str,
          act: str = "", partial: bool = False) -> tuple[Fields, ModelShape]:
    """A decoder with LayerNorms; eps, act: the fields of their epsilon and of the activation of an
    MLP without a gate ("": it has one, which is SiLU). partial: see `decoder_shape`."""
    get = Fields(completed(raw, defaults), where)
    get.raw["rms_norm_eps"] = get.float(eps)
    kind = _activation(get, act) if act else "silu"
    shape = decoder_shape(get, dtype, activation=kind, partial=partial)
    return get, replace(shape, layer_norm=True, norm_parts=("weight", "bias"), gated=not act)


def _activation(get: Fields, field: str) -> str:
    name = get.raw.get(field)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise get.bad(field, f"must be one of {', '.join(ACTIVATIONS)}, got {shown(name)}")
    return ACTIVATIONS[name]
