"""How many steps a worker has run, by how it ran them, and of each way by size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from actorium.actors.runtime.step_gauges import STEP_MODES, step_key


class StepCounts(Mapping[str, int]):
    """Counters by name: each of `STEP_MODES`, and each `step_key`. One thread counts; another may
    read meanwhile."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(STEP_MODES, 0)

    def add(self, mode: str, size: int) -> None:
        """One step more. size: sequences that a graph or a program of decodes is for; tokens that
        segments are for; of an eager step its tokens."""
        if mode == "eager":
            size = 1 << (size - 1).bit_length()
        key = step_key(mode, size)
        self._counts[mode] += 1
        self._counts[key] = self._counts.get(key, 0) + 1

    def clear(self) -> None:
        """Back to 0."""
        self._counts = dict.fromkeys(STEP_MODES, 0)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._counts))

    def __len__(self) -> int:
        return len(self._counts)
