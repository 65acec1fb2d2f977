"""Choosing the tokens that queries attend to: against scores of every token at once, in blocks of
any size, over pages in any order."""

from __future__ import annotations

import pytest
import torch
from helpers_builds import EACH_BUILD, built

from actorium.kernels.cpu.native_ops import NativeOps
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


# --- Scores that are the same among any others ----------------------------------------------------

@pytest.fixture(params=EACH_BUILD)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(built(request.param), torch.get_num_threads())


@pytest.mark.parametrize(("heads", "dim", "size"), [(5, 12, 4), (16, 128, 16), (9, 64, 1)])
def test_a_score_has_the_same_bits_among_any_others(ops: NativeOps, heads: int, dim: int,
                                                    size: int) -> None:
    """Alone, in another batch, in rows of a chunk and behind another one; and it is the
    reference's, but for how sums are rounded."""
    lens = torch.tensor([77, 1, 130, 40], dtype=torch.int32)
    width, rows, span = -(-130 // size), 7, 130
    pages = (torch.randperm(4 * width) + 1).int().view(4, width)
    keys = torch.full(((4 * width + 1) * size, dim), torch.nan).bfloat16()
    for own, length in zip(pages, lens.tolist(), strict=True):
        keys[tokens_of(own, size, length)] = torch.randn((length, dim)).bfloat16()
    q = torch.randn((4, rows, heads, dim)).bfloat16()
    weights = torch.randn((4, rows, heads))
    scores = ops.token_scores(q, weights, keys, pages, lens, size, span)
    wanted = token_choice.token_scores(q, weights, keys.nan_to_num(), pages, lens, size, span)
    for b, length in enumerate(lens.tolist()):
        torch.testing.assert_close(scores[b, :, :length], wanted[b, :, :length], rtol=1e-4,
                                   atol=1e-3 * dim**0.5)
        assert bool((scores[b, :, length:] == -torch.inf).all())
        for at in range(0, rows, 3):  # a decode of this row, of a sequence that may be shorter
            for seen in {length, max(1, length - 20)}:
                alone = ops.token_scores(
                    q[b:b + 1, at:at + 1], weights[b:b + 1, at:at + 1], keys, pages[b:b + 1],
                    torch.tensor([seen], dtype=torch.int32), size, seen)
                assert torch.equal(alone[0, 0], scores[b, at, :seen])
    fewer = ops.token_scores(q[1:, 2:5], weights[1:, 2:5], keys, pages[1:], lens[1:], size, span)
    assert torch.equal(fewer, scores[1:, 2:5])
    threads = NativeOps(ops.lib, 1)
    assert torch.equal(threads.token_scores(q, weights, keys, pages, lens, size, span), scores)
