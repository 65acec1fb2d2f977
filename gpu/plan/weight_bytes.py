"""Bytes of weights, tables and workspace on one GPU, from the shape alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from actorium.gpu.families.architectures import model_tensors
from actorium.gpu.families.eagle_config import eagle_tensors
from actorium.gpu.families.fp8_config import BLOCK, Fp8Shape
from actorium.gpu.families.model_shape import DTYPE_BYTES, EagleShape, ModelShape
from actorium.gpu.families.tensor_specs import OUTER, TensorSpec, held_format, stacks
from actorium.gpu.families.weight_formats import GroupedShape, WeightFormat
from actorium.gpu.plan.sizes import page_table_width

RECORD_BYTES = 8 + 4 + 1 + 13 * 4 + 4
"""A slot's last token, length, end, parameters and first end-of-sequence id
(`gpu/step/tables.py`)."""
FP8 = "float8_e4m3"
ORDER_BYTES = 8
"""Of a column that has a place of its own, an int64."""
SCALE_BYTES = 4
"""Of a scale of weights in FP8, a float32."""


def parameters(shape: ModelShape) -> int:
    """Numbers in one GPU's weights."""
    return shape.by_transformers or sum(spec.size for spec in model_tensors(shape))


def weight_bytes(shape: ModelShape) -> int:
    """Bytes of one GPU's weights: of all tensors that the model reads, and a draft model, as they
    are held.

    shape: that GPU's part.
    """
    return sum(bytes_by_format(shape).values()) + (weight_bytes(shape.draft) if shape.draft else 0)


def bytes_by_format(shape: ModelShape) -> dict[str, int]:
    """The same of the model alone, by how they are held: the name of a dtype, or a `WeightFormat`
    in words; most first."""
    if shape.by_transformers:
        return _by_transformers(shape)
    held: Counter[str] = Counter()
    specs = model_tensors(shape)
    for spec in specs:
        if held_format(shape.grouped, spec) is None:
            dtype = spec.dtype or shape.dtype
            held[dtype] += spec.size * DTYPE_BYTES[dtype]
    for form, rows, columns in _grouped_products(shape.grouped, specs):
        ordered = shape.grouped is not None and shape.grouped.ordered
        held[str(form)] += form.held_bytes(rows, columns) + ORDER_BYTES * columns * ordered
    if shape.fp8 is not None and shape.grouped is None:
        for product in _fp8_products(shape.fp8, specs):
            size = sum(spec.size for spec in product)
            held[shape.dtype] -= size * shape.itemsize
            held[FP8] += size + _scales(shape.fp8, product) * SCALE_BYTES
    if shape.eagle is not None:
        held[shape.dtype] += shape.itemsize * sum(own.size for own in eagle_tensors(shape.eagle))
    return dict(held.most_common())


def _by_transformers(shape: ModelShape) -> dict[str, int]:
    """An estimate, of the numbers that its layers have beside embedding and head."""
    size, form = shape.by_transformers, shape.grouped.default if shape.grouped else None
    form = form.fitting(shape.hidden) if form else None
    plain = min(size, (2 - shape.tied) * shape.vocab_size * shape.hidden)
    rows = (size - plain) // shape.hidden
    if form is not None:
        return {str(form): form.held_bytes(rows, shape.hidden), shape.dtype: plain * shape.itemsize}
    if shape.fp8 is not None:
        return {FP8: size - plain + rows * SCALE_BYTES, shape.dtype: plain * shape.itemsize}
    return {shape.dtype: size * shape.itemsize}


def _grouped_products(grouped: GroupedShape | None, specs: Sequence[TensorSpec]
                      ) -> Iterator[tuple[WeightFormat, int, int]]:
    """(format, rows, columns) of each weight in 4 to 8 bits, neighbours in one format together."""
    outer = [[spec] for spec in specs if spec.name in OUTER]
    for stack in (*stacks(specs), *outer):
        for form, own in groupby(stack, lambda spec: held_format(grouped, spec)):
            run = list(own)
            gates = sum(spec.shape[0] // 2 for spec in run
                        if spec.projection and spec.projection.gated_head)
            rows = sum(spec.shape[0] for spec in run) - gates
            if form is not None:
                yield from ((form, count, run[0].shape[1]) for count in (rows, gates) if count)


