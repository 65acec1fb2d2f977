"""What is nobody's stays as it is, byte for byte, whatever is replayed: pages no sequence has, and
rows of slots no sequence is in. A graph is replayed with more rows than a step has, and reads
from tables where they write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actorium.actors.messages import StepPlan
from actorium.gpu.step.runner import ModelRunner


class Part(NamedTuple):
    """Rows of a tensor."""

    name: str
    whole: Tensor
    """u8[rows, bytes]"""
    rows: Tensor
    """i64[n]"""


class Untouched:
    """Of one runner, whose plans it sees."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._held = runner, dict[int, list[set[int]]]()
        self.more: Callable[[], Sequence[Collection[int]]] = lambda: [[]] * len(runner.pools)
        """Pages of each group that nobody has, beside those that the plans tell of."""
        launch, reset = runner.launch, runner.reset

        def launching(plan: StepPlan, *given: Any, **named: Any) -> Any:
            self._follow(plan)
            return launch(plan, *given, **named)

        def resetting() -> None:
            self._held.clear()
            reset()

        runner.launch, runner.reset = launching, resetting  # type: ignore[method-assign]

    def _follow(self, plan: StepPlan) -> None:
        groups = len(self._runner.pools)
        for slot in np.frombuffer(plan.release, np.int32).tolist():
            self._held.pop(slot, None)
        for own in plan.admit:
            named = np.frombuffer(own.pages, np.int32).reshape(groups, -1).tolist()
            self._held[own.slot] = [set(pages) for pages in named]
        for slot, _, *pages in np.frombuffer(plan.page_appends, np.int32).reshape(
                -1, 2 + groups).tolist():
            for held, page in zip(self._held[slot], pages, strict=True):
                held.add(page)

    def _parts(self) -> Iterator[Part]:
        runner = self._runner
        more, windows = self.more(), [group.window for group in runner.model.shape.groups]
        free = []
        for group, pool in enumerate(runner.pools):
            held = set[int]().union(*(own[group] for own in self._held.values()))
            free.append(torch.tensor(sorted((set(range(1, pool.pages)) - held)
                                            | set(more[group])), dtype=torch.int64))
        pools = [*zip(runner.pools, free, strict=True)]
        pools += [(own, free[windows.index(0)]) for own in runner.draft_pools]
        for pool, pages in pools:
            for number, layer in enumerate(pool.tensors):
                yield Part(f"a freed page of layer {number}", _bytes(layer, pool.pages), pages)
        t = runner.tables
        slots = torch.tensor([own for own in range(1, t.slots) if own not in self._held],
                             dtype=torch.int64)
        for name in ("last_token", "seq_len", "ended", "record", "eos"):
            yield Part(f"a released slot's {name}", _bytes(getattr(t, name), t.slots), slots)
        for table in t.pages:
            yield Part("a released slot's pages", _bytes(table, t.slots), slots)
        for name in ("tokens", "accepted"):
            yield Part(f"a released slot's drafts' {name}",
                       _bytes(getattr(t.drafts, name), t.slots), slots)
        if runner.states is not None:
            for layer_states in runner.states.layers:
                for name, own in layer_states._asdict().items():
                    live = torch.ones(len(own), dtype=torch.bool)
                    live[[slot - 1 for slot in self._held]] = False
                    yield Part(f"a released slot's {name}", _bytes(own, len(own)),
                               live.nonzero().flatten())

    def before(self) -> Callable[[], None]:
        """To be called before a replay; what it gives, behind it. Raises `AssertionError`."""
        parts = [(own, own.whole[own.rows]) for own in self._parts()]

        def check() -> None:
            for own, was in parts:
                now = own.whole[own.rows]
                if not torch.equal(now, was):
                    row = int(own.rows[(now != was).any(1)][0])
                    raise AssertionError(f"{own.name} was written: number {row}")

        return check


def _bytes(array: Any, rows: int) -> Tensor:
    """u8[rows, bytes] of a tensor, or of numpy's array: the same memory."""
    tensor = torch.as_tensor(array)
    if not tensor.numel():
        return torch.empty(rows, 0, dtype=torch.uint8)
    return tensor.view(rows, -1).view(torch.uint8)
