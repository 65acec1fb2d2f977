"""Products of parameters of which `make test` runs a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def pairs(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Parameters of a test: every pair of a value of the one with one of the other, half of which,
    like the black fields of a chessboard, run in `make test` and all in the battery. So each value
    is met by every other one of the other list. Plain tuples stand for several parameters."""
    def parts(value: Any) -> tuple[Any, ...]:
        return value if type(value) is tuple else (value,)

    columns = list(second)
    return [pytest.param(*parts(one), *parts(other), marks=[pytest.mark.slow] * ((i + j) % 2))
            for i, one in enumerate(first) for j, other in enumerate(columns)]
