"""A vocabulary that ranks cannot share evenly: what they gather is sampled as the whole would be,
by Triton's kernels too, which reckon rows by the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers_ranks import gloo, run_ranks, whole
from torch import Tensor

from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.parallel.split_layers import SplitHead
from actorium.gpu.parallel.torch_group import open_group
from actorium.kernels import sampling_tables as columns
from actorium.kernels.backends import select_sampling, triton_fault
from actorium.kernels.linear import Linear
from actorium.kernels.sampling_tables import RowLayout, SamplingTables

CPU = torch.device("cpu")
ROWS, HIDDEN = 3, 8


def tables(vocabulary: int) -> SamplingTables:
    """Rows that sample and penalise; slot 0 is that of padding."""
    record = torch.zeros(ROWS + 1, columns.WIDTH, dtype=torch.int32)
    record[:, columns.SEED_LOW] = record[:, columns.COUNT_ROW] = torch.arange(ROWS + 1)
    record[:, columns.TOP_K] = 50
    real = record.view(torch.float32)
    real[:, columns.TEMPERATURE] = real[:, columns.TOP_P] = 1.0
    real[:, columns.REPETITION] = 1.3
    counts = torch.randint(0, 2, (ROWS + 1, vocabulary), dtype=torch.int32,
                           generator=torch.Generator().manual_seed(2))
    return SamplingTables(record, torch.full((ROWS + 1, 1), vocabulary - 1, dtype=torch.int32),
                          torch.zeros(ROWS + 1, 0, dtype=torch.int64), counts)


def sampled(logits: Tensor, kernels: str) -> list[Tensor]:
    """What a sampler makes of them: likeliest, drawn, log-probabilities, adjusted and masked."""
    ops, (rows, vocabulary) = select_sampling(CPU, kernels), logits.shape
    slots, own = torch.arange(1, rows + 1, dtype=torch.int32), tables(vocabulary)
    found = [ops.choose(logits, slots, slots, own, samples, samples) for samples in (False, True)]
    found += ops.logprobs(logits, found[0], 2)[:2]
    found.append(ops.adjust(logits, slots, slots, own, RowLayout(rows), True, False, True).clone())
    words = torch.full((1, -(-vocabulary // 32)), -2, dtype=torch.int32)
    ops.mask(logits, torch.tensor([rows - 1], dtype=torch.int32), words)
    return [*found, logits]


@pytest.mark.parametrize("form", [open_group, gloo])
@pytest.mark.parametrize(("vocabulary", "size"), [(301, 2), (101, 3), (4, 3)])
def test_rows_are_sampled_as_those_of_one_rank(tmp_path: Path, vocabulary: int, size: int,
                                               form: Callable[..., RankGroup]) -> None:
    if triton_fault(CPU):
        pytest.skip(triton_fault(CPU))
    draw = torch.Generator().manual_seed(vocabulary)
    x, weight = torch.randn(ROWS, HIDDEN, generator=draw), torch.randn(
        size * -(-vocabulary // size), HIDDEN, generator=draw)

    def gathered(group: RankGroup) -> Tensor:
        own = weight.chunk(size)[group.place.rank]
        return SplitHead(Linear(own), vocabulary, group).logits(x)

    alone = Linear(weight[:vocabulary]).logits(x)
    found = whole(run_ranks(tmp_path / "group", size, gathered, form=form))
    for own in found:
        assert own.shape == alone.shape and torch.allclose(own, alone, rtol=0, atol=1e-5)
        assert own.is_contiguous()
    # Triton's interpreter is for one thread alone.
    want, got = sampled(found[0].clone(), "torch"), sampled(found[0], "triton")
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=0, atol=1e-5)
