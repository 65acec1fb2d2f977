"""Triton's row-wise kernels against their references, in the interpreter over drawn shapes, and
against fp64 on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from actorium.kernels.backends import triton_fault
from actorium.kernels.reference import activation, gated_norm, norm
from actorium.kernels.reference.apply_plan import apply_plan, table_addresses
from actorium.kernels.reference.rope import rope_rows, rope_table
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.triton import activation as activation_t
from actorium.kernels.triton import apply_plan as apply_plan_t
from actorium.kernels.triton import gated_norm as gated_norm_t
from actorium.kernels.triton import norm as norm_t
from actorium.kernels.triton import rope as rope_t

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
FLOAT, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
ROUNDING = {FLOAT: 2**-23, HALF: 2**-11, BF16: 2**-8, torch.float8_e4m3fn: 2**-4}
EPS = 1e-6

DTYPES = st.sampled_from([FLOAT, HALF, BF16])
ROWS = st.integers(0, 9)
WIDTHS = st.integers(1, 700)
SEEDS = st.integers(0, 2**32)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
interpreted = pytest.mark.skipif(bool(triton_fault(CPU)), reason="Triton compiles for CUDA here")
gpu = [pytest.mark.gpu,
       pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def drawn(examples: int) -> Callable[..., object]:
    return settings(max_examples=examples, deadline=None)


class Source:
    """Random tensors on a device, some with rows that lie apart."""

    def __init__(self, seed: int, device: torch.device = CPU) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.device = device

    def __call__(self, *size: int, dtype: torch.dtype = FLOAT, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=self.random) * scale).to(dtype).to(self.device)

    def apart(self, *size: int, dtype: torch.dtype, gap: int, scale: float = 1.0) -> Tensor:
        """Between the rows lie NaNs."""
        rows, *rest, last = size
        whole = torch.full((rows, *rest, last + gap), torch.nan, dtype=dtype, device=self.device)
        whole[..., :last] = self(*size, dtype=dtype, scale=scale)
        return whole[..., :last]


def close(got: Tensor, want: Tensor, roundings: float = 4) -> None:
    """`got` within so many roundings to its dtype of `want`, of f64. The device's exp, rsqrt and
    quotient take some in fp32; Triton's interpreter cuts off what bf16 does not hold: two."""
    assert got.shape == want.shape
    unit = ROUNDING[got.dtype] * (2 if got.dtype is FLOAT else 1)
    wide = got.to(want.dtype)
    assert torch.isfinite(wide).all()
    assert torch.allclose(wide, want, rtol=roundings * unit, atol=roundings * unit)


def wide(x: Tensor) -> Tensor:
    return x.double()


# --- norms ---------------------------------------------------------------------------------------

def check_norms(source: Source, rows: int, width: int, gap: int, dtype: torch.dtype) -> None:
    x = source.apart(rows, width, dtype=dtype, gap=gap, scale=3)
    residual = source.apart(rows, width, dtype=dtype, gap=2 * gap, scale=3)
    weight = source(width, dtype=dtype)
    plain = norm.rms_norm(wide(x), wide(weight), EPS)
    close(norm_t.rms_norm(x, weight, EPS), plain)
    close(norm_t.rms_norm_add(x, weight, EPS, residual), plain + wide(residual), 16)
    normed, total = norm_t.add_rms_norm(x, residual, weight, EPS)
    close(total, wide(x) + wide(residual))
    close(normed, norm.rms_norm(wide(total), wide(weight), EPS))
    assert normed.is_contiguous() and total.is_contiguous()


def check_layer_norm(source: Source, rows: int, parts: int, width: int, gap: int,
                     dtype: torch.dtype) -> None:
    """Of rows that are no multiple of anything apart, whose mean is far from 0; and in place."""
    whole = source.apart(rows, parts * width, dtype=dtype, gap=gap, scale=3)
    whole += 5
    x = whole.unflatten(1, (parts, width)) if parts > 1 else whole
    weight = source(2, *x.shape[1:], dtype=dtype)
    want = norm.layer_norm(x.float(), weight.float(), EPS)
    close(norm_t.layer_norm(x, weight, EPS), want, 16)
    assert norm_t.layer_norm(x, weight, EPS, x) is x
    close(x, want, 16)


