"""The Triton kernel of decode attention against its torch reference and the formula."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers_attention import (
    BF16,
    DTYPES,
    FEW,
    INTERPRETED,
    Paged,
    check_sinks,
    check_soft_cap,
    error,
)
from helpers_pairs import pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.gpu.plan import graph_memory as plan
from actorium.gpu.plan.graph_memory import parts_estimate
from actorium.kernels.reference.merge import merge as torch_merge
from actorium.kernels.reference.paged_attention import torch_decode
from actorium.kernels.triton import decode as module
from actorium.kernels.triton.decode import config, decode, few, least_of
from actorium.kernels.triton.merge import merge
from actorium.kernels.triton.work import PARTS, Room, Rule, make, room_of, rule_of

pytestmark = INTERPRETED


def run(case: Paged, q_len: int, soft_cap: float = 0.0, splits: int = 0,
        sinks: torch.Tensor | None = None) -> torch.Tensor:
    tables, lens = case.tables()
    attend = decode(tables, lens, int(lens.max()), q_len, case.page_size, case.window, case.scale,
                    soft_cap, splits)
    out = case.poisoned()
    assert attend(case.q, case.layer, out, None, sinks) is out
    return out


def reference(case: Paged, q_len: int) -> torch.Tensor:
    tables, lens = case.tables()
    return torch_decode(tables, lens, int(lens.max()), q_len, case.page_size, case.window,
                        case.scale)(case.q, case.layer)


@settings(FEW, max_examples=8)
@given(
    before=st.lists(st.integers(0, 120), min_size=1, max_size=2), q_len=st.integers(1, 8),
    kv_heads=st.integers(1, 2), group=st.integers(1, 16),
    dim=st.sampled_from([10, 64, 80, 96, 128, 256]), page_size=st.sampled_from([16, 32, 64, 128]),
    window=st.sampled_from([0, 0, 1, 2, 15, 16, 17, 40, 400]), splits=st.sampled_from([0, 1, 2, 5]),
)
def test_equals_torch(
    before: list[int], q_len: int, kv_heads: int, group: int, dim: int, page_size: int,
    window: int, splits: int,
) -> None:
    case = Paged([(n, q_len) for n in before], kv_heads * group, kv_heads, dim, page_size, window)
    got = run(case, q_len, splits=splits)
    assert torch.allclose(got, reference(case, q_len), rtol=1e-4, atol=1e-5)
    assert error(got, case.wanted()) < 1e-6


@pytest.mark.parametrize(("dtype", "kv_dtype", "bound", "splits"),
                         pairs([*DTYPES, (BF16, torch.float32, 1e-2)], [1, 3]))
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype, bound: float, splits: int) -> None:
    case = Paged([(90, 2), (0, 2)], 6, 2, 64, 16, dtype=dtype, kv_dtype=kv_dtype)
    got = run(case, 2, splits=splits)
    assert got.dtype is dtype
    assert error(got, case.wanted()) < bound


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_soft_cap(cap: float) -> None:
    case = Paged([(70, 3), (3, 3)], 4, 2, 64, 16, window=50)
    check_soft_cap(case, cap, lambda: run(case, 3, cap, splits=2))


@pytest.mark.parametrize(("splits", "window"), [(1, 0), (4, 0), (3, 50)])
def test_sinks_count_once(splits: int, window: int) -> None:
    case = Paged([(70, 3), (3, 3)], 4, 2, 64, 16, window=window)
    check_sinks(case, lambda sinks: run(case, 3, splits=splits, sinks=sinks))


def test_more_rows_than_a_program_takes() -> None:
    case = Paged([(30, 7), (0, 7)], 20, 1, 16, 16)  # 140 rows share keys
    assert config(140, 16, 4, True).rows == 128
    for splits in (1, 2):
        assert error(run(case, 7, splits=splits), case.wanted()) < 1e-6


@pytest.mark.parametrize(("bad", "splits"), pairs([math.nan, math.inf], [1, 4]))
def test_a_row_beside_drafts_without_a_page(bad: float, splits: int) -> None:
    """The tokens a row does not see may lie where another sequence, or none, has its own."""
    case = Paged([(20, 5), (31, 5)], 4, 2, 32, 16)
    before = run(case, 5, splits=splits)
    for row in case.rows:
        case.layer[case.index(row.pages, row.start + 5)[-3:]] = bad
    after = run(case, 5, splits=splits).view(2, 5, 4, 32)
    assert torch.equal(after[:, :2], before.view(2, 5, 4, 32)[:, :2])
    assert after[:, 2:].isnan().flatten(2).any(2).all()


def test_padding_reads_the_sink_alone() -> None:
    """Length 1 on page 0, whatever the window of drafts."""
    case = Paged([(40, 4)], 4, 2, 32, 16)
    case.layer[0] = 3.0
    tables, lens = case.tables()
    tables, lens = torch.cat((tables, tables * 0)), torch.cat((lens, lens * 0 + 1))
    q = torch.cat((case.q, case.q))
    for splits in (1, 3):
        got = decode(tables, lens, 44, 4, 16, 0, case.scale, splits=splits)(q, case.layer)
        assert error(got[:4], case.wanted()) < 1e-6
        assert torch.allclose(got[4:], torch.tensor(3.0))


def test_lengths_are_read_when_it_runs() -> None:
    """One room serves all lengths up to its bound, as a captured graph's does."""
    case = Paged([(99, 1), (64, 1)], 4, 2, 32, 16)
    tables, lens = case.tables()
    now = torch.ones_like(lens)
    attend = decode(tables, now, 4096, 1, 16, 0, case.scale, splits=7)
    now.copy_(lens)
    assert error(attend(case.q, case.layer), case.wanted()) < 1e-6


