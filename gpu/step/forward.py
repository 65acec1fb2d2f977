"""What a step needs of a model and of what was captured of it, and counts of how steps were run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from actorium.actors.runtime.beat_gauges import STEP_MODES, eager_key, step_key
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.layer_weights import RoutingTape
from actorium.gpu.models.pooler import Pooler
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.states import RecurrentBatch


class CapturedLayers(Protocol):
    """Runs the layers of steps that it serves; see `graphs.piecewise_graphs` and
    `graphs.decode_programs`."""

    serves_as: str
    """What its steps count as: see `ModelRunner.served`."""

    def serves(self, step: InputBatch) -> int:
        """The size that this step is run at, see `StepCounts`; 0 where it cannot be run so."""

    def misses(self, step: InputBatch) -> str:
        """Of `EAGER_REASONS`, why this step is not served."""

    def forward(self, step: InputBatch, pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None = None) -> Tensor:
        """See `Decoder.forward`; of a step that is served."""


class StepModel(Protocol):
    """What a step needs of a model; see `Decoder`."""

    shape: ModelShape
    no_graphs: str
    pooler: Pooler | None
    tape: RoutingTape

    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None = None) -> Tensor:
        """See `Decoder.forward`."""

    def logits(self, rows: Tensor) -> Tensor:
        """[R, hidden] before the final norm -> [R, vocab]."""

    def norm_rows(self, rows: Tensor) -> Tensor:
        """The final norm: [R, hidden]."""

    def head_logits(self, normed: Tensor) -> Tensor:
        """[R, hidden] after the final norm -> [R, vocab]."""


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