@interpreted
@drawn(20)
@given(SEEDS, st.integers(1, 5), st.integers(1, 5), st.integers(2, 300), st.sampled_from([0, 3]),
       DTYPES)
@example(1, 3, 1, 1500, 16, BF16)
def test_layer_norms(seed: int, rows: int, parts: int, width: int, gap: int,
                     dtype: torch.dtype) -> None:
    check_layer_norm(Source(seed), rows, parts, width, gap, dtype)


@interpreted
@drawn(25)
@given(SEEDS, ROWS, WIDTHS, st.sampled_from([0, 1, 16]), DTYPES)
@example(1, 3, 1024, 0, BF16)
@example(2, 2, 1500, 0, FLOAT)
def test_norms(seed: int, rows: int, width: int, gap: int, dtype: torch.dtype) -> None:
    check_norms(Source(seed), rows, width, gap, dtype)


@interpreted
def test_norm_keeps_leading_dimensions_and_promotes() -> None:
    x, weight = torch.randn(2, 3, 40).to(BF16), torch.randn(40)
    got, want = norm_t.rms_norm(x, weight, EPS), norm.rms_norm(x, weight, EPS)
    assert got.dtype is want.dtype is FLOAT
    assert torch.allclose(got, want, rtol=2**-7, atol=2**-7)


def test_a_program_holds_whole_rows() -> None:
    for width in (1, 64, 100, 1024, 1025, 4096, 5120, 8192, 16384):
        c = norm_t.norm_config(width)
        assert c.block >= width and c.block & (c.block - 1) == 0
        assert 1 <= c.warps <= 16 and c.rows >= 1


@interpreted
@drawn(20)
@given(SEEDS, st.integers(0, 5), st.integers(1, 4), st.integers(1, 70), DTYPES)
def test_gated_norms(seed: int, rows: int, heads: int, width: int, dtype: torch.dtype) -> None:
    check_gated(Source(seed), rows, heads, width, dtype)


def check_gated(source: Source, rows: int, heads: int, width: int, dtype: torch.dtype) -> None:
    x, weight = source(rows, heads, width), source(width)
    gate = source.apart(rows, heads * width, dtype=dtype, gap=5)
    by_head = gate.unflatten(-1, (heads, width))
    want = gated_norm.gated_norm(wide(x), wide(weight), wide(by_head), EPS)
    close(gated_norm_t.gated_norm(x, weight, by_head, EPS), want)
    rounded = x.to(dtype)  # as GatedDeltaNet's extends leave it
    want = gated_norm.gated_norm(wide(rounded), wide(weight), wide(by_head), EPS)
    close(gated_norm_t.gated_norm(rounded, weight, by_head, EPS), want)
    weight = source(heads * width)
    want = gated_norm.norm_gated(wide(x.flatten(1)), wide(weight), wide(gate), EPS, heads)
    close(gated_norm_t.norm_gated(x.flatten(1), weight, gate, EPS, heads), want)


# --- activations ---------------------------------------------------------------------------------