def test_keys_behind_a_window_are_not_read() -> None:
    case = Paged([(70, 2), (35, 2)], 4, 2, 32, 16, window=20)
    before = run(case, 2)
    for row in case.rows:
        case.layer[case.index(row.pages, row.start + 1 - 20)] = math.nan
    assert torch.equal(run(case, 2), before)


def test_no_rows() -> None:
    case = Paged([(9, 1)], 2, 1, 16, 16)
    tables, lens = case.tables()
    attend = decode(tables[:0], lens[:0], 0, 1, 16, 0, 1.0)
    assert attend(case.q[:0], case.layer).shape == (0, 2, 16)


@FEW
@given(count=st.integers(1, 37), rows=st.integers(0, 3), heads=st.integers(1, 3),
       dim=st.sampled_from([16, 80, 256]), seed=st.integers(0, 99))
def test_merge(count: int, rows: int, heads: int, dim: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    parts = torch.randn((count, rows, heads, dim), generator=random)
    lse = torch.randn((count, rows, heads), generator=random) * 20
    empty = torch.rand(lse.shape, generator=random) < 0.3
    lse[empty], parts[empty] = -math.inf, math.nan
    out = torch.full((rows, heads, dim), math.nan)
    want = torch_merge(parts, lse, torch.empty_like(out))
    assert merge(parts, lse, out) is out
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-6)


def test_merge_gives_attention_over_both_parts() -> None:
    """A prefix and a chunk: weights of one softmax over all keys."""
    score, values = torch.randn(3, 2, 11), torch.randn(11, 2, 16)
    cut, out = 4, torch.empty(3, 2, 16)
    sides = [slice(0, cut), slice(cut, 11)]
    parts = [torch.einsum("nhk,khd->nhd", score[..., s].softmax(-1), values[s]) for s in sides]
    lse = torch.stack([score[..., s].logsumexp(-1) for s in sides])
    merge(torch.stack(parts), lse, out)
    want = torch.einsum("nhk,khd->nhd", score.softmax(-1), values)
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-6)


def test_a_part_of_nan_spoils_the_whole() -> None:
    lse = torch.zeros(3, 1, 1)
    lse[1] = math.nan
    assert merge(torch.ones(3, 1, 1, 16), lse, torch.zeros(1, 1, 16)).isnan().all()


