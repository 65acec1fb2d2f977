"""`make gpu-check` finds it where rows have other bits in batches than alone."""

from __future__ import annotations

import pytest
import torch
from helpers_benchmarks import benchmark
from torch import Tensor

from actorium.kernels.linear import Linear

exact = benchmark("gpucheck.exact")


class SumsFollowTheBatch(Linear):
    """As a split of the columns by the number of rows would give."""

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().__call__(x) * (1 + 2**-20 * (len(x) > 2))


def test_rows_that_depend_on_their_batch_fail() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    exact._rows_are_alone(SumsFollowTheBatch(weight), x[:1], "bf16")
    with pytest.raises(AssertionError, match="numbers have other bits"):
        exact._rows_are_alone(SumsFollowTheBatch(weight), x, "bf16")
