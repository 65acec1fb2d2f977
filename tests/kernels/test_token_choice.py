"""Choosing the tokens that queries attend to: against scores of every token at once, in blocks of
any size, over pages in any order."""

from __future__ import annotations

import pytest
import torch

from actorium.kernels.reference import token_choice
from actorium.kernels.reference.token_choice import Rows, best_places, choose

HEADS, DIM = 5, 12


def tokens_of(pages: torch.Tensor, size: int, length: int) -> torch.Tensor:
    place = torch.arange(length)
    return pages[place // size].long() * size + place % size


@pytest.mark.parametrize("limit", [500, 5000, 64 << 20])
@pytest.mark.parametrize(("lens", "q_len", "size"), [
    ((70,), 70, 16), ((61,), 9, 1), ((40, 3, 77, 12), 1, 4), ((19, 30, 5), 3, 8)])
def test_the_highest_scores_are_chosen(
    lens: tuple[int, ...], q_len: int, size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence reads nothing of others, and nothing behind itself: that is NaN."""
    monkeypatch.setattr(token_choice, "BYTES", limit)
    gen = torch.Generator().manual_seed(sum(lens))
    width, count = -(-max(lens) // size), 7
    pages = (torch.randperm(len(lens) * width, generator=gen) + 1).int().view(len(lens), width)
    keys = torch.full(((pages.numel() + 1) * size, DIM), torch.nan)
    for own, length in zip(pages, lens, strict=True):
        keys[tokens_of(own, size, length)] = torch.randn((length, DIM), generator=gen)
    q = torch.randn((len(lens) * q_len, HEADS, DIM), generator=gen)
    weights = torch.randn((len(q), HEADS), generator=gen)
    rows = Rows(pages, torch.tensor(lens, dtype=torch.int32), max(lens), q_len)
    choice = choose(q, weights, keys, rows, size, count)
    assert choice.tokens.dtype == choice.lens.dtype == torch.int32
    for at, row in enumerate(choice.tokens):
        own, last = pages[at // q_len], lens[at // q_len] - q_len + at % q_len
        tokens = tokens_of(own, size, last + 1)
        scores = (torch.einsum("hd,sd->hs", q[at], keys[tokens]).relu()
                  * weights[at][:, None]).sum(0)
        best = scores.topk(min(count, last + 1)).indices.sort().values
        held = int(choice.lens[at])
        assert held == len(best) and row[:held].tolist() == tokens[best].tolist()
        assert set(row.tolist()) <= set(tokens.tolist())


def test_of_equal_scores_the_first_are_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
                           [3.0, -torch.inf, 1.0, -torch.inf, 2.0, -torch.inf]])
    assert best_places(scores, 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 3], [0, 1, 2, 4]]


def test_nan_chooses_something_of_its_own_row() -> None:
    scores = torch.tensor([[torch.nan, 2.0, torch.nan, 1.0], [1.0, 2.0, 3.0, 0.0]])
    assert best_places(scores, 2).tolist()[1] == [1, 2]
    assert set(best_places(scores, 2).flatten().tolist()) <= {0, 1, 2, 3}
