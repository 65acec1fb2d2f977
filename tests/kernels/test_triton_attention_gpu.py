"""The attention kernels on a CUDA device against the formula in fp64 and torch's own attention;
results go where NaN was, and all that no row may read is NaN."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers_attention import Paged, error

from actorium.kernels.reference.paged_attention import Attend, torch_decode, torch_extend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEAR = {BF16: 5e-3, FP16: 8e-4, FP32: 1e-5}
"""Weights and results are rounded to the dtype: relative error of all numbers together."""
HEADS = [(32, 8, 128), (8, 8, 64), (28, 4, 128), (32, 1, 80), (12, 4, 96), (16, 1, 256),
         (8, 4, 256)]


def decoded(case: Paged, q_len: int, cap: float = 0.0, splits: int = 0) -> torch.Tensor:
    from actorium.kernels.triton.decode import decode

    tables, lens = case.tables()
    attend = decode(tables, lens, int(lens.max()), q_len, case.page_size, case.window, case.scale,
                    cap, splits)
    return into(attend, case)


def extended(case: Paged, cap: float = 0.0, splits: int = 0) -> torch.Tensor:
    from actorium.kernels.triton.extend import extend

    return into(extend(case.rows, case.page_size, case.window, case.scale, cap, splits), case)


def into(attend: Attend, case: Paged) -> torch.Tensor:
    out = case.poisoned()
    assert attend(case.q, case.layer, out, case.scales) is out
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
@pytest.mark.parametrize(("page_size", "window"), [(16, 0), (64, 0), (16, 100), (128, 1023)])
def test_decode(
    heads: int, kv_heads: int, dim: int, q_len: int, page_size: int, window: int
) -> None:
    before = [0, 1, 15, 16, 63, 64, 65, 700, 2047, 3000]
    case = Paged([(n, q_len) for n in before], heads, kv_heads, dim, page_size, window, BF16,
                 device="cuda")
    want = case.wanted()
    for splits in (0, 1, 3, 40):
        assert error(decoded(case, q_len, splits=splits), want) < NEAR[BF16]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize(("page_size", "window"), [(16, 0), (64, 0), (16, 100), (128, 1023)])
def test_extend(heads: int, kv_heads: int, dim: int, page_size: int, window: int) -> None:
    spans = [(0, 1), (0, 777), (40, 7), (16, 16), (0, 0), (129, 100), (1300, 1), (1000, 600)]
    case = Paged(spans, heads, kv_heads, dim, page_size, window, BF16, device="cuda")
    want = case.wanted()
    for splits in (0, 1, 3):
        assert error(extended(case, splits=splits), want) < NEAR[BF16]
    few = Paged([(1300, 1), (0, 2)], heads, kv_heads, dim, page_size, window, BF16, device="cuda")
    assert error(extended(few), few.wanted()) < NEAR[BF16]


@pytest.mark.parametrize(("dtype", "kv_dtype"), [
    (FP16, FP16), (FP32, FP32), (BF16, FP16), (BF16, torch.float8_e4m3fn), (FP32, BF16),
    (BF16, torch.int8), (FP32, torch.int8), (FP16, torch.int8)])
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "device": "cuda"}
    # Weights of codes are bf16 beside queries in fp16, too.
    bound = NEAR[BF16 if kv_dtype is torch.int8 and dtype is FP16 else dtype]
    for dim in (128, 256):
        case = Paged([(500, 3), (0, 3)], 8, 2, dim, 16, 0, **options)
        assert error(decoded(case, 3), case.wanted()) < bound
        case = Paged([(500, 130), (0, 30)], 8, 2, dim, 16, 0, **options)
        assert error(extended(case), case.wanted()) < bound


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_soft_cap(cap: float) -> None:
    case = Paged([(500, 4), (0, 4)], 8, 2, 128, 16, 0, FP16, device="cuda")
    case.q *= 8
    assert error(decoded(case, 4, cap), case.wanted(cap)) < 2e-3
    assert error(extended(case, cap), case.wanted(cap)) < 2e-3


def test_like_torchs_own_attention() -> None:
    case = Paged([(0, 1000)], 32, 8, 128, 16, 0, BF16, device="cuda")
    own = case.layer[case.index(case.rows[0].pages, 1000)]
    keys, values = own.transpose(0, 1).chunk(2)
    theirs = F.scaled_dot_product_attention(
        case.q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=case.scale,
        enable_gqa=True)[0].transpose(0, 1)
    want = case.wanted()
    assert error(extended(case), want) < 1.5 * error(theirs, want)


def test_like_the_reference_on_the_same_device() -> None:
    case = Paged([(700, 3), (31, 3)], 8, 2, 64, 16, 48, FP32, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    tables, lens = case.tables()
    want = torch_decode(tables, lens, 703, 3, 16, 48, case.scale)(case.q, case.layer)
    assert torch.allclose(decoded(case, 3), want, rtol=1e-4, atol=1e-5)
    want = torch_extend(case.rows, 16, 48, case.scale)(case.q, case.layer)
    assert torch.allclose(extended(case), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_beside_drafts_without_a_page(bad: float) -> None:
    case = Paged([(20, 5), (3000, 5)], 8, 2, 128, 16, 0, BF16, device="cuda")
    for splits in (1, 4):
        before = decoded(case, 5, splits=splits).view(2, 5, 8, 128)
        layer = case.layer.clone()
        for row in case.rows:
            case.layer[case.index(row.pages, row.start + 5)[-3:]] = bad
        after = decoded(case, 5, splits=splits).view(2, 5, 8, 128)
        assert torch.equal(after[:, :2], before[:, :2])
        assert after[:, 2:].isnan().flatten(2).any(2).all()
        case.layer = layer


def test_the_same_every_time() -> None:
    """An error that moves is a race."""
    case = Paged([(2000, 4), (64, 4), (900, 4)], 16, 4, 128, 16, 0, BF16, device="cuda")
    first = decoded(case, 4, splits=5), extended(case)
    for _ in range(20):
        assert torch.equal(decoded(case, 4, splits=5), first[0])
        assert torch.equal(extended(case), first[1])


@pytest.mark.parametrize("splits", [1, 6])
def test_decode_in_a_graph_reads_lengths_and_pages_anew(splits: int) -> None:
    from actorium.kernels.triton.decode import decode

    case = Paged([(2000, 2), (64, 2), (900, 2)], 16, 4, 128, 16, 0, BF16, device="cuda")
    case.layer[:2] = 1.0  # the sink
    tables, lens = case.tables()
    now, now_lens = torch.zeros_like(tables), torch.full_like(lens, 2)
    out = case.poisoned()

    def step() -> None:
        attend = decode(now, now_lens, 2048, 2, 16, 0, case.scale, splits=splits)
        for _ in range(3):  # layers
            attend(case.q, case.layer, out)

    step()  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    now.copy_(tables)
    now_lens.copy_(lens)
    out.fill_(math.nan)
    graph.replay()
    assert error(out, case.wanted()) < NEAR[BF16]


def test_the_same_bits_beside_any_others() -> None:
    """Of as many sequences: also where all programs are at work at once, and other ones finish
    last."""
    from actorium.kernels.triton.decode import decode

    before = [0, 17, 300, 1023, 5000, 20_000] * 12
    for q_len, heads, kv_heads, dim in ((1, 32, 8, 128), (3, 32, 8, 128), (1, 16, 1, 256)):
        case = Paged([(n, q_len) for n in before], heads, kv_heads, dim, 16, 0, BF16,
                     device="cuda")
        whole = decoded(case, q_len)
        for _ in range(5):
            assert torch.equal(decoded(case, q_len), whole)
        tables, lens = case.tables()
        q, span = case.q.view(len(before), q_len, heads, dim), int(lens.max())
        for i in range(6):  # beside copies of itself
            same = torch.full((len(before),), i, device="cuda")
            out = decode(tables[same], lens[same], span, q_len, 16, 0, case.scale)(
                q[same].flatten(0, 1), case.layer).view_as(q)
            assert torch.equal(out, whole.view_as(q)[same])


def test_nothing_waits_for_the_device() -> None:
    from actorium.kernels.triton.decode import decode
    from actorium.kernels.triton.extend import extend

    case = Paged([(2000, 2), (64, 2)], 16, 4, 128, 16, 0, BF16, device="cuda")
    decoded(case, 2), extended(case)
    tables, lens = case.tables()
    out = case.poisoned()
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode(tables, lens, 2048, 2, 16, 0, case.scale)(case.q, case.layer, out)
        extend(case.rows, 16, 0, case.scale)(case.q, case.layer, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_beyond_32_bits() -> None:
    """Pages at the end of more than 2**31 numbers."""
    page, heads, dim = 16, 16, 128
    pages = 2**31 // (page * heads * dim) + 9
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * pages * page * heads * dim:
        pytest.skip("too little memory is free")
    case = Paged([(60, 4), (100, 4)], 32, 8, 128, page, 0, BF16, device="cuda")
    layer = torch.empty((pages * page, heads, dim), dtype=BF16, device="cuda")
    by = pages - case.pages
    layer[by * page:] = case.layer
    want = case.wanted()
    for row in case.rows:
        row.pages += by
    case.layer = layer
    assert error(decoded(case, 4), want) < NEAR[BF16]
    assert error(extended(case), want) < NEAR[BF16]
