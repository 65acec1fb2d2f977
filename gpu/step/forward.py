"""The forward pass of one step, a model over its caches, and counts of how steps were run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from actorium.actors.messages import StepPlan
from actorium.actors.runtime.beat_gauges import STEP_MODES, eager_key, step_key
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.speculation import MTPProposer
from actorium.gpu.step.states import RecurrentBatch, StatePool
from actorium.gpu.step.tables import SlotTables


class LayerRunner(Protocol):
    """Runs the layers: a model, or graphs of parts of it."""

    def forward(self, batches: Sequence[ForwardBatch], pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None = None) -> Tensor:
        """See `Decoder.forward`."""


class CapturedLayers(LayerRunner, Protocol):
    """See `graphs.piecewise_graphs` and `graphs.decode_programs`."""

    serves_as: str
    """What its steps count as: see `ForwardPass.served`."""

    def serves(self, step: InputBatch) -> int:
        """The size that this step is run at, see `StepCounts`; 0 where it cannot be run so."""

    def misses(self, step: InputBatch) -> str:
        """Of `EAGER_REASONS`, why this step is not served."""


class StepModel(LayerRunner, Protocol):
    """What a step needs of a model; see `Decoder`."""

    shape: ModelShape

    def logits(self, rows: Tensor) -> Tensor:
        """[R, hidden] before the final norm -> [R, vocab]."""

    def norm_rows(self, rows: Tensor) -> Tensor:
        """The final norm: [R, hidden]."""

    def head_logits(self, normed: Tensor) -> Tensor:
        """[R, hidden] after the final norm -> [R, vocab]."""


class ForwardPass:
    """A model, the caches it writes, and what steps know of sequences."""

    def __init__(self, model: StepModel, pools: list[KVPagePool], tables: SlotTables,
                 states: StatePool | None = None, proposer: MTPProposer | None = None) -> None:
        """pools: of each group of the model's layers; states: of its recurrent layers; proposer: of
        its MTP layer, which is not run without."""
        self.model, self.pools, self.tables, self.states = model, pools, tables, states
        self.proposer = proposer
        self._one = tables.arrays.full((1,), 1, "int64")
        self.segments: CapturedLayers | None = None
        """Runs the layers of steps that it serves."""
        self.served = StepCounts()
        """Steps so far, by how they were run."""

    @property
    def draft_pool(self) -> KVPagePool | None:
        """Pages of the MTP layer; None where it is not run."""
        return self.proposer.pool if self.proposer else None

    @property
    def all_pools(self) -> list[KVPagePool]:
        """The pools of the model's groups and of its MTP layer."""
        return [*self.pools, self.draft_pool] if self.draft_pool else self.pools

    def recurrent(self, plan: StepPlan, step: InputBatch) -> RecurrentBatch | None:
        """The step's rows of the recurrent states; None where the model has none."""
        if self.states is None:
            return None
        arrays, drafts = self.tables.arrays, self.tables.drafts
        slots, extends = step.slots_d[step.ending:], step.batches[0].extends
        decodes = arrays.tensor(slots - self._one)  # i64: slot 0, of padding, has no row
        if not drafts.max_drafts:
            return RecurrentBatch(self.states, self.states.rows(plan, extends, decodes))
        accepted = arrays.tensor(drafts.accepted[slots])
        return RecurrentBatch(self.states, self.states.rows(plan, extends, decodes, step.q_len,
                                                            accepted))

    def wanted_rows(self, step: InputBatch, recurrent: RecurrentBatch | None) -> Tensor:
        """[R, hidden]: the rows `logit_rows` before the final norm; all T where `all_rows`."""
        as_text = all(batch.images is None and batch.turned_to.dim() == 1 for batch in step.batches)
        if self.segments is None:
            why = "off"
        elif not as_text:
            why = "images"
        elif size := self.segments.serves(step):
            self.served.add(self.segments.serves_as, size)
            return self.segments.forward(step.batches, self.pools, recurrent)
        else:
            why = self.segments.misses(step)
        self.served.add_eager(step.tokens, why)
        return self.model.forward(step.batches, self.pools, recurrent)

    def all_rows(self, step: InputBatch, recurrent: RecurrentBatch | None) -> Tensor:
        """[T, hidden]: every row before the final norm."""
        for batch in step.batches:
            batch.all_rows = True
        return self.wanted_rows(step, recurrent)

    def all_rows_normed(self, step: InputBatch, recurrent: RecurrentBatch | None) -> Tensor:
        """[T, hidden]: every row after the final norm."""
        return self.model.norm_rows(self.all_rows(step, recurrent))


# --- Counts --------------------------------------------------------------------------------------

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
