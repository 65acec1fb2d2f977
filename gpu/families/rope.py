"""Rope objects of configs: base frequency and scaling."""

from __future__ import annotations

from typing import Any

from actorium.actors.errors import shown
from actorium.gpu.families.config_fields import MOST, Fields
from actorium.gpu.families.model_shape import RopeShape

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def one_rope(get: Fields, name: str, found: Any, base: float, positions: int,
             partial: bool = False) -> tuple[RopeShape, int]:
    """The rope object `found`, which errors call `name`, and the length limit.

    base: theta where it names none; partial: whether it may speak of a part of each head.
    Raises `BadModel`.
    """
    if not isinstance(found, dict):
        raise get.bad(name, "must be an object")
    r = Fields(found, get.where, f"{name}.")
    theta = r.float("rope_theta", base)
    kind = found.get("rope_type") or found.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise r.bad("rope_type", f"must be one of {', '.join(ROPE_TYPES)}, got {shown(kind)}")
    share = found.get("partial_rotary_factor") or get.raw.get("partial_rotary_factor") or 1
    if share != 1 and not partial:
        raise r.bad("partial_rotary_factor", "only 1.0 is supported")
    if kind == "default":
        return RopeShape(theta=theta), positions
    return _scaled_rope(r, kind, theta, positions)


def _scaled_rope(r: Fields, kind: str, theta: float, positions: int) -> tuple[RopeShape, int]:
    original = r.int("original_max_position_embeddings",
                     r.raw.get("original_max_position_embeddings") or positions)
    if kind in ("yarn", "llama3") and theta == 1:
        raise r.bad("rope_theta", "must not be 1")
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
        if factor * original > MOST:
            raise r.bad("factor", f"{shown(factor)} times {original} positions are too many")
        return rope, max(positions, int(factor * original))
    return rope, positions
