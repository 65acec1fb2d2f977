"""Attention over latents in pages, against its definition: keys and values of every head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from actorium.gpu.attention.attention_backend import TorchAttention
from actorium.kernels.reference.latent import (
    FEW,
    HeadProducts,
    latent_masked,
    write_latent,
)

HEADS, PLAIN, ROPE, RANK, VALUE = 3, 10, 4, 14, 6
OVER_LATENTS = TorchAttention(RANK)


@dataclass
class Weights:
    to_keys: Tensor
    to_values: Tensor

    def attend(self, q: Tensor, rows: Tensor, first: int, scale: float) -> Tensor:
        """f64[N, H, V]: queries [N, H, PLAIN + ROPE] at first, first + 1, ... over rows [S, D]."""
        latent, rope = rows[:, :RANK], rows[:, RANK:]
        keys = torch.cat((torch.einsum("hnr,sr->hsn", self.to_keys, latent),
                          rope.expand(HEADS, -1, -1)), -1)
        values = torch.einsum("hrv,sr->hsv", self.to_values, latent)
        scores = torch.einsum("nhd,hsd->hns", q, keys) * scale
        seen = torch.arange(len(rows)) <= first + torch.arange(len(q))[:, None]
        return torch.einsum("hns,hsv->nhv", scores.masked_fill(~seen, -math.inf).softmax(-1),
                            values)

    def absorbed(self, q: Tensor) -> Tensor:
        plain, rope = q.split([PLAIN, ROPE], -1)
        return torch.cat((HeadProducts(self.to_keys)(plain), rope), -1)

    def values(self, out: Tensor) -> Tensor:
        return HeadProducts(self.to_values)(out[..., :RANK])


@dataclass
class Chunk:
    start: int
    count: int
    pages: Tensor


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(1)
    return Weights(torch.randn(HEADS, PLAIN, RANK, dtype=torch.float64),
                   torch.randn(HEADS, RANK, VALUE, dtype=torch.float64))


def pages_of(lens: list[int], size: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A layer's pages, NaN where nobody wrote; each sequence's page table, and its rows."""
    order = torch.randperm(60) + 1
    layer = torch.full((61 * size, 1, RANK + ROPE), torch.nan, dtype=torch.float64)
    tables, kept, at = [], [], 0
    for n in lens:
        own = order[at:at + -(-n // size)].to(torch.int32)
        at += len(own)
        place = torch.arange(n)
        rows = torch.randn(n, RANK + ROPE, dtype=torch.float64)
        write_latent(layer, rows[:, :RANK], rows[:, None, RANK:],
                     own.long()[place // size] * size + place % size)
        tables.append(own)
        kept.append(rows)
    return layer, tables, kept


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("q_len", [1, 2, 5, FEW, FEW + 1])
def test_decodes_and_windows(weights: Weights, size: int, q_len: int) -> None:
    torch.manual_seed(q_len)
    lens = [q_len, 13, 17]
    layer, tables, rows = pages_of(lens, size)
    table = torch.zeros(3, max(map(len, tables)), dtype=torch.int32)
    for i, own in enumerate(tables):
        table[i, :len(own)] = own
    q = torch.randn(3 * q_len, HEADS, PLAIN + ROPE, dtype=torch.float64)
    run = OVER_LATENTS.decode(table, torch.tensor(lens, dtype=torch.int32), 17, q_len, size, 0, 0.3)
    got = weights.values(run(weights.absorbed(q), layer))
    want = torch.cat([weights.attend(own, kept, n - q_len, 0.3)
                      for own, kept, n in zip(q.split(q_len), rows, lens, strict=True)])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_extends(weights: Weights, size: int) -> None:
    """Whole prompts, equal ones side by side, chunks behind a prefix, all in one step."""
    torch.manual_seed(size)
    parts = [(0, 9), (0, 9), (5, 7), (11, 1), (0, 3)]
    layer, tables, rows = pages_of([start + count for start, count in parts], size)
    chunks = [Chunk(start, count, own) for (start, count), own in zip(parts, tables, strict=True)]
    counts = [count for _, count in parts]
    q = torch.randn(sum(counts), HEADS, PLAIN + ROPE, dtype=torch.float64)
    got = weights.values(OVER_LATENTS.extend(chunks, size, 0, 0.3)(weights.absorbed(q), layer))
    want = torch.cat([weights.attend(own, kept, start, 0.3) for own, kept, (start, _)
                      in zip(q.split(counts), rows, parts, strict=True)])
    torch.testing.assert_close(got, want)


def test_a_window_cuts_off_what_is_behind_it(weights: Weights) -> None:
    torch.manual_seed(3)
    layer, (table,), (rows,) = pages_of([40], 4)
    q = torch.randn(1, HEADS, PLAIN + ROPE, dtype=torch.float64)
    run = OVER_LATENTS.decode(table[None], torch.tensor([40], dtype=torch.int32), 40, 1, 4, 8, 0.3)
    layer[table[0].item() * 4] = torch.nan
    got = weights.values(run(weights.absorbed(q), layer))
    torch.testing.assert_close(got, weights.attend(q, rows[-8:], 7, 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_queries_round_as_many_do(dtype: torch.dtype) -> None:
    """Heads as rows of one product, and heads apart: a window's length does not show in a token."""
    torch.manual_seed(4)
    layer = torch.randn(64, 1, 64, dtype=dtype)
    index = torch.randint(0, 64, (2, 48))
    q = torch.randn(2, FEW + 1, 4, 64, dtype=dtype)
    mask = torch.arange(48) <= 39 + torch.arange(FEW + 1)[:, None]
    mask = mask.expand(2, 1, -1, -1)
    many = latent_masked(q, layer[index], mask, 0.1)
    few = latent_masked(q[:, :FEW], layer[index], mask[:, :, :FEW], 0.1)
    assert (few - many[:, :FEW]).abs().max() <= (1e-6 if dtype is torch.float32 else 2 ** -7)
