"""Bytes of weights, tables and workspace on one GPU, from the shape alone."""

from __future__ import annotations

from actorium.gpu.families.mla_shape import LatentShape
from actorium.gpu.plan.fp8 import fp8_saved
from actorium.gpu.plan.shape import PlanShape, Recurrent
from actorium.gpu.plan.sizes import page_table_width

RECORD_BYTES = 8 + 4 + 1 + 12 * 4 + 4
"""A slot's last token, length, end, parameters and first end-of-sequence id
(`gpu/step/tables.py`)."""


def weight_bytes(shape: PlanShape, mtp: bool = False) -> int:
    """Bytes of one GPU's weights; mtp: with the MTP layers.

    shape: that GPU's part. What is not divided (norms, router, gates, projections to latents)
    counts on every GPU. A_log, dt_bias and routers that choose by groups are kept in float32,
    weights in FP8 as they are.
    """
    r = shape.recurrent
    wide = r.wide * r.heads * r.layers if r else 0
    if shape.routing and shape.experts:
        layers = shape.sparse + shape.mtp * mtp
        wide += layers * shape.experts.number * (shape.hidden + 1)
    dense = parameters(shape, mtp) * shape.itemsize + wide * (4 - shape.itemsize)
    return dense - fp8_saved(shape, mtp)


def parameters(shape: PlanShape, mtp: bool = False) -> int:
    """Numbers in one GPU's weights."""
    h, recurrent = shape.hidden, shape.recurrent
    total = shape.vocab * h * (1 if shape.tied else 2) + h
    total += len(shape.windows) * _attention(shape)
    if recurrent is not None:
        total += recurrent.layers * _recurrent(h, recurrent)
    total += shape.layers * _norms(shape)
    total += (shape.layers - shape.sparse) * _mlp(shape) + shape.sparse * _experts(shape)
    if mtp and shape.mtp:
        block = _attention(shape) + _norms(shape)
        block += _experts(shape) if shape.experts else _mlp(shape)
        total += shape.mtp * block + -(-2 * h * h // shape.tp) + 3 * h
    return total


def _attention(s: PlanShape) -> int:
    if s.latent:
        return _latent_attention(s, s.latent)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    total = s.hidden * (q * (2 if s.output_gate else 1) + 2 * kv) + q * s.hidden
    total += (q * (2 if s.output_gate else 1) + 2 * kv) * s.qkv_bias + s.hidden * s.o_bias
    return total + 2 * s.head_dim * s.qk_norm


def _latent_attention(s: PlanShape, m: LatentShape) -> int:
    queries, values = s.heads * m.query, s.heads * m.value
    total = s.hidden * m.row + m.rank + m.rank * s.heads * (m.plain + m.value)
    if m.query_rank:
        total += (s.hidden + 1 + queries) * m.query_rank
    else:
        total += s.hidden * queries
    total += (m.query_rank + m.row) * s.qkv_bias + s.hidden * s.o_bias
    return total + values * s.hidden


def _recurrent(hidden: int, r: Recurrent) -> int:
    """GatedDeltaNet norms each head with the same weights, Mamba-2 all of them at once."""
    values = r.heads * r.rows
    into, norm = r.channels + values + r.scalars * r.heads, r.rows if r.scalars == 2 else values
    return (into * (hidden + r.proj_bias) + r.channels * (r.width + r.conv_bias)
            + r.wide * r.heads + norm + hidden * (values + r.proj_bias))


def _norms(s: PlanShape) -> int:
    return s.hidden * (4 if s.sandwich_norms else 2)


def _mlp(s: PlanShape) -> int:
    return 3 * s.hidden * s.intermediate + (2 * s.intermediate + s.hidden) * s.mlp_bias


def _experts(s: PlanShape) -> int:
    if s.experts is None:
        return 0
    experts, _, size, shared, _, gate = s.experts
    total = experts * (s.hidden + 3 * s.hidden * size)
    if s.routing:
        return total + experts + 3 * s.hidden * shared
    return total + (3 * s.hidden * shared + s.hidden * gate if shared else 0)


def table_bytes(slots: int, max_model_len: int, page_size: int, groups: int,
                drafts: int = 0) -> int:
    """The worker's resident tables; slots: slot 0 included. What requests with penalties, biases or
    many stop ids add to them is allocated when the first such request comes."""
    pages = page_table_width(max_model_len, page_size) + -(-drafts // page_size)
    return slots * (RECORD_BYTES + 4 * groups * pages + 8 * (drafts + 1) * (drafts > 0))


def workspace_bytes(shape: PlanShape, tokens: int, rows: int) -> int:
    """An estimate of a step's temporaries.

    tokens: computed in that step; rows: sampled in it. Residual, normed input and the widest
    layer's inner activations, each token; logits in the weights' dtype and in float32, each row.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = [q * (3 if shape.output_gate else 2) + 2 * kv]
    if (m := shape.latent) is not None:
        widths = [m.query_rank + m.row + shape.heads * (m.query + 2 * m.row + m.value)]
    if shape.layers > shape.sparse:
        widths.append(3 * shape.intermediate)
    if shape.sparse and (e := shape.experts) is not None:
        widths.append(e.chosen * (3 * e.size + shape.hidden) + 3 * e.shared)
    if (r := shape.recurrent) is not None:
        widths.append(2 * r.channels + 3 * r.heads * r.rows)
    each = (2 * shape.hidden + max(widths)) * shape.itemsize
    return tokens * each + rows * shape.vocab * shape.tp * (shape.itemsize + 4)
