"""Products summed in a tree of leaves: the same bits on one rank as on several, in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_builds import EACH_BUILD, built
from helpers_ranks import run_ranks, whole
from torch import Tensor

from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.parallel.split_layers import SummedLinear
from actorium.kernels.cpu.column_parts import LeafLinear, LeafProducts, leaf_columns
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.linear import Linear, Reordered

pytestmark = pytest.mark.usefixtures("all_threads")
COUNTS = (1, 2, 5, 17, 32, 33, 100, 513)
SIZES = [(128, 96), (192, 70), (100, 64), (2048, 200), (131, 33), (127, 64)]
"""(columns, outs)"""


@pytest.fixture(params=EACH_BUILD)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(built(request.param), torch.get_num_threads(), exact=True)


def drawn(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def added(parts: list[Tensor]) -> Tensor:
    """In a tree of neighbours."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@pytest.mark.parametrize("leaves", [2, 4, 8])
@pytest.mark.parametrize(("columns", "outs"), SIZES)
def test_leaves_are_added_in_a_tree(ops: NativeOps, columns: int, outs: int, leaves: int) -> None:
    """Whatever the number of rows, with a bias and a residual, in f32 and rounded."""
    weight, bias = drawn(outs, columns).mul_(columns**-0.5).bfloat16(), drawn(outs).bfloat16()
    x, residual = drawn(513, columns).bfloat16(), drawn(513, outs).bfloat16()
    own = ops.linear_in_leaves(weight, bias, leaves)
    inner = own.linear if isinstance(own, Reordered) else own
    assert isinstance(inner, LeafLinear) and len(inner.leaves) == leaves and not ops.uncut
    inner.chunk = 96  # several, the last of few rows
    cut = leaf_columns(weight, leaves)
    each = cut[0].shape[1]
    shown = torch.nn.functional.pad(x, (0, each * leaves - columns))
    wide = added([ops.linear(part, None if i else bias).wide(
        shown[:, i * each:(i + 1) * each].contiguous()) for i, part in enumerate(cut)])
    torch.testing.assert_close(wide, x.float() @ weight.float().t() + bias.float(), atol=5e-3,
                               rtol=1e-3)
    for count in COUNTS:
        for at in {0, len(x) - count}:
            rows = slice(at, at + count)
            assert torch.equal(own.wide(x[rows]), wide[rows]), count
            assert torch.equal(own(x[rows]), wide[rows].bfloat16()), count
            assert torch.equal(own.add(x[rows], residual[rows]),
                               (wide[rows] + residual[rows].float()).bfloat16()), count


def test_they_are_not_what_one_sum_gives(ops: NativeOps) -> None:
    """Else nothing here would show anything."""
    weight, x = drawn(64, 512).bfloat16(), drawn(9, 512).bfloat16()
    one, two, four = (ops.linear_in_leaves(weight, None, n).wide(x) for n in (1, 2, 4))
    assert not torch.equal(one, two) and not torch.equal(two, four)


def part_of_rank(weight: Tensor, group: RankGroup) -> Tensor:
    return leaf_columns(weight, group.place.size)[group.place.rank]


@pytest.mark.parametrize("leaves", [2, 4])
@pytest.mark.parametrize(("columns", "outs"), [(256, 96), (192, 70), (200, 33)])
def test_ranks_give_what_one_gives(tmp_path: Path, columns: int, outs: int, leaves: int) -> None:
    """Ranks with a leaf each, or two; with a residual, rounded; alone and in a batch."""
    ops = NativeOps(built("this"), 1, exact=True)
    weight, bias = drawn(outs, columns).mul_(columns**-0.5).bfloat16(), drawn(outs).bfloat16()
    x, residual = drawn(700, columns).bfloat16(), drawn(700, outs).bfloat16()
    alone = ops.linear_in_leaves(weight, bias, leaves)
    want, more = alone(x), alone.add(x, residual)

    def body(group: RankGroup) -> None:
        own = NativeOps(built("this"), 1, exact=True)
        parts = own.linear_in_leaves(part_of_rank(weight, group),
                                     torch.zeros_like(bias) if group.place.rank else bias,
                                     leaves // group.place.size)
        summed, mine = SummedLinear(parts, group), part_of_rank(x, group)
        for count in (1, 3, 33, 700):
            assert torch.equal(summed(mine[:count].contiguous()), want[:count]), count
            assert torch.equal(summed.add(mine[-count:].contiguous(), residual[-count:]),
                               more[-count:]), count

    for size in {2, leaves}:
        whole(run_ranks(tmp_path / str(size), size, body))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_ranks_do_not_know_of_other_rows(tmp_path: Path, size: int,
                                                 dtype: torch.dtype) -> None:
    """In one shot and in shares, in slots and beyond them: each number is that of the tree."""
    width, rows = 1000, 900
    parts = [drawn(rows, width + rank)[:, :width].contiguous().to(dtype) for rank in range(size)]
    residual = drawn(rows, width).bfloat16()

    def tree(some: list[Tensor]) -> Tensor:
        if len(some) == 1:
            return some[0].float()
        half = 1 << (len(some) - 1).bit_length() - 1
        return tree(some[:half]) + tree(some[half:])

    total = tree(parts)
    want = (total + residual.float()).bfloat16()

    def body(group: RankGroup) -> None:
        own = parts[group.place.rank]
        for count in (1, 7, 40, rows):
            for at in {0, rows - count}:
                here = slice(at, at + count)
                assert torch.equal(group.reduce_add(own[here], residual[here]), want[here])
                assert torch.equal(group.all_reduce(own[here].clone()), total[here].to(dtype))

    whole(run_ranks(tmp_path, size, body))


def test_leaves_of_experts_lie_side_by_side(ops: NativeOps) -> None:
    weight, x = drawn(64, 99).bfloat16(), drawn(5, 99).bfloat16()
    cut = leaf_columns(weight, 2)
    products: list[Linear] = [ops.linear(part) for part in cut]
    found = LeafProducts(products, 50)(x)
    assert torch.equal(found[:, :64], products[0](x[:, :50].contiguous()))
    assert torch.equal(found[:, 64:], products[1](torch.nn.functional.pad(x[:, 50:], (0, 1))))
