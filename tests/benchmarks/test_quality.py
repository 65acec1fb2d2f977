"""What `quality.py` counts, on distributions whose divergence is known."""

from __future__ import annotations

import math

import torch
from helpers_benchmarks import BENCHMARKS, benchmark


def test_divergence_and_equal_tokens_of_known_distributions() -> None:
    quality = benchmark("quality")
    base = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.75, 0.25], [0.1, 0.9]]).log()
    found = quality.Difference()
    found.add(base, other, quality.Text(prompt=[5, 6], answer=[7]))
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    last = 0.9 * math.log(9.0) + 0.1 * math.log(1 / 9.0)
    row = found.row()
    assert row["positions"] == 3 and row["kl_median"] == round(first, 6)
    assert math.isclose(row["kl_mean"], (first + last) / 3, abs_tol=1e-5)
    assert (row["same_token"], row["same_token_of_answers"]) == (0.3333, 1.0)


def test_there_are_200_different_prompts() -> None:
    prompts = (BENCHMARKS / "quality_prompts.txt").read_text().splitlines()
    assert len(prompts) == len(set(prompts)) == 200 and all(prompts)
