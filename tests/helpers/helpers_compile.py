"""Triton kernels compiled for Hopper (sm_90) where there is no device; nothing is launched.

What the interpreter accepts may still not compile. What a kernel takes when it does:
tests/kernels/test_ptxas.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers_benchmarks import BENCHMARKS

BEFORE = "from ptxas_device import ARCHS, Standin\nhopper = Standin().install()\n"
AFTER = """
for kernel in hopper.kernels:
    assert kernel.metadata.shared <= ARCHS[90].shared, kernel.metadata.name
    assert kernel.asm["cubin"]
    print(kernel.metadata.name)
"""


def alone(arguments: list[str], cache: Path, seconds: float) -> str:
    """What Python says, in a process whose triton does not interpret."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here, here.with_name("kernels"), BENCHMARKS)))
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True,
                          timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return done.stdout


def compiled(code: str, cache: Path) -> list[str]:
    """Run code after `hopper = Standin().install()`; the kernels it launched, by name."""
    return alone(["-c", f"{BEFORE}{code}\n{AFTER}"], cache, 200).splitlines()
