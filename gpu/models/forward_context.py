"""What the layers need of a step, made once and used by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from actorium.gpu.attention.attention_plan import AttentionPlan
from actorium.gpu.step.batch import StateRows
from actorium.gpu.step.states import LayerStates
from actorium.kernels.cpu.delta_native import Runs, plan_runs
from actorium.kernels.ragged import Ragged, plan_ragged


class GroupContext(NamedTuple):
    """What attention layers of one group need."""

    kv_index: Tensor
    """i64[T]: where the step's keys and values go."""
    pages: list[Tensor]
    """Of each layer of the group."""
    plan: AttentionPlan
    scales: Sequence[Tensor] = ()
    """Of each layer's pages, where they have some: see `KVPagePool.scales`."""

    def layer(self, place: int, own: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The pages of the group's layer at this place, and their scales, see `kv.write_kv`: those
        beside the pages, or the layer's own, which its checkpoint has."""
        return self.pages[place], self.scales[place] if self.scales else own


@dataclass(slots=True)
class ForwardContext:
    """A step as the layers see it."""

    ropes: list[Tensor]
    """[T, 2, 1, head_dim] each."""
    groups: list[GroupContext]
    states: StatePlan | None
    """None where no layer is recurrent."""
    recurrent: list[LayerStates]
    """Of each recurrent layer."""


class StatePlan:
    """What recurrent layers need of a step, made once and used by every layer."""

    def __init__(self, rows: StateRows, width: int, device: torch.device) -> None:
        """width: the convolution's."""
        self.extends, self.decodes = rows.extends, rows.decodes
        self.q_len, self.accepted = rows.q_len, rows.accepted
        self.extend_tokens = sum(run.length for run in rows.extends)
        self._width, self._device = width, device

    @cached_property
    def ragged(self) -> Ragged:
        """The extends in chunks."""
        return plan_ragged(self.extends, self._width, self._device)

    @cached_property
    def runs(self) -> Runs:
        """The extends for the C kernel."""
        return plan_runs(self.extends)
