"""Cases: products with weights, experts, what lies between products, what ranks of tensor
parallelism do together as far as one GPU shows it, and drawing tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels import sampling_tables as columns
from actorium.kernels.backends import select_sampling
from actorium.kernels.grouped_rows import RowFormat, grouped_mm, pack_rows, quantise_grouped
from actorium.kernels.reference.all_reduce import sum_parts_norm
from actorium.kernels.reference.experts import EachExpert, route
from actorium.kernels.reference.rope import rope_rows, rope_table
from actorium.kernels.reference.torch_ops import TorchOps, TorchSampling
from actorium.kernels.sampling_tables import SamplingTables
from actorium.kernels.scaled_linear import COLUMNS, pack, quantise
from actorium.kernels.triton.all_reduce import PeerRows, memory_bytes, room_of, sum_rows_norm

from . import shapes
from .case import BF16, Case, Named, Run, Setting, Truth, ready

OUT, INNER = 28_672, 4096
"""Llama-3.1-8B's gate and up."""
BY_BYTES = 256
"""Rows up to which the weight's bytes are the limit."""


def products(s: Setting) -> Named:
    """Returns products in bf16 (cuBLAS as we call it) and in FP8 with dynamic quantisation of the
    input, beside the same products of cuBLAS in bf16 and FP8."""
    for rows in shapes.PRODUCT_ROWS:
        yield f"bf16, {rows} rows", partial(_bf16, s, rows)
    for kind in ("row", "block"):
        for rows in shapes.PRODUCT_ROWS:
            yield f"fp8 {kind}, {rows} rows", partial(_fp8, s, rows, kind)


def codes(s: Setting) -> Named:
    """Products with weights in 4 and 8 bits: with a scale per group, and with one per row as
    integer products."""
    for kind, form in shapes.CODES.items():
        for rows in shapes.PRODUCT_ROWS:
            yield f"{kind}, {rows} rows", partial(_codes, s, rows, RowFormat(*form))


def _sizes(s: Setting, rows: int) -> tuple[int, int, int]:
    return min(rows, s.size(rows, 3)), s.size(OUT, 256), s.size(INNER, 256)


def _bf16(s: Setting, rows: int) -> Case:
    n, out, inner = _sizes(s, rows)
    weight, x = s.randn(out, inner), s.randn(n, inner)
    linear = s.ops.linear(weight)
    truth = Truth("product", "bf16", lambda: x.float() @ weight.float().t())
    return _product(lambda: linear(x), truth, rows, n, out, inner, 2,
                    {"torch": ready(lambda: F.linear(x, weight))})


def _product(run: Run, truth: Truth, rows: int, n: int, out: int, inner: int, width: float,
             peers: dict[str, Callable[[], Run]]) -> Case:
    """rows: of the full size, which say what the limit is; width: bytes of a number of the weight.
    """
    if rows <= BY_BYTES:
        return Case(run, truth, width * out * inner + 2 * n * (out + inner), peers=peers)
    return Case(run, truth, flops=2.0 * n * out * inner, peers=peers, fp8=width == 1)


def _fp8(s: Setting, rows: int, kind: str) -> Case:
    """Scales by row of the weight, or by blocks of 128 x 128."""
    n, out, inner = _sizes(s, rows)
    weight, x = s.randn(out, inner), s.randn(n, inner)
    by_row = kind == "row"
    q, scales = quantise(weight, inner if by_row else COLUMNS)
    if not by_row:
        scales = scales.view(-1, COLUMNS, scales.shape[1])[:, :1].expand(
            -1, COLUMNS, -1).reshape(out, -1).contiguous()
    packed = pack(q, scales)
    linear, reference = s.ops.linear(packed), TorchOps().linear(packed)
    peers = {"cuBLAS in bf16": ready(lambda: F.linear(x, weight))}
    if not s.toy:
        peers["torch._scaled_mm, x quantised before"] = partial(_scaled_mm, s, n, q, inner)
    truth = Truth("product", "fp8", lambda: reference(x))
    return _product(lambda: linear(x), truth, rows, n, out, inner, 1, peers)


