"""Which of a model's weights are in FP8, and their bytes, from the shape alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from actorium.gpu.families.fp8_shape import BLOCK, Fp8Shape
from actorium.gpu.families.mla_shape import LatentShape
from actorium.gpu.plan.shape import PlanShape, Recurrent


class Product(NamedTuple):
    """One product of a layer: projections whose rows are stacked."""

    parts: tuple[tuple[str, int], ...]
    """(module, rows) of each."""
    columns: int
    copies: int = 1
    """Of them in a layer."""
    scattered: bool = False
    """Its rows lie in another order than in the checkpoint, across blocks."""
    apart: bool = False
    """Parts in FP8 are served beside others; else all are in FP8, or none."""


def fp8_saved(shape: PlanShape, mtp: bool) -> int:
    """Bytes that one GPU's weights take less for being in FP8, their scales counted."""
    fp8 = shape.fp8
    if fp8 is None:
        return 0
    saved = 0.0
    for layers, at, products in _layers(shape, mtp):
        for product in products:
            own = [(rows, fp8.share(module, layers, shape.layers) if not at else
                    float(fp8.covers(f"{at}{module}"))) for module, rows in product.parts]
            if not product.apart:
                least = min(share for _, share in own)
                own = [(rows, least) for rows, _ in own]
            each = sum(rows * share for rows, share in own) * product.columns
            each *= shape.itemsize - 1
            each -= max(share for _, share in own) * _scale_bytes(
                fp8, product, sum(rows for rows, share in own if share))
            saved += layers * product.copies * each
    return round(saved)


def _scale_bytes(fp8: Fp8Shape, product: Product, rows: int) -> int:
    """As they are held: those of blocks, where none is cut, else one a row (and block's width)."""
    if not fp8.block or product.columns <= BLOCK:
        return 4 * rows
    groups = -(-product.columns // BLOCK)
    whole = not product.scattered and not any(rows % BLOCK for _, rows in product.parts[:-1])
    return 4 * groups * (rows // BLOCK if whole and rows % BLOCK == 0 else rows)


def _layers(s: PlanShape, mtp: bool) -> Iterator[tuple[int, str, list[Product]]]:
    """(how many, what their modules' names begin with where they are not among the model's layers,
    products) of layers of each kind."""
    attention = list(_attention(s))
    yield len(s.windows), "", attention
    if s.recurrent is not None:
        yield s.recurrent.layers, "", list(_recurrent(s.hidden, s.recurrent))
    yield s.layers - s.sparse, "", _mlp("mlp.", s.hidden, s.intermediate)
    yield s.sparse, "", list(_experts(s))
    if mtp and s.mtp:
        at = f"model.layers.{s.layers}." if s.latent else "mtp.layers.0."
        last = list(_experts(s)) if s.experts else _mlp("mlp.", s.hidden, s.intermediate)
        yield s.mtp, at, [*attention, *last]


def _attention(s: PlanShape) -> Iterator[Product]:
    if s.latent:
        yield from _latent_attention(s, s.latent)
        return
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    # Where a part of each head is rotated, its pairs are brought half a head apart.
    apart = s.output_gate and s.head_dim > BLOCK or BLOCK % s.head_dim and s.head_dim % BLOCK
    qkv = (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    yield Product(qkv, s.hidden, 1, bool(apart))
    if s.output_gate:
        gate = (qkv[0], ("self_attn.k_proj", 0), ("self_attn.v_proj", 0))
        yield Product(gate, s.hidden, 1, bool(s.head_dim % BLOCK))
    yield Product((("self_attn.o_proj", s.hidden),), q)


def _latent_attention(s: PlanShape, m: LatentShape) -> Iterator[Product]:
    queries, row = s.heads * m.query, ("self_attn.kv_a_proj_with_mqa", m.row)
    if m.query_rank:
        yield Product((("self_attn.q_a_proj", m.query_rank), row), s.hidden)
        yield Product((("self_attn.q_b_proj", queries),), m.query_rank)
    else:
        yield Product((("self_attn.q_proj", queries), row), s.hidden)
    yield Product((("self_attn.o_proj", s.hidden),), s.heads * m.value)


def _recurrent(hidden: int, r: Recurrent) -> Iterator[Product]:
    values = r.heads * r.rows
    if r.scalars == 2:
        at = "linear_attn."
        into = [("in_proj_qkv", r.channels), ("in_proj_z", values), ("in_proj_b", r.heads),
                ("in_proj_a", r.heads)]
    else:
        at, into = "mamba.", [("in_proj", r.channels + values + r.heads)]
    yield Product(tuple((f"{at}{name}", rows) for name, rows in into), hidden, apart=True)
    yield Product(((f"{at}out_proj", hidden),), values)


def _mlp(at: str, hidden: int, size: int, count: int = 1) -> list[Product]:
    return [Product(((f"{at}gate_proj", size), (f"{at}up_proj", size)), hidden, count),
            Product(((f"{at}down_proj", hidden),), size, count)]


def _experts(s: PlanShape) -> Iterator[Product]:
    if s.experts is not None:
        number, _, size, shared, _, _ = s.experts
        yield from _mlp("mlp.experts.0.", s.hidden, size, number)
        if shared:
            at = "mlp.shared_experts." if s.routing else "mlp.shared_expert."
            yield from _mlp(at, s.hidden, shared)
