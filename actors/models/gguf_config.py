"""What a GGUF file says of a model, as the `config.json` that its family's reader knows, and the
names that its tensors have in a checkpoint of that family (`gguf_families.py`).

Nothing here needs torch: the memory plan reads it, too.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from actorium.actors.errors import shown
from actorium.actors.models.gguf_families import (
    COMMON,
    COMPUTED,
    FUSED,
    JOINED,
    LATENT,
    NOT_WEIGHTS,
    OUTER,
    QKV,
    SECOND,
    Config,
    GgufFamily,
    Name,
    family,
    read_keys,
)
from actorium.actors.models.gguf_file import GgufFile, GgufTensor, read_tensor
from actorium.actors.models.gguf_tokenizer import end_ids

GGUF = "gguf"
"""Key of a config.json that was made of a GGUF file: its path (`file`), the type of its matrices
(`default`), and of modules whose own is another (`modules`)."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Of all of Llama 3's ropes: files have the factors that come of them."""
ORIGINAL_LENGTHS = (8192, 4096, 2048, 16_384, 32_768, 65_536, 131_072)
ROPE_ERROR = 1e-3
MAX_LAYERS = 4096
MINUS_ONE = "minus_one"
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([\w.]+)")


class GgufPart(NamedTuple):
    """A tensor of a checkpoint, as the file has it."""

    name: str
    """In the checkpoint."""
    stored: GgufTensor
    expert: int | None = None
    """Which part of a tensor of all experts it is."""
    rows: tuple[int, int] | None = None
    """(first, behind the last) of a tensor's; None: all."""
    heads: int = 0
    """Heads whose rows lie in pairs; 0: rows lie as in the checkpoint."""
    change: str = ""
    """What is done to it; see `GgufFamily.changes`."""
    other: GgufTensor | None = None
    """What is joined with it."""

    @property
    def kind(self) -> str:
        """The type in which a matrix can be held."""
        kept = self.change == "" or self.change == JOINED and self.other is not None and (
            self.other.type == self.stored.type)
        return self.stored.type.name if kept else "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        shape = self.stored.shape if self.expert is None else self.stored.shape[1:]
        if self.rows is not None:
            shape = (self.rows[1] - self.rows[0], *shape[1:])
        if self.other is not None and self.change == JOINED:
            return (shape[0] + self.other.shape[0], *shape[1:])
        if self.other is not None:  # [heads, rank, keys] and [heads, values, rank]
            return (shape[0] * (shape[2] + self.other.shape[1]), shape[1])
        return {"row": (1, *shape), "convolution": (shape[0], 1, *shape[1:]),
                "flat": (math.prod(shape),), "log_negated": (math.prod(shape),)
                }.get(self.change, shape)


