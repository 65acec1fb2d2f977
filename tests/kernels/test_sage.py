"""Attention with queries and keys in 8 bits: its reference against the formula in fp64, and the C
kernel against the reference."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from helpers_attention import Paged, Row, error
from helpers_builds import EACH_BUILD, built
from torch import Tensor

from actorium.kernels.cpu.attention_native import NativeSage
from actorium.kernels.reference.kv import read_rows
from actorium.kernels.reference.paged_attention import Attend
from actorium.kernels.reference.sage import KeyMeans, code_rows, sage_chunk, sage_extend, sage_rows

pytestmark = pytest.mark.usefixtures("all_threads")
BF16 = torch.bfloat16
MIXED = [(0, 1), (0, 300), (40, 7), (16, 16), (129, 100), (300, 1)]
BOUND = 0.02
"""Of an error beside the formula on random numbers, all of them together."""
NEAR = 4e-3
"""Of an error beside the reference: weights and outputs are rounded elsewhere."""


@pytest.fixture(params=[own for own in EACH_BUILD if own.values[0] in ("this", "avx_vnni")])
def kernel(request: pytest.FixtureRequest) -> NativeRun:
    lib = built(request.param)
    if not lib.sage_ready():
        pytest.skip("this processor has no VNNI")
    return NativeRun(lib)


class NativeRun:
    """The C kernel of one build."""

    def __init__(self, lib: ctypes.CDLL, threads: int = 2) -> None:
        self.lib, self.threads = lib, threads

    def __call__(self, case: Paged, means: KeyMeans, rows: list[Row] | None = None) -> Attend:
        return NativeSage(self.lib, self.threads, case.rows if rows is None else rows,
                          case.page_size, case.window, case.scale, means)


def reference(case: Paged, means: KeyMeans) -> Tensor:
    return sage_extend(case.rows, case.page_size, case.window, case.scale, means)(
        case.q, case.layer)


def biased(case: Paged, loud: float = 8.0) -> KeyMeans:
    """Adds the same to all keys, far more than they differ by, and tells of it."""
    means, kv_heads = KeyMeans(), case.layer.shape[1] // 2
    bias = loud * torch.randn(case.layer.shape[1:],
                              generator=torch.Generator().manual_seed(5))[:kv_heads]
    case.layer[:, :kv_heads] += bias.to(case.layer.dtype)
    means.store(case.layer, bias)
    return means


# --- reference -----------------------------------------------------------------------------------

def test_codes_by_hand() -> None:
    codes, scales = code_rows(torch.tensor([[127.0, -63.5, 0.5, 1.5], [0.0, 0, 0, 0]]))
    assert codes.tolist() == [[127, -64, 0, 2], [0, 0, 0, 0]] and scales.tolist() == [1, 0]
    codes, scales = code_rows(torch.tensor([[1.0, math.nan]]))
    assert scales.isnan().all()


@pytest.mark.parametrize("window", [0, 33])
def test_near_the_formula(window: int) -> None:
    case = Paged(MIXED, 6, 2, 64, 16, window)
    assert error(reference(case, KeyMeans()), case.wanted()) < BOUND


def test_a_mean_that_is_taken_off_saves_the_codes() -> None:
    """Keys that all carry a bias: most of a code says nothing, unless it is taken off."""
    case = Paged(MIXED, 6, 2, 64, 16)
    means = biased(case, 40.0)
    assert error(reference(case, means), case.wanted()) < BOUND
    assert error(reference(case, KeyMeans()), case.wanted()) > 4 * BOUND


@pytest.mark.parametrize("loud", [0.0, 3.0])
def test_the_normaliser_is_that_of_whole_scores(loud: float) -> None:
    """What the mean takes off all scores is added again: parts of a sequence that other backends
    attended to can be merged with it."""
    case, means = Paged([(20, 30)], 6, 2, 64, 16), KeyMeans()
    if loud:
        means = biased(case, loud)
    row = case.rows[0]
    found = sage_chunk(case.q, case.layer, row, 16, 0, case.scale, means(case.layer))
    keys, _ = read_rows(case.layer, case.index(row.pages, 50), torch.float64).chunk(2, dim=1)
    score = torch.einsum("qhd,khd->qhk", case.q.double(),
                         keys.repeat_interleave(3, 1)) * case.scale
    hidden = torch.arange(50) > torch.arange(20, 50)[:, None]
    want = score.masked_fill(hidden[:, None], -math.inf).logsumexp(-1)
    assert (found.log_sum_exp - want).abs().max() < 0.03
    if loud:
        unshifted = sage_rows(case.q, code_rows(keys.float() - means(case.layer)),
                              torch.zeros(50, 2, 64), torch.zeros(2, 64), ~hidden, case.scale)
        assert (unshifted.log_sum_exp - want).abs().max() > 1


# --- the C kernel --------------------------------------------------------------------------------

@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"),
                         [(2, 2, 32), (9, 3, 64), (3, 1, 96), (8, 1, 128), (2, 1, 256)])
def test_equals_the_reference(kernel: NativeRun, page_size: int, heads: int, kv_heads: int,
                              dim: int) -> None:
    case = Paged(MIXED, heads, kv_heads, dim, page_size, dtype=BF16)
    for loud in (0.0, 8.0):
        out, means = case.poisoned(), biased(case, loud)
        assert kernel(case, means)(case.q, case.layer, out) is out
        assert error(out, reference(case, means).double()) < NEAR
        assert error(out, case.wanted()) < BOUND


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 2, 128), (2, 1, 32)])
def test_pages_that_hold_codes(kernel: NativeRun, heads: int, kv_heads: int, dim: int,
                               window: int) -> None:
    """They are multiplied as they are: what is lost is what queries lose."""
    case = Paged(MIXED, heads, kv_heads, dim, 16, window, dtype=BF16, kv_dtype=torch.int8)
    means = biased(case, 0.0)
    want = sage_extend(case.rows, 16, window, case.scale, means)(
        case.q, case.layer, None, case.scales)
    got = kernel(case, means)(case.q, case.layer, case.poisoned(), case.scales)
    assert error(got, want.double()) < NEAR
    assert error(got, case.wanted()) < BOUND


@pytest.mark.parametrize("window", [1, 33, 200, 5000])
def test_windows(kernel: NativeRun, window: int) -> None:
    case = Paged(MIXED, 6, 2, 64, 16, window, dtype=BF16)
    got = kernel(case, KeyMeans())(case.q, case.layer)
    assert error(got, reference(case, KeyMeans()).double()) < NEAR


def test_more_keys_than_are_packed_at_once(kernel: NativeRun) -> None:
    case = Paged([(2500, 70), (0, 2300)], 2, 1, 128, 16, dtype=BF16)
    got = kernel(case, KeyMeans())(case.q, case.layer)
    assert error(got, case.wanted()) < BOUND


def test_large_scores_and_none(kernel: NativeRun) -> None:
    """Queries of which one is all zeros: its weights are equal."""
    case = Paged([(0, 100), (50, 60)], 4, 2, 64, 16, dtype=BF16)
    case.q *= 300
    case.q[::7] = 0
    got = kernel(case, KeyMeans())(case.q, case.layer)
    assert not got.isnan().any()
    assert error(got, reference(case, KeyMeans()).double()) < NEAR
    assert error(got[::7], case.wanted()[::7]) < NEAR


def test_masked_keys_do_not_matter(kernel: NativeRun) -> None:
    case = Paged([(0, 40), (200, 30), (10, 20)], 4, 2, 64, 16, window=64, dtype=BF16)
    attend = kernel(case, KeyMeans())
    before = attend(case.q, case.layer).clone()
    case.layer[case.index(case.rows[2].pages, 30)] = math.nan
    case.layer[case.index(case.rows[1].pages, 201 - 64)] = math.inf
    after = attend(case.q, case.layer)
    assert torch.equal(before[:70], after[:70]) and after[70:].isnan().all()


@pytest.mark.parametrize("cut", [1, 23, 128, 250])
def test_a_token_does_not_depend_on_where_its_chunk_begins(kernel: NativeRun, cut: int) -> None:
    """To the bit, as keys behind it and beside it do not change its codes or theirs."""
    case = Paged([(0, 300)], 4, 2, 64, 16, dtype=BF16)
    means = biased(case)
    want = kernel(case, means)(case.q, case.layer)
    rest = kernel(case, means, [Row(cut, 300 - cut, case.rows[0].pages)])
    assert torch.equal(rest(case.q[cut:], case.layer), want[cut:])


def test_a_row_is_the_same_alone_and_in_a_batch(kernel: NativeRun) -> None:
    case, first = Paged(MIXED, 4, 2, 64, 16, dtype=BF16), 0
    means = biased(case)
    together = kernel(case, means)(case.q, case.layer)
    for row in case.rows:
        alone = kernel(case, means, [row])(case.q[first:first + row.count], case.layer)
        assert torch.equal(alone, together[first:first + row.count])
        first += row.count


def test_pages_stay_as_they_are(kernel: NativeRun) -> None:
    """Whatever is taken off keys is taken off copies of them: see `SmoothsInPlace`."""
    case = Paged([(20, 40)], 4, 2, 64, 16, dtype=BF16)
    means = biased(case)
    before = case.layer.clone()
    kernel(case, means)(case.q, case.layer)
    reference(case, means)
    assert torch.equal(case.layer.view(torch.int16), before.view(torch.int16))
