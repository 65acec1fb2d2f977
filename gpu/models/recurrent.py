"""The frame of a layer with a recurrent state instead of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.models.plan import StatePlan, Step
from actorium.gpu.states import LayerStates
from actorium.kernels.linear import Linear


@dataclass(slots=True)
class RecurrentLayer(ABC):
    """Two projections; between them a kind of layer says what its state does."""

    place: int
    """Its place among the recurrent layers."""
    project: Linear
    out: Linear

    def __call__(self, x: Tensor, hidden: Tensor, step: Step, rows: Tensor | None) -> Tensor:
        """hidden + the layer's output for x, both [T, hidden]; with `rows`, those rows of it."""
        plan, states = step.states, step.recurrent[self.place]
        assert plan is not None
        p, n = self.project(x), plan.extend_tokens
        parts = []
        if plan.extends:
            parts.append(self.extend(p[:n], states, plan))
        if len(plan.decodes):
            parts.append(self.step(p[n:], states, plan.decodes))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        if rows is not None:
            y, hidden = y.index_select(0, rows), hidden.index_select(0, rows)
        return self.out.add(y, hidden)

    @abstractmethod
    def extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        """Many tokens a sequence; states are kept where the plan says. p: [T, projected]; returns
        [T, inner], what the second projection takes."""

    @abstractmethod
    def step(self, p: Tensor, states: LayerStates, rows: Tensor) -> Tensor:
        """One token a sequence. p: [B, projected]; rows: i64[B] -> [B, inner]."""
