"""Sampling against transformers' processors: the same kept sets, the same distributions."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actorium.kernels.cpu import sampling_cpu
from actorium.kernels.reference import sampling
from actorium.kernels.reference.logprobs import logprobs
from actorium.kernels.reference.philox import uniform

VOCAB = 300
INF = float("inf")


def _column(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _warp(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
          min_p: float = 0.0) -> Tensor:
    """f32[R, V] through transformers' warpers, in the order of `generate`."""
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    steps: list[Any] = []
    if temperature != 1.0:
        steps.append(TemperatureLogitsWarper(temperature))
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    if min_p:
        steps.append(MinPLogitsWarper(min_p))
    for step in steps:
        logits = step(ids, logits)
    return logits


COMBINATIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 7}, {"top_k": 299}, {"top_k": 5000},
    {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.97}, {"min_p": 0.02}, {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.6, "top_p": 0.95, "min_p": 0.01}, {"top_k": 3, "top_p": 0.3},
]


def _rows(n: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _ours(logits: Tensor, options: list[dict[str, Any]]) -> Tensor:
    return sampling.truncate(
        logits.clone(), _column([o.get("temperature", 1.0) for o in options]),
        _column([o.get("top_k", 0) for o in options], torch.long),
        _column([o.get("top_p", 1.0) for o in options]),
        _column([o.get("min_p", 0.0) for o in options]))


def _least(logits: Tensor, options: list[dict[str, Any]]) -> np.ndarray:
    scaled = logits.numpy() / np.array([o.get("temperature", 1.0) for o in options],
                                       np.float32)[:, None]
    least = sampling_cpu.threshold(
        scaled, np.array([o.get("top_k", 0) for o in options], np.int32),
        np.array([o.get("top_p", 1.0) for o in options], np.float32),
        np.array([o.get("min_p", 0.0) for o in options], np.float32))
    return scaled >= least[:, None]


def test_kept_sets_equal_transformers() -> None:
    """All combinations in one batch, each row with its own parameters."""
    logits = _rows(len(COMBINATIONS) * 8)
    options = COMBINATIONS * 8
    want = torch.cat([_warp(row[None], **o) for row, o in zip(logits, options, strict=True)])
    got = _ours(logits, options)
    assert torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got, want)
    assert np.array_equal(_least(logits, options), ~want.isinf().numpy())


def test_large_vocabulary_needs_more_than_the_first_guess() -> None:
    options = [{"top_p": 0.9}, {"top_p": 0.2}, {"min_p": 1e-3}, {"top_k": 1000, "top_p": 0.99},
               {"temperature": 2.0, "top_p": 0.999}]
    logits = _rows(len(options), 5, 20_000)
    want = torch.cat([_warp(row[None], **o) for row, o in zip(logits, options, strict=True)])
    kept = ~want.isinf()
    assert int(kept.sum(1).max()) > 4 * sampling_cpu.GUESS
    # The cumulative sums round differently: a token right at the boundary may differ.
    assert int((_least(logits, options) != kept.numpy()).sum()) <= len(options)
    assert int((_ours(logits, options).isinf() == kept).sum()) <= len(options)


def test_ties_at_the_boundary_stay_together() -> None:
    logits = torch.full((2, 600), 1.0)
    logits[:, 17] = 2.0
    options = [{"top_k": 3}, {"top_p": 0.5}]
    assert _least(logits, options).sum(1).tolist() == [600, 600]
    assert (~_ours(logits, options).isinf()).sum(1).tolist() == [600, 600]


BY = [sampling_cpu.sample, sampling_cpu.sample_by_numpy]
"""In C, where there is a compiler, and without it."""
by = pytest.mark.parametrize("by", BY, ids=["native", "numpy"])


def _cpu(by: Any, logits: Tensor, o: dict[str, Any], u: np.ndarray) -> np.ndarray:
    n = len(u)
    return by(
        logits.expand(n, -1).numpy().copy(), np.full(n, o.get("temperature", 1.0), np.float32),
        np.full(n, o.get("top_k", 0), np.int32), np.full(n, o.get("top_p", 1.0), np.float32),
        np.full(n, o.get("min_p", 0.0), np.float32), u)


