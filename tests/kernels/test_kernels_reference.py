"""Kernels against definitions written out, and every fast path against the plain one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers_builds import EACH_BUILD, built
from torch import Tensor

from actorium.gpu.attention.attention_backend import NativeAttention, TorchAttention
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.linear import FEW_ROWS, Linear, NativeLinear, PackedLinear, can_pack
from actorium.kernels.reference.activation import ACTIVATIONS, activate, gelu_mul, silu_mul
from actorium.kernels.reference.norm import layer_norm, rms_norm
from actorium.kernels.reference.paged_attention import (
    decode_mask,
    extend_mask,
    paged_decode,
    token_index,
)
from actorium.kernels.reference.rope import apply_rope, rope_rows, rope_table
from actorium.kernels.reference.torch_ops import TorchOps

pytestmark = pytest.mark.usefixtures("all_threads")
CPU = torch.device("cpu")
BF16 = torch.bfloat16


def rand(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.fixture(params=EACH_BUILD)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(built(request.param), torch.get_num_threads())


def attention(ops: NativeOps) -> NativeAttention:
    """Of the same build."""
    return NativeAttention(ops.lib, ops.threads)


def close(got: Tensor, want: Tensor) -> None:
    """Within one rounding to bf16 of an fp32 result."""
    assert got.shape == want.shape
    assert torch.allclose(got.float(), want.float(), rtol=2**-7, atol=2e-3)


def test_rms_norm_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0]])
    assert torch.allclose(rms_norm(x, torch.tensor([1.0, 2.0]), 0.0),
                          torch.tensor([[3.0, 8.0]]) / math.sqrt(12.5))


def test_layer_norm_is_that_of_torch() -> None:
    x, weight = rand(3, 2, 40).float() * 3 + 5, rand(2, 40, seed=1).float()
    want = F.layer_norm(x, (40,), *weight, 1e-5)
    assert torch.allclose(layer_norm(x, weight, 1e-5), want, atol=1e-5)
    by_part = torch.stack((weight, weight * 2), 1)  # each part of a row has its own
    assert torch.allclose(layer_norm(x, by_part, 1e-5)[:, 1], want[:, 1] * 2, atol=1e-5)


def test_rope_turns_pairs_by_the_position() -> None:
    table = rope_table(torch.tensor([1.0, 0.1]), 1.0, 8, torch.float32)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    got = apply_rope(x, rope_rows(table, torch.tensor([5])))[0, 0]
    for i, angle in enumerate((5.0, 0.5)):
        lo, hi = x[0, 0, i].item(), x[0, 0, i + 2].item()
        assert got[i].item() == pytest.approx(lo * math.cos(angle) - hi * math.sin(angle), abs=1e-5)
        assert got[i + 2].item() == pytest.approx(
            hi * math.cos(angle) + lo * math.sin(angle), abs=1e-5)


def test_token_index_repeats_a_rows_own_first_token() -> None:
    pages = torch.tensor([[3, 5], [7, 0]], dtype=torch.int32)
    got = token_index(pages, torch.tensor([6, 2], dtype=torch.int32), 4, 6)
    assert got.tolist() == [[12, 13, 14, 15, 20, 21], [28, 29, 28, 28, 28, 28]]


def test_masks() -> None:
    lens = torch.tensor([3, 5])
    assert decode_mask(lens, 2, 5, 0)[:, 0].int().tolist() == [
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]
    assert decode_mask(lens, 1, 5, 2)[:, 0, 0].int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
    assert extend_mask(2, 2, 0, CPU).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert extend_mask(2, 2, 2, CPU).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_paged_decode_by_the_formula() -> None:
    q, kv = rand(2, 1, 4, 8).float(), rand(64, 4, 8, seed=1).float()
    index = torch.tensor([[9, 3, 60], [5, 5, 5]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)[:, None, None]
    got = paged_decode(q, kv[index], mask, 0.5)
    for b, seen in enumerate(([9, 3, 60], [5])):
        for h in range(4):
            weight = (kv[seen, h // 2] @ q[b, 0, h] * 0.5).softmax(0)
            assert torch.allclose(got[b, 0, h], weight @ kv[seen, 2 + h // 2], atol=1e-5)


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 200])
@pytest.mark.parametrize(("outs", "ins"), [(96, 64), (33, 250), (512, 256), (7, 31)])
@pytest.mark.parametrize("bias", [False, True])
def test_linears_agree(ops: NativeOps, rows: int, outs: int, ins: int, bias: bool) -> None:
    weight, x, more = rand(outs, ins), rand(rows, ins, seed=1), rand(rows, outs, seed=2)
    b = rand(outs, seed=3) if bias else None
    plain = Linear(weight.float(), b.float() if b is not None else None)
    if not can_pack(weight):
        pytest.skip("this processor has no bf16 in oneDNN")
    for fast in (PackedLinear(weight, b), NativeLinear(weight, b, ops.lib, 2)):
        for got, want in ((fast(x), plain(x.float())),
                          (fast.add(x, more), plain.add(x.float(), more.float()))):
            assert torch.allclose(got.float(), want, rtol=2**-6, atol=2**-6 * ins**0.5)


@pytest.mark.parametrize("dim", [1, 15, 64, 1000])
@pytest.mark.parametrize("rows", [1, 70])
def test_native_norm_and_activation(ops: NativeOps, dim: int, rows: int) -> None:
    x, weight, gate_up = rand(rows, dim) * 3, rand(dim, seed=1), rand(rows, 2 * dim, seed=2) * 20
    close(ops.rms_norm(x, weight, 1e-5), rms_norm(x.float(), weight.float(), 1e-5))
    close(ops.silu_mul(gate_up), silu_mul(gate_up.float()))
    close(ops.gelu_mul(gate_up / 8), gelu_mul((gate_up / 8).float()))


@pytest.mark.parametrize("kind", [*ACTIVATIONS, "xielu"])
def test_native_plain_activations(ops: NativeOps, kind: str) -> None:
    ends = torch.tensor([[-math.inf, math.inf, math.nan] * 100]).to(BF16)
    x = torch.cat((rand(70, 300) * 4, ends))
    assert torch.equal(ops.activation(kind, (0.7, 1.3))(x).nan_to_num(7.0),
                       activate(x.double(), kind, (0.7, 1.3)).to(BF16).nan_to_num(7.0))


@pytest.mark.parametrize(("parts", "dim"), [(1, 15), (1, 1000), (6, 64), (3, 10)])
@pytest.mark.parametrize("rows", [1, 70])
def test_native_layer_norm(ops: NativeOps, parts: int, dim: int, rows: int) -> None:
    """Of rows that lie apart, whose mean is far from 0; and in place."""
    x = (rand(rows, parts * dim + 8) * 3 + 5)[:, :parts * dim]
    weight = rand(2, parts * dim, seed=1)
    if parts > 1:
        x, weight = x.unflatten(1, (parts, dim)), weight.unflatten(1, (parts, dim))
    want = layer_norm(x.float(), weight.float(), 1e-5)
    close(ops.layer_norm(x, weight, 1e-5), want)
    ops.layer_norm(x, weight, 1e-5, x)
    close(x, want)


def test_native_activation_at_the_ends(ops: NativeOps) -> None:
    gate = torch.tensor([-1e30, -200.0, -0.0, 200.0, 1e30, math.inf, math.nan], dtype=BF16)
    both = torch.cat((gate, torch.ones_like(gate)))[None]
    for got, want in ((ops.silu_mul(both), silu_mul(both)), (ops.gelu_mul(both), gelu_mul(both))):
        assert torch.allclose(got, want, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 10), (16, 8, 128)])
def test_native_rotate_write(
    ops: NativeOps, norm: bool, heads: int, kv_heads: int, dim: int
) -> None:
    rows = 37
    weight = rand(heads + kv_heads, dim, seed=1) if norm else None
    table = rope_table(torch.linspace(1, 0.01, dim // 2), 1.0, 100, BF16)
    rope = rope_rows(table, torch.arange(rows) + 11)
    index = torch.randperm(80, generator=torch.Generator().manual_seed(2))[:rows]
    got, want = rand(rows, heads + 2 * kv_heads, dim), rand(rows, heads + 2 * kv_heads, dim).float()
    pages = torch.zeros(80, 2 * kv_heads, dim, dtype=BF16)
    wide = pages.float()
    ops.rotate_write(got, heads, weight, 1e-6, rope, pages, index)
    TorchOps().rotate_write(want, heads, weight.float() if norm else None, 1e-6,  # type: ignore
                            rope.float(), wide, index)
    assert torch.allclose(got[:, :heads].float(), want[:, :heads], rtol=2**-7, atol=2**-6)
    assert torch.allclose(pages.float(), wide, rtol=2**-7, atol=2**-6)
    assert torch.equal(pages[index, kv_heads:], got[:, heads + kv_heads:]), "values as they are"
    untouched = torch.ones(80, dtype=torch.bool)
    untouched[index] = False
    assert (pages[untouched] == 0).all()


@pytest.mark.parametrize("dim", [64, 128])
def test_native_rotate_write_of_many_rows_is_that_of_few(ops: NativeOps, dim: int) -> None:
    """Many rows are written past the caches."""
    rows, heads, kv_heads = 2**20 // (16 * dim) + 3, 3, 8
    weight = rand(heads + kv_heads, dim, seed=1)
    table = rope_table(torch.linspace(1, 0.01, dim // 2), 1.0, rows, BF16)
    rope, index = rope_rows(table, torch.arange(rows)), torch.arange(rows).flip(0)
    whole = rand(rows, heads + 2 * kv_heads, dim)
    parts, pages = whole.clone(), torch.zeros(2, rows, 2 * kv_heads, dim, dtype=BF16)
    ops.rotate_write(whole, heads, weight, 1e-6, rope, pages[0], index)
    for some in torch.arange(rows).split(100):
        ops.rotate_write(parts[some[0]:some[-1] + 1], heads, weight, 1e-6, rope[some], pages[1],
                         index[some])
    assert torch.equal(whole[:, :heads], parts[:, :heads])
    assert torch.equal(*pages) and (pages[0] != 0).any(-1).all()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"),
                         [(9, 3, 64), (8, 8, 128), (7, 1, 32), (6, 2, 128), (4, 4, 10)])
def test_native_decode(
    ops: NativeOps, page_size: int, window: int, heads: int, kv_heads: int, dim: int
) -> None:
    lens = torch.tensor([1, 130, 128, 300, 7], dtype=torch.int32)
    width = -(-300 // page_size)
    order = torch.randperm(5 * width, generator=torch.Generator().manual_seed(1)) + 1
    pages = order.view(5, width).to(torch.int32)
    kv = rand((5 * width + 1) * page_size, 2 * kv_heads, dim)
    qkv = rand(5, heads + 2 * kv_heads, dim, seed=3)
    q = qkv[:, :heads]
    got = attention(ops).decode(pages, lens, 300, 1, page_size, window, dim**-0.5)(q, kv)
    want = TorchAttention().decode(pages, lens, 300, 1, page_size, window, dim**-0.5)(
        q.float().contiguous(), kv.float())
    assert torch.allclose(got.float(), want, rtol=2**-7, atol=2e-3)


def test_native_decode_of_windows_of_drafts(ops: NativeOps) -> None:
    lens, pages = torch.tensor([20], dtype=torch.int32), torch.tensor([[2, 1]], dtype=torch.int32)
    q, kv = rand(2, 4, 16), rand(48, 4, 16, seed=1)
    two = attention(ops).decode(pages, lens, 20, 2, 16, 0, 0.25)(q, kv)
    one = TorchAttention().decode(pages, lens, 20, 1, 16, 0, 0.25)(q[1:], kv)
    close(two[1:], one)
