"""How many steps a worker has run, by how it ran them, and of each way by size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from actorium.actors.runtime.beat_gauges import STEP_MODES, eager_key, step_key


class StepCounts(Mapping[str, int]):
    """Counters by name: each of `STEP_MODES`, each `step_key` and `eager_key`. One thread counts;
    another may read meanwhile."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(STEP_MODES, 0)

    def add(self, mode: str, size: int) -> None:
        """One step more. size: sequences that a graph or a program of decodes is for; tokens that
        segments are for."""
        self._add(mode, step_key(mode, size))

    def add_eager(self, tokens: int, why: str) -> None:
        """One eager step more; why: of `EAGER_REASONS`."""
        self._add("eager", step_key("eager", 1 << (tokens - 1).bit_length()), eager_key(why))

    def _add(self, *names: str) -> None:
        for name in names:
            self._counts[name] = self._counts.get(name, 0) + 1

    def clear(self) -> None:
        """Back to 0."""
        self._counts = dict.fromkeys(STEP_MODES, 0)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._counts))

    def __len__(self) -> int:
        return len(self._counts)
