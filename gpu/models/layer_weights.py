"""Taking a model's weights out of what the loader read, joined as the forward pass wants them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.parallel.rank_group import LoneRank, RankGroup
from actorium.gpu.parallel.split_layers import MixtureSum, SummedLinear
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.gpu.weights.lazy_tensors import (
    INPUT_ORDER,
    LazyTensor,
    WeightTensors,
    drop_pages,
    materialised,
    not_to_be_kept,
)
from actorium.kernels.cpu.column_parts import LeafProducts, leaf_columns
from actorium.kernels.grouped_rows import (
    ROWS,
    BlockRows,
    RowFormat,
    RowLookup,
    is_grouped,
    row_format,
    stacked_blocks,
)
from actorium.kernels.linear import (
    ConcatLinear,
    Gated,
    Linear,
    Reordered,
    TileGated,
    TileLinear,
    huge,
)
from actorium.kernels.reference.torch_ops import TorchOps


class Part(NamedTuple):
    """Rows of a product's weight."""

    weight: Tensor
    """[N, K]; or rows in FP8 or in 4 to 8 bits, see `TorchOps.linear`."""
    bias: Tensor | None = None
    """[N]"""
    order: Tensor | None = None
    """i64[K], which column of the input meets each column of the weight; None: its own."""
    mapped: bool = False
    """The weight is pages of a file."""
    module: str = ""
    """Name of the checkpoint's module that the rows are of."""
    rows: Tensor | None = None
    """i64[N]: which of that module's rows each is; None: all of them in their order."""
    shared: bool = False
    """Who keeps the weight copies it: see `not_to_be_kept`."""

    def kept(self) -> Part:
        """The same, to be kept."""
        if not self.shared:
            return self
        copy = self._replace(weight=self.weight.clone(), mapped=False, shared=False)
        if self.mapped:
            drop_pages(self.weight)
        return copy

    @property
    def kind(self) -> tuple[torch.dtype, int, RowFormat | None, bytes]:
        """Equal for parts whose rows can lie in one weight."""
        rows = row_format(self.weight) if is_grouped(self.weight) else None
        order = b"" if self.order is None else self.order.cpu().numpy().tobytes()
        return self.weight.dtype, self.weight.shape[1], rows, order


class ModuleRows(NamedTuple):
    """Rows of a product's weight that are of one of the checkpoint's modules."""

    module: str
    outs: int
    rows: Tensor | None = None
    """See `Part`."""


class NamedProduct(NamedTuple):
    """A product, and the modules of the checkpoint that its weight is made of."""

    product: Linear | Gated
    modules: tuple[ModuleRows, ...]
    """From its first row on."""
    activation: str = ""
    """Of a `Gated`."""


class RoutingTape:
    """The experts that the mixtures of a model choose, noted while somebody asks for them."""

    def __init__(self) -> None:
        self.chosen: list[Tensor] | None = None
        """i64[T, chosen] of each mixture so far, in the order of the layers; None: nobody asks."""

    def add(self, chosen: Tensor) -> None:
        """What the next mixture has chosen."""
        if self.chosen is not None:
            self.chosen.append(chosen)


