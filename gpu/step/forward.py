"""The forward pass of one step: a model over its caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from actorium.actors.messages import StepPlan
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.staging import Array
from actorium.gpu.step.states import RecurrentBatch, StatePool
from actorium.gpu.step.step_counts import StepCounts
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


class Proposer(Protocol):
    """Proposes drafts with a layer of the model's own; see `speculation.MTPProposer`."""

    pool: KVPagePool
    """Keys and values of the layer."""

    def needs_hidden(self, step: InputBatch, drafts: int) -> bool:
        """Whether `propose` must see this step."""

    def propose(self, step: InputBatch, drafts: int, sampled: Array, counts: Array,
                hidden: Tensor) -> None:
        """Write so many drafts for every sampled sequence to the tables. sampled: i64[rows], None
        without any; counts: i64[sequences], tokens emitted; hidden: [T, hidden], of every row after
        the final norm."""


class ForwardPass:
    """A model, the caches it writes, and what steps know of sequences."""

    def __init__(self, model: StepModel, pools: list[KVPagePool], tables: SlotTables,
                 states: StatePool | None = None, proposer: Proposer | None = None) -> None:
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
