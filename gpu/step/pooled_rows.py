"""Rows of prompts that are pooled: those of a step, and what is kept from chunk to chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from actorium.actors.messages import Pooled
from actorium.actors.models.pooling_shape import PoolingKind
from actorium.actors.params import ResolvedPooling
from actorium.gpu.models.pooler import Pooler
from actorium.gpu.step.staging import Download

Shapes: TypeAlias = list[tuple[int, list[int]]]
"""Slot and shape of results, one after the other."""


@dataclass(slots=True)
class PooledPrompt:
    """A sequence that is pooled."""

    pooling: ResolvedPooling
    length: int
    """Tokens of its prompt."""
    parts: list[Tensor] = field(default_factory=list)
    """Of its chunks so far: sums of rows, the first row, or what is wanted of each token."""


class PooledRows(NamedTuple):
    """Rows of a step that belong to one prompt, the next ones of those that are wanted."""

    slot: int
    start: int
    """Tokens of the prompt before the chunk."""
    rows: int
    ends: bool
    """The chunk ends the prompt."""


class PooledStep(NamedTuple):
    """What a step has pooled, on its way to the host."""

    shapes: Shapes
    """Of its results."""
    values: Download
    """All of them, f32, flat."""

    def results(self) -> list[tuple[int, Pooled]]:
        """Waits for the step; what `StepResult.pooled` has."""
        (flat,), at, out = self.values.wait(), 0, []
        for slot, shape in self.shapes:
            size = int(np.prod(shape))
            out.append((slot, Pooled(shape, flat[at:at + size].tobytes())))
            at += size
        return out


def pool_rows(pooler: Pooler, rows: Sequence[PooledRows], normed: Tensor,
              prompts: Mapping[int, PooledPrompt]) -> tuple[Shapes, Tensor] | None:
    """Takes in the rows of a step. normed: [R, hidden], those of all `rows` in order, behind the
    final norm; prompts: by slot.

    Returns slots and shapes of what is complete, and its numbers, f32, flat, in the same order;
    None where nothing is.
    """
    complete: dict[tuple[str, int, bool], list[tuple[int, Tensor]]] = {}
    shapes: Shapes = []
    parts: list[Tensor] = []
    for own, chunk in zip(rows, normed.split([each.rows for each in rows]), strict=True):
        prompt = prompts[own.slot]
        pooling = prompt.pooling
        if pooling.layers:
            continue  # see `hidden_rows`
        if pooling.task.startswith("token"):
            prompt.parts.append(pooler.finish(chunk, pooling))
            if own.ends:
                whole = torch.cat(prompt.parts)
                shapes.append((own.slot, list(whole.shape)))
                parts.append(whole.reshape(-1))
            continue
        if (part := _part(pooler.shape.kind, own, chunk, pooling.skipped)) is not None:
            prompt.parts.append(part)
        if own.ends:
            pooled = torch.stack(prompt.parts).sum(0)
            if pooler.shape.kind == "mean":
                pooled = pooled / (prompt.length - pooling.skipped)
            alike = pooling.task, pooling.dimensions, pooling.activation
            complete.setdefault(alike, []).append((own.slot, pooled))
    for several in complete.values():
        found = pooler.finish(torch.stack([pooled for _, pooled in several]),
                              prompts[several[0][0]].pooling)
        shapes += [(slot, [found.shape[1]]) for slot, _ in several]
        parts.append(found.reshape(-1))
    return (shapes, torch.cat(parts)) if parts else None


def _part(kind: PoolingKind, own: PooledRows, chunk: Tensor, skipped: int) -> Tensor | None:
    """What of a chunk goes into a vector: f32[hidden]; None: nothing. skipped: as of
    `ResolvedPooling`."""
    if kind == "mean":
        return chunk[max(skipped - own.start, 0):].float().sum(0)
    if kind == "cls":
        # A copy: a view would keep all the step's rows.
        return chunk[0].to(torch.float32, copy=True) if own.start == 0 else None
    return chunk[-1].float() if own.ends else None
