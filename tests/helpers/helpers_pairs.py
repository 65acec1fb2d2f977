"""Products of parameters of which `make test` runs a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def pairs(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Parameters of a test: every pair of a value of the one with one of the other. As many run in
    `make test` as the longer list has values, so that each value of both is met, and all in the
    battery. Plain tuples stand for several parameters."""
    def parts(value: Any) -> tuple[Any, ...]:
        return value if type(value) is tuple else (value,)

    rows, columns = list(first), list(second)
    apart = min(len(rows), len(columns))
    return [pytest.param(*parts(one), *parts(other), marks=[pytest.mark.slow] * ((i + j) % apart))
            for i, one in enumerate(rows) for j, other in enumerate(columns)]
