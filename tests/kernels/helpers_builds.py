"""The C library as other processors have it, which this one can run: built once, kept like any."""

from __future__ import annotations

import ctypes

import pytest

from actorium.kernels.cpu.native_library import library
from actorium.tools.as_processor import PROCESSORS, missing

EACH_BUILD = [pytest.param(name, marks=[pytest.mark.slow] * (name != "this"))
              for name in PROCESSORS]
"""A build takes most of a minute of a processor: `make test` has this processor's alone, `make
test-processor` after it another one's, `make battery` all."""


def built(name: str) -> ctypes.CDLL:
    """That of one of PROCESSORS; skips where it cannot be had."""
    if lacks := missing(name):
        pytest.skip(f"this processor has no {lacks}")
    found = library(None, PROCESSORS[name].flags)
    if found is None:
        pytest.skip("no C compiler, or torch with another OpenMP")
    return found
