"""What torch allocates while something runs, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def most_held(run: Callable[[], object]) -> int:
    """Bytes that were held at once, at most, beyond those of before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as seen:
        run()
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
