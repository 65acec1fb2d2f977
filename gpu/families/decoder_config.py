"""What the configs of all families share: typed access to fields, sizes, dtype, rotary embeddings,
layers that draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from actorium.actors.errors import BadModel, shown
from actorium.actors.models.model_classes import default_positions
from actorium.actors.models.model_dir import max_model_len, trained_length
from actorium.gpu.families.layer_shapes import ExpertShape, RopeShape
from actorium.gpu.families.model_shape import WEIGHT_DTYPES, ModelShape

ConfigReader = Callable[[dict[str, Any], Path, str], ModelShape]
"""(parsed config.json, its path, dtype or "auto") -> the shape, at the model's own longest length.
Raises `BadModel` naming the field that is missing or wrong."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ROPE_NAMES = {"su": "longrope"}
"""What some configs call one of them."""
SILU = ("silu", "swish")
"""Names of the one activation of these MLPs."""
MAX_FACTORS = 65_536
"""Numbers that a rope may list."""
MTP_FIELDS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
MAX_INT = 2**31 - 1
"""The largest size, number or id that a field may name."""
MAX_LAYERS = 4096
MIN_FLOAT, MAX_FLOAT = 1e-30, 1e30
"""What float32 can still multiply."""


def decoder_shape(
    get: Fields, dtype: str, *, head_dim: int | None = None,
    ropes: tuple[RopeShape, ...] | None = None, activation: str = "silu", partial: bool = False,
) -> ModelShape:
    """A decoder with full attention, no biases and dense MLPs: families replace what differs.

    head_dim: where the config names none (None: hidden / heads). ropes: None reads the one that
    all layers share. partial: a part of each head may be rotated alone. Raises `BadModel`.
    """
    heads, hidden = get.int("num_attention_heads"), get.int("hidden_size")
    layers = get.layers()
    own = (shared_rope(get, partial),) if ropes is None else ropes
    kv_heads = get.int("num_key_value_heads", heads)
    width = get.int("head_dim", head_dim or max(1, hidden // heads))
    if heads % kv_heads:
        raise get.bad("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if width % 2:
        raise get.bad("head_dim", f"must be even, got {width}")
    rotary = _rotary_dim(get, width) if partial else 0
    for rope in own:
        _check_factors(get, rope, (rotary or width) // 2)
    if activation == "silu" and get.raw.get("hidden_act", "silu") not in SILU:
        raise get.bad("hidden_act", f"only silu is supported, "
                      f"got {shown(get.raw['hidden_act'])}")
    return ModelShape(
        architecture=str(get.raw["architectures"][0]), vocab_size=get.int("vocab_size"),
        hidden=hidden, intermediate=get.int("intermediate_size"), layers=layers, heads=heads,
        kv_heads=kv_heads, head_dim=width, norm_eps=get.float("rms_norm_eps", 1e-6),
        tied=get.flag("tie_word_embeddings"), ropes=own, windows=(0,) * layers,
        max_model_len=_longest(get), dtype=weight_dtype(get, dtype),
        attention_scale=width**-0.5, activation=activation, rotary_dim=rotary)


def completed(raw: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The config with all it leaves out."""
    return {**defaults, **{key: value for key, value in raw.items() if value is not None}}


def _longest(get: Fields) -> int:
    """The model's own limit on a sequence's length, as the tokenizer reads it too."""
    if get.raw.get("max_position_embeddings") is not None:
        get.int("max_position_embeddings")  # says what is wrong with it
    return max_model_len(get.raw)


def weight_dtype(get: Fields, wanted: str) -> str:
    """Returns the dtype that was asked for; of "auto" that of the config. Raises `BadModel`."""
    name = wanted
    if wanted == "auto":
        name = get.raw.get("dtype") or get.raw.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in WEIGHT_DTYPES:
        raise get.bad("dtype", f"must be float32, bfloat16 or float16, got {shown(name)}")
    return name


def read_experts(get: Fields, number: str, size: int, normalised: bool, shared: int = 0,
                 each: str = "num_experts_per_tok", **more: Any) -> ExpertShape:
    """A mixture of as many experts as the field `number` says, of which each token goes through as
    many as `each` says. Raises `BadModel`."""
    count, chosen = get.int(number), get.int(each)
    if chosen > count:
        raise get.bad(each, f"{chosen} is more than {count} experts")
    return ExpertShape(count, chosen, size, shared, normalised, **more)


def mtp_layers(get: Fields) -> int:
    """1 where the config promises a layer that drafts (MTP), else 0. Of several the first is used,
    and chained. Qwen3-Next's checkpoints hold one that their config does not mention.

    Raises `BadModel` naming the field that is wrong.
    """
    for name in MTP_FIELDS:
        if get.raw.get(name):
            return min(1, get.int(name))
    return int(get.raw.get("model_type") == "qwen3_next" and MTP_FIELDS[0] not in get.raw)


# --- rotary embeddings ---------------------------------------------------------------------------

def shared_rope(get: Fields, partial: bool = False) -> RopeShape:
    """That of all layers, of old (`rope_scaling`) and new (`rope_parameters`) configs. partial: a
    part of each head may be rotated alone. Raises `BadModel`."""
    name = rope_field(get)
    return read_rope(get, name, get.raw.get(name) or {}, get.float("rope_theta", 10000.0), partial)


def rope_field(get: Fields) -> str:
    """The field that a config's rope is in: the new one, or the old."""
    return "rope_parameters" if get.raw.get("rope_parameters") else "rope_scaling"


def read_rope(get: Fields, name: str, found: Any, base: float,
              partial: bool = False) -> RopeShape:
    """The rope object `found`, which errors call `name`.

    base: theta where it names none; partial: whether it may speak of a part of each head.
    Raises `BadModel`.
    """
    if not isinstance(found, dict):
        raise get.bad(name, "must be an object")
    r = Fields(found, get.where, f"{get.prefix}{name}.")
    theta = r.float("rope_theta", base)
    kind = found.get("rope_type") or found.get("type") or "default"
    kind = ROPE_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise r.bad("rope_type", f"must be one of {', '.join(ROPE_TYPES)}, got {shown(kind)}")
    share = found.get("partial_rotary_factor") or get.raw.get("partial_rotary_factor") or 1
    if share != 1 and not partial:
        raise r.bad("partial_rotary_factor", "only 1.0 is supported")
    if kind == "default":
        return RopeShape(theta=theta)
    return _scaled_rope(get, r, kind, theta)


def _scaled_rope(get: Fields, r: Fields, kind: str, theta: float) -> RopeShape:
    positions = trained_length(get.raw) or default_positions(get.raw)
    name = "original_max_position_embeddings"
    original = get.int(name, r.int(name, positions))
    if kind in ("yarn", "llama3") and theta == 1:
        raise r.bad("rope_theta", "must not be 1")
    long = kind == "longrope"
    factor = r.float("factor", positions / original if long else None)

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
        short_factors=_factors(r, "short_factor") if long else (),
        long_factors=_factors(r, "long_factor") if long else (),
    )
    if kind in ("yarn", "linear", "dynamic") and factor * original > MAX_INT:
        raise r.bad("factor", f"{shown(factor)} times {original} positions are too many")
    if long and original == 1:
        raise r.bad("original_max_position_embeddings", "must be more than 1")
    return rope


def _factors(r: Fields, name: str) -> tuple[float, ...]:
    """A number for each pair of dimensions that is rotated."""
    found = r.raw.get(name)
    if not isinstance(found, list) or len(found) > MAX_FACTORS:
        raise r.bad(name, f"must list positive numbers, got {shown(found)}")
    each = [Fields({name: one}, r.where, r.prefix) for one in found]
    return tuple(one.float(name) for one in each)


def _check_factors(get: Fields, rope: RopeShape, pairs: int) -> None:
    """Raise `BadModel` where a longrope has more or fewer factors than pairs are rotated."""
    for name, own in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and len(own) != pairs:
            raise get.bad(f"{rope_field(get)}.{name}",
                          f"must list {pairs} numbers, one a rotated pair, got {len(own)}")


def _rotary_dim(get: Fields, head_dim: int) -> int:
    """Leading dimensions of a head that are rotated; 0: all."""
    name, at = rope_field(get), "partial_rotary_factor"
    r = Fields(get.raw.get(name) or {}, get.where, f"{name}.")
    share = r.float(at, get.float(at, 1.0))
    bad = (r if r.raw.get(at) else get).bad
    if share > 1:
        raise bad(at, f"must be above 0 and at most 1, got {shown(share)}")
    rotary = int(head_dim * share)
    if rotary % 2 or rotary < 2:
        raise bad(at, f"{share} of {head_dim} dimensions is no even number")
    return rotary if rotary < head_dim else 0


class Fields:
    """Typed access to the fields of a config, with errors that name them."""

    def __init__(self, raw: dict[str, Any], where: Path, prefix: str = "",
                 called: Mapping[str, str] = MappingProxyType({})) -> None:
        """called: what the file calls fields that have other names in `raw`."""
        self.raw, self.where, self.prefix, self.called = raw, where, prefix, called

    def bad(self, name: str, why: str) -> BadModel:
        return BadModel(f"{self.where}: {self.prefix}{self.called.get(name, name)}: {why}")

    def only(self, **fields: Any) -> None:
        """Raises `BadModel` for the first of these fields that says something else, where this is
        all that is supported; null and a missing field say it too."""
        for name, value in fields.items():
            if self.raw.get(name) not in (None, value):
                raise self.bad(name, f"only {shown(value)} is supported, "
                               f"got {shown(self.raw[name])}")

    def layers(self) -> int:
        """Their number: what is read for each of them is bounded by it."""
        return self.int("num_hidden_layers", maximum=MAX_LAYERS)

    def kinds(self, name: str, known: tuple[str, ...], layers: int) -> list[str]:
        """What the field says of each layer, one of the known, of which errors name
        two. Raises `BadModel`."""
        found = self.raw.get(name)
        if (not isinstance(found, list) or len(found) != layers
                or not all(isinstance(kind, str) and kind in known for kind in found)):
            raise self.bad(name, f"must be {layers} times {' or '.join(known[:2])}")
        return found

    def number(self, name: str) -> int:
        """An integer that may be 0 or, to say that there is none, -1."""
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= MAX_INT:
            raise self.bad(name, f"must be an integer from -1 on, got {shown(value)}")
        return value
    def indices(self, name: str, layers: int) -> frozenset[int]:
        """The layers that the field lists; none where it is left out. Raises `BadModel`."""
        listed = self.raw.get(name) or []
        if not isinstance(listed, list) or not all(
                type(i) is int and 0 <= i < layers for i in listed):
            raise self.bad(name, f"must list layers of 0 to {layers - 1}, got {shown(listed)}")
        return frozenset(listed)

    def floats(self, name: str, count: int) -> tuple[float, ...]:
        """So many positive numbers; 1 each where the field is left out. Raises `BadModel`."""
        listed = self.raw.get(name) or [1.0] * count
        if not isinstance(listed, list) or len(listed) != count:
            raise self.bad(name, f"must list {count} positive numbers, got {shown(listed)}")
        return tuple(Fields({name: value}, self.where, self.prefix).float(name)
                     for value in listed)

    def int(self, name: str, default: int | None = None, maximum: int = MAX_INT) -> int:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(name, f"must be a positive integer, got {shown(value)}")
        if value > maximum:
            raise self.bad(name, f"must be at most {maximum}, got {shown(value)}")
        return value

    def float(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.bad(name, f"must be a positive number, got {shown(value)}")
        if not MIN_FLOAT <= value <= MAX_FLOAT:
            raise self.bad(name, f"must be between {MIN_FLOAT:g} and {MAX_FLOAT:g}, "
                           f"got {shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        return default if value is None else bool(value)
