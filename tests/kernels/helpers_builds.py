"""The C library as other processors have it, which this one can run: built once, kept like any."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from actorium.kernels.cpu.native_library import SLOW_PAIRS, THIS_PROCESSOR, library

BUILDS = {"this": THIS_PROCESSOR, "avx2": ("-march=haswell",), "avx_vnni": ("-march=alderlake",),
          "avx512": ("-march=skylake-avx512",), "slow_pairs": (*THIS_PROCESSOR, SLOW_PAIRS),
          "pairs": ("-march=icelake-server", "-mavx512bf16")}
NEEDED = {"this": "", "avx2": "avx2", "avx_vnni": "avx_vnni", "avx512": "avx512vl",
          "slow_pairs": "avx512_bf16", "pairs": "avx512_bf16"}
"""Flags that a processor must have to run it."""
EACH_BUILD = [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("this", "avx2")))
              for name in BUILDS]
"""`make test` builds one library more; `make battery` all."""


def built(name: str) -> ctypes.CDLL:
    """One of BUILDS; skips where it cannot be had."""
    if NEEDED[name] and NEEDED[name] not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"no {name} here")
    found = library(None, BUILDS[name])
    if found is None:
        pytest.skip("no C compiler, or torch with another OpenMP")
    return found