class LayerWeights:
    """Tensors whose names begin with `prefix`; each is taken once."""

    def __init__(self, tensors: WeightTensors, prefix: str, ops: TorchOps, plus_one: bool,
                 group: RankGroup = LoneRank(), beside: int = 1,
                 device: torch.device = torch.device("cpu"),
                 made: list[NamedProduct] | None = None,
                 tape: RoutingTape | None = None) -> None:
        """plus_one: norms multiply by 1 + weight; group: of ranks that share the model; beside: see
        `parts`; device: where what is made of no tensor lies; made: gets all products that are
        made, but for those in leaves; tape: of the model's mixtures."""
        self.tensors, self.prefix, self.ops, self.plus_one = tensors, prefix, ops, plus_one
        self.group, self.beside, self.device = group, beside, device
        self.made = [] if made is None else made
        self.tape = tape or RoutingTape()

    def under(self, prefix: str) -> LayerWeights:
        """Those with a longer prefix."""
        return self.at(self.prefix + prefix)

    def at(self, prefix: str) -> LayerWeights:
        """Those with another prefix."""
        return LayerWeights(self.tensors, prefix, self.ops, self.plus_one, self.group, self.beside,
                            self.device, self.made, self.tape)

    def parts(self) -> LayerWeights:
        """The same, of which each rank gives its part, its leaves side by side: for a mixture,
        which sums those of all its experts at once."""
        return LayerWeights(self.tensors, self.prefix, self.ops, self.plus_one,
                            beside=self.group.leaves, device=self.device, made=self.made)

    def mixture_sum(self) -> RankGroup | MixtureSum | None:
        """What sums `parts`; None: there is one."""
        group, sure = self.group, self.group.exact_ranks > 1
        return MixtureSum(group, group.leaves) if sure else group if group.place.size > 1 else None

    def pop(self, *names: str) -> Tensor:
        """One tensor, or several stacked."""
        parts = [materialised(self.tensors.pop(self.prefix + name)) for name in names]
        return parts[0] if len(parts) == 1 else joined(parts)

    def put(self, name: str, tensor: Tensor) -> None:
        """What is to be taken under this name."""
        self.tensors[self.prefix + name] = tensor

    def optional(self, name: str) -> Tensor | None:
        """One tensor, if it is there."""
        found = self.tensors.pop(self.prefix + name, None)
        return None if found is None else materialised(found)

    def dtype(self, name: str) -> torch.dtype:
        """That of this projection's weight: see `TorchOps.linear`."""
        return self.tensors[f"{self.prefix}{name}.weight"].dtype

    def reordered(self, name: str) -> bool:
        """Whether this projection has its columns in an order of its own."""
        return f"{self.prefix}{name}{INPUT_ORDER}" in self.tensors

    def part(self, bias: bool, name: str) -> Part:
        """A projection."""
        found = self.tensors[f"{self.prefix}{name}.weight"]
        weight = found.read() if isinstance(found, LazyTensor) else found
        shared = isinstance(found, LazyTensor) and not_to_be_kept(found, weight)
        del self.tensors[f"{self.prefix}{name}.weight"]
        return Part(weight, self.pop(f"{name}.bias") if bias else None,
                    self.optional(f"{name}{INPUT_ORDER}"),
                    isinstance(found, LazyTensor) and found.mapped, f"{self.prefix}{name}",
                    shared=shared)

    def linear(self, bias: bool, *names: str) -> Linear:
        """Projections of the same input as one product."""
        blocks = self._blocks(names)
        if blocks is None:
            return self.product([self.part(bias, name) for name in names])
        modules = self._in_blocks(names)
        own = [self.ops.linear_of_blocks(weight, self._biases(bias, part))
               for weight, part in blocks]
        made = own[0] if len(own) == 1 else ConcatLinear(own)
        self.made.append(NamedProduct(made, modules))
        return made

    def summed(self, bias: bool, name: str) -> Linear:
        """A projection whose weight's columns the ranks share: what it gives is the sum of what
        theirs give."""
        group = self.group
        if group.place.size == group.leaves == self.beside == 1:
            return self.linear(bias, name)
        part = self.part(bias, name).kept()
        if group.place.rank and part.bias is not None:
            part = part._replace(bias=torch.zeros_like(part.bias))  # rank 0 adds it
        if self.beside > 1:
            leaves = leaf_columns(part.weight, self.beside)
            biases = [part.bias, *[None] * (self.beside - 1)]
            return LeafProducts(list(map(self.ops.linear, leaves, biases)), leaves[0].shape[1])
        own = self._in_leaves(part)
        return own if group.place.size == 1 else SummedLinear(own, group)

    def joined(self, name: str) -> Linear:
        """The same where every rank has the whole of the input, of which it takes its part."""
        part, group = self.part(False, name).kept(), self.group
        own = self._in_leaves(part)
        return own if group.place.size == 1 else SummedLinear(own, group, part.weight.shape[1])

    def _in_leaves(self, part: Part) -> Linear:
        if self.group.leaves == 1 or part.order is not None:
            return self.product([part])
        return self.ops.linear_in_leaves(part.weight, part.bias, self.group.leaves)

    def product(self, parts: Sequence[Part]) -> Linear:
        """One product with these rows; those in different formats side by side."""
        own = [_ordered(self._linear(part), part) for part in stacked(parts)]
        if all(isinstance(each, TileLinear) for each in own):
            _let_go(parts)
        made = own[0] if len(own) == 1 else ConcatLinear(own)
        self.made.append(NamedProduct(made, _modules(parts)))
        return made

    def _linear(self, part: Part) -> Linear:
        made = self.ops.linear(part.weight, part.bias)
        keeps = part.shared and not isinstance(made, TileLinear)
        return self.ops.linear(part.kept().weight, part.bias) if keeps else made

    def gated(self, bias: bool, activation: str, *names: str) -> Gated:
        """Gate and up of an MLP."""
        blocks = self._blocks(names)
        if blocks is not None and len(blocks) == 1:
            modules = self._in_blocks(names)
            own = self.ops.gated_of_blocks(blocks[0][0], self._biases(bias, names), activation)
            self.made.append(NamedProduct(own, modules, activation))
            return own
        if blocks is not None:
            return self.ops.gated_by(self.linear(bias, *names), activation)
        read = [self.part(bias, name) for name in names]
        parts = stacked(read)
        # Gates are rounded alike whether or not ranks share their rows out.
        uneven = max(self.beside, self.group.leaves) > 1 and len(parts[0].weight) % (
            32 * max(self.beside, self.group.leaves))
        if len(parts) > 1 or parts[0].order is not None or uneven:
            return self.ops.gated_by(self.product(parts), activation)
        own = self.ops.gated(parts[0].kept().weight, parts[0].bias, activation)
        if isinstance(own, TileGated):
            _let_go(read)
        self.made.append(NamedProduct(own, _modules(read), activation))
        return own

    def clamped(self, bias: bool, clamp: tuple[float, float], *names: str) -> Gated:
        """Gate and up of an expert with a clamped SwiGLU, see `ExpertShape.clamp`."""
        return self.ops.clamped_gated(self.linear(bias, *names), *clamp)

    def embedding(self, name: str, is_head: bool) -> tuple[Tensor | RowLookup, Linear | None]:
        """([V, K], or what gives its rows; a product with it, where it is the head as well)."""
        if self.dtype(name) is not ROWS:
            if not is_head:
                return self.pop(f"{name}.weight"), None
            embed = self.part(False, name).kept()
            head = self.product([embed])
            return head if isinstance(head, TileLinear) else embed.weight, head
        looked_up = self.linear(False, name)
        return cast(RowLookup, looked_up), looked_up

    def _blocks(self, names: Sequence[str]) -> list[tuple[BlockRows, list[str]]] | None:
        """The weights of these projections where all still lie in files, neighbours in one format
        as one, with their names."""
        weights: list[tuple[BlockRows, str]] = []
        for name in names:
            found = self.tensors.get(f"{self.prefix}{name}.weight")
            if not isinstance(found, LazyTensor) or found.blocks is None or self.reordered(name):
                return None
            weights.append((found.blocks, name))
        runs = [list(run) for _, run in groupby(weights, lambda each: each[0][:2])]
        return [(stacked_blocks([weight for weight, _ in run]), [name for _, name in run])
                for run in runs]

    def _in_blocks(self, names: Sequence[str]) -> tuple[ModuleRows, ...]:
        """Those of projections whose weights still lie in files."""
        weights = [(f"{self.prefix}{name}", self.tensors[f"{self.prefix}{name}.weight"])
                   for name in names]
        return tuple(ModuleRows(name, own.blocks.outs) for name, own in weights
                     if isinstance(own, LazyTensor) and own.blocks is not None)

    def _biases(self, bias: bool, names: Sequence[str]) -> Tensor | None:
        """Of these projections, whose weights have been laid out from their files."""
        for name in names:
            del self.tensors[f"{self.prefix}{name}.weight"]
        return self.pop(*(f"{name}.bias" for name in names)) if bias else None

    def norm(self, name: str) -> Tensor:
        """A norm's weight, with the 1 folded in."""
        weight = self.pop(f"{name}.weight")
        return (weight.float() + 1).to(weight.dtype) if self.plus_one else weight

    def norm_of(self, s: ModelShape, name: str, device: torch.device) -> Tensor:
        """The weight of a norm of hidden states, [hidden]; of a LayerNorm [2, hidden], its bias
        behind it, where a checkpoint may have only one of them, or none."""
        if not s.layer_norm:
            return self.norm(name)
        own = torch.tensor([[1.0], [0.0]], dtype=TORCH_DTYPES[s.dtype]).to(device)
        own = own.repeat(1, s.hidden)
        for row, part in enumerate(("weight", "bias")):
            if part in s.norm_parts:
                own[row] = self.pop(f"{name}.bias") if row else self.norm(name)
        return own


