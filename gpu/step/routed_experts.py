"""Experts that requests ask for: which rows of a step they are of, and how results carry them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorium.actors.messages import BYTE_EXPERTS, RoutedExperts, RowExperts
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.staging import Download


class RoutedRows(NamedTuple):
    """Consecutive rows of a step whose experts are told."""

    row: int
    """See `RowExperts`, as of `start`."""
    start: int
    first: int
    """Among all rows of the step."""
    length: int


class RoutedStep(NamedTuple):
    """The experts of a step, on their way to the host."""

    rows: list[RoutedRows]
    experts: int
    """Of a layer."""
    values: Download
    """i32[rows of all, layers, chosen]"""

    def results(self, counts: NDArray[np.uint8]) -> list[RowExperts]:
        """Waits for the step; what `StepResult.experts` has. counts: u1[sampled sequences], the
        tokens emitted: of a decode's rows, so many belong to tokens of the sequence."""
        (values,), out, at = self.values.wait(), [], 0
        values = values.astype(np.uint8 if self.experts <= BYTE_EXPERTS else "<u2")
        for row, start, _, length in self.rows:
            told = length if row < 0 else int(counts[row])
            if told:
                part = values[at:at + told]
                layers, chosen = part.shape[1:]
                out.append(RowExperts(row, start,
                                      RoutedExperts((told, layers, chosen), part.tobytes())))
            at += length
        return out


def routing_of(shape: ModelShape) -> tuple[int, int, int]:
    """What `Ready.routing` says of a model."""
    experts = shape.experts
    return (0, 0, 0) if experts is None else (shape.mixtures, experts.chosen, experts.number)


def routed_rows(step: InputBatch, routed: set[int]) -> list[RoutedRows]:
    """The rows of a step that belong to these slots."""
    found, at = [], 0
    for slot, start, count in step.extends.rows if step.extends else ():
        if slot in routed:
            found.append(RoutedRows(-1 - slot, start, at, count))
        at += count
    return found + [RoutedRows(step.ending + i, 0, at + i * step.q_len, step.q_len)
                    for i, slot in enumerate(step.decode.tolist()) if slot in routed]


def chosen_of(chosen: list[Tensor], rows: list[RoutedRows]) -> Tensor:
    """i32[rows of all, layers, chosen]. chosen: i64[T, chosen] of each layer."""
    index = torch.cat([torch.arange(own.first, own.first + own.length) for own in rows])
    index = index.to(chosen[0].device)
    return torch.stack([own.index_select(0, index) for own in chosen], 1).int()
