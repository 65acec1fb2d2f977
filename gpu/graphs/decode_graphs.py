"""Decode steps captured once and replayed: a step of decodes alone is a few launches instead of
thousands.

A graph serves one number of rows and one window, of the model by itself or with adapters; a batch
is padded up to the next one with rows of the sink slot, which has a page, and no recurrent state.
The only thing that changes from replay to replay is `SlotTables.chosen`, the slots of the rows, and
which rows have which adapter (`AdapterSlots.write`); all else is read from the resident tables by
slot, on the device.

A step is captured in stages, replayed one behind the other: the forward pass up to the logits;
sampling and commit, once for each set of parameters that many requests have; new drafts. A step
that needs more (log-probabilities, masks, penalties, ...) is sampled operation by operation between
the first and the last.

Nothing in a graph knows how long sequences are, so page tables are gathered at full width: 8 MB for
256 sequences of 131,072 tokens, some 4 us of a step of milliseconds. Attention must take lengths
from the device, as its kernels do; see `why_eager` for what runs without graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actorium.gpu.adapters.adapter_slots import AdapterSlots, HostRows
from actorium.gpu.graphs.capture import Capturer, Replayable, ReportPhase
from actorium.gpu.plan import graph_memory as plan
from actorium.gpu.plan.graph_memory import EagerReasons, GraphShape
from actorium.gpu.step.input_batch import InputBatch, decode_batch, fill_decodes
from actorium.gpu.step.sampler import SamplerBuffers, SamplerOutput, sample_and_commit
from actorium.gpu.step.speculation import Proposer
from actorium.gpu.step.staging import Array, Upload
from actorium.gpu.step.tables import HOLDS, SAMPLES, TRUNCATES, SlotTables

CLASSES = (0, SAMPLES, SAMPLES | TRUNCATES)
"""What steps need whose sampling is captured: greedy ones, those that draw, those that truncate."""
DecodeForward = Callable[[InputBatch], tuple[Tensor | None, Tensor]]
"""From a step to its rows after the final norm, where drafts are made of them, and logits."""


@dataclass(slots=True)
class CapturedDecode:
    """The stages of one shape."""

    shape: GraphShape
    forward: Replayable
    logits: Tensor
    """[rows * q_len, V], until the next replay of anything."""
    draws: dict[int, Replayable] = field(default_factory=dict)
    """By class."""
    drafts: Replayable | None = None
    """As many new ones as the window has: any other number is rare, and made operation by
    operation."""


class StaticBuffers:
    """What graphs leave for others, one memory for all shapes: only one step is under way at a
    time."""

    def __init__(self, tables: SlotTables, rows: int, q_len: int) -> None:
        """rows, q_len: the most of any graph."""
        full = tables.arrays.full
        self._positions = full((rows * q_len,), 0, "int32")
        self._slots = full((rows * q_len,), 0, "int32")
        self._tokens = full((rows * q_len,), 0, "int64")
        self._told = full((rows * (2 + q_len),), 0, "int64")

    def positions(self, shape: GraphShape) -> Array:
        """i32[rows * q_len]: see `InputBatch.positions`."""
        return self._positions[:shape.rows * shape.q_len]

    def row_slots(self, shape: GraphShape) -> Array:
        """i32[rows * q_len]: see `InputBatch.row_slots_d`."""
        return self._slots[:shape.rows * shape.q_len]

    def tokens(self, shape: GraphShape) -> Array:
        """i64[rows * q_len]: `SamplerOutput.rows`."""
        return self._tokens[:shape.rows * shape.q_len]

    def counts(self, shape: GraphShape) -> Array:
        """i64[rows]: `SamplerOutput.counts`."""
        return self.packed(shape)[0]

    def packed(self, shape: GraphShape) -> Array:
        """i64[2 + q_len, rows]: counts, finish, then the columns, of `SamplerOutput`."""
        return self._told[:shape.rows * (2 + shape.q_len)].view(-1, shape.rows)


class GraphReplay:
    """How one step is replayed."""

    def __init__(self, tables: SlotTables, statics: StaticBuffers, tier: CapturedDecode,
                 needs: int | None, drafts: bool) -> None:
        """needs: its class; None: it is sampled operation by operation."""
        self._tables, self._statics, self._tier = tables, statics, tier
        self._needs, self._drafts = needs, drafts

    @property
    def rows(self) -> int:
        """Of the graph, those of the sink as well."""
        return self._tier.shape.rows

    @property
    def logits(self) -> Tensor:
        """[rows * q_len, V], of those of the sink as well."""
        return self._tier.logits

    @property
    def packed(self) -> Tensor | None:
        """See `StaticBuffers.packed`; None where the step must still be sampled."""
        packed: Tensor = self._statics.packed(self._tier.shape)
        return None if self._needs is None else packed

    def forward(self) -> None:
        """Everything up to the logits."""
        self._tier.forward.replay()

    def finish(self) -> None:
        """Everything behind them."""
        assert self._needs is not None
        self._tier.draws[self._needs].replay()
        self._draft()

    def follow(self, emitted: SamplerOutput) -> None:
        """Everything behind the sampling of the step's own rows, which was done outside."""
        if self._drafts:
            shape = self._tier.shape
            self._statics.tokens(shape)[:len(emitted.rows)] = emitted.rows
            counts = self._statics.counts(shape)
            counts.zero_()  # of padding too: graphs of other shapes keep other things here
            counts[:len(emitted.counts)] = emitted.counts
            self._draft()

    def emitted(self, step: InputBatch) -> tuple[Array, Array]:
        """(rows, counts) of `SamplerOutput`, of the step's own rows; until the next replay."""
        shape = self._tier.shape
        return (self._statics.tokens(shape)[:len(step.row_slots)],
                self._statics.counts(shape)[:len(step.slots)])

    def _draft(self) -> None:
        if self._drafts:
            assert self._tier.drafts is not None
            self._tier.drafts.replay()

    def lend(self, step: InputBatch) -> None:
        """What sampling must know of the step's own rows on the device."""
        shape, rows = self._tier.shape, len(step.row_slots)
        step.slots_d = self._tables.chosen[:len(step.decode)]
        step.row_slots_d = self._statics.row_slots(shape)[:rows]
        step.positions = self._statics.positions(shape)[:rows]


