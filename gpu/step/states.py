"""The state cache of recurrent layers, which have a state per sequence instead of pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actorium.actors.messages import Admit, StepPlan
from actorium.gpu.families.recurrent_shapes import StateShape
from actorium.gpu.step.batch import ExtendRow, StateRows
from actorium.gpu.step.pools import stacked, zeros
from actorium.gpu.step.staging import on_device
from actorium.kernels.ragged import ExtendRun


class LayerStates(NamedTuple):
    """One layer's states; a row is a sequence's or a checkpoint's.

    With speculation a commit is delayed: state and columns are those after every token known to be
    certain when the sequence's last step was made. That step's drafts wait in `pending`, as inputs;
    the next step applies the accepted ones. After a step without drafts nothing waits.
    """

    state: Tensor
    """[rows, *StateShape.state]"""
    columns: Tensor
    """[rows, W - 1, channels]: last inputs of the convolution, the newest last."""
    pending: Tensor
    """[sequences, K, inputs]: what the layer's first projection gave for the last step's drafts, K
    at most; 0 where nothing is ever drafted. Rows that no draft has filled hold rubbish."""

    @property
    def committed(self) -> tuple[Tensor, Tensor]:
        """All that there is of a sequence without drafts, and of a checkpoint."""
        return self.state, self.columns


def row_bytes(shape: StateShape, layers: int, state_dtype: torch.dtype,
              dtype: torch.dtype) -> int:
    """Bytes one row takes over so many layers; dtype: the model's, of the columns."""
    return layers * (math.prod(shape.state) * state_dtype.itemsize
                     + math.prod(shape.columns) * dtype.itemsize)


class StatePool:
    """Rows for the live states, one for each slot but slot 0 (row = slot - 1; what fills up a batch
    has no state, and no row), then one for each checkpoint, numbered from 1."""

    def __init__(
        self, shape: StateShape, layers: int, slots: int, checkpoints: int,
        state_dtype: torch.dtype, dtype: torch.dtype, device: torch.device, drafts: int = 0,
    ) -> None:
        """slots: of the resident tables, slot 0 included; drafts: most that a sequence has in a
        step (K)."""
        self.live, self.checkpoints, self.drafts = slots - 1, checkpoints, drafts
        rows, waiting = self.live + checkpoints, (self.live, drafts, shape.inputs)
        self.committed = [stacked(layers, (rows, *shape.state), state_dtype, device),
                          stacked(layers, (rows, *shape.columns), dtype, device)]
        """`LayerStates.committed` of all layers: [layers, rows, ...] each."""
        self.layers = [LayerStates(state, columns, zeros(waiting, dtype, device) if drafts
                                   else torch.empty(waiting, dtype=dtype, device=device))
                       for state, columns in zip(*self.committed, strict=True)]

    @property
    def bytes(self) -> int:
        """Bytes of all layers."""
        return sum(part.numel() * part.element_size() for layer in self.layers for part in layer)

    def clear(self) -> None:
        """Zeros, as they were made."""
        for layer in self.layers:
            for part in layer:
                part.zero_()

    def admit(self, admits: Sequence[Admit]) -> None:
        """Live states begin at zero, or as copies of their checkpoints; counts of accepted drafts
        must begin at 0. Raises `ValueError`."""
        fresh, copies = [], []
        for a in admits:
            if (a.checkpoint > 0) != (a.cached_len > 0):
                raise ValueError(f"admit: slot {a.slot}: {a.cached_len} tokens are cached and the "
                                 f"checkpoint is {a.checkpoint}: both or neither")
            if a.checkpoint:
                copies.append((a.slot - 1, self._row(a.slot, a.checkpoint)))
            else:
                fresh.append(a.slot - 1)
        device = self.layers[0].state.device
        if fresh:
            rows = on_device(fresh, device)
            for layer in self.layers:
                for part in layer.committed:
                    part.index_fill_(0, rows, 0)
        if copies:
            to, source = on_device(copies, device).unbind(1)
            for layer in self.layers:
                for part in layer.committed:
                    part.index_copy_(0, to, part.index_select(0, source))

    def rows(self, plan: StepPlan, extends: Sequence[ExtendRow], decodes: Tensor,
             q_len: int = 1, accepted: Tensor | None = None) -> StateRows:
        """Rows of a step. decodes, q_len and accepted: see `StateRows`. Raises `ValueError` on
        checkpoints that do not fit its extends, and on windows larger than there is room for."""
        if q_len > self.drafts + 1:
            raise ValueError(f"drafts: {q_len - 1} are more than the {self.drafts} that the states "
                             "have room for")
        if self.drafts and accepted is None and len(decodes):
            raise ValueError("decode: the drafts that wait in the states were accepted or not, and "
                             "the step does not tell")
        counts = {row.slot: row.count for row in extends}
        saves: dict[int, list[tuple[int, int]]] = {slot: [] for slot in counts}
        for slot, checkpoint, tokens in np.frombuffer(
                plan.checkpoints, np.int32).reshape(-1, 3).tolist():
            if not 0 < tokens <= counts.get(slot, 0):
                raise ValueError(f"checkpoints: slot {slot} extends by {counts.get(slot, 0)} "
                                 f"tokens, not to {tokens}")
            saves[slot].append((tokens, self._row(slot, checkpoint)))
        return StateRows([ExtendRun(row.slot - 1, row.count,
                                    tuple(saves[row.slot])) for row in extends],
                         decodes, q_len, accepted)

    def _row(self, slot: int, checkpoint: int) -> int:
        if not 0 < checkpoint <= self.checkpoints:
            raise ValueError(f"slot {slot}: checkpoint {checkpoint} is not in "
                             f"1..{self.checkpoints}")
        return self.live + checkpoint - 1


class RecurrentBatch(NamedTuple):
    """The inputs of recurrent layers in a step."""

    pool: StatePool
    rows: StateRows
