"""Cases: what `--exact on` runs, beside what runs without it. A case is made only if bits agree: of
rows alone and in batches, and of queries decoded, in windows, and in chunks of prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.gpu.attention.attention_backend import TorchAttention, TritonAttention
from actorium.gpu.step.batch import ExtendRow
from actorium.kernels.grouped_rows import (
    RowFormat,
    grouped_mm,
    pack_rows,
    quantise_grouped,
    unpack_rows,
)
from actorium.kernels.linear import Linear
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.scaled_linear import pack, quantise

from . import shapes
from .attention import PAGE, decoded, extended
from .case import Case, Named, Run, Setting, Truth, ready

BATCHES = (1, 2, 3, 17, 33, 100, 300)
"""Rows that a row is computed among; from 256 on tiles are those of prompts."""


def same(what: str, one: Tensor, other: Tensor) -> None:
    """Raises `AssertionError` where their bits differ."""
    if not torch.equal(one, other):
        differ = int((one != other).sum())
        raise AssertionError(f"{what}: {differ} of {one.numel()} numbers have other bits")


def exacts(s: Setting) -> Named:
    for name, kind, outs, ins, rows in shapes.EXACT_PRODUCTS:
        yield name, partial(_product, s, kind, outs, ins, rows)
    for name, batch, length in shapes.EXACT_DECODES:
        yield name, partial(_decode, s, batch, length)
    yield shapes.EXACT_PROMPT, partial(_prompt, s, 2048)


def _product(s: Setting, kind: str, outs: int, ins: int, rows: int) -> Case:
    """A weight of which rows alone have the bits that they have in batches."""
    from actorium.kernels.triton.exact_ops import ExactTritonOps

    outs, ins, n = s.size(outs, 96), s.size(ins, 128), s.size(rows, min(rows, 3))
    weight = s.randn(outs, ins) * ins**-0.5
    given = {"bf16": lambda: weight, "fp8": lambda: pack(*quantise(weight, ins)),
             "int8": lambda: pack_rows(quantise_grouped(weight, RowFormat(8, 0, False, 128))),
             "int4": lambda: pack_rows(quantise_grouped(weight, RowFormat(4, 32, True)))}[kind]()
    exact, plain = ExactTritonOps().linear(given), s.ops.linear(given)
    x = s.randn(max(BATCHES[:2 if s.toy else None]), ins)
    for count in BATCHES[:2 if s.toy else None]:
        _rows_are_alone(exact, x[:count], kind)
    x = s.randn(n, ins)
    peers: dict[str, Callable[[], Run]] = {"not exact": ready(lambda: plain(x))}
    if kind == "bf16":
        peers["cuBLAS"] = ready(lambda: F.linear(x, weight))
    truth = Truth("product", kind, {
        "bf16": lambda: x.float() @ weight.float().t(),
        "fp8": lambda: TorchOps().linear(given)(x)}.get(
            kind, lambda: grouped_mm(x, unpack_rows(given))))
    return Case(lambda: exact(x), truth, given.nbytes + 2 * n * (outs + ins) if rows <= 64 else 0.0,
                2.0 * n * outs * ins, peers, fp8=kind == "fp8")


def _rows_are_alone(linear: Linear, x: Tensor, kind: str) -> None:
    many, residual = linear(x), x.new_zeros(len(x), linear(x[:1]).shape[1])
    same(f"{kind}, added to 0", linear.add(x, residual), many)
    for i in {0, len(x) // 2, len(x) - 1}:
        same(f"{kind}, row {i} of {len(x)}", linear(x[i:i + 1])[0], many[i])


def _attention(s: Setting) -> TritonAttention | TorchAttention:
    """The exact one. (Toys on torch's kernels compare those.)"""
    return TritonAttention(exact_for=32_768) if s.attention is TritonAttention else s.attention()


def _decode(s: Setting, batch: int, length: int) -> Case:
    """Decode over sequences of any length: the same bits as one alone and as a prompt's end."""
    batch, length = s.size(batch, 2), s.size(length, 40)
    heads, kv, dim = s.size(32, 4), s.size(8, 2), s.size(128, 32)
    width = -(-length // PAGE)
    layer = s.randn((batch * width + 1) * PAGE, 2 * kv, dim)
    pages = s.arange(batch * width).view(batch, width) + 1
    lens = torch.full((batch,), length, device=s.device, dtype=torch.int32)
    uneven = (lens - 7 * s.arange(batch)).clamp(min=3)
    exact, scale = _attention(s), dim**-0.5
    q = s.randn(batch * 3, heads, dim)
    singles = q.view(batch, 3, heads, dim)
    windows = exact.decode(pages, uneven, length, 3, PAGE, 0, scale)(q, layer)
    windows = windows.view(batch, 3, heads, dim)
    for i in range(3):
        alone = exact.decode(pages, uneven - 2 + i, length, 1, PAGE, 0, scale)
        same(f"token {i} of windows", alone(singles[:, i].contiguous(), layer), windows[:, i])
    for b in {0, batch - 1}:
        one = exact.decode(pages[b:b + 1], uneven[b:b + 1], length, 3, PAGE, 0, scale)
        same(f"sequence {b} alone", one(singles[b].contiguous(), layer), windows[b])
        end = int(uneven[b])
        chunk = exact.extend([ExtendRow(0, end - 3, 3, pages[b].contiguous())], PAGE, 0, scale)
        same(f"sequence {b} as a prompt", chunk(singles[b].contiguous(), layer), windows[b])
    q = s.randn(batch, heads, dim)
    ours = exact.decode(pages, lens, length, 1, PAGE, 0, scale)
    plain = s.attention().decode(pages, lens, length, 1, PAGE, 0, scale)
    truth = Truth("attention", "bf16", partial(decoded, q, layer, pages, lens, length, 1, scale))
    return Case(lambda: ours(q, layer), truth, batch * length * 2 * kv * dim * 2.0,
                peers={"not exact": ready(lambda: plain(q, layer))})


def _prompt(s: Setting, count: int) -> Case:
    """Prompts in chunks of several lengths: the same bits as whole."""
    count = s.size(count, 40)
    heads, kv, dim = s.size(32, 4), s.size(8, 2), s.size(128, 32)
    width = -(-count // PAGE)
    layer, pages = s.randn((width + 1) * PAGE, 2 * kv, dim), s.arange(width) + 1
    q, exact, scale = s.randn(count, heads, dim), _attention(s), dim**-0.5

    def part(start: int, end: int) -> Tensor:
        row = ExtendRow(0, start, end - start, pages)
        return exact.extend([row], PAGE, 0, scale)(q[start:end], layer)

    whole = part(0, count)
    for size in (1 + count // 2, 1 + count // 5):
        ends = [*range(0, count, size), count]
        parts = [part(a, b) for a, b in zip(ends, ends[1:], strict=False)]
        same(f"chunks of {size}", torch.cat(parts), whole)
    row = [ExtendRow(0, 0, count, pages)]
    ours, plain = (own.extend(row, PAGE, 0, scale) for own in (exact, s.attention()))
    truth = Truth("attention", "bf16", partial(extended, q, layer, row, scale))
    return Case(lambda: ours(q, layer), truth, flops=2.0 * heads * dim * count * (count + 1),
                peers={"not exact": ready(lambda: plain(q, layer))})
