"""What a GGUF file says of a model, as the `config.json` that its family's reader knows, and the
names that its tensors have in a checkpoint of that family.

Nothing here needs torch: the memory plan reads it, too.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from actorium.actors.errors import shown
from actorium.actors.models.gguf_file import GgufFile, GgufTensor, read_tensor
from actorium.actors.models.gguf_tokenizer import end_ids

GGUF = "gguf"
"""Key of a config.json that was made of a GGUF file: its path (`file`), the type of its matrices
(`default`), and of modules whose own is another (`modules`)."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Of all of Llama 3's ropes: files have the factors that come of them."""
ORIGINAL_LENGTHS = (8192, 4096, 2048, 16_384, 32_768, 65_536, 131_072)
ROPE_ERROR = 1e-3
GEMMA_27B_LAYERS = 62


class GgufFamily(NamedTuple):
    """An architecture by GGUF's name for it."""

    architecture: str
    """Class name in config.json."""
    permuted: bool = False
    """Rows of queries and keys lie in pairs, as llama.cpp rotates them for Llama."""
    norm_plus_one: bool = False
    """The 1 that norms add lies in their weights."""
    experts: bool = False


FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", permuted=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", experts=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", norm_plus_one=True),
}
"""By `general.architecture`."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}
"""Modules of a layer."""
GEMMA_LAYER = {**LAYER, "ffn_norm": "pre_feedforward_layernorm",
               "post_attention_norm": "post_attention_layernorm",
               "post_ffw_norm": "post_feedforward_layernorm"}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Modules of all of a layer's experts."""
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)")


def family(file: GgufFile) -> GgufFamily:
    """Of the model. Raises `BadModel` where its architecture is not served."""
    name = file.text("general.architecture")
    if name not in FAMILIES:
        raise file.bad("general.architecture", f"{shown(name)} is not served; served are "
                       f"{', '.join(FAMILIES)}")
    return FAMILIES[name]