def _codes(s: Setting, rows: int, form: RowFormat) -> Case:
    """The peer is the same product in bf16, whose weight has two bytes a number."""
    n, out, inner = _sizes(s, rows)
    weight, x = s.randn(out, inner), s.randn(n, inner)
    coded = quantise_grouped(weight, form)
    linear = s.ops.linear(pack_rows(coded))
    group = form.group or inner
    width = form.bits / 8 + (2 if form.group else 4) * (1 + form.mins) / group
    if not form.group and rows > BY_BYTES:
        width = 1  # integers have the rate of FP8
    truth = Truth("product", f"int{form.bits}", lambda: grouped_mm(x, coded))
    return _product(lambda: linear(x), truth, rows, n, out, inner, width,
                    {"cuBLAS in bf16": ready(lambda: F.linear(x, weight))})


def _scaled_mm(s: Setting, n: int, q: Tensor, inner: int) -> Run:
    x = s.randn(n, inner, dtype=torch.float8_e4m3fn)
    ones_x = torch.ones(n, 1, device=s.device)
    ones_w = torch.ones(1, len(q), device=s.device)
    return lambda: torch._scaled_mm(x, q.t(), ones_x, ones_w, out_dtype=BF16)


def mixtures(s: Setting) -> Named:
    """Qwen3-30B-A3B's experts; bytes of the experts that were chosen."""
    for rows in shapes.EXPERT_ROWS:
        yield f"{rows} rows", partial(_mixture, s, rows)


def _mixture(s: Setting, full: int) -> Case:
    number, width, inner, chosen = s.size(128, 4), s.size(2048, 64), s.size(768, 32), s.size(8, 2)
    rows = min(full, s.size(full, 2))
    gate_up = s.randn(number, 2 * inner, width) * width**-0.5
    down = s.randn(number, width, inner) * inner**-0.5
    ours = s.ops.experts(gate_up, down)
    each = EachExpert([lambda y, g=g, d=d: F.linear(s.ops.silu_mul(F.linear(y, g)), d)
                       for g, d in zip(gate_up, down, strict=True)])
    x, logits = s.randn(rows, width), s.randn(rows, number)
    weights, experts = route(logits, chosen, True)
    wanted = len(experts.unique())
    flops = rows * chosen * 6 * width * inner
    return Case(lambda: ours(x, weights, experts),
                Truth("experts", "bf16", lambda: each(x, weights, experts)),
                wanted * 6 * width * inner if full < 4096 else 0.0, flops)


def elementwise(s: Setting) -> Named:
    yield "rms_norm", partial(_norm, s, False)
    yield "rms_norm_add", partial(_norm, s, True)
    yield "silu_mul", partial(_gate, s)
    yield "rotate_write", partial(_rotation, s)


def _norm(s: Setting, adds: bool) -> Case:
    rows, width = s.size(8192, 4), s.size(4096, 64)
    x, residual, weight = s.randn(rows, width), s.randn(rows, width), s.randn(width)
    moved = rows * width * 2
    if adds:
        truth = Truth("elementwise", "bf16", lambda: TorchOps().rms_norm_add(
            x.float(), weight.float(), 1e-6, residual.float()))
        return Case(lambda: s.ops.rms_norm_add(x, weight, 1e-6, residual), truth, 3 * moved, peers={
            "torch": ready(lambda: residual + F.rms_norm(x, (width,), weight, 1e-6))})
    truth = Truth("elementwise", "bf16",
                  lambda: TorchOps().rms_norm(x.float(), weight.float(), 1e-6))
    return Case(lambda: s.ops.rms_norm(x, weight, 1e-6), truth, 2 * moved,
                peers={"torch": ready(lambda: F.rms_norm(x, (width,), weight, 1e-6))})


def _gate(s: Setting) -> Case:
    rows, width = s.size(8192, 4), s.size(14336, 64)
    x = s.randn(rows, 2 * width)
    truth = Truth("elementwise", "bf16", lambda: TorchOps().silu_mul(x.float()))
    return Case(lambda: s.ops.silu_mul(x), truth, 6 * rows * width,
                peers={"torch": ready(lambda: F.silu(x[:, :width]) * x[:, width:])})