def _fp8_products(fp8: Fp8Shape, specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """The weights in FP8, those together that are served as one product."""
    for stack in stacks(specs):
        runs = [(covered, list(run)) for covered, run in groupby(
            stack, lambda spec: fp8.covers(spec.module))]
        mixed = stack[0].projection is not None and stack[0].projection.mixed
        if mixed or len(runs) == 1:
            yield from (run for covered, run in runs if covered)


def _scales(fp8: Fp8Shape, product: Sequence[TensorSpec]) -> int:
    """Scales that are held of a product: those of blocks, where none is cut, else one a row (and
    block's width)."""
    rows, queries, head, scattered, columns = [], 0, 0, False, product[0].shape[1]
    for spec in product:
        own = spec.projection
        assert own is not None
        gated = own.gated_head
        rows.append(spec.shape[0] // 2 if gated else spec.shape[0])
        queries, head = (rows[-1], gated) if gated else (queries, head)
        scattered = scattered or own.scattered
    count = _scales_of(fp8, rows, columns, scattered)
    return count + (_scales_of(fp8, [queries], columns, head % BLOCK > 0) if head else 0)


def _scales_of(fp8: Fp8Shape, parts: Sequence[int], columns: int, scattered: bool) -> int:
    """Of stacked parts with so many rows each."""
    rows = sum(parts)
    if not fp8.block or columns <= BLOCK:
        return rows
    whole = not scattered and not any(count % BLOCK for count in [*parts[:-1], rows])
    return -(-columns // BLOCK) * (rows // BLOCK if whole else rows)


def table_bytes(slots: int, max_model_len: int, page_size: int, groups: int,
                drafts: int = 0, history: bool = False) -> int:
    """The worker's resident tables; slots: slot 0 included; history: they keep each sequence's
    tokens. What requests with penalties, biases or
    many stop ids add to them is allocated when the first such request comes."""
    pages = page_table_width(max_model_len, page_size) + -(-drafts // page_size)
    return slots * (RECORD_BYTES + 4 * groups * pages + 8 * (drafts + 1) * (drafts > 0)
                    + 4 * (max_model_len + drafts + 1) * history)


def workspace_bytes(shape: ModelShape, tokens: int, rows: int) -> int:
    """An estimate of a step's temporaries.

    tokens: computed in that step; rows: sampled in it. Residual, normed input and the widest
    layer's inner activations, each token; logits in the weights' dtype and in float32, each row.
    """
    beside = shape.output_gate or shape.norm_after_rope or shape.scales_queries
    # Of normed values there is a copy of queries and keys, too.
    widths = [own.q_size * (3 if beside or own.value_norm else 2) + (
        5 if own.value_norm else 2) * own.kv_size for own in shape.kinds]
    if shape.whole_qk_norm or shape.clip_qkv:  # what is normed and joined again lies beside it
        widths.append(3 * shape.q_size + 5 * shape.kv_size)
    if (m := shape.latent) is not None:
        widths = [m.query_rank + m.row + shape.heads * (m.query + 2 * m.row + m.value)]
    if (x := shape.index) is not None:
        widths[0] += x.dim + x.heads + 2 * x.heads * x.dim
    if shape.has_dense:
        widths.append(3 * max(own.intermediate for own in shape.kinds))
    if (e := shape.experts) is not None and (shape.sparse or e.beside):
        widths.append(e.chosen * (3 * e.size + shape.hidden) + 3 * e.shared)
    if shape.altup is not None:  # what is predicted, in f32, and corrected
        more = 1 + 3 * 4 // shape.itemsize
        widths = [width + more * shape.stream_width for width in widths]
    if shape.recurrence is not None:
        inner = 2 * shape.recurrence.state.columns[1] + 3 * shape.recurrence.inner
        # Attention beside it takes the same input, and its output lies beside.
        widths.append(inner + (len(shape.attention_layers) + len(shape.recurrent) > shape.layers)
                      * 2 * widths[0])
    if shape.eagle is not None:  # what its head takes is kept until the layers are through
        widths.append(max(widths) + len(shape.eagle.taps) * shape.hidden)
        widths.append(_head_width(shape.eagle))
    each = (2 * shape.stream_width + shape.token_width + max(widths)) * shape.itemsize
    logits = 0 if shape.bidirectional else rows * shape.vocabulary * (shape.itemsize + 4)
    return tokens * each + logits


def _head_width(s: EagleShape) -> int:
    """Numbers of a token while an EAGLE-3 head runs: what it takes, twice as it is joined, and the
    layer's own."""
    own = s.layer
    return 2 * len(s.taps) * s.width + 5 * own.hidden + max(
        3 * own.q_size + 2 * own.kv_size, 3 * own.intermediate)
