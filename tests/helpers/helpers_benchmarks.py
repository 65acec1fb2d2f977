"""The scripts of benchmarks/, as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> Any:
    """The module of benchmarks/NAME.py, which finds its neighbours as when run as a script."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
