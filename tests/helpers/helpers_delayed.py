"""Recurrent layers under windows of drafts, against the same layers one token after the other.

`Speculation` stands for the worker: it holds, for each slot, how many drafts were accepted. Its
methods are the places where such an engine can go wrong; tests override them with what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from actorium.gpu.families.recurrent_shapes import DeltaShape, StateShape
from actorium.gpu.models.recurrent import GatedDelta, Mamba2, RecurrentLayer
from actorium.gpu.parallel.rank_group import LoneRank
from actorium.gpu.step.states import LayerStates, StatePool
from actorium.kernels.cpu.delta_native import NativeDelta
from actorium.kernels.cpu.native_library import library
from actorium.kernels.reference.delta_rule import Heads
from actorium.kernels.reference.delta_window import DeltaLayer
from actorium.kernels.reference.ssd import SSDSizes
from actorium.kernels.reference.state_rows import NOBODY
from actorium.kernels.reference.torch_ops import TorchOps

CPU, EPS, DRAFTS = torch.device("cpu"), 1e-6, 4
SLOTS = 6
"""State rows of sequences."""
ROWS = (4, 1, 5)
"""State rows of the sequences, in the batch's order; the others are nobody's and hold NaN."""
NOTHING: Any = None
"""The projections of a layer that is given what they would give."""


class Case:
    """A layer with random weights, and random rows of its first projection."""

    def __init__(self, layer: RecurrentLayer, shape: StateShape, width: int, dtype: torch.dtype,
                 state_dtype: torch.dtype) -> None:
        """width: of the first projection; dtype: the model's."""
        self.layer, self.shape, self.width = layer, shape, width
        self.dtype, self.state_dtype = dtype, state_dtype
        self.random = torch.Generator().manual_seed(3)

    def rows(self, *size: int) -> Tensor:
        """[*size, width], of a row stride that is larger; numbers that bf16 has."""
        made = torch.randn((*size, self.width + 5), generator=self.random).bfloat16()
        return made.to(self.dtype)[..., :self.width]

    def states(self, drafts: int) -> LayerStates:
        """Zeros for the sequences, NaN for everything else."""
        pool = StatePool(self.shape, 1, SLOTS + 1, 2, self.state_dtype, self.dtype, CPU, drafts)
        own = pool.layers[0]
        for part in own:
            part.fill_(math.nan)
        for part in own.committed:
            part[list(ROWS)] = 0
        return own


def delta(heads: Heads, width: int, dtype: torch.dtype, state_dtype: torch.dtype,
          native: bool = False, ops: TorchOps | None = None) -> Case:
    """GatedDeltaNet."""
    gen = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen)

    rule = DeltaLayer(heads, normal(width, heads.channels), normal(heads.values).square(),
                      normal(heads.values))
    norm, kernel = normal(heads.value_dim), None
    if native:
        lib = library()
        if lib is None:
            pytest.skip("no C compiler, or torch with another OpenMP")
        kernel = NativeDelta(lib, 2, *rule, norm, EPS)
    shape = DeltaShape(heads.keys, heads.values, heads.key_dim, heads.value_dim, width)
    full = heads.channels + heads.values * (heads.value_dim + 2)
    return Case(GatedDelta(0, NOTHING, NOTHING, ops or TorchOps(), rule, EPS, norm, kernel),
                shape.state, full, dtype, state_dtype)


def mamba(sizes: SSDSizes, width: int, dtype: torch.dtype, state_dtype: torch.dtype) -> Case:
    """Mamba-2."""
    gen = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen)

    heads = sizes.heads
    layer = Mamba2(0, NOTHING, NOTHING, TorchOps(), sizes, EPS, (0.0, math.inf),
                   normal(width, sizes.channels), normal(sizes.channels), -normal(heads).exp(),
                   normal(heads), normal(heads), normal(sizes.inner), LoneRank(), 1)
    shape = StateShape((heads, sizes.head_dim, sizes.state_dim), (width - 1, sizes.channels),
                       sizes.channels + heads)
    return Case(layer, shape, sizes.inner + sizes.channels + heads, dtype, state_dtype)


class Speculation:
    """Steps of d drafts for all sequences at once, and what they have made certain."""

    def __init__(self, case: Case, drafts: int = DRAFTS) -> None:
        self.case, self.states = case, case.states(drafts)
        self.slots = torch.tensor(ROWS)
        self.accepted = torch.zeros(SLOTS, dtype=torch.int64)
        self.tokens: list[list[Tensor]] = [[] for _ in ROWS]
        """Certain ones: rows of the first projection."""
        self.outs: list[list[Tensor]] = [[] for _ in ROWS]
        self.drafts: list[list[Tensor]] = [[] for _ in ROWS]

    def step(self, drafts: int, emitted: Sequence[int]) -> None:
        """One step; emitted: 1 to drafts + 1, of each sequence."""
        p = self.case.rows(len(ROWS), drafts + 1)
        out = self.run(p).unflatten(0, (len(ROWS), -1))
        for i, count in enumerate(emitted):
            before = int(self.accepted_before[i])
            self.tokens[i] += [*self.drafts[i][:before], p[i, 0]]
            self.drafts[i] = list(p[i, 1:])
            self.outs[i] += out[i, :count]
        self.learn(torch.tensor(emitted))

    @property
    def accepted_before(self) -> Tensor:
        """How many drafts of the last step really were accepted."""
        return torch.tensor([len(out) - len(tokens)
                             for out, tokens in zip(self.outs, self.tokens, strict=True)])

    def commit(self) -> None:
        """A step without drafts: nothing waits after it."""
        self.step(0, [1] * len(ROWS))

    # --- what the tests break ---

    def run(self, p: Tensor) -> Tensor:
        """p: [B, q, width] -> [B * q, inner]."""
        return self.case.layer.window(p.flatten(0, 1), self.states, self.slots,
                                      self.accepted[self.slots])

    def learn(self, emitted: Tensor) -> None:
        """The step's outcome."""
        self.accepted[self.slots] = emitted - 1


class OneByOne:
    """The same tokens without drafts, each sequence at its own place in the batch: vectors and
    their ends round differently."""

    def __init__(self, case: Case) -> None:
        self.case, self.states = case, case.states(0)
        self.done = 0
        self.counts = [0] * len(ROWS)

    def follow(self, other: Speculation) -> None:
        """Go on to where the other is; everything must be equal, to the bit."""
        slots, layer = torch.tensor(ROWS), self.case.layer
        todo = [len(tokens) - count for tokens, count in zip(other.tokens, self.counts,
                                                             strict=True)]
        rubbish = self.case.rows(1)[0]
        for t in range(max(todo)):
            live = [t < count for count in todo]
            p = torch.stack([own[at + t] if now else rubbish for own, at, now in zip(
                other.tokens, self.counts, live, strict=True)])
            out = layer.step(p, self.states, torch.where(torch.tensor(live), slots, NOBODY))
            for i, now in enumerate(live):
                assert not now or torch.equal(out[i], other.outs[i][self.counts[i] + t])
        self.counts = [len(tokens) for tokens in other.tokens]
        for mine, theirs in zip(self.states.committed, other.states.committed, strict=True):
            assert torch.equal(mine[slots], theirs[slots])
            assert mine[slots].isfinite().all()


def check(speculation: Speculation, steps: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Run (drafts, emitted) steps; compare after each one that leaves nothing to wait, and at the
    end. Raises `AssertionError`."""
    reference = OneByOne(speculation.case)
    for drafts, emitted in steps:
        speculation.step(drafts, emitted)
        if not drafts:
            reference.follow(speculation)
    speculation.commit()
    reference.follow(speculation)
