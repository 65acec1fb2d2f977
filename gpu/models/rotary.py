"""Tables of rotary embeddings: frequencies of every scaling variant, as transformers computes
them, in the order in which heads are stored; and weights in that order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actorium.gpu.families.layer_shapes import NOPE, RopeShape
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.layer_weights import LayerWeights, Part
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.kernels.linear import Linear
from actorium.kernels.reference.rope import rope_table


def head_order(s: ModelShape) -> Tensor:
    """i64[head_dim]: the order of dimensions in which the rotated pairs lie half a head apart.

    The pairs of a part of a head lie half that part apart, or side by side. Queries and keys are
    stored in this order, which changes no product of them, so that one kernel rotates whole heads
    and parts.
    """
    rotary = s.rotary_dim or s.head_dim
    turned, still = torch.arange(s.head_dim).split((rotary, s.head_dim - rotary))
    pairs = turned.view(-1, 2).t() if s.interleaved else turned.view(2, -1)
    still = still.view(2, len(still) // 2)
    return torch.cat((pairs, still), 1).flatten()


def rope_tables(s: ModelShape) -> list[Tensor]:
    """[max_model_len, 2, 1, head_dim] of each rope, or one that rotates nothing where the model has
    none. For heads in `head_order`: pairs that stay have angle 0. Behind them, where queries are
    scaled, [max_model_len, 1, 1]: see `QueryScaling`."""
    tables = [_still_table(own) if rope.kind == "none" else _partial_table(own, rope)
              for own, rope in ((s.of_rope(r), rope) for r, rope in enumerate(s.ropes or (NOPE,)))]
    if (q := s.query_scaling) is None or not s.scales_queries:
        return tables
    steps = ((torch.arange(s.max_model_len) + q.offset) // q.every).float()
    scales = 1 + q.beta * torch.log1p(steps)
    return [*tables, scales.to(TORCH_DTYPES[s.dtype]).view(-1, 1, 1)]


def _still_table(s: ModelShape) -> Tensor:
    row = torch.zeros((1, 2, 1, s.head_dim), dtype=TORCH_DTYPES[s.dtype])
    row[:, 0] = 1
    return row.expand(s.max_model_len, -1, -1, -1)


def _partial_table(s: ModelShape, rope: RopeShape) -> Tensor:
    rotary = s.rotary_dim or s.head_dim
    turning, scale = frequencies(rope, rotary, s.max_model_len)
    still = turning.new_zeros((s.head_dim - rotary) // 2)
    table = rope_table(torch.cat((turning, still)), scale, s.max_model_len, TORCH_DTYPES[s.dtype])
    halves = table.view(s.max_model_len, 2, 1, 2, -1)
    halves[:, 0, ..., rotary // 2:] = 1
    return table


def frequencies(rope: RopeShape, dim: int, longest: int) -> tuple[Tensor, float]:
    """(f32[dim / 2] inverse frequencies, factor on cos and sin). longest: the longest sequence that
    is served.

    linear: Chen et al., arXiv 2306.15595. yarn: Peng et al., arXiv 2309.00071. llama3: Llama 3.1.
    longrope: Ding et al., arXiv 2402.13753. proportional: Gemma 4, whose slower pairs stay. dynamic
    is NTK scaling. It and longrope know other frequencies for sequences beyond `original_max`,
    where transformers changes them as a sequence grows. Keys in the cache are rotated already, so
    here `longest` decides for all sequences.
    """
    base = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "proportional":
        base[int(rope.share * dim // 2):] = 0
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, dim, base), _yarn_scale(rope)
    if rope.kind == "dynamic" and longest > rope.original_max and dim > 2:
        stretch = rope.factor * longest / rope.original_max - (rope.factor - 1)
        theta = rope.theta * stretch ** (dim / (dim - 2))
        return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)), 1.0
    if rope.kind == "longrope":
        factors = rope.long_factors if longest > rope.original_max else rope.short_factors
        return base / torch.tensor(factors), _long_scale(rope)
    return base, 1.0


def _long_scale(rope: RopeShape) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max))


def _llama3(rope: RopeShape, base: Tensor) -> Tensor:
    wavelength = 2 * math.pi / base
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * base / rope.factor + smooth * base
    scaled = torch.where(wavelength > rope.original_max / low, base / rope.factor, smoothed)
    return torch.where(wavelength < rope.original_max / high, base, scaled)


def _yarn(rope: RopeShape, dim: int, base: Tensor) -> Tensor:
    def at(rotations: float) -> float:
        turns = math.log(rope.original_max / (rotations * 2 * math.pi))
        return dim * turns / (2 * math.log(rope.theta))

    low, high = at(rope.beta_fast), at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2).float() - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return base / rope.factor * (1 - keep) + base * keep


def _yarn_scale(rope: RopeShape) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def turned_projections(w: LayerWeights, s: ModelShape,
                       order: Tensor) -> tuple[Linear, Linear | None]:
    """Queries, keys and values, heads in this order; and the gate of the output."""
    queries, keys, values = (w.part(s.qkv_bias, f"{name}_proj") for name in "qkv")
    order = order.to(queries.weight.device)
    q, gate = _split_gate(queries.weight, s)
    q_bias = gate_bias = None
    if queries.bias is not None:
        q_bias, gate_bias = _split_gate(queries.bias, s)
    rows, gate_rows = _split_gate(torch.arange(len(queries.weight)), s)
    queries = queries._replace(mapped=False)
    own = [_ordered(queries._replace(weight=q, bias=q_bias, rows=rows), order),
           _ordered(keys, order), values]
    return w.product(own), None if gate is None else w.product(
        [queries._replace(weight=gate, bias=gate_bias, rows=gate_rows)])


def _split_gate(stacked: Tensor, s: ModelShape) -> tuple[Tensor, Tensor | None]:
    """Rows of the queries and of the gate; each head's lie one after the other."""
    if not s.output_gate:
        return stacked, None
    q, gate = stacked.view(s.heads, 2, s.head_dim, *stacked.shape[1:]).unbind(1)
    return q.flatten(0, 1), gate.flatten(0, 1)


def _ordered(part: Part, order: Tensor) -> Part:
    """The rows of each head in this order."""
    def ordered(rows: Tensor) -> Tensor:
        return rows.view(-1, len(order), *rows.shape[1:])[:, order.to(rows.device)].flatten(0, 1)

    rows = torch.arange(len(part.weight)) if part.rows is None else part.rows
    return part._replace(weight=ordered(part.weight), rows=ordered(rows),
                         bias=None if part.bias is None else ordered(part.bias))
