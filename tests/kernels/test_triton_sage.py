"""Triton's attention with queries and keys in 8 bits against its reference, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_attention import INTERPRETED, Paged, error
from torch import Tensor

from actorium.kernels.reference.sage import KeyMeans
from actorium.kernels.reference.sage import sage_extend as reference
from actorium.kernels.triton import sage as kernels
from actorium.kernels.triton.sage import CODED, SageExtend, lengths_of, plan_coding, sage_decode

pytestmark = [*INTERPRETED, *(pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning")
                              for what in ("divide by zero", "All-NaN slice"))]


def means_of(case: Paged) -> KeyMeans:
    """Some means."""
    means, kv_heads = KeyMeans(), case.layer.shape[1] // 2
    spread = torch.linspace(-2, 2, kv_heads * case.layer.shape[2])
    means.store(case.layer, spread.view(kv_heads, -1))
    return means


def wanted(case: Paged, means: KeyMeans) -> Tensor:
    return reference(case.rows, case.page_size, case.window, case.scale, means)(case.q, case.layer)


@pytest.mark.parametrize(("spans", "window", "dim", "ready"), [
    ([(0, 40), (20, 17)], 0, 64, True), ([(0, 40)], 17, 32, True), ([(90, 3)], 0, 96, False),
    ([(70, 9)], 33, 64, False)])
def test_equals_the_reference(spans: list[tuple[int, int]], window: int, dim: int, ready: bool
                              ) -> None:
    """With keys that are coded first, and by each program for itself."""
    case = Paged(spans, 4, 2, dim, 16, window)
    means = means_of(case)
    for splits in (1, 2):
        out = case.poisoned()
        attend = SageExtend(case.rows, 16, window, case.scale, means, splits)
        assert attend.ready is ready
        assert attend(case.q, case.layer, out) is out
        assert error(out, wanted(case, means).double()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pages_that_hold_codes(dtype: torch.dtype) -> None:
    case = Paged([(0, 20), (40, 17)], 4, 2, 32, 16, dtype=dtype, kv_dtype=torch.int8)
    means, bound = means_of(case), 1e-5 if dtype is torch.float32 else 6e-3
    want = reference(case.rows, 16, 0, case.scale, means)(case.q, case.layer, None, case.scales)
    for splits in (1, 2):
        attend = SageExtend(case.rows, 16, 0, case.scale, means, splits)
        assert error(attend(case.q, case.layer, case.poisoned(), case.scales), want.double()
                     ) < bound
    assert error(want, case.wanted()) < 0.02


def test_codes_are_the_same_whoever_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: a token must not depend on how long the prefix is beside the step's prompts."""
    case = Paged([(20, 20)], 4, 2, 32, 16, dtype=torch.bfloat16)
    means = means_of(case)
    found = []
    for most in (0, 9):
        monkeypatch.setattr(kernels, "MOST_KEYS", most)
        attend = SageExtend(case.rows, 16, 0, case.scale, means, 1)
        assert attend.ready is (most > 0)
        found.append(attend(case.q, case.layer))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decodes_read_nothing_behind_themselves(dtype: torch.dtype) -> None:
    """Windows of two tokens; of the first of each, the last may be anybody's."""
    case = Paged([(40, 2), (0, 2)], 6, 2, 32, 16, dtype=dtype)
    means, (tables, lens) = means_of(case), case.tables()
    want = wanted(case, means)
    got = sage_decode(tables, lens, 42, 2, 16, 0, case.scale, means)(case.q, case.layer)
    assert error(got, want.double()) < 6e-3
    for row in case.rows:
        case.layer[case.index(row.pages, row.start + 2)[-1]] = torch.nan
    spoilt = sage_decode(tables, lens, 42, 2, 16, 0, case.scale, means)(case.q, case.layer)
    assert torch.equal(spoilt[::2], got[::2]) and spoilt[1::2].isnan().all()


def test_every_key_is_coded_once() -> None:
    case = Paged([(0, 70), (9, 0), (100, 33)], 1, 1, 16, 16)
    for window in (0, 20):
        first, lengths = lengths_of(case.rows, window)
        pieces = plan_coding(case.rows, first, lengths)
        assert (pieces[:, 3] <= CODED).all()
        places = np.concatenate([np.arange(at, at + n) for *_, n, at in pieces.tolist()])
        assert places.tolist() == list(range(int(lengths.sum())))
        tokens = [token for *_, start, n, _ in pieces.tolist()
                  for token in range(start, start + n)]
        assert tokens == [token for row, begin in zip(case.rows, first.tolist(), strict=True)
                          if row.count for token in range(begin, row.start + row.count)]
