"""What GGUF files say of Gemma's models beside their keys."""

from __future__ import annotations

from statistics import NormalDist

from actorium.actors.errors import shown
from actorium.actors.models.gguf_fields import kv_heads_of_layers, layer_types
from actorium.actors.models.gguf_file import GgufFile
from actorium.actors.models.gguf_keys import Config

GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
GEMMA3N_OWN_KV = 20
"""Layers of Gemma 3n before those that read others' keys, where a file does not say."""
FULL, SLIDING = "full_attention", "sliding_attention"


def gemma_fields(file: GgufFile, at: str, config: Config) -> Config:
    heads, width = config["num_attention_heads"], config["head_dim"]
    wide = config["num_hidden_layers"] == GEMMA_27B_LAYERS[at]
    every, local = (2, {}) if at == "gemma2" else (6, {
        "rope_local_base_freq": file.real(f"{at}.rope.freq_base_swa", 10_000.0),
        "rope_theta": file.real(f"{at}.rope.freq_base", 1_000_000.0)})
    return {"query_pre_attn_scalar": config["hidden_size"] // max(1, heads) if wide else width,
            "sliding_window": None, **local, **layer_types(file, at, config, every)}


def gemma3n_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Llama.cpp's converter writes the deviations above which a gate is kept."""
    key = f"{at}.activation_sparsity_scale"
    fields: Config = {} if key not in file else {"activation_sparsity_pattern": [
        round(NormalDist().cdf(own), 6) for own in file.numbers(key, config["num_hidden_layers"])]}
    low_rank = file.tensors.get("blk.0.laurel_l.weight")
    if low_rank is None:
        raise file.bad("tensor blk.0.laurel_l.weight", "must be there")
    return {**fields, **_windows(file, at, config, 5), **_token_vocab(file),
            "num_kv_shared_layers": file.number(
                f"{at}.attention.shared_kv_layers",
                max(0, config["num_hidden_layers"] - GEMMA3N_OWN_KV)),
            "laurel_rank": low_rank.shape[0],
            "rope_local_base_freq": file.real(f"{at}.rope.freq_base_swa", 10_000.0),
            "rope_theta": file.real(f"{at}.rope.freq_base", 1_000_000.0)}


def gemma4_fields(file: GgufFile, at: str, config: Config) -> Config:
    """Layers with full attention have heads of their own. Raises `BadModel`."""
    width = f"{at}.attention.key_length_swa"
    for key in (f"{at}.attention.value_length_swa", f"{at}.rope.dimension_count_swa"):
        if file.number(key, file.number(width)) != file.number(width):
            raise file.bad(key, f"must be {width}, {file.number(width)}")
    windows = _windows(file, at, config)
    kinds = windows["layer_types"]
    if kinds[-1:] != [FULL]:
        raise file.bad(f"{at}.attention.sliding_window_pattern", "the last layer must have full "
                       "attention")
    heads = {kind: _heads(file, at, config, kinds, kind) for kind in (FULL, SLIDING)}
    own = [i for i, kind in enumerate(kinds) if kind == FULL]
    ropes = {FULL: {"rope_type": "default", "rope_theta": file.real(
        f"{at}.rope.freq_base", 1_000_000.0), **config.get("rope_scaling", {})},
        SLIDING: {"rope_type": "default",
                  "rope_theta": file.real(f"{at}.rope.freq_base_swa", 10_000.0)}}
    return {
        **windows, **_token_vocab(file), **_widths(file, at, config),
        "head_dim": file.number(width), "num_key_value_heads": heads[SLIDING] or heads[FULL],
        "per_layer_config": {str(i): {"head_dim": config["head_dim"],
                                      "num_key_value_heads": heads[FULL]} for i in own},
        "attention_k_eq_v": f"blk.{own[0]}.attn_v.weight" not in file.tensors,
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in file.tensors, "rope_parameters": ropes}


def _windows(file: GgufFile, at: str, config: Config, every: int = 0) -> Config:
    """`layer_types`, which must be there."""
    if not (windows := layer_types(file, at, config, every)):
        raise file.bad(f"{at}.attention.sliding_window", "must be there, and "
                       "sliding_window_pattern with it")
    return windows


def _heads(file: GgufFile, at: str, config: Config, kinds: list[str], kind: str) -> int:
    """Key heads of the layers of this kind; 0: there are none."""
    counts = {count for count, own in zip(kv_heads_of_layers(file, at, config), kinds, strict=False)
              if own == kind}
    if len(counts) > 1:
        raise file.bad(f"{at}.attention.head_count_kv", f"layers with {kind} that differ in it are "
                       "not served")
    return next(iter(counts), 0)


def _widths(file: GgufFile, at: str, config: Config) -> Config:
    """Whether the MLPs of the layers that read others' keys are twice as wide."""
    key, layers = f"{at}.feed_forward_length", config["num_hidden_layers"]
    if not file.is_array(key):
        return {}
    widths, shared = file.numbers(key, layers), config["num_kv_shared_layers"]
    first = widths[0] if widths else 0
    for times in (1, 2):
        if widths == [first] * (layers - shared) + [times * first] * min(shared, layers):
            return {"intermediate_size": first, "use_double_wide_mlp": times == 2}
    raise file.bad(key, f"must be one width, and perhaps twice that of the last {shared} layers, "
                   f"got {shown(widths)}")


def _token_vocab(file: GgufFile) -> Config:
    """How many tokens give every layer an input by themselves."""
    table = file.tensors.get("per_layer_token_embd.weight")
    return {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
