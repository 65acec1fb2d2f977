"""Workers with faults of the kind that `actorium verify` is for: right alone, wrong in company,
with drafts, behind a cached prefix or in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def _with(ctx: Any, owner: type, name: str, wrapped: Callable[[Any], Any]) -> Any:
    from actorium.gpu.worker.core import build

    setattr(owner, name, wrapped(getattr(owner, name)))
    return build(ctx)


def sharing_seeds(ctx: Any) -> Any:
    """Each row is sampled with the seed of the first."""
    from actorium.gpu.step.tables import UniformCache

    def wrapped(usual: Any) -> Any:
        def at(self: Any, slots: Any, low: Any, high: Any, positions: Any) -> Any:
            first = np.zeros(len(low), np.int64)
            return usual(self, slots, low[first], high[first], positions)
        return at

    return _with(ctx, UniformCache, "at", wrapped)


def committing_too_much(ctx: Any) -> Any:
    """Of each window one draft more than was accepted is put into the recurrent states."""
    from actorium.gpu.step.states import StatePool

    def wrapped(usual: Any) -> Any:
        def rows(self: Any, plan: Any, extends: Any, decodes: Any, q_len: int = 1,
                 accepted: Any = None) -> Any:
            if accepted is not None:
                accepted = (accepted + 1).clamp(max=self.drafts)
            return usual(self, plan, extends, decodes, q_len, accepted)
        return rows

    return _with(ctx, StatePool, "rows", wrapped)


def forgetting_checkpoints(ctx: Any) -> Any:
    """A sequence behind a cached prefix begins with half of the state that was kept there."""
    from actorium.gpu.step.states import StatePool

    def wrapped(usual: Any) -> Any:
        def admit(self: Any, admits: Any) -> None:
            usual(self, admits)
            for a in admits:
                if a.checkpoint:
                    for layer in self.layers:
                        layer.state[a.slot - 1] *= 0.5
        return admit

    return _with(ctx, StatePool, "admit", wrapped)
