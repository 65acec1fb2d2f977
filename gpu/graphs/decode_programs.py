"""Decode steps on a CPU, their layers captured once and replayed in one call each.

A program serves one number of sequences and one window, of the model by itself or with adapters. It
is captured when the first step of its
size comes (or at the start, where sizes were asked for), over the sink page and no states:
that takes about as long as the step. What a step brings lies in memory of its own, which is filled
before the replay: hidden states, rows of the ropes, page tables at full width. How long sequences
are the kernels read there, so a program serves any lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actorium.gpu.adapters.adapted_layers import AdaptedLayers
from actorium.gpu.graphs.capture import Arena, KernelCapturer
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.plan.graph_memory import GraphShape, ProgramSizes
from actorium.gpu.step.batch import ForwardBatch, StateRows
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.states import RecurrentBatch, StatePool
from actorium.kernels.adapter_rows import AdapterRows, most_blocks
from actorium.kernels.cpu.native_ops import NativeOps
from actorium.kernels.cpu.program import NotRecordable, Program
from actorium.kernels.reference.state_rows import NOBODY

LOG = logging.getLogger(__name__)


class StepInputs:
    """What replays read of a step, one memory for all programs: only one step is under way."""

    def __init__(self, model: Decoder, arena: Arena, sizes: ProgramSizes,
                 adapters: int) -> None:
        """adapters: different ones of a step, at most."""
        rows, width = sizes.rows, sizes.width

        def take(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
            return arena.keep(arena.take(shape, dtype)).zero_()

        groups = len(model.shape.groups)
        self.hidden = take((rows, model.shape.stream_width), model.dtype)
        self._tables = [_bits(table) for table in model.ropes]
        self.ropes = [take((rows, *table.shape[1:]), table.dtype) for table in model.ropes]
        if model.shape.token_width:
            self.ropes.append(take((rows, model.shape.token_width), model.dtype))
        self.kv_index = take((groups, rows))
        self.pages = take((groups, rows, width), torch.int32)
        self.lens = take((rows,), torch.int32)
        self.states, self.accepted = take((rows,)), take((rows,))
        # Written by numpy: torch takes several times as long for so little.
        self._arrays = [own.numpy() for own in (self.kv_index, self.pages, self.lens, self.states,
                                                self.accepted)]
        self._hidden, self._ropes = _bits(self.hidden), [_bits(rope) for rope in self.ropes]
        self._adapters = adapters
        self._adapted = AdapterRows(take((rows,), torch.int32),
                                    take((most_blocks(rows, adapters), 3), torch.int32))
        self._adapted_arrays = self._adapted.rows.numpy(), self._adapted.blocks.numpy()

    def batches(self, shape: GraphShape) -> list[ForwardBatch]:
        """A step of this shape, all of whose rows the model gives."""
        tokens, n = shape.rows * shape.q_len, shape.rows
        none = self.states[:0]  # what layers do not read
        return [ForwardBatch(none, none, kv[:tokens], [], 0, n, pages[:n], self.lens[:n], 0, none,
                             shape.q_len, True)
                for kv, pages in zip(self.kv_index, self.pages, strict=True)]

    def adapted(self, shape: GraphShape) -> AdapterRows:
        """Rows with adapters of a step of this shape."""
        tokens = shape.rows * shape.q_len
        return AdapterRows(self._adapted.rows[:tokens],
                           self._adapted.blocks[:most_blocks(tokens, self._adapters)])

    def clear(self, shape: GraphShape) -> None:
        """A step over the sink page that has no states and no adapters."""
        for each in (self.hidden, *self.ropes, self.kv_index, self.pages, self.accepted,
                     self._adapted.blocks):
            each.zero_()
        self.states.fill_(NOBODY)
        self.lens.fill_(shape.q_len)

    def fill(self, model: Decoder, step: InputBatch, states: StateRows | None) -> None:
        """The step's own."""
        batches = step.batches
        batch, (kv_index, pages, lens, rows, accepted) = batches[0], self._arrays
        n, tokens = batch.decode_rows, len(batch.tokens)
        hidden = model.embedded(batch.tokens, batch.turned_to)
        self._hidden[:tokens] = _bits(hidden)
        positions = batch.turned_to.numpy()
        for to, table in zip(self._ropes, self._tables, strict=False):
            to[:tokens] = table[positions]
        for given in model.token_inputs(batch.tokens, hidden):
            self._ropes[-1][:tokens] = _bits(given)
        for g, own in enumerate(batches):
            assert own.decode_pages is not None and own.decode_kv_lens is not None
            kv_index[g, :tokens] = own.kv_index.numpy()
            pages[g, :n, :own.decode_pages.shape[1]] = own.decode_pages.numpy()
            lens[:n] = own.decode_kv_lens.numpy()
        if states is not None:
            rows[:n] = states.decodes.numpy()
            if states.accepted is not None:
                accepted[:n] = states.accepted.numpy()
        if step.adapted is not None:
            with_adapters, blocks = self._adapted_arrays
            with_adapters[:len(step.adapted.rows)] = step.adapted.rows.numpy()
            blocks[:len(step.adapted.blocks)] = step.adapted.blocks.numpy()
            blocks[len(step.adapted.blocks):] = 0


