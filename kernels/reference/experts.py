"""A mixture of experts, grouped: the rows of each expert in one product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.kernels.inputs import Input, InputForm, plain
from actorium.kernels.linear import Gated, Linear
from actorium.kernels.reference.activation import clamped_swiglu


def route(logits: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """(weights, experts): [T, chosen] each, of the highest softmax probabilities.

    logits: [T, E]; weights have its dtype; normalised: they add up to 1.
    """
    weights, experts = logits.float().softmax(-1).topk(chosen, -1)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts


def route_groups(
    scores: Tensor, bias: Tensor | None, groups: int, chosen_groups: int, chosen: int,
    good: int = 2,
) -> tuple[Tensor, Tensor]:
    """(scores, experts): [T, chosen] each, of the highest of scores + bias among the experts of the
    best groups, a group being as good as its `good` best (DeepSeek-V3, arXiv 2412.19437).

    scores: f32[T, E], above 0; bias: f32[E], None: 0. E is a multiple of groups.
    """
    biased = (scores if bias is None else scores + bias).unflatten(1, (groups, -1))
    if chosen_groups < groups:
        best = biased.topk(good, -1).values.sum(-1).topk(chosen_groups, -1).indices
        closed = torch.ones(biased.shape[:2], dtype=torch.bool, device=scores.device)
        closed.scatter_(1, best, False)
        biased = biased.masked_fill(closed.unsqueeze(-1), -torch.inf)
    experts = biased.flatten(1).topk(chosen, -1).indices
    return scores.gather(1, experts), experts


class ExpertChoice(NamedTuple):
    """How a row's experts are chosen by a router's scores."""

    chosen: int
    normalised: bool = False
    """Weights add up to `factor`."""
    groups: int = 1
    chosen_groups: int = 1
    best: int = 2
    """See `route_groups`, as of the last two."""
    softmax: bool = False
    """Scores are probabilities; else sigmoids."""
    added: float = 1e-20
    """To the sum that weights are divided by."""
    least: float = 0.0
    """Of that sum."""
    factor: float = 1.0
    """On the weights."""


def choose(logits: Tensor, bias: Tensor | None, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
    """f32[T, chosen] weights, i64[T, chosen] experts. logits: f32[T, E], which may be overwritten;
    bias: f32[E] on the scores, when experts are chosen."""
    scores = logits.softmax(-1) if choice.softmax else logits.sigmoid_()
    weights, experts = route_groups(scores, bias, choice.groups, choice.chosen_groups,
                                    choice.chosen, choice.best)
    if choice.normalised:
        total = weights.sum(-1, keepdim=True) + choice.added
        weights = weights / (total.clamp_min(choice.least) if choice.least else total)
    return weights * choice.factor, experts


class Experts(ABC):
    """The experts of a layer."""

    waits = True
    """Whether the host must know how the rows are split over the experts before it can go on."""

    form = InputForm()
    """The form in which x is best given; see `Linear`."""

    def choose(self, logits: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
        return route(logits, chosen, normalised)

    @abstractmethod
    def __call__(self, x: Input, weights: Tensor, chosen: Tensor) -> Tensor:
        """sum over each row's experts of weight * expert(row): [T, H].

        x: [T, H]; weights, chosen: [T, chosen], in the dtype of x and i64.
        """


class ExpertExtras(NamedTuple):
    """What some mixtures have beside weights."""

    gate_up_bias: Tensor | None = None
    """[E, 2 * I]"""
    down_bias: Tensor | None = None
    """[E, H]; there is one where the other is."""
    clamp: tuple[float, float] | None = None
    """(alpha, limit) of `clamped_swiglu`; None: the activation, times up."""
    activation: str = "silu"
    """silu or gelu (its tanh form); of experts without biases."""


class ExpertProducts(Protocol):
    """An expert made of products, [n, H] -> [n, H]."""

    @property
    def gate_up(self) -> Gated:
        """Its gate and what it is times."""

    @property
    def down(self) -> object:
        """A `Linear`, or what has one."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, H] -> [n, H]."""


