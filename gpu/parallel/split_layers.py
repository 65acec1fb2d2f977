"""Parts of a model whose weights several ranks share, so that those who use them notice nothing:
each gives on every rank what the whole would (Megatron-LM, arXiv 1909.08053, section 3).

What is made token by token on each rank's own heads or columns needs none of this: it ends in a
product whose weight's columns are shared out, and whose partial sums are summed here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.gpu.parallel.rank_group import RankGroup
from actorium.kernels.grouped_rows import RowLookup
from actorium.kernels.inputs import Input, InputForm, plain
from actorium.kernels.linear import Linear


class SummedLinear(Linear):
    """A product of which each rank has the weight's columns that meet its part of the input. x:
    that part, [T, K / ranks], or the whole input -> [T, N], summed over the ranks; where the group
    takes parts in f32, and the product gives them so, rounded once."""

    def __init__(self, linear: Linear, group: RankGroup, columns: int = 0) -> None:
        """linear: the rank's part; its bias is the whole one on one rank, and zeros on others.
        columns: of a rank's weight, all alike, where every rank has the whole input, of which it
        takes its columns; the last one's may be more than are left."""
        self.linear, self.group, self.columns = linear, group, columns

    @property
    def form(self) -> InputForm:  # type: ignore[override]
        return self.linear.form

    def __call__(self, x: Input) -> Tensor:
        return self.group.reduce_to(self.part(x), x.dtype)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        return self.group.reduce_add(self.part(x), residual)

    def sums(self, dtype: torch.dtype) -> bool:
        """See `Linear`: where the ranks do."""
        return self.group.sums(dtype)

    def wide(self, x: Input) -> Tensor:
        return self.group.all_reduce(self.linear.wide(x))

    def part(self, x: Input) -> Tensor:
        """What this rank adds to the sum, [T, N], of x's dtype or in f32."""
        if self.columns:
            start = self.group.place.rank * self.columns
            own = plain(x)[:, start:start + self.columns]
            x = F.pad(own, (0, self.columns - own.shape[1])).contiguous()
        form = self.linear.form
        if self.group.wide and self.linear.widens and (form.int8 or not form.columns):
            return self.linear.wide(x)
        return self.linear(x)


class MixtureSum:
    """What adds up what the leaves of a mixture give, those of a rank and those of all: each is a
    rounded sum of what experts gave, and their sum is rounded once."""

    def __init__(self, group: RankGroup, leaves: int) -> None:
        """leaves: of a rank, side by side."""
        self.group, self.leaves = group, leaves

    def sums(self, dtype: torch.dtype) -> bool:
        """Never with what is added to it: that would be rounded otherwise on one rank."""
        return False

    def all_reduce(self, x: Tensor) -> Tensor:
        """[T, leaves * N] -> [T, N]."""
        own = list(x.float().chunk(self.leaves, 1))
        while len(own) > 1:
            own = [a + b for a, b in zip(own[::2], own[1::2], strict=True)]
        return self.group.reduce_to(own[0].contiguous(), x.dtype)


class SplitEmbedding:
    """An embedding of whose rows each rank has its own; a `RowLookup`."""

    def __init__(self, own: Tensor | RowLookup, rows: int, group: RankGroup) -> None:
        """own: the rank's `rows` rows, or what looks them up."""
        self.own, self.count, self.group = own, rows, group

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, hidden] for i64[T], of the whole vocabulary: others add zeros to the one rank's."""
        local = ids - self.group.place.rank * self.count
        there = (local >= 0) & (local < self.count)
        at = torch.where(there, local, 0)
        found = (self.own.index_select(0, at) if isinstance(self.own, Tensor)
                 else self.own.rows(at, dtype))
        return self.group.all_reduce(torch.where(there.unsqueeze(1), found, 0))


class SplitHead(Linear):
    """A head of whose rows each rank has its own; all ranks get all logits."""

    def __init__(self, linear: Linear, vocabulary: int, group: RankGroup) -> None:
        """linear: the rank's rows, as many on each; vocabulary: all tokens, perhaps fewer than that
        makes."""
        self.linear, self.vocabulary, self.group = linear, vocabulary, group

    @property
    def form(self) -> InputForm:  # type: ignore[override]
        return self.linear.form

    def __call__(self, x: Input) -> Tensor:
        return self._gathered(self.linear(x))

    def add(self, x: Input, residual: Tensor) -> Tensor:
        return residual + self(x)

    def wide(self, x: Input) -> Tensor:
        return self._gathered(self.linear.wide(x))

    def logits(self, x: Input) -> Tensor:
        return self._gathered(self.linear.logits(x))

    def _gathered(self, y: Tensor) -> Tensor:
        """[R, V], contiguous whatever V is: who samples reckons rows by it."""
        return self.group.all_gather(y, columns=self.vocabulary)


def norm_over(group: RankGroup, parts: Sequence[Tensor], weights: Sequence[Tensor],
              eps: float) -> list[Tensor]:
    """`TorchOps.rms_norm` of several rows, of each of which the ranks have a part each, all as many
    numbers; some may have the same. parts: [T, D] each; weights: [D] each."""
    means = torch.cat([part.float().square().mean(-1, keepdim=True) for part in parts], -1)
    scales = torch.rsqrt(group.all_reduce(means) / group.place.size + eps)
    return [weight * (part.float() * scale).to(part.dtype)
            for part, weight, scale in zip(parts, weights, scales.split(1, -1), strict=True)]


def norm_gated_over(group: RankGroup, shared_by: int, x: Tensor, weight: Tensor, gate: Tensor,
                    eps: float) -> Tensor:
    """`TorchOps.norm_gated` of one part of the last dimension, of which `shared_by` neighbouring
    ranks have an equal share each. x: f32[T, D]; weight: f32[D]; gate: [T, D], of any row stride.
    """
    gated = x * F.silu(gate.float())
    squares = group.all_gather(gated.square().mean(-1, keepdim=True))
    first = group.place.rank // shared_by * shared_by
    mean = squares[:, first:first + shared_by].mean(-1, keepdim=True)
    return gated.mul_(torch.rsqrt(mean + eps)).mul_(weight).to(gate.dtype)
