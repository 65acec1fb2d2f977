"""Products with weights in AMX tiles against f64 products with the same weights."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from helpers_builds import EACH_BUILD, built
from torch import Tensor

from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.linear import Linear, TileGated, TileLinear, can_tile

pytestmark = pytest.mark.usefixtures("all_threads")
BF16 = torch.bfloat16
ROWS = (1, 2, 3, 5, 16, 17, 31, 32, 33, 64, 65, 100, 513)
SUMMED = 4e-6
"""How far sums in fp32 may be off, as a share of the absolute values summed."""
SHAPES = ((1, 32), (33, 64), (250, 256), (96, 768), (100, 1024), (32, 2080))


@pytest.fixture(scope="module", params=EACH_BUILD)
def lib(request: pytest.FixtureRequest) -> ctypes.CDLL:
    found = built(request.param)
    if not found.linear_ready():
        pytest.skip("this processor has no AVX2")
    return found


def tiled(lib: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None) -> TileLinear:
    scratch = torch.empty(2 * lib.linear_scratch(), dtype=torch.uint8)
    return TileLinear(weight, bias, lib, 2, scratch)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def spread(outs: int, ins: int, share: float) -> Tensor:
    """Weights of which a share lies far from the others, in every direction."""
    weight = rand(outs, ins) * ins**-0.5
    far = torch.rand(outs, ins, generator=torch.Generator().manual_seed(1)) < share
    power = torch.randint(-100, 12, (outs, ins), generator=torch.Generator().manual_seed(2))
    return torch.where(far, torch.ldexp(weight.float(), power), weight.float()).to(BF16)


def agree(got: Tensor, want: Tensor, terms: Tensor) -> None:
    """terms: the sum of the absolute values of what was summed."""
    assert ((got.double() - want).abs() <= want.abs() * 2**-8 + terms * SUMMED + 1e-30).all()


def check(product: TileLinear, weight: Tensor, bias: Tensor | None, rows: int) -> None:
    outs, ins = weight.shape
    x, more = rand(rows, ins, seed=3), rand(rows, outs, seed=4)
    plain = Linear(weight.double(), None if bias is None else bias.double())
    terms = x.float().abs() @ weight.float().abs().T + more.float().abs() + 4
    agree(product(x), plain(x.double()), terms)
    agree(product.add(x, more), plain.add(x.double(), more.double()), terms)
    wide = product.wide(x)
    assert wide.dtype is torch.float32
    assert ((wide - plain(x.double())).abs() <= terms * SUMMED).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
def test_tiles_by_f64(lib: ctypes.CDLL, rows: int, outs: int, ins: int) -> None:
    weight = rand(outs, ins) * ins**-0.5
    for bias in (None, rand(outs, seed=5)):
        product = tiled(lib, weight, bias)
        assert product.coded or outs * ins < 10000
        check(product, weight, bias, rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("share", "coded"), [(0.005, True), (0.5, False)])
def test_weights_without_a_code(lib: ctypes.CDLL, rows: int, share: float, coded: bool) -> None:
    weight = spread(250, 1024, share)
    product = tiled(lib, weight)
    assert product.coded is coded
    assert (len(product.exceptions) > 100) is coded
    check(product, weight, None, rows)


@pytest.mark.parametrize("share", [0.0, 0.005, 0.5])
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
def test_unpack_is_exact(lib: ctypes.CDLL, outs: int, ins: int, share: float) -> None:
    weight = spread(outs, ins, share)
    odd = torch.tensor([0.0, -0.0, 1e-39, -1e-40, 3e38, -3e38, torch.inf, torch.nan]).to(BF16)
    weight.view(-1)[:8] = odd
    weight.view(-1)[-8:] = odd
    assert torch.equal(tiled(lib, weight).unpack().view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("share", [0.0, 0.005, 0.5])
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
def test_rows_are_exact(lib: ctypes.CDLL, outs: int, ins: int, share: float) -> None:
    """Any of them, in any order: those of an embedding that is the head as well."""
    weight = spread(outs, ins, share)
    ids = torch.cat((torch.randperm(outs), torch.tensor([outs - 1, 0])))
    product = tiled(lib, weight)
    assert torch.equal(product.rows(ids, torch.bfloat16), weight[ids])
    assert torch.equal(product.rows(ids[:1], torch.float32), weight[ids[:1]].float())
    assert product.rows(ids[:0], torch.bfloat16).shape == (0, ins)
    for wrong in (-1, outs):
        with pytest.raises(IndexError, match=f"of {outs} rows"):
            product.rows(torch.tensor([0, wrong]), torch.bfloat16)


def test_every_pattern_of_bits_is_kept(lib: ctypes.CDLL) -> None:
    weight = torch.arange(-32768, 32768, dtype=torch.int16).view(BF16).view(64, 1024)
    product = tiled(lib, weight)
    assert not product.coded
    assert torch.equal(product.unpack().view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_all_zero(lib: ctypes.CDLL, rows: int) -> None:
    product = tiled(lib, torch.zeros(50, 64, dtype=BF16))
    assert product.coded and not product.exceptions.numel()
    assert not product(rand(rows, 64)).any()


@pytest.mark.parametrize("rows", [1, 20, 600])
def test_rows_do_not_depend_on_their_neighbours(lib: ctypes.CDLL, rows: int) -> None:
    """The same row gives the same bits wherever it stands in a step of that size."""
    product, x = tiled(lib, rand(128, 512)), rand(rows, 512, seed=1)
    swapped = product(x.flip(0)).flip(0)
    assert torch.equal(product(x), swapped)


@pytest.mark.parametrize("ins", [512, 2048])
def test_rows_do_not_depend_on_how_many_there_are(lib: ctypes.CDLL, ins: int) -> None:
    weight = spread(250, ins, 0.005)
    product, x = tiled(lib, weight), rand(100, ins, seed=1)
    whole = product(x)
    for rows in (1, 4, 12, 13, 32, 33, 64):
        assert torch.equal(product(x[:rows]), whole[:rows]), rows


def test_a_view_is_read_as_it_stands(lib: ctypes.CDLL) -> None:
    weight, x = rand(64, 128), rand(6, 256, seed=1)
    product = tiled(lib, weight.T.contiguous().T)
    assert torch.equal(product(x[:, ::2]), product(x[:, ::2].contiguous()))
    assert torch.equal(product.unpack(), weight)


def test_shapes_without_tiles_fall_back(lib: ctypes.CDLL) -> None:
    ops = NativeOps(lib, 2, tiles=True)
    assert isinstance(ops.linear(rand(40, 64)), TileLinear)
    for weight in (rand(40, 48), rand(40, 64).float(), rand(2, 1 << 15)):
        assert not can_tile(weight)
    product, x = ops.linear(rand(40, 48)), rand(3, 48, seed=1)
    assert not isinstance(product, TileLinear)
    assert product.wide(x).dtype is torch.float32


@pytest.mark.parametrize("rows", [1, 31, 65, 513])
@pytest.mark.parametrize("bias", [False, True])
def test_gated(lib: ctypes.CDLL, rows: int, bias: bool) -> None:
    weight, x = rand(2 * 48, 256) * 0.1, rand(rows, 256, seed=1)
    b = rand(2 * 48, seed=2) if bias else None
    ops = NativeOps(lib, 2, tiles=True)
    product = ops.gated(weight, b, "silu")
    assert isinstance(product, TileGated)
    assert torch.equal(product.tiles.unpack(), weight)
    gate, up = F.linear(x.float(), weight.float(), b.float() if b is not None else None).chunk(2, 1)
    want = F.silu(gate) * up
    assert ((product(x).float() - want).abs() <= want.abs() * 2**-8 + 1e-5).all()
    assert not isinstance(ops.gated(weight, b, "gelu"), TileGated)
    assert not isinstance(ops.gated(rand(2 * 40, 256), None, "silu"), TileGated)


@pytest.mark.parametrize("ins", [3104, 16384])
@pytest.mark.parametrize("rows", [3, 50, 70])
def test_many_k(lib: ctypes.CDLL, rows: int, ins: int) -> None:
    check(tiled(lib, rand(40, ins) * ins**-0.5), rand(40, ins) * ins**-0.5, None, rows)


def test_results_too_large_for_caches(lib: ctypes.CDLL) -> None:
    weight = rand(2048, 64) * 0.1
    check(tiled(lib, weight), weight, None, 1100)


@pytest.mark.parametrize("rows", [500, 1100])  # threads share columns, or rows
def test_a_gated_result_too_large_for_caches(lib: ctypes.CDLL, rows: int) -> None:
    """Rows written past the caches, two panels to a line, are those written through them."""
    product = NativeOps(lib, 2, tiles=True).gated(rand(2 * 1184, 64) * 0.1, rand(2 * 1184), "silu")
    assert isinstance(product, TileGated)
    x = rand(rows, 64, seed=3)
    assert torch.equal(product(x), torch.cat([product(part) for part in x.split(100)]))


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_no_rows_give_no_rows(lib: ctypes.CDLL, kind: str) -> None:
    """A step of unfinished prompts alone wants no row of the last layer."""
    ops = NativeOps(lib, 1, tiles=True)
    weight = torch.randn(64, 64).to(BF16)
    out = ops.linear(weight)(torch.empty(0, 64, dtype=BF16)) if kind == "plain" else \
        ops.gated(weight, None, "silu")(torch.empty(0, 64, dtype=BF16))
    assert out.shape == (0, 64 if kind == "plain" else 32)
