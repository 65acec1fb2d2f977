"""The frame of a layer with a recurrent state instead of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actorium.gpu.models.forward_context import ForwardContext, StatePlan
from actorium.gpu.passes.canonical_ops import linear, recur
from actorium.gpu.step.states import LayerStates
from actorium.kernels.inputs import InputForm
from actorium.kernels.linear import Linear
from actorium.kernels.ops import Ops
from actorium.kernels.reference.window import run_window


@dataclass(slots=True)
class RecurrentLayer(ABC):
    """Two projections; between them a kind of layer says what its state does."""

    place: int
    """Its place among the recurrent layers."""
    project: Linear
    o: Linear
    ops: Ops

    @property
    @abstractmethod
    def inner(self) -> int:
        """See `Mixer`."""

    @property
    def form(self) -> InputForm:
        """See `Mixer`."""
        return self.project.form

    def forward(self, x: Tensor, step: ForwardContext) -> Tensor:
        """See `Mixer`."""
        return linear(recur(linear(x, self.project), self, step), self.o)

    def between(self, p: Tensor, step: ForwardContext, rows: Tensor | None = None,
                out: Tensor | None = None) -> Tensor:
        """See `Mixer`."""
        plan, states = step.states, step.recurrent[self.place]
        assert plan is not None
        parts, n = [], plan.extend_tokens
        if plan.extends:
            parts.append(self.extend(p[:n], states, plan))
        if len(plan.decodes):
            parts.append(self.step(p[n:], states, plan.decodes) if plan.accepted is None
                         else self.window(p[n:], states, plan.decodes, plan.accepted))
        if out is not None:
            return torch.cat(parts, out=out)
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y if rows is None else y.index_select(0, rows)

    @abstractmethod
    def extend(self, p: Tensor, states: LayerStates, plan: StatePlan) -> Tensor:
        """Many tokens a sequence; states are kept where the plan says. p: [T, projected]; returns
        [T, inner], what the second projection takes."""

    def step(self, p: Tensor, states: LayerStates, rows: Tensor) -> Tensor:
        """One token a sequence. p: [B, projected]; rows: i64[B], see `StateRows.decodes` -> [B,
        inner]."""
        return self.gate(self.advance(self.inputs(p), states.committed, rows), p)

    def window(self, p: Tensor, states: LayerStates, rows: Tensor, accepted: Tensor) -> Tensor:
        """The last token and drafts of each sequence, once the drafts accepted of its last window
        are taken in (see `LayerStates`). p: [B * q, projected]; rows, accepted: i64[B].
        Returns [B * q, inner]."""
        x = self.inputs(p).view(len(rows), len(p) // len(rows), -1)
        y = run_window(self.advance, x, states.committed, states.pending, rows, accepted)
        return self.gate(y, p)

    @abstractmethod
    def inputs(self, p: Tensor) -> Tensor:
        """[T, `StateShape.inputs`]: all that a token brings to its state. p: [T, projected]."""

    @abstractmethod
    def advance(self, x: Tensor, pools: Sequence[Tensor], rows: Tensor) -> Tensor:
        """One more token a row. x: [B, `StateShape.inputs`]; pools: `LayerStates.committed`, or
        tensors like these, in place; rows: i64[B], see `StateRows.decodes` -> [B, ...], what `gate`
        takes."""

    @abstractmethod
    def gate(self, y: Tensor, p: Tensor) -> Tensor:
        """[T, inner]: normed and gated. y: [T, ...]; p: [T, projected]."""
