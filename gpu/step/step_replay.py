"""What a step of decodes that was captured offers to the runner."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.sampler import SamplerOutput
from actorium.gpu.step.staging import Upload


class StepReplay(Protocol):
    """A step of decodes that is replayed from graphs; see `graphs.decode_graphs`."""

    @property
    def logits(self) -> Tensor:
        """[rows, V], rows >= those of the step; after `forward`."""

    @property
    def packed(self) -> Tensor | None:
        """i64[2 + q_len, rows], after `finish`: counts, finish and tokens of `SamplerOutput`. None
        where the step is sampled operation by operation."""

    def lend(self, step: InputBatch) -> None:
        """Give the step's rows on the device to `step`."""

    def forward(self) -> None:
        """Queue everything up to the logits."""

    def finish(self) -> None:
        """Queue sampling and drafts."""

    def follow(self, emitted: SamplerOutput) -> None:
        """Queue drafts after a sampling that was done outside."""


class StepGraphs(Protocol):
    """Graphs of whole steps of decodes."""

    def serve(self, step: InputBatch, drafts: int, up: Upload) -> StepReplay | None:
        """How to replay a step that makes so many drafts; None: it must run otherwise. What the
        graph needs goes to the upload."""
