"""Pages in FP8 with scales: the Triton kernels and torch's against the formula in fp64 over the
same quantised pages, and the kernels compiled for Hopper."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path

import pytest
import torch
from helpers_attention import BF16, INTERPRETED, Paged, error
from helpers_compile import compiled
from helpers_fp8 import exact_fp8
from helpers_pairs import pairs
from torch import Tensor

from actorium.gpu.attention.attention_backend import NativeAttention, TorchAttention
from actorium.kernels.backends import select_ops
from actorium.kernels.cpu import attention_native
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.reference.kv import key_and_value_scales, largest, write_kv
from actorium.kernels.reference.latent import write_latent
from actorium.kernels.reference.paged_attention import torch_decode, torch_extend
from actorium.kernels.reference.rope import rope_table
from actorium.kernels.reference.torch_ops import TorchOps

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = math.inf, math.nan
KINDS = [(torch.float32, E4M3, 2e-6), (torch.float32, E5M2, 2e-6), (BF16, E4M3, 1e-2)]
"""(of queries, of pages, error); in bf16 the interpreter cuts off what should be rounded."""


def spread(parts: int) -> Tensor:
    """f32[parts]: scales from 0.04 to 2.7, no powers of two; values' far from their keys'."""
    return torch.linspace(-1.4, 0.43, parts)[torch.arange(parts).flip(0)].mul(math.log(10)).exp()


def wanted(case: Paged, scales: Tensor) -> Tensor:
    """By the formula, with keys and values as the scales say."""
    wide = copy.copy(case)
    wide.q, wide.layer = case.q.double(), case.layer.double() * scales.double()[:, None]
    return wide.wanted()


# --- the reference -------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_written_numbers_are_cut_off_and_never_spoilt(dtype: torch.dtype) -> None:
    scales = torch.tensor([0.5, 3.0])
    most = largest(dtype)
    kv = torch.tensor([1.0, most * 0.4, most, -most * 7, INF, -INF, NAN, 0.0]).view(8, 1, 1)
    pages = torch.zeros(9, 2, 1).to(dtype)
    write_kv(pages, kv.expand(8, 2, 1).contiguous(), torch.arange(8) + 1, scales)
    keys, values = pages.float()[1:, :, 0].unbind(1)
    assert keys[:6].tolist() == [2.0, pytest.approx(0.8 * most, rel=0.2), most, -most, most, -most]
    assert values[1] == pytest.approx(most * 0.4 / 3, rel=2**-3) and values[3] == -most
    assert keys[6].isnan() and values[6].isnan() and keys[7] == 0 and not pages[0].float().any()
    assert largest(BF16) == 0, "of other dtypes nothing is cut off"


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("window", [0, 20])
def test_the_reference_by_the_formula(dtype: torch.dtype, window: int) -> None:
    scales = spread(4)
    case = Paged([(40, 3), (17, 3)], 6, 2, 16, 16, window, kv_dtype=dtype)
    tables, lens = case.tables()
    decode = torch_decode(tables, lens, 43, 3, 16, window, case.scale)
    assert error(decode(case.q, case.layer, None, scales), wanted(case, scales)) < 1e-6
    chunks = Paged([(0, 20), (0, 20), (30, 9)], 6, 2, 16, 16, window, kv_dtype=dtype)
    out = chunks.poisoned()
    torch_extend(chunks.rows, 16, window, chunks.scale)(chunks.q, chunks.layer, out, scales)
    assert error(out, wanted(chunks, scales)) < 1e-6


def test_a_latent_has_one_scale() -> None:
    scale = torch.tensor([0.3])
    keys, values = key_and_value_scales(scale)
    assert keys is values
    latents = torch.randn(40, 24)
    pages = torch.zeros(48, 1, 24).to(E4M3)
    write_latent(pages, latents[:, :16], latents[:, None, 16:], torch.arange(40), scale)
    assert torch.equal(pages[:40, 0].float(), (latents * (1 / scale)).to(E4M3).float())
    q, table = torch.randn(1, 3, 24), torch.arange(3, dtype=torch.int32)[None]
    lens = torch.tensor([40], dtype=torch.int32)
    attend = TorchAttention(16).decode(table, lens, 40, 1, 16, 0, 0.2)
    want = attend(q, pages.float() * scale)
    assert torch.allclose(attend(q, pages, None, scale), want, rtol=1e-5, atol=1e-6)


# --- in C ----------------------------------------------------------------------------------------

@pytest.fixture
def native() -> NativeOps:
    found = select_ops(BF16, torch.device("cpu"), 64, native=True)
    if not isinstance(found, NativeOps):
        pytest.skip("no C compiler, or torch with another OpenMP")
    return found


def attention(ops: NativeOps) -> NativeAttention:
    """Of the same build."""
    return NativeAttention(ops.lib, ops.threads)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("widened", [1, 1 << 25])
@pytest.mark.parametrize(("q_len", "window"), [(1, 0), (3, 0), (1, 20), (3, 20)])
def test_decodes_in_c(native: NativeOps, dtype: torch.dtype, widened: int, q_len: int, window: int,
                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_native, "WIDENED", widened)
    case = Paged([(90, q_len), (0, q_len), (33, q_len)], 6, 2, 32, 16, window, BF16, dtype)
    scales, (tables, lens) = spread(4), case.tables()
    attend = attention(native).decode(tables, lens, int(lens.max()), q_len, 16, window, case.scale)
    assert isinstance(attend, attention_native.NativeDecode)
    for own in (scales, None):
        got = attend(case.q, case.layer, case.poisoned(), own)
        assert error(got, wanted(case, torch.ones(4) if own is None else own)) < 5e-3
    # One by one, as without drafts: the same bits.
    for at in range(q_len):
        alone = attention(native).decode(tables, lens - (q_len - 1 - at), int(lens.max()), 1, 16,
                                         window, case.scale)
        got = alone(case.q[at::q_len], case.layer)
        assert torch.equal(got, attend(case.q, case.layer)[at::q_len])


@pytest.mark.parametrize("window", [0, 20])
def test_chunks_in_c(native: NativeOps, window: int) -> None:
    case = Paged([(70, 40), (0, 9), (20, 1)], 6, 2, 32, 16, window, BF16, E4M3)
    attend, scales = attention(native).extend(case.rows, 16, window, case.scale), spread(4)
    for own in (scales, None):
        got = attend(case.q, case.layer, case.poisoned(), own)
        assert error(got, wanted(case, torch.ones(4) if own is None else own)) < 5e-3


@pytest.mark.parametrize("scaled", [True, False])
def test_rotate_write_in_c(native: NativeOps, scaled: bool) -> None:
    """What it writes to pages of bf16, quantised."""
    gen = torch.Generator().manual_seed(1)
    qkv = torch.randn(5, 8, 64, generator=gen).to(BF16) * 200
    rope = rope_table(torch.linspace(1, 0.01, 32), 1.0, 5, BF16)
    plain, index = qkv.clone(), torch.tensor([3, 1, 7, 0, 2])
    wide, got, want = torch.zeros(8, 4, 64, dtype=BF16), *torch.zeros(2, 8, 4, 64).to(E4M3)
    scales = spread(4) if scaled else None
    native.rotate_write(plain, 4, None, 1e-6, rope, wide, index)
    native.rotate_write(qkv, 4, None, 1e-6, rope, got, index, scales)
    write_kv(want, wide[index], index, scales)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(qkv[:, :4], plain[:, :4])
    assert (got.float().abs() == 448).any() and got.float().isfinite().all()


# --- Triton --------------------------------------------------------------------------------------

class TestInterpreted:
    pytestmark = INTERPRETED

    @pytest.mark.parametrize(("dtype", "kv_dtype", "bound", "q_len", "window", "splits"), pairs(
        KINDS, [(1, 0, 1), (1, 0, 3), (3, 0, 2), (3, 30, 1), (8, 30, 2)]))
    def test_decode(self, dtype: torch.dtype, kv_dtype: torch.dtype, bound: float, q_len: int,
                    window: int, splits: int) -> None:
        from actorium.kernels.triton.decode import decode

        case = Paged([(70, q_len), (0, q_len)], 4, 2, 16, 16, window, dtype, kv_dtype)
        scales, (tables, lens) = spread(4), case.tables()
        attend = decode(tables, lens, int(lens.max()), q_len, 16, window, case.scale, 0.0, splits)
        got = attend(case.q, case.layer, case.poisoned(), scales)
        assert error(got, wanted(case, scales)) < bound
        assert error(attend(case.q, case.layer), wanted(case, torch.ones(4))) < bound

    @pytest.mark.parametrize(("dtype", "kv_dtype", "bound", "window", "splits"), pairs(
        KINDS, [(0, 1), (0, 3), (30, 1)]))
    def test_extend(self, dtype: torch.dtype, kv_dtype: torch.dtype, bound: float, window: int,
                    splits: int) -> None:
        from actorium.kernels.triton.extend import extend

        case = Paged([(40, 8), (0, 5)], 4, 2, 16, 16, window, dtype, kv_dtype)
        scales = spread(4)
        attend = extend(case.rows, 16, window, case.scale, 0.0, splits)
        got = attend(case.q, case.layer, case.poisoned(), scales)
        assert error(got, wanted(case, scales)) < bound
        assert error(attend(case.q, case.layer), wanted(case, torch.ones(4))) < bound

    def test_a_soft_cap_is_of_whole_scores(self) -> None:
        from actorium.kernels.triton.decode import decode

        case = Paged([(40, 1)], 4, 2, 16, 16, kv_dtype=E4M3)
        case.q *= 30
        scales, (tables, lens) = spread(4), case.tables()
        got = decode(tables, lens, 41, 1, 16, 0, case.scale, 5.0)(case.q, case.layer, None, scales)
        wide = copy.copy(case)
        wide.q, wide.layer = case.q.double(), case.layer.double() * scales.double()[:, None]
        assert error(got, wide.wanted(5.0)) < 1e-5 < 1e-2 < error(got, wide.wanted())

    def test_queries_beyond_fp16_choose_as_they_would(self) -> None:
        """Beside pages of 8 bits queries in bf16 are multiplied in fp16."""
        from actorium.kernels.triton.decode import decode
        from actorium.kernels.triton.extend import extend

        case = Paged([(40, 1), (17, 1)], 4, 2, 16, 16, 0, BF16, E4M3)
        tables, lens = case.tables()
        case.q[0, 0], case.q[1, 0] = case.q[0, 0].sign() * 1e30, case.q[1, 0].sign() * 3e-6
        want = copy.copy(case)  # beyond 65504 the choice is as sharp
        want.q = case.q.float().clamp(-65504, 65504)
        for got in (decode(tables, lens, 41, 1, 16, 0, case.scale)(case.q, case.layer),
                    extend(case.rows, 16, 0, case.scale)(case.q, case.layer)):
            assert error(got, wanted(want, torch.ones(4))) < 1e-2

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize("q_len", [1, 3])
    def test_latents(self, q_len: int, splits: int) -> None:
        from test_triton_latent import Case

        from actorium.kernels.triton.latent import LatentDecode

        case, scale = Case([50, 40], q_len, 4, 32, 16, 16), torch.tensor([0.3])
        case.layer = case.layer.to(E4M3)
        attend = LatentDecode(case.pages, case.lens, case.span, q_len, 16, case.scale, 32, splits)
        got = attend(case.q, case.layer, None, scale)[..., :32]
        case.layer = case.layer.float() * scale
        want = case.wanted()
        assert (got.double() - want).norm() < 1e-5 * want.norm()

    @pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, E4M3), (torch.float32, E4M3),
                                                     (BF16, E5M2)])
    @pytest.mark.parametrize("scaled", [True, False])
    @pytest.mark.parametrize("normed", [True, False])
    def test_rotate_write(self, dtype: torch.dtype, kv_dtype: torch.dtype, scaled: bool,
                          normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """To the bit what the reference writes of the same keys and values, and cut off as it
        does; each key head and each value head by its own scale."""
        from actorium.kernels.triton.rope import rotate_write

        exact_fp8(monkeypatch)
        heads, kv_heads, dim, tokens = 5, 2, 32, 7
        gen = torch.Generator().manual_seed(3)
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=gen).to(dtype)
        qkv[0, heads:, :2], qkv[1, -1, 0] = 5e4, INF
        qkv[1, heads + kv_heads, 1] = NAN
        norm = torch.rand(heads + kv_heads, dim, generator=gen).to(dtype) if normed else None
        # A table of right angles: rotation is exact.
        rope = torch.zeros(tokens, 2, 1, dim, dtype=dtype)
        rope[::2, 0], rope[1::2, 1, :, :dim // 2], rope[1::2, 1, :, dim // 2:] = 1, -1, 1
        scales = spread(2 * kv_heads) if scaled else None
        index = torch.tensor([4, 0, 9, 2, 7, 1, 5])
        got, want = torch.zeros(2, 10, 2 * kv_heads, dim).to(kv_dtype)
        theirs = qkv.clone()
        rotate_write(qkv, heads, norm, 1e-6, rope, got, index, scales)
        TorchOps().rotate_write(theirs, heads, norm, 1e-6, rope, want, index, scales)
        if normed:  # norms are rounded otherwise
            assert torch.allclose(got.float(), want.float(), rtol=2**-2, atol=1e-2, equal_nan=True)
        else:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        written = got.float()
        assert written[:, kv_heads:].isnan().sum() == 1, "the NaN that was given, no other"
        assert (written[index[0], kv_heads:, :2] == largest(kv_dtype)).all() or kv_dtype is E5M2
        assert not written[[3, 6, 8]].any()

    def test_rotate_write_reads_no_scale_of_nobodys(self) -> None:
        """A program's last heads may be none."""
        from actorium.kernels.triton.rope import rotate_write

        scales = torch.cat((spread(4), torch.zeros(999)))[:4]
        pages, rope = torch.zeros(6, 4, 16).to(E4M3), torch.zeros(6, 2, 1, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rotate_write(torch.ones(6, 7, 16), 3, None, 1e-6, rope, pages, torch.arange(6), scales)
        assert (pages[:, 2:].float() > 0).all()

    def test_rotate_write_with_a_table_of_angles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from actorium.kernels.triton.rope import rotate_write

        exact_fp8(monkeypatch)
        qkv, scales = torch.randn(6, 4, 16), spread(2)
        rope = rope_table(torch.linspace(1, 0.01, 8), 1.0, 6, torch.float32)
        got, want = torch.zeros(2, 6, 2, 16).to(E4M3)
        theirs = qkv.clone()
        rotate_write(qkv, 2, None, 1e-6, rope, got, torch.arange(6), scales)
        TorchOps().rotate_write(theirs, 2, None, 1e-6, rope, want, torch.arange(6), scales)
        assert torch.allclose(got.float(), want.float(), rtol=2**-3)
        assert torch.equal(got[:, 1].float(), want[:, 1].float()), "values are not rotated"


CODE = """
import torch
from helpers_attention import Paged
from test_triton_latent import Case
from actorium.kernels.triton.decode import decode
from actorium.kernels.triton.extend import extend
from actorium.kernels.triton.rope import rotate_write

def all_three(kv_dtype, scales, q_len=1, window=0, splits=2):
    case = Paged([(0, q_len)], 32, 8, 128, 16, window, torch.bfloat16, kv_dtype)
    attend = decode(*case.tables(), 99, q_len, 16, window, 1.0, 0.0, splits)
    attend(case.q, case.layer, None, scales)
    case = Paged([(9, 40)], 32, 8, 128, 16, window, torch.bfloat16, kv_dtype)
    attend = extend(case.rows, 16, window, 1.0, 0.0, splits)
    attend(case.q, case.layer, None, scales)
    qkv, rope = torch.empty(3, 48, 128, dtype=torch.bfloat16), torch.empty(3, 2, 1, 128)
    rotate_write(qkv, 32, None, 1e-6, rope.bfloat16(), case.layer, torch.arange(3), scales)

all_three(torch.float8_e4m3fn, torch.ones(16))
case = Case([70], 1, 16, 512, 64, 16, torch.bfloat16)
case.layer = case.layer.to(torch.float8_e4m3fn)
from actorium.kernels.triton.latent import LatentDecode
LatentDecode(case.pages, case.lens, 70, 1, 16, 0.1, 512, 1)(case.q, case.layer, None, torch.ones(1))
"""


@pytest.mark.slow
def test_compile_for_hopper(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    split = ["_list", "_decode", "_extend", "_merge", "_rotate"]
    assert compiled(CODE, tmp_path) == [*split, "_list", "_latent"]
