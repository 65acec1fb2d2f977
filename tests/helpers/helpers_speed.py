"""How fast this machine is now, for tests that bound what a computation may take.

A bound in seconds says as much of the machine as of what is tested. It is written as measured on
the machine where the tests were made, and multiplied by `slowness()` where it is held.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from time import thread_time

LOOPS = 20_000
HERE = 0.0010
"""Processor seconds of the loop where the bounds were measured."""


def slowness() -> float:
    """How many times longer computations take on this machine, as busy as it is, than where bounds
    were measured; at least 1. A few milliseconds."""
    best = 1e9
    for _ in range(5):
        began = thread_time()
        _work()
        best = min(best, thread_time() - began)
    return max(best / HERE, 1.0)


def seconds_of_process(code: str) -> float:
    """Of a processor, that a fresh interpreter takes for some code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _work() -> int:
    """Calls, dictionaries and numbers, as in the code that is bounded."""
    seen: dict[int, int] = {}
    for number in range(LOOPS):
        seen[number & 255] = seen.get(number & 127, 0) + number
    return len(seen)