def stacked(parts: Sequence[Part]) -> list[Part]:
    """The same rows in the same order; neighbours in one format as one part."""
    runs = [list(own) for _, own in groupby(parts, lambda part: part.kind)]
    return [own[0] if len(own) == 1 else Part(
        joined([part.weight for part in own]), _stacked_bias(own), own[0].order)
        for own in runs]


def _modules(parts: Sequence[Part]) -> tuple[ModuleRows, ...]:
    return tuple(ModuleRows(part.module, len(part.weight), part.rows) for part in parts)


def _let_go(parts: Sequence[Part]) -> None:
    """Of the pages of files that a backend has a layout of its own of."""
    for part in parts:
        if part.mapped:
            drop_pages(part.weight)


def joined(parts: list[Tensor]) -> Tensor:
    """These one below the other. In bf16 on a CPU, where the stack is soon laid out anew and freed,
    it lies on huge pages: the faults of small ones took a third of the time to load a model."""
    if parts[0].device.type != "cpu" or any(own.dtype is not torch.bfloat16 for own in parts):
        return torch.cat(parts)
    whole = huge(sum(own.nbytes for own in parts)).view(torch.bfloat16)
    return torch.cat(parts, out=whole.view(-1, *parts[0].shape[1:]))


def _stacked_bias(parts: Sequence[Part]) -> Tensor | None:
    found = [part.bias for part in parts if part.bias is not None]
    return torch.cat(found) if found else None


def _ordered(linear: Linear, part: Part) -> Linear:
    return linear if part.order is None else Reordered(linear, part.order)