@by
@pytest.mark.parametrize("options", COMBINATIONS)
def test_draws_follow_transformers_distribution(options: dict[str, Any], by: Any) -> None:
    """Chi-square of 20,000 draws with fixed seeds; and both implementations draw alike."""
    logits = _rows(1, 11, 40) * 0.7
    options = {**options, "top_k": min(options.get("top_k", 0), 40)}
    n = 20_000
    seeds = np.arange(n)
    u = uniform(seeds, seeds * 0, seeds * 0 + 77)
    tokens = _cpu(by, logits, options, u)
    shaped = _ours(logits.expand(n, -1), [options] * n)
    assert (sampling.draw(shaped, torch.from_numpy(u)).numpy() != tokens).sum() <= 2
    want = _warp(logits.clone(), **options).softmax(-1)[0].double().numpy() * n
    counts = np.bincount(tokens, minlength=40)
    assert counts[want == 0].sum() == 0
    big = want >= 5
    seen, expected = list(counts[big]), list(want[big])
    if want[~big].sum() > 0:
        seen.append(counts[~big].sum())
        expected.append(want[~big].sum())
    if len(seen) == 1:
        assert seen == [n]
        return
    chi2 = float(((np.array(seen) - expected) ** 2 / expected).sum())
    freedom = len(seen) - 1
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5 + 6


@by
def test_ends_of_the_unit_interval_draw_possible_tokens(by: Any) -> None:
    logits = torch.full((2, 700), -INF)
    logits[:, 100:300] = 0.0
    u = np.array([0.0, 1 - 2.0**-53])
    one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    for k in (0, 250):
        got = by(logits.numpy(), one, np.full(2, k, np.int32), one, zero, u)
        assert got.tolist() == [100, 299]
    assert sampling.draw(logits, torch.from_numpy(u)).tolist() == [100, 299]


@by
@pytest.mark.parametrize("k", [0, 5])
def test_a_row_of_nan_disturbs_no_other(k: int, by: Any) -> None:
    logits = _rows(3).numpy()
    one, zero = np.ones(3, np.float32), np.zeros(3, np.float32)
    top_k, u = np.full(3, k, np.int32), np.array([0.3, 0.6, 0.9])
    want = by(logits, one, top_k, one, zero, u)
    for broken in range(3):
        hurt = logits.copy()
        hurt[broken] = np.nan
        got = by(hurt, one, top_k, one, zero, u)
        assert ((got == want) | (np.arange(3) == broken)).all()
        assert 0 <= got[broken] < VOCAB


@pytest.mark.parametrize("spread", [0.01, 1.0, 9.0, 40.0])
@pytest.mark.parametrize("vocab", [1, 17, 300, 5000])
def test_c_and_numpy_draw_alike_however_wide_rows_are(vocab: int, spread: float) -> None:
    """Thresholds near the top and far below it, ties, tokens that a mask forbids, few tokens."""
    rng, rows = np.random.default_rng(vocab), 40
    logits = (rng.standard_normal((rows, vocab)) * spread).astype(np.float32)
    logits[::4] = np.round(logits[::4])
    logits[1::4][rng.random((10, vocab)) < 0.7] = -np.inf
    logits[:, rng.integers(vocab)] = 3 * spread
    choice = partial(rng.choice, size=rows)
    given = (logits, choice([0.3, 1.0, 1.7]).astype(np.float32),
             choice([0, 1, 5, 40, vocab]).astype(np.int32),
             choice([0.1, 0.9, 0.999, 1.0]).astype(np.float32),
             choice([0.0, 0.0, 0.05]).astype(np.float32))
    different = 0
    for _ in range(20):
        u = rng.random(rows)
        different += int((sampling_cpu.sample(*given, u)
                          != sampling_cpu.sample_by_numpy(*given, u)).sum())
    assert different <= 4, "of 800: what rounding moves across a boundary"


def test_the_first_of_the_likeliest_is_taken() -> None:
    rng = np.random.default_rng(5)
    for vocab in (1, 31, 700):
        logits = np.round(rng.standard_normal((50, vocab)) * 2).astype(np.float32)
        logits[1::3][:, ::2] = -np.inf
        assert (sampling_cpu.likeliest(logits) == logits.argmax(1)).all()
        assert (sampling_cpu.likeliest(logits[:, ::2]) == logits[:, ::2].argmax(1)).all()
    lost = np.full((2, 40), np.nan, np.float32)
    lost[1, 7] = 1
    assert sampling_cpu.likeliest(lost)[1] == 7 and 0 <= sampling_cpu.likeliest(lost)[0] < 40


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, rng = _rows(4), np.random.default_rng(1)
    ids = torch.from_numpy(rng.integers(0, VOCAB, (4, 20)))
    counts = torch.zeros(4, VOCAB, dtype=torch.int32)
    counts.scatter_(1, ids[:, :10], sampling.PROMPT_BIT)
    for row, tail in zip(counts, ids[:, 10:], strict=True):
        row += torch.bincount(tail, minlength=VOCAB).int()
    zero = torch.zeros(4)
    got = logits.clone()
    sampling.penalise(got, counts, torch.full((4,), 1.3), zero, zero)
    torch.testing.assert_close(got, RepetitionPenaltyLogitsProcessor(1.3)(ids, logits))


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    logits = torch.zeros(1, 5)
    counts = torch.tensor([[0, 1, 3, sampling.PROMPT_BIT, sampling.PROMPT_BIT + 2]]).int()
    sampling.penalise(logits, counts, _column([1.0]), _column([0.5]), _column([0.25]))
    torch.testing.assert_close(logits, _column([[0, -0.75, -1.25, 0, -1.0]]))


