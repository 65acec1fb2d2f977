"""Pages in INT8 with a scale for each token and head: what is written, and the kernels that attend
over them against the formula in fp64 over the same quantised pages."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from helpers_attention import BF16, FEW, INTERPRETED, Paged, error
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actorium.gpu.attention.attention_backend import TorchAttention
from actorium.kernels.reference.kv import CODES, quantise_rows, read_rows, write_kv
from actorium.kernels.reference.latent import write_latent
from actorium.kernels.reference.paged_attention import torch_decode, torch_extend
from actorium.kernels.reference.torch_ops import TorchOps

INF, NAN = math.inf, math.nan


def exact(x: Tensor) -> list[Fraction]:
    return [Fraction(value) for value in x.double().tolist()]


# --- what is written -----------------------------------------------------------------------------

@FEW
@given(st.integers(0, 1000), st.sampled_from([1, 24, 64]), st.integers(-30, 30),
       st.sampled_from([torch.float32, BF16, torch.float16]))
def test_a_scale_is_the_least_that_holds_a_row(seed: int, dim: int, power: int,
                                               dtype: torch.dtype) -> None:
    """By exact arithmetic: scales are rounded up, codes to nearest, ties to even."""
    gen = torch.Generator().manual_seed(seed)
    power = max(power, -12) if dtype is torch.float16 else power
    rows = (torch.randn(5, dim, generator=gen) * 2.0 ** min(power, 12)).to(dtype)
    rows[0] = rows[0].sign() * 2.0 ** min(power, 12)
    codes, scales = quantise_rows(rows)
    assert codes.dtype is torch.int8 and scales.dtype is BF16 and scales.shape == (5,)
    lower = (scales.view(torch.int16) - 1).view(BF16)
    for row, own, scale, less in zip(rows, codes, exact(scales), exact(lower), strict=True):
        most = max(map(abs, exact(row)))
        # The quotient is rounded to fp32 first.
        assert less * CODES < most * (1 + Fraction(1, 2**23))
        assert scale * CODES >= most * (1 - Fraction(1, 2**23))
        for value, code in zip(exact(row), own.tolist(), strict=True):
            assert abs(code) <= CODES and abs(value / scale - code) <= Fraction(1, 2) + 2**-16


def test_ties_go_to_even() -> None:
    codes, scales = quantise_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49]]))
    assert scales.tolist() == [1.0]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, 0]]


def test_rows_of_zeros_and_what_is_no_number() -> None:
    rows = torch.tensor([[0.0, -0.0, 0.0], [1.0, INF, 0.0], [1.0, -3.0, NAN], [1e-45, 0.0, 0.0],
                         [3e38, -1e38, 0.0]])
    codes, scales = quantise_rows(rows)
    assert scales[0] == 0 and not codes[0].any()
    read = read_rows(codes[:, None], torch.arange(5), torch.float32, scales[:, None])[:, 0]
    assert read[0].tolist() == [0, 0, 0]
    assert read[1].isnan().all() and read[2].isnan().all(), "such a token shows"
    assert read[3].tolist() == [0, 0, 0]
    assert torch.allclose(read[4], rows[4], rtol=2**-7)


def test_write_puts_codes_and_scales_where_the_index_says() -> None:
    kv = torch.randn(3, 4, 8, dtype=BF16)
    pages, scales = torch.zeros(9, 4, 8, dtype=torch.int8), torch.zeros(9, 4, dtype=BF16)
    index = torch.tensor([7, 1, 4])
    write_kv(pages, kv, index, scales)
    codes, own = quantise_rows(kv)
    assert torch.equal(pages[index], codes) and torch.equal(scales[index], own)
    assert not pages[[0, 2, 3, 5, 6, 8]].any() and not scales[[0, 2, 3, 5, 6, 8]].any()
    read = read_rows(pages, index, BF16, scales)
    assert read.dtype is torch.float32 and error(read, kv.double()) < 6e-3


def test_a_token_leaves_the_same_whatever_is_beside_it() -> None:
    kv = torch.randn(6, 2, 32, dtype=BF16)
    codes, scales = quantise_rows(kv)
    for at in range(6):
        alone = quantise_rows(kv[at:at + 1])
        assert torch.equal(alone[0][0], codes[at]) and torch.equal(alone[1][0], scales[at])


# --- the reference -------------------------------------------------------------------------------

@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (BF16, 4e-3)])
@pytest.mark.parametrize("window", [0, 20])
def test_the_reference_by_the_formula(dtype: torch.dtype, bound: float, window: int) -> None:
    case = Paged([(40, 3), (17, 3)], 6, 2, 16, 16, window, dtype, torch.int8)
    tables, lens = case.tables()
    decode = torch_decode(tables, lens, 43, 3, 16, window, case.scale)
    assert error(decode(case.q, case.layer, None, case.scales), case.wanted()) < bound
    chunks = Paged([(0, 20), (0, 20), (30, 9)], 6, 2, 16, 16, window, dtype, torch.int8)
    out = chunks.poisoned()
    torch_extend(chunks.rows, 16, window, chunks.scale)(chunks.q, chunks.layer, out, chunks.scales)
    assert error(out, chunks.wanted()) < bound


def test_a_latent_has_a_scale_a_token() -> None:
    latents = torch.randn(40, 24)
    pages, scales = torch.zeros(48, 1, 24, dtype=torch.int8), torch.zeros(48, 1, dtype=BF16)
    write_latent(pages, latents[:, :16], latents[:, None, 16:], torch.arange(40), scales)
    q, table = torch.randn(1, 3, 24), torch.arange(3, dtype=torch.int32)[None]
    lens = torch.tensor([40], dtype=torch.int32)
    attend = TorchAttention(16).decode(table, lens, 40, 1, 16, 0, 0.2)
    want = attend(q, pages.float() * scales.float()[..., None])
    assert torch.allclose(attend(q, pages, None, scales), want, rtol=1e-5, atol=1e-6)
    plain = attend(q, torch.cat((latents, latents[:8])).unsqueeze(1))
    assert 1e-4 < error(want, plain.double()) < 1e-2


# --- Triton's, in its interpreter ----------------------------------------------------------------

KINDS = [(torch.float32, 2e-6), (BF16, 1e-2), (torch.float16, 1e-2)]
"""(of queries, error); in bf16, which weights of codes are for fp16, too, the interpreter cuts off
what should be rounded."""


class TestInterpreted:
    pytestmark = INTERPRETED

    @pytest.mark.parametrize(("dtype", "bound"), KINDS)
    @pytest.mark.parametrize(("q_len", "window", "splits"), [(1, 0, 1), (1, 0, 3), (3, 0, 2),
                                                             (3, 30, 1), (8, 30, 2)])
    def test_decode(self, dtype: torch.dtype, bound: float, q_len: int, window: int,
                    splits: int) -> None:
        from actorium.kernels.triton.decode import decode

        case = Paged([(70, q_len), (0, q_len)], 4, 2, 16, 16, window, dtype, torch.int8)
        tables, lens = case.tables()
        attend = decode(tables, lens, int(lens.max()), q_len, 16, window, case.scale, 0.0, splits)
        got = attend(case.q, case.layer, case.poisoned(), case.scales)
        assert error(got, case.wanted()) < bound

    @pytest.mark.parametrize(("dtype", "bound"), KINDS)
    @pytest.mark.parametrize(("window", "splits"), [(0, 1), (0, 3), (30, 1)])
    def test_extend(self, dtype: torch.dtype, bound: float, window: int, splits: int) -> None:
        from actorium.kernels.triton.extend import extend

        case = Paged([(40, 8), (0, 5)], 4, 2, 16, 16, window, dtype, torch.int8)
        attend = extend(case.rows, 16, window, case.scale, 0.0, splits)
        got = attend(case.q, case.layer, case.poisoned(), case.scales)
        assert error(got, case.wanted()) < bound

    def test_values_out_of_fp16s_range(self) -> None:
        """Weights times scales, which fp16 would not hold."""
        from actorium.kernels.triton.decode import decode

        for power in (2.0**-30, 2.0**30):
            case = Paged([(40, 1)], 4, 2, 16, 16, 0, torch.float16, torch.int8)
            assert case.scales is not None
            case.scales[:, 2:] *= power
            tables, lens = case.tables()
            case.q = case.q.float()
            want = case.wanted()
            got = decode(tables, lens, 41, 1, 16, 0, case.scale)(
                case.q.half(), case.layer, torch.empty(case.q.shape), case.scales)
            assert error(got, want) < 1e-2

    def test_a_soft_cap_is_of_whole_scores(self) -> None:
        from actorium.kernels.triton.decode import decode

        case = Paged([(40, 1)], 4, 2, 16, 16, kv_dtype=torch.int8)
        case.q *= 30
        tables, lens = case.tables()
        got = decode(tables, lens, 41, 1, 16, 0, case.scale, 5.0)(case.q, case.layer, None,
                                                                  case.scales)
        assert error(got, case.wanted(5.0)) < 1e-5 < 1e-2 < error(got, case.wanted())

    def test_a_damaged_token_spoils_those_that_see_it(self) -> None:
        """Its scale is NaN; in a window of drafts the rows before it stay as they are."""
        from actorium.kernels.triton.decode import decode

        case = Paged([(40, 3)], 4, 2, 16, 16, kv_dtype=torch.int8)
        tables, lens = case.tables()
        want, scales = case.wanted(), case.scales
        assert scales is not None
        scales[int(tables[0, 41 // 16]) * 16 + 41 % 16] = NAN
        got = decode(tables, lens, 43, 3, 16, 0, case.scale)(case.q, case.layer, None, scales)
        assert error(got[:1], want[:1]) < 1e-5 and got[1:].isnan().all()

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize("q_len", [1, 3])
    def test_latents(self, q_len: int, splits: int) -> None:
        from test_triton_latent import Case

        from actorium.kernels.triton.latent import LatentDecode

        case = Case([50, 40], q_len, 4, 32, 16, 16)
        case.layer, scales = quantise_rows(case.layer)
        attend = LatentDecode(case.pages, case.lens, case.span, q_len, 16, case.scale, 32, splits)
        got = attend(case.q, case.layer, None, scales)[..., :32]
        case.layer = case.layer.float() * scales.float()[..., None]
        want = case.wanted()
        assert (got.double() - want).norm() < 1e-5 * want.norm()

    @pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
    @pytest.mark.parametrize("normed", [True, False])
    def test_rotate_write(self, dtype: torch.dtype, normed: bool) -> None:
        """To the bit what the reference writes of the same keys and values."""
        from actorium.kernels.triton.rope import rotate_write

        heads, kv_heads, dim, tokens = 5, 2, 32, 7
        gen = torch.Generator().manual_seed(3)
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=gen).to(dtype)
        qkv[0, heads:, :2], qkv[1, -1, 0] = 5e4, INF
        qkv[1, heads + kv_heads, 1], qkv[2, -1] = NAN, 0
        norm = torch.rand(heads + kv_heads, dim, generator=gen).to(dtype) if normed else None
        # A table of right angles: rotation is exact.
        rope = torch.zeros(tokens, 2, 1, dim, dtype=dtype)
        rope[::2, 0], rope[1::2, 1, :, :dim // 2], rope[1::2, 1, :, dim // 2:] = 1, -1, 1
        index = torch.tensor([4, 0, 9, 2, 7, 1, 5])
        got, want = torch.zeros(2, 10, 2 * kv_heads, dim, dtype=torch.int8)
        own, wanted = torch.zeros(2, 10, 2 * kv_heads, dtype=BF16)
        theirs = qkv.clone()
        rotate_write(qkv, heads, norm, 1e-6, rope, got, index, own)
        TorchOps().rotate_write(theirs, heads, norm, 1e-6, rope, want, index, wanted)
        same = slice(kv_heads, None) if normed else slice(None)  # norms are rounded otherwise
        assert torch.equal(got[:, same], want[:, same])
        assert torch.equal(own[:, same].view(torch.int16), wanted[:, same].view(torch.int16)) or (
            torch.equal(own[:, same].nan_to_num(-1), wanted[:, same].nan_to_num(-1)))
        assert torch.allclose(own.float(), wanted.float(), rtol=2**-6, equal_nan=True)
        assert (got.float() - want.float()).abs().max() <= 2
        assert own.isnan().nonzero().tolist() == [[0, kv_heads], [0, 2 * kv_heads - 1]]
        assert not got[[3, 6, 8]].any() and not own[[3, 6, 8]].any() and own[9, -1] == 0


# --- long contexts -------------------------------------------------------------------------------

def long_case() -> Paged:
    """16,400 tokens that all weigh about as much, and values that do not cancel out: what a sum
    loses with each addition shows."""
    case = Paged([(16_384, 2)], 2, 1, 16, 64, kv_dtype=torch.int8)
    assert case.scales is not None
    case.q *= 0.05
    case.layer[:, 1].abs_()
    case.layer[:, 1] //= 4
    case.layer[:, 1] += 90
    return case


LONG_BOUND = 2e-6
"""Of fp32 queries over 16,386 tokens, against fp64 over the same codes and scales."""


def test_long_sums_in_torch() -> None:
    case = long_case()
    tables, lens = case.tables()
    want = case.wanted()
    decode = torch_decode(tables, lens, int(lens[0]), 2, 64, 0, case.scale)
    assert error(decode(case.q, case.layer, None, case.scales), want) < LONG_BOUND
    extend = torch_extend(case.rows, 64, 0, case.scale)
    assert error(extend(case.q, case.layer, None, case.scales), want) < LONG_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("splits", [pytest.param(own, marks=INTERPRETED) for own in (1, 0)])
def test_long_sums_in_triton(splits: int) -> None:
    from actorium.kernels.triton.decode import decode
    from actorium.kernels.triton.extend import extend

    case = long_case()
    tables, lens = case.tables()
    want = case.wanted()
    got = decode(tables, lens, int(lens[0]), 2, 64, 0, case.scale, 0.0, splits)(
        case.q, case.layer, None, case.scales)
    assert error(got, want) < LONG_BOUND
    got = extend(case.rows, 64, 0, case.scale, 0.0, splits)(case.q, case.layer, None, case.scales)
    assert error(got, want) < LONG_BOUND

