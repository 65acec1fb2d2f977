"""Steps of up to some hundred tokens as segments that are replayed, with the middles of the layers
between them.

In a step with prompts, attention depends on how their tokens are shared out, and no graph can hold
that; nor the recurrent layers' part between their projections. All else works token by token: from
behind the middle of one layer to before that of the next one is a segment, captured for a few
numbers of tokens. A step is padded up to the next one. What padding computes is rubbish, and its
keys and values go to the sink page.

Steps of decodes alone that are not captured whole (`graphs`) run so as well. The end of the last
layer, of few rows mostly, is run operation by operation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actorium.gpu.graphs.capture import Capturer, Replayable, ReportPhase, WhyNot
from actorium.gpu.models.decoder import Decoder, Layer, LayerRun
from actorium.gpu.models.forward_context import NO_ATTENTION, ForwardContext, GroupContext
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.states import RecurrentBatch
from actorium.kernels.inputs import settled

"""What a segment knows of how its rows attend."""


class PieceGraph(NamedTuple):
    """Up to the middle of a layer."""

    work: Replayable
    p: Tensor
    """What the middle takes, until the next replay."""


class PiecewiseGraph(NamedTuple):
    """A step's segments."""

    segments: list[PieceGraph]
    ropes: list[Tensor]
    carried: tuple[Any, ...]
    """What is carried past the last layer's middle; see `LayerRun`."""


class StaticInputs:
    """What segments take from outside, one memory for all numbers of tokens: only one step is under
    way at a time."""

    def __init__(self, model: Decoder, groups: int, most: int) -> None:
        """most: tokens."""
        self._numbers = torch.zeros((2 + groups, most), dtype=torch.int64, device=model.device)
        self._middles = {
            inner: torch.zeros((most, inner), dtype=model.dtype, device=model.device)
            for inner in sorted({layer.mixer.inner for layer in model.layers})}

    def tokens(self, size: int) -> Tensor:
        """i64[size]"""
        return self._numbers[0, :size]

    def positions(self, size: int) -> Tensor:
        """i64[size]"""
        return self._numbers[1, :size]

    def kv_index(self, group: int, size: int) -> Tensor:
        """i64[size]: see `ForwardBatch`."""
        return self._numbers[2 + group, :size]

    def middle(self, layer: Layer, size: int) -> Tensor:
        """[size, inner]: what `Mixer.between` gives."""
        return self._middles[layer.mixer.inner][:size]

    def fill(self, batches: Sequence[ForwardBatch], size: int) -> None:
        """Take in a step of up to `size` tokens. Padding is token 0 at position 0, in the sink, and
        attends to nothing: rows that are alike want the same experts, whose weights are read."""
        first = batches[0]
        count = len(first.tokens)
        torch.stack((first.tokens, first.turned_to, *(own.kv_index for own in batches)),
                    out=self._numbers[:, :count])
        if count < size:
            self._numbers[:, count:size].zero_()
            for middle in self._middles.values():
                middle[count:size].zero_()

    def clear(self) -> None:
        """Nothing but padding."""
        self._numbers.zero_()


