"""Pages in INT8 in C: what is written is the reference's to the bit, and attention over them is as
close to the formula in fp64 over the same codes as it is over pages in bf16."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_attention import BF16, Paged, error
from helpers_builds import EACH_BUILD, built
from torch import Tensor

from actorium.gpu.attention.attention_backend import NativeAttention
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.reference.kv import quantise_rows

pytestmark = pytest.mark.usefixtures("all_threads")
INF, NAN = math.inf, math.nan
SHAPES = [(2, 2, 32), (9, 3, 64), (4, 2, 96), (4, 2, 128), (8, 1, 128), (5, 1, 256), (6, 2, 80)]
"""(heads, key heads, size): groups of 1 to 8; heads of 80 numbers fill no registers."""


@pytest.fixture(params=EACH_BUILD)
def attention(request: pytest.FixtureRequest) -> NativeAttention:
    return NativeAttention(built(request.param), torch.get_num_threads())


@pytest.fixture
def ops(attention: NativeAttention) -> NativeOps:
    return NativeOps(attention.lib, attention.threads)


# --- writing -------------------------------------------------------------------------------------

@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("rows", [5, 70])
def test_what_is_written_is_the_references(ops: NativeOps, heads: int, kv_heads: int, dim: int,
                                           rows: int) -> None:
    """Codes and scales of what it writes to pages of bf16."""
    gen = torch.Generator().manual_seed(dim)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=gen)
    qkv *= 10.0 ** torch.randint(-3, 3, (rows, 1, 1), generator=gen)
    qkv[0], qkv[1, -1, 3], qkv[2, -1, dim - 1], qkv[3, -1] = 0, INF, NAN, 0
    qkv[3, -1, 0], qkv[4, -1, :2] = 1e-40, torch.tensor([3.3e38, -3.3e38])
    norm = torch.rand(heads + kv_heads, dim, generator=gen).to(BF16)
    rope = torch.randn(rows, 2, 1, dim, generator=gen).to(BF16)
    index = torch.randperm(90, generator=gen)[:rows]
    plain = qkv.to(BF16)
    coded, wide = plain.clone(), torch.zeros(90, 2 * kv_heads, dim, dtype=BF16)
    codes, scales = torch.zeros_like(wide, dtype=torch.int8), torch.zeros(90, 2 * kv_heads).to(BF16)
    ops.rotate_write(plain, heads, norm, 1e-6, rope, wide, index)
    ops.rotate_write(coded, heads, norm, 1e-6, rope, codes, index, scales)
    want, own = quantise_rows(wide)
    assert torch.equal(codes, want)
    assert torch.equal(scales.isfinite(), own.isfinite())
    assert torch.equal(scales.nan_to_num(-1, -1), own.nan_to_num(-1, -1))
    assert torch.equal(plain[:, :heads].view(torch.int16), coded[:, :heads].view(torch.int16))
    assert (scales[index] == 0).any() and not scales.isfinite().all()


# --- decodes -------------------------------------------------------------------------------------

def decoded(attention: NativeAttention, case: Paged, q_len: int, cut: int = 0) -> Tensor:
    """Of the first row of each window, without its last `cut` tokens; with none, of all rows."""
    tables, lens = case.tables()
    q = case.q[::q_len] if cut else case.q
    attend = attention.decode(tables, lens - cut, int(lens.max()), 1 if cut else q_len,
                              case.page_size, case.window, case.scale)
    return attend(q, case.layer, None, case.scales)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize(("q_len", "window"), [(1, 0), (3, 0), (1, 20), (3, 20)])
def test_decodes(attention: NativeAttention, heads: int, kv_heads: int, dim: int, q_len: int,
                 window: int) -> None:
    """What a row must not see has scales that are NaN."""
    spans, found = [(300, q_len), (0, q_len), (63, q_len), (64, q_len), (33, q_len)], []
    for dtype in (torch.int8, BF16):
        case = Paged(spans, heads, kv_heads, dim, 16, window, BF16, dtype)
        case.q *= 2
        found.append(error(decoded(attention, case, q_len), case.wanted()))
        if q_len > 1:  # to the bit what it is without the drafts behind it
            assert torch.equal(decoded(attention, case, q_len)[::q_len],
                               decoded(attention, case, q_len, q_len - 1))
    assert found[0] < 2 * found[1] < 6e-3


def test_codes_are_the_same_in_every_build(attention: NativeAttention) -> None:
    """Sums of integers do not depend on the instructions."""
    case = Paged([(200, 1), (33, 1)], 6, 2, 64, 16, 0, BF16, torch.int8)
    want = decoded(NativeAttention(built("this"), 1), case, 1)
    got = decoded(attention, case, 1)
    assert error(got, want.double()) < 1e-3
    assert (got == want).float().mean() > 0.9


def test_large_and_small_numbers(attention: NativeAttention) -> None:
    """One token's values are a million times those of another; scores span hundreds of bits."""
    case = Paged([(400, 1)], 4, 2, 64, 16, 0, BF16, torch.int8)
    assert case.scales is not None
    case.scales[:, 2:] *= 10.0 ** torch.linspace(-3, 3, len(case.scales))[:, None]
    assert error(decoded(attention, case, 1), case.wanted()) < 3e-3
    case.q *= 100
    assert error(decoded(attention, case, 1), case.wanted()) < 3e-3
    case.scales[:] = 0
    assert not decoded(attention, case, 1).any()


@pytest.mark.parametrize(("where", "head"), [("query", 1), ("key", 0), ("value", 3)])
def test_what_is_no_number_spoils_what_sees_it(attention: NativeAttention, where: str,
                                               head: int) -> None:
    case = Paged([(100, 1), (70, 1)], 4, 2, 64, 16, 0, BF16, torch.int8)
    assert case.scales is not None
    want = decoded(attention, case, 1)
    if where == "query":
        case.q[0, head, 5] = INF
        spoilt = [(0, 1)]
    else:
        case.scales[case.index(case.rows[0].pages, 60)[-1], head] = NAN
        spoilt = [(0, h) for h in ((0, 1) if where == "key" else (2, 3))]
    got = decoded(attention, case, 1)
    for row in range(2):
        for h in range(4):
            if (row, h) in spoilt:
                assert got[row, h].isnan().all()
            else:
                assert torch.equal(got[row, h], want[row, h])


# --- prompts -------------------------------------------------------------------------------------

@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES[:-1])
@pytest.mark.parametrize("window", [0, 20])
def test_chunks(attention: NativeAttention, heads: int, kv_heads: int, dim: int,
                window: int) -> None:
    if not attention.lib.extend_ready():
        pytest.skip("this processor has no AVX2")
    found = []
    for dtype in (torch.int8, BF16):
        case = Paged([(70, 40), (0, 9), (130, 1)], heads, kv_heads, dim, 16, window, BF16, dtype)
        attend = attention.extend(case.rows, 16, window, case.scale)
        found.append(error(attend(case.q, case.layer, case.poisoned(), case.scales),
                           case.wanted()))
    assert found[0] < 2 * found[1] < 8e-3