def check_activations(source: Source, rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = source.apart(rows, 2 * width, dtype=dtype, gap=3, scale=4)
    close(activation_t.silu_mul(gate_up), activation.silu_mul(wide(gate_up)))
    close(activation_t.gelu_mul(gate_up), activation.gelu_mul(wide(gate_up)), 16)
    for kind in (*activation.ACTIVATIONS, "xielu"):
        close(activation_t.activate(gate_up, kind, (0.7, 1.3)),
              activation.activate(wide(gate_up), kind, (0.7, 1.3)), 16)


@interpreted
@drawn(20)
@given(SEEDS, st.integers(0, 5), st.integers(1, 1300), DTYPES)
def test_activations(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    check_activations(Source(seed), rows, width, dtype)


@interpreted
def test_activations_at_the_ends() -> None:
    gate = torch.tensor([-1e30, -200.0, -0.0, 200.0, 1e30, torch.inf, torch.nan], dtype=BF16)
    both = torch.cat((gate, torch.ones_like(gate)))[None]
    for fast, plain in ((activation_t.silu_mul, activation.silu_mul),
                        (activation_t.gelu_mul, activation.gelu_mul)):
        assert torch.allclose(fast(both), plain(both), atol=1e-6, equal_nan=True)


# --- rotation and writing to the pages -----------------------------------------------------------

def check_rotate_write(
    source: Source, tokens: int, heads: int, kv_heads: int, dim: int, rotary: int, normed: bool,
    gap: int, dtype: torch.dtype, kept: torch.dtype,
) -> None:
    """rotary: of dim; the pairs beyond have angle 0. Half of the tokens go to the sink."""
    width, places = heads + 2 * kv_heads, 48
    qkv = source.apart(tokens, width * dim, dtype=dtype, gap=gap).unflatten(-1, (width, dim))
    weight = source(heads + kv_heads, dim, dtype=dtype) if normed else None
    turning = torch.linspace(1, 0.01, dim // 2)
    turning[rotary // 2:] = 0
    rope = rope_rows(rope_table(turning, 1.0, 100, dtype),
                     torch.randint(100, (tokens,), generator=source.random)).to(source.device)
    index = torch.randperm(places - 1, generator=source.random)[:tokens] + 1
    index[::2] = 0
    pages = torch.full((places, 2 * kv_heads, dim), torch.nan, device=source.device).to(kept)
    want, want_pages = qkv.double(), pages.double()
    TorchOps().rotate_write(want, heads, None if weight is None else weight.double(), EPS,
                            rope.double(), want_pages, index.to(source.device))
    rope_t.rotate_write(qkv, heads, weight, EPS, rope, pages, index.to(source.device))
    close(qkv, want, 16)
    assert torch.equal(qkv[:, heads + kv_heads:].double(), want[:, heads + kv_heads:])
    named = torch.zeros(places, dtype=torch.bool)
    named[index[1::2]] = True
    wrote = pages.float().cpu()
    close(wrote[index[1::2]].to(kept), qkv[1::2, heads:].cpu().double(), 2)
    named[0] = tokens > 0
    assert wrote[~named].isnan().all(), "a row that nobody named"


GROUPS = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 7, 16]))
"""KV heads, and query heads of each."""
DIMS = st.sampled_from([(64, 64), (80, 80), (96, 24), (128, 128), (256, 64), (10, 4)])
"""Of a head, and those that turn."""


@interpreted
@drawn(25)
@given(SEEDS, st.integers(0, 6), GROUPS, DIMS, st.booleans(), st.sampled_from([0, 8]), DTYPES,
       DTYPES)
def test_rotate_write(seed: int, tokens: int, groups: tuple[int, int], dims: tuple[int, int],
                      normed: bool, gap: int, dtype: torch.dtype, kept: torch.dtype) -> None:
    kv_heads, shared = groups
    check_rotate_write(Source(seed), tokens, kv_heads * shared, kv_heads, *dims, normed, gap,
                       dtype, kept)


@interpreted
def test_rotate_write_to_pages_of_fp8() -> None:
    """Numbers that need no rounding, at which Triton's interpreter fails."""
    qkv = torch.randint(-8, 9, (3, 4, 16), generator=Source(0).random).to(BF16)
    rope = rope_table(torch.zeros(8), 1.0, 3, BF16)
    pages = torch.full((5, 2, 16), torch.nan, dtype=torch.float8_e4m3fn)
    rope_t.rotate_write(qkv, 2, None, EPS, rope, pages, torch.tensor([4, 1, 2]))
    assert torch.equal(pages[[4, 1, 2]].to(BF16), qkv[:, 2:])
    assert pages[[0, 3]].float().isnan().all()


def test_the_reference_writes_pages_of_another_dtype() -> None:
    qkv, pages = torch.randn(1, 3, 4).to(BF16), torch.zeros(2, 2, 4)
    rope = rope_table(torch.zeros(2), 1.0, 1, BF16)
    TorchOps().rotate_write(qkv, 1, None, EPS, rope, pages, torch.tensor([1]))
    assert torch.equal(pages[1], qkv[0, 1:].float()) and not pages[0].any()


# --- changes of the tables -----------------------------------------------------------------------

def check_apply_plan(source: Source, sizes: list[tuple[int, int]], share: float) -> None:
    tables = [source(*size, scale=1000).int() for size in sizes]
    tables.append(torch.arange(7, device=source.device).view(torch.int32))
    columns = []
    for t, table in enumerate(tables):
        places = torch.randperm(table.numel() - 1, generator=source.random)
        places = places[:int(len(places) * share)] + 1
        values = torch.randint(-2**31, 2**31, places.shape, generator=source.random)
        columns.append(torch.stack((torch.full_like(places, t), places, values)))
    entries = torch.cat(columns, 1).int()
    upload = torch.zeros(3, entries.shape[1] + 3, dtype=torch.int32)
    upload[:, 1:-2] = entries[:, torch.randperm(entries.shape[1], generator=source.random)]
    entries = upload.to(source.device)[:, 1:-2]
    want = [table.clone() for table in tables]
    apply_plan(want, table_addresses(want), entries)
    apply_plan_t.apply_plan(tables, table_addresses(tables), entries)
    for t, (got, right) in enumerate(zip(tables, want, strict=True)):
        assert torch.equal(got, right)
        own = columns[t]
        assert got.view(-1)[own[1].to(source.device)].cpu().tolist() == own[2].tolist()


@interpreted
@drawn(20)
@given(SEEDS, st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=3),
       st.sampled_from([0.0, 0.3, 1.0]))
