"""Sequences in pages, and what attention over them gives by the formula, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, settings
from torch import Tensor

from actorium.kernels.backends import triton_fault
from actorium.kernels.reference.kv import quantise_rows

INTERPRETED = [
    pytest.mark.skipif(bool(triton_fault(torch.device("cpu"))), reason="Triton compiles for CUDA"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # of numpy
]
FEW = settings(max_examples=15, deadline=None, derandomize=True, database=None,
               phases=[Phase.generate])
BF16 = torch.bfloat16
DTYPES = [(BF16, BF16, 1e-2), (torch.float16, torch.float16, 1e-3), (BF16, torch.float16, 1e-2),
          (torch.float32, BF16, 1e-6)]
"""(of queries, of what is kept, error): the interpreter cuts numbers off where they should be
rounded to bf16."""


@dataclass
class Row:
    """A chunk, as a step names it."""

    start: int
    count: int
    pages: Tensor


class Paged:
    """Sequences whose last tokens attend, their pages dealt out at random.

    What no sequence owns is NaN: what lies beyond its length, all other pages, the sink's too; and,
    with a window, the pages behind it.
    """

    def __init__(
        self, spans: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, page_size: int,
        window: int = 0, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None,
        device: str = "cpu",
    ) -> None:
        """spans: (tokens before, tokens that attend) of each sequence."""
        random = torch.Generator().manual_seed(sum(a + 3 * b for a, b in spans) + dim)
        self.heads, self.page_size, self.window, self.device = heads, page_size, window, device
        self.scale = dim**-0.5
        widths = [-(-(start + count) // page_size) for start, count in spans]
        self.pages = sum(widths) + 2
        dealt = (torch.randperm(self.pages - 1, generator=random) + 1).to(torch.int32)
        self.stranger = int(dealt[-1])
        """A page of no sequence's."""
        tables = dealt[:-1].split(widths)
        wide = layer = torch.full(
            (self.pages * page_size, 2 * kv_heads, dim), math.nan,
            dtype=torch.float32 if kv_dtype is torch.int8 else kv_dtype or dtype)
        self.rows: list[Row] = []
        for (start, count), table in zip(spans, tables, strict=True):
            own = self.index(table, start + count)
            layer[own] = torch.randn((len(own), *layer.shape[1:]), generator=random).to(layer.dtype)
            if window:
                behind = max(0, start + 1 - window) // page_size
                layer[own[:behind * page_size]] = math.nan
                table = table.clone()
                table[:behind] = self.stranger
            self.rows.append(Row(start, count, table.to(device)))
        self.scales: Tensor | None = None
        """Beside pages in INT8."""
        if kv_dtype is torch.int8:
            layer, scales = quantise_rows(wide)
            # What nobody owns: any codes, by which NaN is multiplied.
            layer[scales.isnan()] = torch.arange(dim, dtype=torch.int8) - 64
            self.scales = scales.to(device)
        self.layer = layer.to(device)
        tokens = sum(count for _, count in spans)
        qkv = torch.randn((tokens, heads + 2 * kv_heads, dim), generator=random)
        self.q = qkv.to(device=device, dtype=dtype)[:, :heads]

    def index(self, table: Tensor, length: int) -> Tensor:
        """i64[length]: where a sequence's tokens lie."""
        inside = torch.arange(self.page_size, device=table.device)
        return (table.long()[:, None] * self.page_size + inside).flatten()[:length]

    def poisoned(self) -> Tensor:
        """Where results may go: full of NaN."""
        return torch.full(self.q.shape, math.nan, dtype=self.q.dtype, device=self.device)

    def tables(self) -> tuple[Tensor, Tensor]:
        """i32[B, P], i32[B]: as decode takes them; beyond a length the tables name a stranger."""
        width = max(len(row.pages) for row in self.rows) + 1
        tables = torch.full((len(self.rows), width), self.stranger, dtype=torch.int32)
        for table, row in zip(tables, self.rows, strict=True):
            table[:len(row.pages)] = row.pages
        lens = torch.tensor([row.start + row.count for row in self.rows], dtype=torch.int32)
        return tables.to(self.device), lens.to(self.device)

    def wanted(self, cap: float = 0.0, scales: Tensor | None = None,
               sinks: Tensor | None = None, slopes: Tensor | None = None) -> Tensor:
        """f64[N, H, D], on the CPU. scales: f32[2 * kv_heads], of the pages; those in INT8 have
        their own. sinks, slopes: f32[heads]"""
        done, first, layer = [], 0, self.layer.cpu()
        for row in self.rows:
            length = row.start + row.count
            q = self.q[first:first + row.count].double().cpu()
            place = self.index(row.pages.cpu(), length)
            if self.scales is not None:
                own = layer[place].double() * self.scales.cpu()[place].double()[..., None]
            else:
                own = layer[place].to(self.q.dtype).double()
            if scales is not None and self.scales is None:
                own *= scales.double()[:, None]
            keys, values = own.nan_to_num().chunk(2, dim=1)
            group = self.heads // keys.shape[1]
            score = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)) * self.scale
            if cap:
                score = cap * torch.tanh(score / cap)
            at = torch.arange(row.start, length)[:, None]
            place = torch.arange(length)
            if slopes is not None:
                score += slopes.double().cpu()[:, None, None] * (place - at)
            hidden = place > at
            if self.window:
                hidden |= place <= at - self.window
            score = score.masked_fill(hidden, -math.inf)
            if sinks is not None:
                sunk = sinks.double().cpu()[:, None, None].expand(-1, row.count, 1)
                score = torch.cat((score, sunk), -1)
            weight = score.softmax(-1)[..., :length]
            done.append(torch.einsum("hqk,khd->qhd", weight, values.repeat_interleave(group, 1)))
            first += row.count
        return torch.cat(done) if done else torch.empty(0)


def error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|; NaN where `got` has any."""
    return float((got.double().cpu() - want).norm() / want.norm())


def check_sinks(case: Paged, run: Callable[[Tensor], Tensor]) -> None:
    """Of sinks below, among and above the scores."""
    sinks = torch.linspace(-8, 8, case.heads, device=case.device)
    got = run(sinks)
    assert error(got, case.wanted(sinks=sinks)) < 1e-5
    assert error(got, case.wanted()) > 1e-2


def check_soft_cap(case: Paged, cap: float, run: Callable[[], Tensor]) -> None:
    """Scores are large enough to feel it."""
    case.q *= 30
    got = run()
    assert error(got, case.wanted(cap)) < 1e-5
    assert error(got, case.wanted()) > 1e-2