def _rotation(s: Setting) -> Case:
    rows, heads, kv, dim = s.size(8192, 4), s.size(32, 4), s.size(8, 2), s.size(128, 32)
    qkv, pages = s.randn(rows, heads + 2 * kv, dim), s.randn(rows + 16, 2 * kv, dim)
    inv = 1e4 ** (-s.arange(dim // 2).float() * 2 / dim)
    index = s.arange(rows, torch.int64) + 16
    rope = rope_rows(rope_table(inv, 1.0, rows, BF16), s.arange(rows, torch.int64))

    def run(ops: TorchOps, qkv: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        ops.rotate_write(qkv, heads, None, 1e-6, rope, pages, index)
        return qkv[:, :heads], pages

    truth = Truth("elementwise", "bf16", lambda: run(TorchOps(), qkv.clone(), pages.clone()))
    return Case(lambda: run(s.ops, qkv, pages), truth,
                rows * dim * 2 * (2 * (heads + 2 * kv)))


RANKS = 2


def sums(s: Setting) -> Named:
    """Two ranks' one-shot sums with residual and norm, one after the other on one GPU, three
    launches: neither waits, and nothing goes over a link."""
    for rows in shapes.SUM_ROWS:
        yield f"{rows} x 8192, {RANKS} ranks", partial(_sum, s, s.size(rows, 2))


def _sum(s: Setting, rows: int) -> Case:
    width = s.size(8192, 64)
    room = room_of(width, BF16.itemsize)
    memory = torch.zeros(RANKS, memory_bytes(RANKS, rows, room), dtype=torch.uint8,
                         device=s.device)
    addresses = torch.tensor([own.data_ptr() for own in memory], device=s.device)
    one, other = (PeerRows(addresses, torch.zeros(rows + 1, dtype=torch.int32, device=s.device),
                           rank, room) for rank in range(RANKS))
    x, y, residual, weight = (s.randn(*size, width) for size in ((rows,), (rows,), (rows,), ()))

    def run() -> object:
        sum_rows_norm(y, other, residual, weight, 1e-6, takes=False)
        mine = sum_rows_norm(x, one, residual, weight, 1e-6)
        assert len(memory) == RANKS  # what addresses name is not given back
        return mine, sum_rows_norm(y, other, residual, weight, 1e-6, gives=False)

    def sums() -> object:
        own = [part.float() for part in (x, y, residual, weight)]
        return [sum_parts_norm((own[0], own[1]), own[2], own[3], 1e-6)] * RANKS

    # Of each rank: its part read and given, both parts and the residual read, two rows written.
    moved = RANKS * 7 * rows * width * BF16.itemsize
    return Case(run, Truth("sum of ranks", "bf16", sums), moved, peers={
        "torch, one rank": ready(lambda: sum_parts_norm((x, y), residual, weight, 1e-6))})


ROWS, VOCAB = 256, 151_936
FLAT = 0.02
"""Spread of logits of which a nucleus of 0.9 holds nine tenths of all."""


def draws(s: Setting) -> Named:
    for name, (top_k, top_p, flat) in shapes.DRAWS.items():
        yield name, partial(_draw, s, top_k, top_p, flat)


def _draw(s: Setting, top_k: int, top_p: float, flat: bool) -> Case:
    rows, vocab = s.size(ROWS, 3), s.size(VOCAB, 200)
    ops = select_sampling(s.device, "auto" if not s.toy else "triton")
    record = torch.zeros(rows + 1, columns.WIDTH, dtype=torch.int32)
    real = record.view(torch.float32)
    record[:, columns.TOP_K], record[:, columns.SEED_LOW] = top_k, torch.arange(rows + 1)
    real[:, columns.TEMPERATURE] = 1.0 if top_p else 0.0
    real[:, columns.TOP_P], real[:, columns.REPETITION] = top_p or 1.0, 1.0
    tables = SamplingTables(record.to(s.device),
                            torch.full((rows + 1, 1), -1, dtype=torch.int32, device=s.device),
                            torch.zeros(rows + 1, 0, dtype=torch.int64, device=s.device))
    logits = s.randn(rows, vocab, dtype=torch.float32) * (FLAT if flat else 4)
    slots = s.arange(rows) + 1
    chosen = partial(ops.choose, logits, slots, slots, tables, top_p > 0,
                     0 < top_p < 1 or top_k > 0)
    truth = Truth("draw" if top_p else "likeliest", "i64", partial(
        TorchSampling().choose, logits, *chosen.args[1:]))
    return Case(chosen, truth, rows * vocab * 4, peers={
        "torch": partial(_torchs, logits, top_k, top_p)})


def _torchs(logits: Tensor, top_k: int, top_p: float) -> Run:
    if not top_p:
        return lambda: logits.argmax(-1)
    if top_p == 1.0:
        return lambda: logits.softmax(-1).multinomial(1)

    def sorted_out() -> Tensor:
        found, order = logits.sort(-1, descending=True)
        if top_k:
            found, order = found[:, :top_k], order[:, :top_k]
        p = found.softmax(-1)
        p = p.masked_fill(p.cumsum(-1) - p > top_p, 0.0)
        return order.gather(-1, p.multinomial(1))

    return sorted_out
