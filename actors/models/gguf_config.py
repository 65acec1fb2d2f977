"""What a GGUF file says of a model, as the `config.json` that its family's reader knows.

Nothing here needs torch: the memory plan reads it, too.
"""

from __future__ import annotations

import math
import struct
from collections import Counter

from actorium.actors.errors import shown
from actorium.actors.models.gguf_families import GgufFamily, family
from actorium.actors.models.gguf_file import GgufFile, read_tensor
from actorium.actors.models.gguf_keys import COMMON, Config, read_keys
from actorium.actors.models.gguf_names import FUSED
from actorium.actors.models.gguf_tensors import checkpoint_tensors, kv_heads_of, layers_of
from actorium.actors.models.gguf_tokenizer import end_ids

GGUF = "gguf"
"""Key of a config.json that was made of a GGUF file: its path (`file`), the type of its matrices
(`default`), and of modules whose own is another (`modules`)."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Of all of Llama 3's ropes: files have the factors that come of them."""
ORIGINAL_LENGTHS = (8192, 4096, 2048, 16_384, 32_768, 65_536, 131_072)
ROPE_ERROR, NO_TURN = 1e-3, 1e29
"""Of factors; and from which on a frequency is none."""


def gguf_config(file: GgufFile) -> Config:
    """The model's config.json, with what is the file's own under `GGUF`. Raises `BadModel`."""
    own, at = family(file), file.text("general.architecture")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.bad("tensor token_embd.weight", "must be there, and a matrix")
    read_otherwise = {key.key for key in own.keys}
    config: Config = {
        "architectures": [own.architecture], GGUF: _types(file), "dtype": _dtype(file),
        "vocab_size": embedding.shape[0], "num_hidden_layers": layers_of(file, at),
        **read_keys(file, at, (*(key for key in COMMON if key.key not in read_otherwise),
                               own.epsilon)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if "attention.head_count_kv" not in read_otherwise:
        config["num_key_value_heads"] = kv_heads_of(file, at, heads)
    if not own.latent:
        config["head_dim"] = file.number(f"{at}.attention.key_length",
                                         hidden // heads if heads else 0)
        config |= _rotated(file, at, own, config)
    config |= read_keys(file, at, own.keys)
    if "intermediate_size" not in config:  # of experts alone
        config["intermediate_size"] = file.number(
            f"{at}.expert_feed_forward_length" if own.experts else f"{at}.feed_forward_length")
    if scaling := _rope_scaling(file, at, config):
        config["rope_scaling"] = scaling
    if own.more is not None:
        config |= own.more(file, at, config)
    if own.drafts:
        layer = f"blk.{config['num_hidden_layers']}.nextn.eh_proj.weight"
        config["num_nextn_predict_layers"] = int(layer in file.tensors)
    if (pooling := POOLING.get(file.number(f"{at}.pooling_type", 0))) is not None:
        config[GGUF]["pooling"] = pooling
    if eos := end_ids(file):
        config["eos_token_id"] = eos
    return config


def _types(file: GgufFile) -> Config:
    """The file and the types of its matrices."""
    types = {name: part.kind for part in checkpoint_tensors(file)
             if part.name.endswith(".weight") and len(part.shape) > 1
             for name in _modules(part.name.removesuffix(".weight"))}
    most = Counter(types.values()).most_common(1)
    default = most[0][0] if most else "F32"
    return {"file": str(file.path), "default": default,
            "modules": {name: kind for name, kind in types.items()
                        if kind != default or not name.startswith("model.layers.")}}


POOLING = {1: "mean", 2: "cls", 3: "last"}
"""Values of `pooling_type`: which row of a prompt is its vector."""


def _modules(name: str) -> list[str]:
    """What a checkpoint's module is loaded as."""
    at, _, own = name.rpartition(".")
    return [f"{at}.{each}" for each in FUSED[own]] if own in FUSED else [name]


def _rotated(file: GgufFile, at: str, own: GgufFamily, config: Config) -> Config:
    """What part of each head is rotated; {}: all of it, of which its reader knows."""
    value, rotary = f"{at}.attention.value_length", f"{at}.rope.dimension_count"
    width = config["head_dim"]
    if file.number(value, width) != width:
        raise file.bad(value, f"must be {at}.attention.key_length, {width}")
    count = file.number(rotary, width)
    if own.partial:
        return {"partial_rotary_factor": count / max(1, width)}
    if count != width:
        raise file.bad(rotary, f"must be {at}.attention.key_length, {width}")
    return {}


def _dtype(file: GgufFile) -> str:
    """Of what is computed: float32 where all matrices are stored so, else bfloat16."""
    kinds = {own.type.name for own in file.tensors.values() if len(own.shape) > 1}
    return "float32" if kinds == {"F32"} else "bfloat16"


def _rope_scaling(file: GgufFile, at: str, config: Config) -> Config:
    """config.json's `rope_scaling`; {} where positions are as they are."""
    if "rope_freqs.weight" in file.tensors:
        return _rope_by_factors(file, config)
    if "rope_factors_long.weight" in file.tensors:
        return _longrope(file, at)
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


def _longrope(file: GgufFile, at: str) -> Config:
    """That of Phi-3, whose factors are tensors."""
    rope: Config = {"rope_type": "longrope"}
    for name in ("long", "short"):
        stored = file.tensors.get(f"rope_factors_{name}.weight")
        if stored is None or stored.type.name != "F32" or len(stored.shape) != 1:
            raise file.bad(f"tensor rope_factors_{name}.weight", "must be numbers in F32")
        rope[f"{name}_factor"] = list(struct.unpack(f"<{stored.shape[0]}f", read_tensor(stored)))
    if f"{at}.rope.scaling.attn_factor" in file:
        rope["attention_factor"] = file.real(f"{at}.rope.scaling.attn_factor")
    return rope


def _rope_by_factors(file: GgufFile, config: Config) -> Config:
    """Llama 3's rope, or one of whose frequencies only the first ones turn, by the factors that the
    file divides frequencies by. Raises `BadModel` where no such rope has these."""
    stored = file.tensors["rope_freqs.weight"]
    half, theta = config["head_dim"] // 2, config["rope_theta"]
    if stored.type.name != "F32" or stored.shape != (half,):
        raise file.bad("tensor rope_freqs.weight", f"must be {half} numbers in F32")
    factors = struct.unpack(f"<{half}f", read_tensor(stored))
    if all(abs(own - 1) < ROPE_ERROR for own in factors):
        return {}
    turning = sum(own < NO_TURN for own in factors)
    if turning < half and {*factors[:turning]} <= {1.0} and max(factors) < math.inf:
        return {"rope_type": "proportional", "partial_rotary_factor": turning / half}
    for original in ORIGINAL_LENGTHS if theta > 1 and max(factors) > 1 else ():
        found = {"rope_type": "llama3", "factor": max(factors), **LLAMA3,
                 "original_max_position_embeddings": original}
        wanted = _llama3_factors(found, theta, half)
        if all(abs(a - b) <= ROPE_ERROR * abs(b) for a, b in zip(factors, wanted, strict=True)):
            return found
    raise file.bad("tensor rope_freqs.weight", "is no rope of Llama 3's, which alone is served")


def _llama3_factors(rope: Config, theta: float, half: int) -> list[float]:
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