def test_apply_plan(seed: int, sizes: list[tuple[int, int]], share: float) -> None:
    check_apply_plan(Source(seed), sizes, share)


# --- on a CUDA device ----------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [FLOAT, HALF, BF16])
class TestOnDevice:
    """The same checks, at the sizes of real models."""

    pytestmark = gpu

    @pytest.mark.parametrize(("rows", "width"),
                             [(1, 4096), (257, 5120), (3, 8192), (33, 16384), (5, 1001), (64, 128)])
    def test_norms(self, dtype: torch.dtype, rows: int, width: int) -> None:
        check_norms(Source(rows, CUDA), rows, width, 0, dtype)
        check_norms(Source(rows, CUDA), rows, width, 8, dtype)

    @pytest.mark.parametrize(("rows", "width"), [(1, 14336), (300, 3072), (7, 1001)])
    def test_activations(self, dtype: torch.dtype, rows: int, width: int) -> None:
        check_activations(Source(rows, CUDA), rows, width, dtype)

    @pytest.mark.parametrize("rows", [1, 300])
    def test_gated_norms(self, dtype: torch.dtype, rows: int) -> None:
        check_gated(Source(rows, CUDA), rows, 48, 128, dtype)
        check_gated(Source(rows, CUDA), rows, 8, 512, dtype)

    @pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"),
                             [(32, 8, 128, 128), (16, 8, 128, 128), (24, 4, 256, 64),
                              (8, 4, 80, 80), (16, 1, 96, 96)])
    @pytest.mark.parametrize("normed", [False, True])
    def test_rotate_write(self, dtype: torch.dtype, heads: int, kv_heads: int, dim: int,
                          rotary: int, normed: bool) -> None:
        for tokens, kept in ((1, dtype), (40, dtype), (40, BF16), (40, torch.float8_e4m3fn)):
            check_rotate_write(Source(tokens, CUDA), tokens, heads, kv_heads, dim, rotary, normed,
                               0, dtype, kept)

    def test_apply_plan(self, dtype: torch.dtype) -> None:
        check_apply_plan(Source(1, CUDA), [(257, 12), (257, 2048), (3, 5)], 0.1)