def chunks_of(lens: list[int], rule: Rule, room: int, workers: int = 5, q_len: int = 1,
              window: int = 0, block: int = 16) -> list[list[int]]:
    """The work list of these lengths."""
    own = make(torch.tensor(lens, dtype=torch.int32), Room(rule, room, workers), 2, 4, 16, q_len,
               window, block)
    assert not own.done.any()
    count = int(own.items[0, 0])
    assert count <= room
    return [row.tolist() for row in own.items[1:count + 1]]


def blocks_seen(length: int, q_len: int, window: int, block: int) -> tuple[int, int]:
    shortest = max(length - q_len + 1, 1)
    return (max(shortest - window, 0) // block if window else 0), -(-max(length, 1) // block)


def taken(count: int, worker: int, workers: int) -> list[int]:
    """As `work.rounds_of` and `work.item_of` have it."""
    turns = [turn * workers + (worker if turn % 2 == 0 else workers - 1 - worker)
             for turn in range(-(-count // workers))]
    return [at for at in turns if at < count]


LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 10**6),
                             st.integers(1, 2**31 - 9)), min_size=1, max_size=40)


@settings(FEW, max_examples=40)
@given(lens=LENGTHS, least=st.integers(1, 20), most=st.integers(1, 40), q_len=st.integers(1, 8),
       window=st.sampled_from([0, 0, 1, 500, 4096]), workers=st.integers(1, 50))
def test_the_work_list_names_every_block_once_and_is_balanced(
    lens: list[int], least: int, most: int, q_len: int, window: int, workers: int
) -> None:
    items = chunks_of(lens, Rule(least, most), len(lens) * most, workers, q_len, window, 64)
    for sequence, length in enumerate(lens):
        own = [(number, *item) for number, item in enumerate(items) if item[0] == sequence]
        begin, end = blocks_seen(length, q_len, window, 64)
        assert [row[3] for row in own] == [begin, *(row[4] for row in own[:-1])]
        assert own[-1][4] == end
        assert {row[2] for row in own} == {length}
        assert [row[0] for row in own] == [row[5] + i for i, row in enumerate(own)]
        assert {row[6] for row in own} == {len(own)} and len(own) <= most
        assert [row[7] for row in own] == [row[0] for row in own] and own[0][8] == 0
        sizes = [row[4] - row[3] for row in own]
        assert max(sizes) - min(sizes) <= 1 and (min(sizes) >= least or len(own) == 1)
    costs = [item[3] - item[2] for item in items]
    for before, after in zip(items, items[1:], strict=False):
        assert after[3] - after[2] <= before[3] - before[2] + (before[0] == after[0]) + 1
    shared = [taken(len(items), worker, workers) for worker in range(workers)]
    assert sorted(at for own in shared for at in own) == list(range(len(items)))
    loads = [sum(costs[at] for at in own) for own in shared]
    assert max(loads) - min(loads) <= max(costs) + max(map(len, shared))


def test_chunks_of_a_sequence_do_not_depend_on_others() -> None:
    rule, others = Rule(4, 33), [1, 40_000, 700, 9_000, 16]
    for length in (1, 63, 64, 65, 1000, 30_000):
        alone = [item[2:4] for item in chunks_of([length], rule, 999)]
        beside = [item[2:4] for item in chunks_of([*others, length], rule, 999) if item[0] == 5]
        assert alone == beside


def test_more_chunks_than_there_is_room_for_are_made_coarser() -> None:
    lens, rule = [30_000, 64, 5_000, 1], Rule(2, 64)
    assert len(chunks_of(lens, rule, 999)) == 64 + 2 + 64 + 1
    for room in (130, 40, 5, 4):
        items = chunks_of(lens, rule, room)
        assert {item[0] for item in items} == {0, 1, 2, 3}
        assert sum(item[3] - item[2] for item in items) == sum(-(-n // 16) for n in lens)


def test_the_rule_fills_the_device_with_one_sequence() -> None:
    """Two programs an SM, however many key heads there are; of enough tokens each."""
    for tiles, most in ((8, 33), (4, 66), (1, 128), (64, 5), (1000, 1)):
        assert rule_of(tiles, 4, 64, 132) == Rule(4, most)
    assert rule_of(8, 128, 64, 132).least == 8
    assert room_of(Rule(4, 33), 256, 2048, 8, 2064, 396) == Room(
        Rule(4, 33), PARTS // (8 * 2064), 49)
    assert room_of(Rule(4, 33), 256, 3, 8, 2064, 396) == Room(Rule(4, 33), 256, 49)
    assert room_of(Rule(4, 33), 1, 2048, 8, 2064, 396) == Room(Rule(4, 33), 33, 33)


def test_one_sequence_is_shared_out_further_than_many() -> None:
    """One of 8 key heads on 132 processors is what eight processors a program would not fill."""
    assert [few(8 * n, 132) for n in (1, 2, 3, 256)] == [True, True, False, False]
    assert [least_of(8 * n, 132) for n in (1, 24, 25, 256)] == [256, 256, 1024, 1024]
    assert rule_of(8, 4, 16, 132, 0, 1024) == Rule(64, 33)
    for itemsize in (1, 2):
        many, one = (config(4, 128, itemsize, alone=alone) for alone in (False, True))
        assert (many.block, many.warps, many.programs) == (16, 1, 8) and one.warps == 4
    for other in (config(4, 128, 2, 3), config(4, 64, 2), config(4, 128, 2, window=512),
                  config(4, 128, 2, capability=89), config(4, 128, 4, fp32=True)):
        assert other.warps == 4, "what was not measured is as it was"


@pytest.mark.parametrize(("q_len", "window"), [(1, 0), (3, 0), (2, 400)])
def test_the_same_bits_alone_and_in_a_batch(q_len: int, window: int) -> None:
    """Chunks, their order in the merge, and every product are a sequence's own."""
    before = [600, 5, 0, 333, 70]
    case = Paged([(n, q_len) for n in before], 4, 2, 32, 16, window)
    tables, lens = case.tables()
    rule = Rule(3, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "rule_of", lambda *given: rule)
        together = decode(tables, lens, 4096, q_len, 16, window, case.scale)
        whole = together(case.q, case.layer)
        assert isinstance(together, module.Decode) and together.work is not None
        assert int(together.work.items[0, 0]) > len(before) and not together.work.done.any()
        assert error(whole, case.wanted()) < 1e-6
        for i in range(len(before)):
            rows = slice(i * q_len, (i + 1) * q_len)
            alone = decode(tables[i:i + 1], lens[i:i + 1], int(lens[i]), q_len, 16, window,
                           case.scale)(case.q[rows], case.layer)
            assert torch.equal(alone, whole[rows])


def test_every_layer_has_the_list_of_the_first_and_makes_none() -> None:
    case = Paged([(300, 1), (64, 1)], 4, 2, 32, 16)
    tables, lens = case.tables()
    launches: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make", lambda *given: launches.append(1) or make(*given))
        attend = decode(tables, lens, 301, 1, 16, 0, case.scale, splits=7)
        outs = [attend(case.q, case.layer, case.poisoned()) for _ in range(3)]
    assert launches == [1]
    assert all(torch.equal(out, outs[0]) for out in outs) and error(outs[0], case.wanted()) < 1e-6


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (28, 4, 128), (16, 1, 256)])
@pytest.mark.parametrize(("sequences", "q_len"), [(1, 1), (16, 4), (256, 1), (512, 8)])
def test_the_memory_plan_has_room_for_all_parts(
    heads: int, kv_heads: int, dim: int, sequences: int, q_len: int
) -> None:
    packed = q_len * heads // kv_heads
    shape = config(packed, dim, 2, q_len)
    tiles, rows = kv_heads * -(-packed // shape.rows), min(packed, shape.rows)
    rule = rule_of(tiles, packed, shape.block, 132)
    room = room_of(rule, sequences, 10**6, tiles, 4 * rows * (dim + 1), 132 * shape.programs)
    parts = room.items * tiles * rows * (dim + 1) * 4
    model = SimpleNamespace(latent=None, heads=heads, kv_heads=kv_heads, head_dim=dim, groups=[0])
    model.kinds = (model,)
    planned = parts_estimate(cast(Any, model), sequences * q_len)
    assert parts <= planned <= PARTS == plan.PARTS
