"""What is not a row's own is never read: NaN in others' pages spoils nobody."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_builds import EACH_BUILD, built
from torch import Tensor

from actorium.gpu.attention.attention_backend import NativeAttention, TorchAttention

PAGE, HEADS, KV, DIM = 8, 4, 2, 64
LENS = [5, 8, 21, 70]


def kernels() -> list[Any]:
    return [pytest.param("torch", KV), *(pytest.param(*name.values, KV, marks=name.marks)
                                         for name in EACH_BUILD), pytest.param("latent", 0)]


@pytest.fixture
def ops(request: pytest.FixtureRequest) -> Any:
    ranks = {"torch": 0, "latent": DIM}
    if request.param in ranks:
        return TorchAttention(ranks[request.param])
    return NativeAttention(built(request.param), torch.get_num_threads())


def written(kv: int, lens: list[int], holes: float) -> tuple[Tensor, Tensor]:
    """A layer in which only the first tokens of each sequence are there, and page tables that name
    the sink behind them. holes: what all else holds."""
    width = -(-max(LENS) // PAGE) + 1
    gen = torch.Generator().manual_seed(0)
    whole = torch.randn((1 + len(lens) * width) * PAGE, 2 * kv or 1, DIM, generator=gen)
    pages = torch.zeros(len(lens), width, dtype=torch.int32)
    layer = torch.full_like(whole, holes)
    for row, n in enumerate(lens):
        held = -(-n // PAGE)
        pages[row, :held] = 1 + row * width + torch.randperm(width, generator=gen)[:held]
        index = pages[row, torch.arange(n) // PAGE] * PAGE + torch.arange(n) % PAGE
        layer[index] = whole[index]
    return layer.bfloat16(), pages


@pytest.mark.parametrize(("ops", "kv"), kernels(), indirect=["ops"])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("past", [0, 1, 2])
def test_rows_of_a_window_read_nothing_behind_themselves(ops: Any, kv: int, window: int,
                                                         past: int) -> None:
    """past: drafts at the end of the window whose keys and values went to the sink."""
    q_len = past + 1
    q = torch.randn(len(LENS) * q_len, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    q, outs = q.bfloat16(), []
    for holes in (math.nan, 0.0):
        layer, pages = written(kv, LENS, holes)
        lens = torch.tensor(LENS, dtype=torch.int32) + past
        attend = ops.decode(pages, lens, int(lens.max()), q_len, PAGE, window, 0.2)
        outs.append(attend(q, layer).view(len(LENS), q_len, HEADS, DIM)[:, 0])
        alone = ops.decode(pages, lens - past, max(LENS), 1, PAGE, window, 0.2)
        torch.testing.assert_close(outs[-1], alone(q[::q_len].contiguous(), layer), rtol=0, atol=0)
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)


@pytest.mark.parametrize(("ops", "kv"), kernels(), indirect=["ops"])
@pytest.mark.parametrize("q_len", [2, 3, 5])
def test_rows_of_a_window_are_those_of_single_steps(ops: Any, kv: int, q_len: int) -> None:
    layer, pages = written(kv, LENS, math.nan)
    lens = torch.tensor(LENS, dtype=torch.int32)
    q = torch.randn(len(lens) * q_len, HEADS, DIM).bfloat16()
    whole = ops.decode(pages, lens, max(LENS), q_len, PAGE, 0, 0.2)(q, layer)
    for j in range(q_len):
        single = ops.decode(pages, lens - q_len + 1 + j, max(LENS), 1, PAGE, 0, 0.2)
        torch.testing.assert_close(whole[j::q_len], single(q[j::q_len].contiguous(), layer),
                                   rtol=0, atol=0)


@pytest.mark.parametrize(("ops", "kv"), kernels(), indirect=["ops"])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("starts", [[0, 0], [0, 13], [9, 0]])
def test_extends_read_nothing_behind_themselves(ops: Any, kv: int, window: int,
                                                starts: list[int]) -> None:
    lens = [20, 20]
    q = torch.randn(sum(lens) - sum(starts), HEADS, DIM).bfloat16()
    outs = []
    for holes in (math.nan, 0.0):
        layer, pages = written(kv, lens, holes)
        rows = [SimpleNamespace(start=start, count=n - start, pages=table[:-(-n // PAGE)])
                for start, n, table in zip(starts, lens, pages, strict=True)]
        outs.append(ops.extend(rows, PAGE, window, 0.2)(q, layer))
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)