class GgufPart(NamedTuple):
    """A tensor of a checkpoint, as the file has it."""

    name: str
    """In the checkpoint."""
    stored: GgufTensor
    expert: int | None
    """Which part of a tensor of all experts it is."""
    heads: int
    """Heads whose rows lie in pairs; 0: rows lie as in the checkpoint."""
    minus_one: bool
    """1 is to be taken off."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.stored.shape if self.expert is None else self.stored.shape[1:]


def checkpoint_tensors(file: GgufFile) -> Iterator[GgufPart]:
    """The file's tensors by the names that they have in a checkpoint, in the order of their bytes;
    those that have none there are left out. Raises `BadModel`."""
    own, at = family(file), file.text("general.architecture")
    heads = file.same(f"{at}.attention.head_count")
    paired = {"attn_q": heads, "attn_k": file.same(f"{at}.attention.head_count_kv", heads)}
    layer = GEMMA_LAYER if own.norm_plus_one else LAYER
    for name, stored in file.tensors.items():
        module, _, kind = name.rpartition(".")
        found = _LAYER_NAME.fullmatch(name)
        if found is None:
            if module in OUTER:
                yield GgufPart(f"{OUTER[module]}.{kind}", stored, None, 0,
                               own.norm_plus_one and module.endswith("norm"))
            continue
        i, module, kind = found.groups()
        prefix = f"model.layers.{int(i)}."
        if module in EXPERTS:
            if len(stored.shape) != 3:
                raise file.bad(f"tensor {name}", "must have three dimensions")
            for expert in range(stored.shape[0]):
                yield GgufPart(f"{prefix}mlp.experts.{expert}.{EXPERTS[module]}.{kind}", stored,
                               expert, 0, False)
        elif module in layer:
            count = paired.get(module, 0) if own.permuted else 0
            if count and stored.shape[0] % (2 * count):
                raise file.bad(f"tensor {name}", f"{stored.shape[0]} rows are not those of {count} "
                               "heads")
            yield GgufPart(f"{prefix}{layer[module]}.{kind}", stored, None, count,
                           own.norm_plus_one and module.endswith("norm"))


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The model's config.json, with what is the file's own under `GGUF`. Raises `BadModel`."""
    own, at = family(file), file.text("general.architecture")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.bad("tensor token_embd.weight", "must be there, and a matrix")
    heads = file.same(f"{at}.attention.head_count")
    hidden = file.number(f"{at}.embedding_length")
    config: dict[str, Any] = {
        "architectures": [own.architecture], GGUF: _types(file), "dtype": _dtype(file),
        "vocab_size": embedding.shape[0], "hidden_size": hidden,
        "num_hidden_layers": file.number(f"{at}.block_count"), "num_attention_heads": heads,
        "num_key_value_heads": file.same(f"{at}.attention.head_count_kv", heads),
        "head_dim": file.number(f"{at}.attention.key_length", hidden // heads if heads else 0),
        "intermediate_size": file.same(f"{at}.feed_forward_length"),
        "rms_norm_eps": file.real(f"{at}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.number(f"{at}.context_length"),
        "rope_theta": file.real(f"{at}.rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }
    _check_heads(file, at, config)
    if scaling := _rope_scaling(file, at, config):
        config["rope_scaling"] = scaling
    if own.experts:
        config |= {
            "num_experts": file.number(f"{at}.expert_count"),
            "num_experts_per_tok": file.number(f"{at}.expert_used_count"),
            "moe_intermediate_size": file.number(f"{at}.expert_feed_forward_length"),
            "norm_topk_prob": True}
    elif file.number(f"{at}.expert_count", 0):
        raise file.bad(f"{at}.expert_count", "mixtures of experts of this architecture are not "
                       "served")
    if at == "gemma3":
        config |= _gemma3(file, config)
    if eos := end_ids(file):
        config["eos_token_id"] = eos
    return config


def _types(file: GgufFile) -> dict[str, Any]:
    """The file and the types of its matrices."""
    types = {part.name.removesuffix(".weight"): part.stored.type.name
             for part in checkpoint_tensors(file)
             if part.name.endswith(".weight") and len(part.shape) > 1}
    most = Counter(types.values()).most_common(1)
    default = most[0][0] if most else "F32"
    return {"file": str(file.path), "default": default,
            "modules": {name: kind for name, kind in types.items()
                        if kind != default or not name.startswith("model.layers.")}}


def _check_heads(file: GgufFile, at: str, config: dict[str, Any]) -> None:
    for key in (f"{at}.attention.value_length", f"{at}.rope.dimension_count"):
        if file.number(key, config["head_dim"]) != config["head_dim"]:
            raise file.bad(key, f"must be {at}.attention.key_length, {config['head_dim']}")


def _dtype(file: GgufFile) -> str:
    """Of what is computed: float32 where all matrices are stored so, else bfloat16."""
    kinds = {own.type.name for own in file.tensors.values() if len(own.shape) > 1}
    return "float32" if kinds == {"F32"} else "bfloat16"


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """What only Gemma 3 has."""
    heads, width = config["num_attention_heads"], config["head_dim"]
    wide = config["num_hidden_layers"] == GEMMA_27B_LAYERS
    window = file.number("gemma3.attention.sliding_window", 0)
    return {
        "query_pre_attn_scalar": config["hidden_size"] // max(1, heads) if wide else width,
        "sliding_window": window or None,
        "sliding_window_pattern": file.number("gemma3.attention.sliding_window_pattern", 6),
        "rope_local_base_freq": file.real("gemma3.rope.freq_base_swa", 10_000.0),
        "rope_theta": file.real("gemma3.rope.freq_base", 1_000_000.0),
        "final_logit_softcapping": file.real("gemma3.final_logit_softcapping", 0.0) or None,
    }


def _rope_scaling(file: GgufFile, at: str, config: dict[str, Any]) -> dict[str, Any]:
    """config.json's `rope_scaling`; {} where positions are as they are."""
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, config)
    kind = file.text(f"{at}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise file.bad(f"{at}.rope.scaling.type", f"{shown(kind)} is not served")
    found = {"rope_type": kind, "factor": file.real(f"{at}.rope.scaling.factor")}
    if original := file.number(f"{at}.rope.scaling.original_context_length", 0):
        found["original_max_position_embeddings"] = original
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if f"{at}.rope.scaling.{key}" in file:
            found[name] = file.real(f"{at}.rope.scaling.{key}")
    return found


def _llama3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's rope, by the factors that the file divides frequencies by. Raises `BadModel` where
    no such rope has these."""
    stored = file.tensors["rope_freqs.weight"]
    half, theta = config["head_dim"] // 2, config["rope_theta"]
    if stored.type.name != "F32" or stored.shape != (half,):
        raise file.bad("tensor rope_freqs.weight", f"must be {half} numbers in F32")
    factors = struct.unpack(f"<{half}f", read_tensor(stored))
    if all(abs(own - 1) < ROPE_ERROR for own in factors):
        return {}
    for original in ORIGINAL_LENGTHS if theta > 1 and max(factors) > 1 else ():
        found = {"rope_type": "llama3", "factor": max(factors), **LLAMA3,
                 "original_max_position_embeddings": original}
        wanted = _llama3_factors(found, theta, half)
        if all(abs(a - b) <= ROPE_ERROR * abs(b) for a, b in zip(factors, wanted, strict=True)):
            return found
    raise file.bad("tensor rope_freqs.weight", "is no rope of Llama 3's, which alone is served")


def _llama3_factors(rope: dict[str, Any], theta: float, half: int) -> list[float]:
    """What each frequency is divided by."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    found = []
    for i in range(half):
        length = 2 * math.pi * theta ** (i / half)
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found