class _Names(NamedTuple):
    """What a file's tensors are called."""

    file: GgufFile
    at: str
    family: GgufFamily
    layers: int
    heads: int
    kv_heads: int

    def parts(self, name: str, stored: GgufTensor) -> Iterator[GgufPart]:
        """The tensors of a checkpoint that are in this one. Raises `BadModel`."""
        module, _, kind = name.rpartition(".")
        layer = _LAYER_NAME.fullmatch(name)
        if layer is None:
            if module in OUTER:
                yield from self._named(f"{OUTER[module]}.{kind}", name, stored)
            elif name not in NOT_WEIGHTS:
                raise self._unknown(name)
            return
        i, inner = int(layer[1]), layer[2]
        if i >= self.layers or inner in COMPUTED:  # layers that draft are not read
            return
        prefix, (module, _, kind) = f"model.layers.{i}.", inner.rpartition(".")
        if inner in self.family.layer:
            yield from self._named(f"{prefix}{self.family.layer[inner]}", inner, stored)
        elif kind not in ("weight", "bias"):
            raise self._unknown(name)
        elif module in self.family.layer:
            own = _prefixed(prefix, self.family.layer[module], kind)
            yield from self._named(own, inner, stored)
        elif module in self.family.experts:
            if len(stored.shape) != 3 or kind == "bias":
                raise self.file.bad(f"tensor {name}", "must be a weight of three dimensions")
            for expert in range(stored.shape[0]):
                each = _prefixed(prefix, self.family.experts[module], kind, expert)
                yield from self._named(each, inner, stored, expert)
        else:
            raise self._unknown(name)

    def _named(self, names: Name, inner: str, stored: GgufTensor,
               expert: int | None = None) -> Iterator[GgufPart]:
        """Each with its rows. inner: the tensor's own name, in its layer."""
        change = self.family.changes.get(inner, "")
        if not change and self.family.norm_plus_one and inner.endswith("norm.weight"):
            change = MINUS_ONE
        if isinstance(names, str):
            part = GgufPart(names, stored, expert, None, self._paired(names, stored), change)
            if change not in (LATENT, JOINED):
                yield part
            elif inner.partition(".")[0] in SECOND:
                yield part._replace(other=self._other(part))
            return
        rows, first = stored.shape[0 if expert is None else 1], 0
        for name, size in zip(names, self._sizes(len(names), rows, inner), strict=True):
            yield GgufPart(name, stored, expert, (first, first + size),
                           self._paired(name, stored._replace(shape=(size,))), change)
            first += size

    def _other(self, part: GgufPart) -> GgufTensor:
        """What is joined with this one."""
        *at, module, kind = part.stored.name.split(".")
        name, shape = ".".join((*at, SECOND[module], kind)), part.stored.shape
        other = self.file.tensors.get(name)
        fits = other is not None and len(shape) == len(other.shape) == 3 and (
            other.shape[0], other.shape[2]) == shape[:2]
        if part.change == JOINED:
            fits = other is not None and shape == other.shape
        if other is None or not fits:
            raise self.file.bad(f"tensor {name}", f"must be there, and fit {part.stored.name}")
        return other

    def _sizes(self, count: int, rows: int, inner: str) -> tuple[int, ...]:
        """How many rows each of the parts has."""
        key, each = self.kv_heads, count
        if count == len(QKV):
            each = self.heads + 2 * key
        if rows % max(1, each):
            raise self.file.bad(f"tensor {inner}", f"{rows} rows are not those of {each} parts")
        if count == len(QKV):
            width = rows // each
            return self.heads * width, key * width, key * width
        return (rows // each,) * count

    def _paired(self, name: str, stored: GgufTensor) -> int:
        """Heads whose rows lie in pairs."""
        if not self.family.permuted:
            return 0
        module = name.rpartition(".")[0]
        heads = (self.heads if module.endswith(QKV[0]) else
                 self.kv_heads if module.endswith(QKV[1]) else 0)
        if heads and stored.shape[0] % (2 * heads):
            raise self.file.bad(f"tensor {stored.name}", f"{stored.shape[0]} rows are not those of "
                                f"{heads} heads")
        return heads

    def _unknown(self, name: str) -> Exception:
        return self.file.bad(f"tensor {shown(name)}", f"is none of {self.at}'s that are served")


def _prefixed(prefix: str, names: Name, kind: str, expert: int | None = None) -> Name:
    """Names of tensors of a layer; expert: its number in them."""
    if isinstance(names, str):
        return f"{prefix}{names.format(expert)}.{kind}"
    return tuple(f"{prefix}{name.format(expert)}.{kind}" for name in names)


def checkpoint_tensors(file: GgufFile) -> Iterator[GgufPart]:
    """The file's tensors by the names that they have in a checkpoint, in the order of their bytes.
    Raises `BadModel`, also where one is not known: what it stands for would be left out."""
    own, at = family(file), file.text("general.architecture")
    heads = file.same(f"{at}.attention.head_count")
    names = _Names(file, at, own, _layers(file, at), heads,
                   _kv_heads(file, at, heads))
    for name, stored in file.tensors.items():
        yield from names.parts(name, stored)


def _kv_heads(file: GgufFile, at: str, heads: int) -> int:
    """Of each layer with attention: those of recurrent ones are 0."""
    key = f"{at}.attention.head_count_kv"
    if at != "granitehybrid" or not file.is_array(key):
        return file.same(key, heads)
    counts = {count for count in file.numbers(key, MAX_LAYERS) if count}
    if len(counts) != 1 or not isinstance(count := counts.pop(), int) or not 0 < count <= heads:
        raise file.bad(key, "layers that differ in it are not served")
    return count


def _layers(file: GgufFile, at: str) -> int:
    """Those that are not there to draft."""
    drafting = file.number(f"{at}.nextn_predict_layers", 0)
    return max(0, file.number(f"{at}.block_count") - drafting)


def gguf_config(file: GgufFile) -> Config:
    """The model's config.json, with what is the file's own under `GGUF`. Raises `BadModel`."""
    own, at = family(file), file.text("general.architecture")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.bad("tensor token_embd.weight", "must be there, and a matrix")
    config: Config = {
        "architectures": [own.architecture], GGUF: _types(file), "dtype": _dtype(file),
        "vocab_size": embedding.shape[0], "num_hidden_layers": _layers(file, at),
        **read_keys(file, at, COMMON),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    config["num_key_value_heads"] = _kv_heads(file, at, heads)
    if not own.latent:
        config["head_dim"] = file.number(f"{at}.attention.key_length",
                                         hidden // heads if heads else 0)
        config |= _rotated(file, at, own, config)
    config |= read_keys(file, at, own.keys)
    if scaling := _rope_scaling(file, at, config):
        config["rope_scaling"] = scaling
    if own.more is not None:
        config |= own.more(file, at, config)
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


def _modules(name: str) -> list[str]:
    """What a checkpoint's module is loaded as."""
    at, _, own = name.rpartition(".")
    return [f"{at}.{each}" for each in FUSED[own]] if own in FUSED else [name]


def _rotated(file: GgufFile, at: str, own: GgufFamily, config: Config) -> Config:
    """What part of each head is rotated; {}: all of it."""
    value, rotary = f"{at}.attention.value_length", f"{at}.rope.dimension_count"
    width = config["head_dim"]
    if file.number(value, width) != width:
        raise file.bad(value, f"must be {at}.attention.key_length, {width}")
    count = file.number(rotary, width)
    if count == width:
        return {}
    if not own.partial:
        raise file.bad(rotary, f"must be {at}.attention.key_length, {width}")
    return {"partial_rotary_factor": count / max(1, width)}


def _dtype(file: GgufFile) -> str:
    """Of what is computed: float32 where all matrices are stored so, else bfloat16."""
    kinds = {own.type.name for own in file.tensors.values() if len(own.shape) > 1}
    return "float32" if kinds == {"F32"} else "bfloat16"


def _rope_scaling(file: GgufFile, at: str, config: Config) -> Config:
    """config.json's `rope_scaling`; {} where positions are as they are."""
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, config)
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


def _llama3(file: GgufFile, config: Config) -> Config:
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
