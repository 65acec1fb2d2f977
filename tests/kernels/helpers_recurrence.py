"""Recurrent layers, in chunks and in steps, against one token after the other in float64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from actorium.kernels.ragged import ExtendRun, Ragged, plan_ragged

CPU = torch.device("cpu")
ROWS = 24
RAGGED = [ExtendRun(3, 130), ExtendRun(1, 7), ExtendRun(9, 64), ExtendRun(2, 1)]
KEPT = [ExtendRun(1, 130, ((64, 11), (100, 12), (130, 13))), ExtendRun(2, 5,
                                                                       ((1, 14),)), ExtendRun(3,
                                                                                              200)]


class Layer(ABC):
    """Random inputs of one layer behind a convolution; a subclass draws them, and says what it does
    of all tokens, of one of each sequence, and by the definition."""

    x: Tensor
    """[tokens, channels]"""
    weight: Tensor
    """[width, channels]: of the convolution."""
    bias: Tensor | float = 0.0
    states: Tensor
    columns: Tensor
    atol: float
    """Of outputs and states against the definition."""

    def __init__(self, tokens: int, sizes: Any, width: int, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.draw(tokens, sizes, width)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._random)

    @abstractmethod
    def draw(self, tokens: int, sizes: Any, width: int) -> None:
        """Set all inputs."""

    @abstractmethod
    def extend(self, states: Tensor, columns: Tensor, plan: Ragged) -> Tensor:
        """The outputs of all tokens."""

    @abstractmethod
    def step(self, at: Tensor, states: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        """The outputs of the tokens `at`, one of each row."""

    @abstractmethod
    def token(self, mixed: Tensor, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """(state, output) of token t, which the convolution has made `mixed`."""

    def one_by_one(self, at: int, count: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """(out, state, columns) of a sequence's tokens, in float64, by the definition."""
        width = len(self.weight)
        whole = torch.cat((self.columns[row], self.x[at:at + count])).double()
        state, outs = self.states[row].double(), []
        for t in range(count):
            mixed = F.silu((whole[t:t + width] * self.weight).sum(0) + self.bias)
            state, out = self.token(mixed, at + t, state)
            outs.append(out)
        return torch.stack(outs).float(), state.float(), whole[count:].float()

    def steps(self, rows: Tensor, tokens: range, states: Tensor, columns: Tensor) -> Tensor:
        """[rows, tokens, ...]: the tokens one after the other, at the same place of each row's
        share of the inputs."""
        each = len(self.x) // len(rows)
        return torch.stack([self.step(torch.arange(len(rows)) * each + t, states, columns, rows)
                            for t in tokens], 1)

    def check(self, out: Tensor, state: Tensor, columns: Tensor, at: int, row: int) -> None:
        """What came of the len(out) tokens from `at` on, after those of `row`."""
        want, wanted_state, kept = self.one_by_one(at, len(out), row)
        torch.testing.assert_close(out, want, atol=self.atol, rtol=1e-4)
        torch.testing.assert_close(state, wanted_state, atol=self.atol, rtol=1e-4)
        assert torch.equal(columns, kept)

    def check_others(self, states: Tensor, columns: Tensor, touched: set[int]) -> None:
        """Rows that nobody named are as they were."""
        others = [row for row in range(ROWS) if row not in touched]
        assert torch.equal(states[others], self.states[others])
        assert torch.equal(columns[others], self.columns[others])


def check_extend(kind: type[Layer], sizes: Any, runs: list[ExtendRun], width: int,
                 chunk: int = 64) -> None:
    """Outputs, states and columns of the runs, those kept on the way too."""
    layer = kind(sum(run.length for run in runs), sizes, width)
    states, columns = layer.states.clone(), layer.columns.clone()
    out = layer.extend(states, columns, plan_ragged(runs, width, CPU, chunk))
    touched, at = set(), 0
    for run in runs:
        for tokens, row in [*run.saves, (run.length, run.row)]:
            layer.check(out[at:at + tokens], states[row], columns[row], at, run.row)
            touched.add(row)
        at += run.length
    layer.check_others(states, columns, touched)


def check_steps(layer: Layer) -> None:
    """Two sequences of 10 tokens, token by token, in rows that do not follow one another."""
    rows, states, columns = torch.tensor([7, 2]), layer.states.clone(), layer.columns.clone()
    out = layer.steps(rows, range(10), states, columns)
    for i, row in enumerate(rows.tolist()):
        layer.check(out[i], states[row], columns[row], 10 * i, row)
    layer.check_others(states, columns, {7, 2})


class Layout(NamedTuple):
    """Of a step, and how it is computed."""

    runs: list[ExtendRun]
    width: int
    chunk: int


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Sequences in rows of their own, with states kept on the way in others."""
    rows = draw(st.permutations(range(ROWS)))
    runs = []
    for length in draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)):
        cuts = draw(st.lists(st.integers(1, length), max_size=2))
        runs.append(ExtendRun(rows.pop(), length, tuple((cut, rows.pop()) for cut in cuts)))
    return Layout(runs, draw(st.integers(2, 4)), draw(st.sampled_from([4, 16, 64])))