def _bits(tensor: Tensor) -> NDArray[np.int16]:
    """A tensor of 16 bits an element for numpy, which knows no bf16."""
    return tensor.view(torch.int16).numpy()


class LayersProgram(NamedTuple):
    """The layers of steps of one shape, and what they write."""

    program: Program
    out: Tensor
    """See `Decoder.run_layers`."""
    tapped: dict[int, Tensor]
    """See `ForwardBatch.tapped`."""


class DecodePrograms:
    """Runs the layers of decode steps; see `CapturedLayers`."""

    serves_as = "program"

    def __init__(self, model: Decoder, pools: Sequence[KVPagePool], states: StatePool | None,
                 sizes: ProgramSizes, asked: Sequence[GraphShape] = (),
                 adapted: AdaptedLayers | None = None) -> None:
        """asked: the only shapes to be captured, where some were asked for; adapted: the layers
        with adapters, where any are served."""
        assert isinstance(model.ops, NativeOps)
        self._asked = frozenset(asked)
        self._model, self._pools, self._states = model, pools, states
        self._adapted = adapted
        self._rows, temporaries = sizes.rows, Arena(sizes.temporaries)
        kept = Arena(sizes.kept)
        self._capturer = KernelCapturer(model.ops.lib, model.ops.threads, temporaries, kept)
        self._inputs = StepInputs(model, kept, sizes, adapted.slots if adapted else 0)
        self.memory = [temporaries.whole, kept.whole]
        """u8: all that programs keep and write."""
        self._programs: dict[GraphShape, LayersProgram | None] = {}
        self.fault = ""
        """Why the last step that could not be captured could not."""
        self.replays = 0
        """Steps served so far."""

    @property
    def count(self) -> int:
        """Programs captured so far."""
        return sum(own is not None for own in self._programs.values())

    def serves(self, step: InputBatch) -> int:
        """Sequences of the step if there is a program for its size, else 0; it is captured at the
        first one."""
        shape = GraphShape(len(step.decode), step.q_len, step.adapted is not None)
        rows = 0 if step.extends is not None or step.prompts else shape.rows * shape.q_len
        if not 0 < rows <= self._rows or (self._asked and shape not in self._asked):
            return 0
        return shape.rows if self.captures(shape) else 0

    def misses(self, step: InputBatch) -> str:
        """See `CapturedLayers`; sequences: there is no program for so many."""
        return "sequences" if step.extends is None else "prompts"

    def captures(self, shape: GraphShape) -> bool:
        """Captures steps of this shape, if that was not done; False where it cannot be done."""
        if shape not in self._programs:
            own = self._captured(shape)
            # All ranks replay a step, or none: what is captured meets what the others do.
            self._programs[shape] = own if self._model.group.agreed(own is not None) else None
        return self._programs[shape] is not None

    def forward(self, step: InputBatch, pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None = None) -> Tensor:
        """See `CapturedLayers`. The result lasts until the next one."""
        batch = step.batches[0]
        found = self._programs[GraphShape(batch.decode_rows, batch.decode_q_len,
                                          step.adapted is not None)]
        assert found is not None
        self._inputs.fill(self._model, step, None if recurrent is None else recurrent.rows)
        self._model.group.replay(found.program.replay)
        batch.tapped = found.tapped
        self.replays += 1
        return found.out

    @torch.inference_mode()
    def _captured(self, shape: GraphShape) -> LayersProgram | None:
        self._inputs.clear(shape)
        batches = self._inputs.batches(shape)
        layers = partial(self._layers, self._model, shape, batches)
        if shape.adapted:
            assert self._adapted is not None
            layers = partial(self._adapted_layers, self._adapted, shape, batches)
        try:
            program, out = self._capturer.capture(layers)
        except NotRecordable as why:
            self.fault = f"{why} has no kernel in C"
            LOG.debug("decode steps of %d x %d rows run operation by operation: %s", shape.rows,
                      shape.q_len, self.fault)
            return None
        borrow = self._capturer.borrow
        return LayersProgram(program, borrow(out), {
            layer: borrow(own) for layer, own in batches[0].tapped.items()})

    def _adapted_layers(self, adapted: AdaptedLayers, shape: GraphShape,
                        batches: Sequence[ForwardBatch]) -> Tensor:
        with adapted.adapting(self._inputs.adapted(shape)):
            return self._layers(adapted.model, shape, batches)

    def _layers(self, model: Decoder, shape: GraphShape, batches: Sequence[ForwardBatch]
                ) -> Tensor:
        inputs, recurrent, tokens = self._inputs, None, shape.rows * shape.q_len
        if self._states is not None:
            accepted = inputs.accepted[:shape.rows] if self._states.drafts else None
            recurrent = RecurrentBatch(self._states, StateRows(
                [], inputs.states[:shape.rows], shape.q_len, accepted))
        return model.run_layers(inputs.hidden[:tokens], batches, self._pools, recurrent,
                                [rope[:tokens] for rope in inputs.ropes])