@pytest.mark.parametrize("padding", [0, 3])
def test_numpy_penalties_equal_torch(padding: int) -> None:
    """Rows of several ranks lie apart, by what they are padded with."""
    rng = np.random.default_rng(2)
    logits = torch.nn.functional.pad(_rows(3), (0, padding))[:, :VOCAB]
    counts = rng.integers(0, 4, (3, VOCAB)).astype(np.int32) * (rng.random((3, VOCAB)) < 0.3)
    counts = (counts | (rng.random((3, VOCAB)) < 0.2) * sampling.PROMPT_BIT).astype(np.int32)
    cut = (_column([1.0, 1.7, 0.6]), _column([0.0, 0.5, -1.0]), _column([0.3, 0.0, 2.0]))
    want = logits.clone()
    sampling.penalise(want, torch.from_numpy(counts), *cut)
    sampling_cpu.penalise(logits.numpy(), counts, *(c.numpy() for c in cut))
    torch.testing.assert_close(logits, want)


def test_hold_back_and_bias() -> None:
    logits = torch.zeros(2, 6)
    sampling.hold_back(logits, torch.tensor([[0, 3], [5, -1]]), torch.tensor([True, False]))
    assert logits.tolist() == [[-INF, 0, 0, -INF, 0, 0], [0] * 6]
    sampling.add_bias(logits, torch.tensor([[3, 1], [4, 0]]), _column([[9.0, 2.0], [-1.5, 0.0]]))
    assert logits.tolist() == [[-INF, 2, 0, -INF, 0, 0], [0, 0, 0, 0, -1.5, 0]]


def test_logprobs_and_ranks() -> None:
    logits = _rows(6)
    tokens = logits.argsort(descending=True).gather(1, torch.tensor([[0], [1], [5], [299], [7],
                                                                     [2]]))[:, 0]
    got = logprobs(logits, tokens, 4)
    want = logits.log_softmax(-1)
    torch.testing.assert_close(got.chosen, want.gather(1, tokens[:, None])[:, 0])
    assert got.ranks.tolist() == [1, 2, 6, 300, 8, 3]
    torch.testing.assert_close(got.top, want.topk(4).values)
    assert torch.equal(got.top_ids.long(), want.topk(4).indices)
    assert logprobs(logits, tokens, 0).top.shape == (6, 0)
    named = torch.tensor([[5, 0, -1, -1], [-1] * 4, [299, 299, 1, 7]] * 2)
    mixed = logprobs(logits, tokens, 4, named)
    ids = torch.where(named < 0, got.top_ids.long(), named)
    assert torch.equal(mixed.top_ids.long(), ids)
    torch.testing.assert_close(mixed.top, want.gather(1, ids))
    assert torch.equal(mixed.ranks, got.ranks) and torch.equal(mixed.chosen, got.chosen)


@by
def test_masked_rows_take_no_longer_than_others(by: Any) -> None:
    """Most of their logits are equal, which some ways of finding the largest do not like."""
    rng = np.random.default_rng(0)
    free = rng.standard_normal((16, 8192)).astype(np.float32) * 3
    masked = free.copy()
    masked[:, 40:] = -np.inf
    ones = np.ones(16, np.float32)

    def seconds(logits: Any) -> float:
        took = []
        for _ in range(7):
            begun = time.thread_time()
            got = by(logits, ones, np.full(16, 20, np.int32), 0.9 * ones, 0 * ones, rng.random(16))
            took.append(time.thread_time() - begun)
            assert logits is free or (got < 40).all()
        return min(took)

    assert seconds(masked) < 2 * seconds(free)