class DecodeGraphRunner:
    """Graphs of whole decode steps."""

    def __init__(self, tables: SlotTables, proposer: Proposer | None, forward: DecodeForward,
                 capturer: Capturer, shapes: Sequence[GraphShape], force: tuple[float, ...] = (),
                 adapters: AdapterSlots | None = None) -> None:
        """shapes: in the order of capture; force: see `sampler.commit`; adapters: of steps in which
        rows have some."""
        self._tables, self._proposer, self._run = tables, proposer, forward
        self._capturer, self.shapes, self._force = capturer, list(shapes), force
        self._adapters = adapters
        self._sizes = sorted({shape.rows for shape in shapes})
        self._statics = StaticBuffers(tables, self._sizes[-1], max(own.q_len for own in shapes))
        self._tiers: dict[GraphShape, CapturedDecode] = {}
        self._chosen = np.zeros(tables.slots, np.int32)
        """Host: what `SlotTables.chosen` holds."""
        self.replays = 0
        """Steps served so far."""

    # --- capturing ---------------------------------------------------------------------------

    def capture(self, report: ReportPhase, most: int | None = None) -> None:
        """Capture graphs, in the order of `shapes`; most: so many of them. The tables' slots are
        untouched: all is run over the sink."""
        todo = self.shapes[:most]
        for number, shape in enumerate(todo):
            report("warming", f"graphs {number}/{len(todo)}")
            if shape not in self._tiers:
                self._tiers[shape] = self._captured(shape)

    @torch.inference_mode()
    def _captured(self, shape: GraphShape) -> CapturedDecode:
        take = self._capturer.capture
        forward, (step, normed, logits) = take(partial(self._forward, shape))
        tier = CapturedDecode(shape, forward, self._capturer.borrow(logits))
        for needs in CLASSES:
            tier.draws[needs], _ = take(partial(self._draw, shape, step, logits, needs))
        proposer = self._proposer
        if proposer is not None and shape.q_len > 1 and normed is not None:
            tier.drafts, _ = take(partial(self._draft, proposer, shape, step, normed))
        return tier

    def _forward(self, shape: GraphShape) -> tuple[InputBatch, Tensor | None, Tensor]:
        """The step, its rows after the final norm where drafts are made of them, and logits."""
        t = self._tables
        step = decode_batch(t, np.zeros(shape.rows, np.int32), shape.q_len, t.max_len)
        step.bounded = False
        fill_decodes(t, step, t.chosen[:shape.rows],
                     (self._statics.positions(shape), self._statics.row_slots(shape)))
        if shape.adapted:
            assert self._adapters is not None
            step.adapted = self._adapters.written(shape.rows * shape.q_len)
        return step, *self._run(step)

    def _draw(self, shape: GraphShape, step: InputBatch, logits: Tensor, needs: int) -> None:
        t = self._tables
        own = replace(step, flags=np.full(len(step.row_slots), needs, np.uint16), needs=needs)
        sample_and_commit(t, own, logits, (), self._force,
                          SamplerBuffers(self._statics.tokens(shape), self._statics.packed(shape)))

    def _draft(self, proposer: Proposer, shape: GraphShape, step: InputBatch,
               normed: Tensor) -> None:
        proposer.propose(step, shape.q_len - 1, self._statics.tokens(shape),
                         self._statics.counts(shape), normed)

    # --- serving -----------------------------------------------------------------------------

    def serve(self, step: InputBatch, drafts: int, up: Upload, adapted: HostRows | None = None
              ) -> GraphReplay | None:
        """How to replay a step that makes so many drafts; its slots, and which rows have adapters
        (adapted), go to the upload. None: it must run operation by operation."""
        count = len(step.decode)
        if step.extends is not None or not 0 < count <= self._sizes[-1]:
            return None
        rows = self._sizes[bisect_left(self._sizes, count)]
        tier = self._tiers.get(GraphShape(rows, step.q_len, adapted is not None))
        if tier is None:
            return None
        drafting = drafts > 0 and self._proposer is not None
        needs = self._class(step)
        if drafting and (drafts != step.q_len - 1 or tier.drafts is None):
            return None
        self._choose(step, rows, up)
        if adapted is not None and self._adapters is not None:
            self._adapters.write(adapted, rows * step.q_len, up)
        self.replays += 1
        return GraphReplay(self._tables, self._statics, tier, needs, drafting)

    def _class(self, step: InputBatch) -> int | None:
        """What the step needs, if that is captured."""
        needs, t = step.needs, self._tables
        if needs & HOLDS and not (t.host_low[step.slots] <= t.host_min[step.slots]).any():
            needs &= ~HOLDS  # nobody's end is held back any longer
        return needs if needs in CLASSES else None

    def _choose(self, step: InputBatch, rows: int, up: Upload) -> None:
        wanted = np.zeros(rows, np.int32)
        wanted[:len(step.decode)] = step.decode
        if not np.array_equal(wanted, self._chosen[:rows]):
            self._chosen[:rows] = wanted
            up.cells(self._tables.chosen, np.arange(rows, dtype=np.int32), wanted)


def why_eager(model: Any, device: torch.device) -> EagerReasons:
    """Of this model."""
    if device.type != "cuda":
        return EagerReasons(*["they are CUDA's"] * 2)
    if model.no_graphs:
        return EagerReasons(*[model.no_graphs] * 2)
    why = plan.why_eager(model.waits, model.attention.decode.graphs and model.shape.index is None)
    if model.shape.eagle is None or why.segments:
        return why
    return why._replace(segments="an EAGLE-3 head takes hidden states between layers",
                        decodes=why.decodes or "drafts are made by an MTP layer and a head" * (
                            model.drafter is not None))
