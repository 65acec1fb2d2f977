"""The shape of a model, read from a Hugging Face `config.json`: plain numbers, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from actorium.actors.errors import BadModel
from actorium.gpu.fields import Fields
from actorium.gpu.hybrid_shape import (
    HYBRIDS,
    DeltaShape,
    ExpertShape,
    StateShape,
    delta_shape,
    expert_shape,
    linear_layers,
    sparse_layers,
    text_part,
)

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
    ropes: tuple[RopeShape, ...]
    """One for all layers; or that of the layers with full attention, and of the windowed ones."""
    windows: tuple[int, ...]
    """Per layer: tokens a query sees, itself included; 0 = all."""
    max_model_len: int
    """Longest sequence the model serves."""
    dtype: torch.dtype
    attention_scale: float
    """On the product of query and key."""
    embed_scale: float = 1.0
    activation: str = "silu"
    """silu or gelu (its tanh form): what gates the MLP."""
    norm_plus_one: bool = False
    """Norms multiply by 1 + weight."""
    sandwich_norms: bool = False
    """What attention and the MLP give is normed, too."""
    rotary_dim: int = 0
    """Leading dimensions of a head that are rotated; 0 = all."""
    output_gate: bool = False
    """What attention gives is gated by a sigmoid, projected with the queries."""
    recurrent: tuple[int, ...] = ()
    """Layers with a recurrent state instead of attention; their windows mean nothing."""
    delta: DeltaShape | None = None
    """Of the recurrent layers."""
    sparse: tuple[int, ...] = ()
    """Layers whose MLP is a mixture of experts."""
    experts: ExpertShape | None = None
    """Of the sparse layers."""

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The attention layers by window, in the order in which the windows first appear."""
        by_window: dict[int, list[int]] = {}
        for i, window in enumerate(self.windows):
            if i not in self.recurrent:
                by_window.setdefault(window, []).append(i)
        return tuple(LayerGroup(window, tuple(own)) for window, own in by_window.items())

    @property
    def state(self) -> StateShape | None:
        """What a recurrent layer keeps of a sequence; None where no layer is recurrent."""
        return self.delta.state if self.delta else None

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
    gemma = arch.startswith("Gemma3")
    if gemma:
        raw = _gemma3(raw, where)
    qwen = HYBRIDS.get(arch)
    if qwen is not None:
        raw = text_part(raw, qwen.defaults)
    get = Fields(raw, where)
    heads = get.int("num_attention_heads")
    hidden = get.int("hidden_size")
    layers = get.int("num_hidden_layers")
    mixed = qwen is not None and qwen.recurrent
    positions = get.int("max_position_embeddings", 2048)
    ropes, limit = (_gemma3_ropes if gemma else _rope)(get, positions)
    kv_heads = get.int("num_key_value_heads", heads)
    head_dim = get.int("head_dim", 128 if arch == "Qwen3ForCausalLM" else max(1, hidden // heads))
    bias = bool(raw.get("attention_bias", False)) and not arch.startswith(("Qwen2", "Mistral"))
    if heads % kv_heads:
        raise get.bad("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if head_dim % 2:
        raise get.bad("head_dim", f"must be even, got {head_dim}")
    if not gemma and raw.get("hidden_act", "silu") != "silu":
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
        qk_norm=gemma or arch.startswith("Qwen3"),
        ropes=ropes,
        windows=_windows(get, arch, layers) if qwen is None else _no_windows(get, layers),
        max_model_len=limit,
        dtype=_dtype(get, dtype),
        attention_scale=(get.float("query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
        embed_scale=hidden**0.5 if gemma else 1.0,
        activation="gelu" if gemma else "silu",
        norm_plus_one=gemma or mixed,
        sandwich_norms=gemma,
        rotary_dim=_rotary_dim(get, head_dim) if mixed else 0,
        output_gate=mixed,
        recurrent=linear_layers(get, layers) if mixed else (),
        delta=delta_shape(get) if mixed else None,
        sparse=sparse_layers(get, layers) if qwen else (),
        experts=expert_shape(get, qwen) if qwen else None,
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


def _dtype(get: Fields, wanted: str) -> torch.dtype:
    name = wanted
    if wanted == "auto":
        name = get.raw.get("dtype") or get.raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise get.bad("dtype", f"must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _rotary_dim(get: Fields, head_dim: int) -> int:
    found = get.raw.get("rope_parameters") or {}
    name = "rope_parameters.partial_rotary_factor"
    share = found.get("partial_rotary_factor") or get.float("partial_rotary_factor", 0.25)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise get.bad(name, f"must be above 0 and at most 1, got {share!r}")
    if int(head_dim * share) % 2 or int(head_dim * share) < 2:
        raise get.bad(name, f"{share} of {head_dim} dimensions is no even number")
    return int(head_dim * share)


def _windows(get: Fields, arch: str, layers: int) -> tuple[int, ...]:
    """Sliding window per layer: Mistral slides everywhere, Qwen where it is switched on, Gemma in
    all layers but every sixth."""
    raw = get.raw
    on = raw.get("sliding_window") is not None
    if arch.startswith("Qwen"):
        on = on and bool(raw.get("use_sliding_window", False))
    elif not arch.startswith(("Mistral", "Gemma3")):
        on = False
    if not on:
        return (0,) * layers
    window = get.int("sliding_window")
    if arch.startswith("Mistral"):
        return (window,) * layers
    kinds = raw.get("layer_types")
    if kinds is not None:
        known = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(known):
            raise get.bad("layer_types", f"must be {layers} times {' or '.join(known)}")
        return tuple(window if kind == known[0] else 0 for kind in kinds)
    if arch.startswith("Qwen"):
        first = raw.get("max_window_layers", 28) and get.int("max_window_layers", 28)
        return tuple(window if i >= first else 0 for i in range(layers))
    every = get.int("sliding_window_pattern", 6)
    return tuple(window if (i + 1) % every else 0 for i in range(layers))


def _no_windows(get: Fields, layers: int) -> tuple[int, ...]:
    if get.flag("use_sliding_window"):
        raise get.bad("use_sliding_window", "is not supported for this architecture")
    return (0,) * layers


def _rope(get: Fields, positions: int) -> tuple[tuple[RopeShape, ...], int]:
    """Rope of old (`rope_scaling`) and new (`rope_parameters`) configs, and the length limit."""
    name = "rope_parameters" if get.raw.get("rope_parameters") else "rope_scaling"
    rope, limit = _one_rope(get, name, get.raw.get(name) or {},
                            get.float("rope_theta", 10000.0), positions)
    return (rope,), limit


def _one_rope(get: Fields, name: str, found: Any, base: float,
              positions: int) -> tuple[RopeShape, int]:
    """A rope object of the config, and the length limit. base: theta where it names none."""
    raw = get.raw
    if not isinstance(found, dict):
        raise get.bad(name, "must be an object")
    r = Fields(found, get.where, f"{name}.")
    theta = r.float("rope_theta", base)
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise r.bad("rope_type", f"must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    partial = found.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    if partial != 1 and not raw.get("linear_num_value_heads"):
        raise r.bad("partial_rotary_factor", "only 1.0 is supported")
    if kind == "default":
        return RopeShape(theta=theta), positions
    return _scaled_rope(r, kind, theta, positions)


def _scaled_rope(r: Fields, kind: str, theta: float, positions: int) -> tuple[RopeShape, int]:
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


# --- Gemma 3 -------------------------------------------------------------------------------------

_GEMMA3: dict[str, Any] = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131_072, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""What a config leaves out (transformers' `Gemma3TextConfig`)."""


def _gemma3(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """The config of the text part, complete. Raises `BadModel` on what is not served."""
    nested, prefix = raw.get("text_config"), ""
    if isinstance(nested, dict):
        kept = {key: raw[key] for key in ("dtype", "torch_dtype") if raw.get(key)}
        raw, prefix = {**kept, **nested}, "text_config."
    raw = {**_GEMMA3, **raw}
    bad = Fields(raw, where, prefix).bad
    for name in ("attn_logit_softcapping", "final_logit_softcapping",
                 "use_bidirectional_attention"):
        if raw.get(name):
            raise bad(name, f"is not supported, got {raw[name]!r}")
    name = "hidden_activation"
    if raw.get(name, "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise bad(name, f"only gelu_pytorch_tanh is supported, got {raw[name]!r}")
    return raw


def _gemma3_ropes(get: Fields, positions: int) -> tuple[tuple[RopeShape, ...], int]:
    """Of the full and of the windowed layers: `rope_parameters` by layer type, or, in old configs,
    rope_theta with rope_scaling, and rope_local_base_freq."""
    by_type = get.raw.get("rope_parameters") or {}
    if not isinstance(by_type, dict):
        raise get.bad("rope_parameters", "must be an object")
    wide = by_type.get("full_attention") or get.raw.get("rope_scaling") or {}
    near = by_type.get("sliding_attention") or {}
    full, limit = _one_rope(get, "rope_parameters.full_attention", wide,
                            get.float("rope_theta", 1e6), positions)
    local, _ = _one_rope(get, "rope_parameters.sliding_attention", near,
                         get.float("rope_local_base_freq", 1e4), positions)
    return (full, local), limit