class PiecewiseGraphRunner:
    """Graphs of a model's layers from one attention to the next."""

    serves_as = "piecewise_graph"

    def __init__(self, model: Decoder, pools: Sequence[KVPagePool], capturer: Capturer,
                 sizes: Sequence[int]) -> None:
        """pools: of each group of layers; sizes: tokens that segments are captured for, in the
        order of capture."""
        self._model, self._pools = model, pools
        self._capturer, self.shapes = capturer, list(sizes)
        self._sizes = sorted(sizes)
        self._inputs = StaticInputs(model, len(pools), self._sizes[-1])
        self._chains: dict[int, PiecewiseGraph] = {}
        self.replays = 0
        """Steps served so far."""

    # --- capturing ---------------------------------------------------------------------------

    def capture(self, report: ReportPhase, most: int | None = None,
                why_not: WhyNot = lambda size, first: "") -> dict[int, str]:
        """Capture segments, in the order of `shapes`; most: for so many numbers of tokens. Nothing
        is written but to the sink page. Returns the sizes that are left out, and why: steps of
        these are padded up to the next one that is there."""
        todo, left = self.shapes[:most], dict[int, str]()
        for number, size in enumerate(todo):
            report("warming", f"segments {number}/{len(todo)}")
            if size in self._chains:
                continue
            if why := why_not(size, not self._chains):
                left[size] = why
            else:
                self._chains[size] = self._captured(size)
        self.shapes = [size for size in self.shapes if size not in left]
        self._sizes = sorted(self.shapes)
        return left

    @torch.inference_mode()
    def _captured(self, size: int) -> PiecewiseGraph:
        take, borrow = self._capturer.capture, self._capturer.borrow
        self._inputs.clear()
        layers, runs = self._model.layers, self._model.runs
        work, (step, p, carried) = take(partial(self._first, size))
        segments = [PieceGraph(work, borrow(p))]
        del p  # or the memory of each layer's would be kept
        for layer, before, run in zip(layers, runs, runs[1:], strict=False):
            y = self._inputs.middle(layer, size)
            work, (p, carried) = take(partial(self._next, before, run, step, y, carried))
            segments.append(PieceGraph(work, borrow(p)))
            del p
        # Given up only now: the segments of this size must not use it among themselves.
        return PiecewiseGraph(segments, [self._given_up(own) for own in step.ropes],
                              tuple(self._given_up(own) for own in carried))

    def _given_up(self, value: Any) -> Any:
        """The same memory, for the next size as well: what is held would grow with every one.
        value: a tensor, or what products take (`kernels.inputs`)."""
        if isinstance(value, Tensor):
            return self._capturer.borrow(value) if value.is_contiguous() else value
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{own.name: self._given_up(getattr(value, own.name))
                                     for own in fields(value)})
        return value

    def _first(self, size: int) -> tuple[ForwardContext, Tensor, tuple[Any, ...]]:
        model, inputs = self._model, self._inputs
        groups = [GroupContext(inputs.kv_index(g, size), pool.layers, NO_ATTENTION, pool.scales,
                               pool.index_keys)
                  for g, pool in enumerate(self._pools)]
        tokens, positions = inputs.tokens(size), inputs.positions(size)
        hidden = model.embedded(tokens, positions)
        ropes = [*model.ropes_at(positions), *model.token_inputs(tokens, hidden)]
        step = ForwardContext(ropes, groups, None, [])
        return step, *model.runs[0].enter(hidden, step)

    def _next(self, before: LayerRun, run: LayerRun, step: ForwardContext, y: Tensor,
              carried: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        return run.enter(before.leave(y, carried), step)

    # --- serving -----------------------------------------------------------------------------

    def serves(self, step: InputBatch) -> int:
        """Tokens of the segments that are there for a step; 0 = none are."""
        size = self._size(step.tokens) if step.bounded and step.adapted is None else 0
        return size if size in self._chains else 0

    def misses(self, step: InputBatch) -> str:
        """See `CapturedLayers`: what is not served has too many tokens."""
        return "tokens"

    def _size(self, tokens: int) -> int:
        at = bisect_left(self._sizes, tokens)
        return self._sizes[at] if at < len(self._sizes) else 0

    def forward(self, served: InputBatch, pools: Sequence[KVPagePool],
                recurrent: RecurrentBatch | None = None) -> Tensor:
        """See `CapturedLayers`."""
        model, batches = self._model, served.batches
        batch = batches[0]
        count = len(batch.tokens)
        size = self._size(count)
        chain = self._chains[size]
        self._inputs.fill(batches, size)
        self.replays += 1
        step = model.step_of(batches, pools, recurrent, [rope[:count] for rope in chain.ropes])
        *others, last = zip(chain.segments, model.layers, strict=True)
        for segment, layer in others:
            segment.work.replay()
            layer.mixer.between(segment.p[:count], step, None,
                                self._inputs.middle(layer, size)[:count])
        segment, layer = last
        segment.work.replay()
        rows = None if batch.all_rows else batch.logit_rows
        y = layer.mixer.between(segment.p[:count], step, rows)
        carried = tuple(own[:count] if rows is None else own.index_select(0, rows)
                        for own in chain.carried)
        return settled(model.runs[-1].leave(y, carried))
