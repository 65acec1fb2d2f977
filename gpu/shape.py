"""The shape of a model, read from a Hugging Face `config.json`: plain numbers, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from actorium.actors.errors import BadModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeShape:
    """Rotary embedding: base frequency and scaling, names as in transformers' `rope_parameters`."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max: int = 0
    """Positions the model was trained on before scaling (llama3, yarn, dynamic)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


class LayerGroup(NamedTuple):
    """The layers of one attention window: they share a page pool and a page table."""

    window: int
    """Tokens a query sees, itself included; 0 = all."""
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a decoder that arithmetic needs (memory plan, forward pass, loader)."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeShape
    windows: tuple[int, ...]
    """Per layer: tokens a query sees, itself included; 0 = all."""
    max_model_len: int
    """Longest sequence the model serves."""
    dtype: torch.dtype

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers by window, in the order in which the windows first appear."""
        return tuple(LayerGroup(window, tuple(i for i, w in enumerate(self.windows) if w == window))
                     for window in dict.fromkeys(self.windows))

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (values have the same)."""
        return self.kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `BadModel`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel(f"{path}: no such file") from None
    except (OSError, ValueError) as e:
        raise BadModel(f"{path}: not readable as JSON: {e}") from None
    if not isinstance(data, dict):
        raise BadModel(f"{path}: must hold a JSON object")
    return data


def architecture_of(raw: dict[str, Any], where: Path) -> str:
    """Name of the model class in a `config.json`. Raises `BadModel`."""
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise BadModel(f"{where}: architectures: must name the model class")
    return str(names[0])


def shape_from_config(
    raw: dict[str, Any], where: Path, dtype: str = "auto", max_model_len: int | None = None
) -> ModelShape:
    """`ModelShape` of a parsed `config.json`.

    dtype: "auto" takes the checkpoint's. max_model_len: None takes the model's own limit.
    Raises `BadModel` naming the field that is missing or wrong.
    """
    arch = architecture_of(raw, where)
    get = _Reader(raw, where)
    heads = get.int("num_attention_heads")
    hidden = get.int("hidden_size")
    layers = get.int("num_hidden_layers")
    rope, limit = _rope(get, get.int("max_position_embeddings", 2048))
    kv_heads = get.int("num_key_value_heads", heads)
    head_dim = get.int("head_dim", 128 if arch.startswith("Qwen3") else max(1, hidden // heads))
    bias = bool(raw.get("attention_bias", False)) and not arch.startswith(("Qwen2", "Mistral"))
    if heads % kv_heads:
        raise get.bad("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if head_dim % 2:
        raise get.bad("head_dim", f"must be even, got {head_dim}")
    if raw.get("hidden_act", "silu") != "silu":
        raise get.bad("hidden_act", f"only silu is supported, got {raw['hidden_act']!r}")
    shape = ModelShape(
        architecture=arch,
        vocab_size=get.int("vocab_size"),
        hidden=hidden,
        intermediate=get.int("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=get.float("rms_norm_eps", 1e-6),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or arch.startswith("Qwen2"),
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and arch.startswith("Llama"),
        qk_norm=arch.startswith("Qwen3"),
        rope=rope,
        windows=_windows(get, arch, layers),
        max_model_len=limit,
        dtype=_dtype(get, dtype),
    )
    return _limit(shape, max_model_len)


def _limit(shape: ModelShape, wanted: int | None) -> ModelShape:
    if wanted is None:
        return shape
    if wanted > shape.max_model_len:
        raise BadModel(
            f"max_model_len: {wanted} is more than the {shape.max_model_len} positions "
            "the model has", "model.max_model_len")
    return replace(shape, max_model_len=wanted)


class _Reader:
    """Typed access to the fields of a config, with errors that name them."""

    def __init__(self, raw: dict[str, Any], where: Path, prefix: str = "") -> None:
        self.raw, self.where, self.prefix = raw, where, prefix

    def bad(self, name: str, why: str) -> BadModel:
        return BadModel(f"{self.where}: {self.prefix}{name}: {why}")

    def int(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(name, f"must be a positive integer, got {value!r}")
        return value

    def float(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.bad(name, f"must be a positive number, got {value!r}")
        return float(value)


def _dtype(get: _Reader, wanted: str) -> torch.dtype:
    name = wanted
    if wanted == "auto":
        name = get.raw.get("dtype") or get.raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise get.bad("dtype", f"must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _windows(get: _Reader, arch: str, layers: int) -> tuple[int, ...]:
    """Sliding window per layer; Mistral slides everywhere, Qwen only where it is switched on."""
    raw = get.raw
    on = raw.get("sliding_window") is not None
    if arch.startswith("Qwen"):
        on = on and bool(raw.get("use_sliding_window", False))
    elif not arch.startswith("Mistral"):
        on = False
    if not on:
        return (0,) * layers
    window = get.int("sliding_window")
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = get.int("max_window_layers", 28) if arch.startswith("Qwen") else 0
    return tuple(window if i >= first else 0 for i in range(layers))


def _rope(get: _Reader, positions: int) -> tuple[RopeShape, int]:
    """Rope of old (`rope_scaling`) and new (`rope_parameters`) configs, and the length limit."""
    raw = get.raw
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    name = "rope_parameters." if raw.get("rope_parameters") else "rope_scaling."
    if not isinstance(found, dict):
        raise get.bad(name[:-1], "must be an object")
    r = _Reader(found, get.where, name)
    theta = r.float("rope_theta", get.float("rope_theta", 10000.0))
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise r.bad("rope_type", f"must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    if (found.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1) != 1:
        raise r.bad("partial_rotary_factor", "only 1.0 is supported")
    if kind == "default":
        return RopeShape(theta=theta), positions
    return _scaled_rope(r, kind, theta, positions)


def _scaled_rope(r: _Reader, kind: str, theta: float, positions: int) -> tuple[RopeShape, int]:
    original = r.int("original_max_position_embeddings",
                     r.raw.get("original_max_position_embeddings") or positions)
    factor = r.float("factor")

    def optional(key: str) -> float:
        return r.float(key) if r.raw.get(key) else 0.0

    rope = RopeShape(
        kind=kind, theta=theta, factor=factor, original_max=original,
        low_freq_factor=r.float("low_freq_factor", 1.0),
        high_freq_factor=r.float("high_freq_factor", 4.0),
        attention_factor=optional("attention_factor") or None,
        beta_fast=r.float("beta_fast", 32.0), beta_slow=r.float("beta_slow", 1.0),
        mscale=optional("mscale"), mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(r.raw.get("truncate", True)),
    )
    if kind == "yarn":
        return rope, max(positions, int(factor * original))
    return rope, positions