class UngatedProducts(Protocol):
    """The same of one without a gate."""

    @property
    def up(self) -> Linear:
        """Its first product."""

    @property
    def down(self) -> object:
        """See `ExpertProducts`."""

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """Between them."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, H] -> [n, H]."""


def combine(weights: Tensor, outs: Tensor) -> Tensor:
    """[T, H]: each row's results, weighted. weights: [T, chosen]; outs: [T * chosen, H]."""
    return torch.bmm(weights.unsqueeze(1), outs.view(*weights.shape, outs.shape[1])).squeeze(1)


Combine = Callable[[Tensor, Tensor], Tensor]
"""`combine` in another way. torch's product rounds a row otherwise among a hundred than alone, now
and then (one number of 650,000 in bf16)."""


class EachExpert(Experts):
    """Runs experts one after the other, of any kind."""

    def __init__(self, run: Sequence[Callable[[Tensor], Tensor]],
                 combined: Combine = combine) -> None:
        """run: each expert, [n, H] -> [n, H]."""
        self._run, self._combined = run, combined

    def __call__(self, x: Input, weights: Tensor, chosen: Tensor) -> Tensor:
        return mix_experts(plain(x), weights, chosen, self._run, self._combined)


class StackedExperts(Experts):
    """The reference of experts whose rows are grouped on the device. Each row multiplies with
    copies of its experts' weights: for small models."""

    waits = False

    def __init__(self, gate_up: Tensor, down: Tensor,
                 extras: ExpertExtras = ExpertExtras()) -> None:
        """gate_up: [E, 2 * I, H], gate's rows before those of up; down: [E, H, I]."""
        self.gate_up, self.down, self.extras = gate_up, down, extras

    def __call__(self, x: Input, weights: Tensor, chosen: Tensor) -> Tensor:
        x = plain(x)
        experts, rows = chosen.flatten(), x.repeat_interleave(chosen.shape[1], 0).unsqueeze(2)
        first, second, clamp, activation = self.extras
        both = self._product(self.gate_up, first, experts, rows).float()
        gate, up = both.chunk(2, 1)
        act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        inner = act * up if clamp is None else clamped_swiglu(both.mT, *clamp).mT
        outs = self._product(self.down, second, experts, inner.to(x.dtype))
        return combine(weights, outs.squeeze(2))

    def _product(self, weight: Tensor, bias: Tensor | None, experts: Tensor, x: Tensor) -> Tensor:
        """[T, N, 1], of x [T, K, 1], by each row's expert."""
        own = torch.bmm(weight.index_select(0, experts), x)
        return own if bias is None else own + bias.index_select(0, experts).unsqueeze(2)


def grouped(chosen: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(order, ends): i64[T * chosen], which row of the flat `chosen` lies at each place where rows
    of one expert lie side by side; i64[E], the place behind the last row of each expert.

    chosen: i64[T, chosen]; numbers: i64[E], those of the experts. Waits for nothing.
    """
    sorted_experts, order = chosen.flatten().sort(stable=True)
    return order, torch.searchsorted(sorted_experts, numbers, right=True)


def mix_experts(x: Tensor, weights: Tensor, experts: Tensor,
                run: Sequence[Callable[[Tensor], Tensor]], combined: Combine = combine) -> Tensor:
    """sum over each row's experts of weight * expert(row).

    x: [T, H]; weights, experts: [T, chosen]; run: each expert, [n, H] -> [n, H], or of another
    width.
    """
    chosen = experts.shape[1]
    if not len(x):
        return run[0](x)
    if len(x) == 1:
        alone = torch.cat([run[expert](x) for expert in experts[0].tolist()])
        return combined(weights, alone)
    sorted_experts, order = experts.flatten().sort(stable=True)
    counts = torch.bincount(sorted_experts, minlength=len(run)).tolist()
    grouped = x.index_select(0, order // chosen)
    outs, at = [], 0
    for expert, count in zip(run, counts, strict=True):
        if count:
            outs.append(expert(grouped[at:at + count]))
            at += count
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return combined(weights, torch.cat(outs).index_select(0, back))
