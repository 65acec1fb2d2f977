"""A second set of a model's layers, whose products adapters may add to. They share all weights with
the model's own, which run the steps in which no row has an adapter: these cost nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from actorium.gpu.families.adapted_modules import adapted_modules
from actorium.gpu.models.decoder import Decoder
from actorium.gpu.models.layer_weights import NamedProduct
from actorium.gpu.parallel.split_layers import SummedLinear
from actorium.gpu.passes import canonical_ops as c
from actorium.gpu.passes.layer_graph import PartGraph
from actorium.gpu.step.batch import ForwardBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.step.states import RecurrentBatch
from actorium.kernels.adapted_linear import Adapted, Halves, StepRows
from actorium.kernels.adapter_rows import AdapterRows, AdapterStack
from actorium.kernels.linear import ConcatLinear, Gated, Linear, Multiplied, SideBySide

Install = Callable[[Decoder], object]
"""Makes a model's `runs` (`PassManager.install`)."""


class ModulePlace(NamedTuple):
    """Where a module of the checkpoint, or some rows of its weight, lie in the products."""

    product: int
    """Index in `AdaptedLayers.stacks`."""
    module: int
    """Index among the modules of the product."""
    rows: Tensor | None
    """i64[N]: which rows of the module's weight, see `Part`."""


class AdaptedLayers:
    """The layers of a model, with adapters in slots."""

    def __init__(self, model: Decoder, slots: int, rank: int, install: Install,
                 filled: Sequence[AdapterStack] = ()) -> None:
        """slots: different adapters of a step; rank: of a module, at most; filled: the stacks of
        the same model with other weights, where there is one, whose adapters stay."""
        self.stacks: list[AdapterStack] = []
        self._filled = list(filled)
        self.places: dict[str, list[ModulePlace]] = {}
        """By name, the modules that adapters may have."""
        self.slots, self.rank = slots, rank
        self._step, self._ops = StepRows(), model.ops
        self._dtype, self._device = model.dtype, model.device
        self._columns = {spec.module: spec.shape[1] for spec in adapted_modules(model.shape)}
        named = {id(own.product): own for own in model.products
                 if own.modules[0].module in self._columns}
        self.model = copy.copy(model)
        """The model with these layers. To run them, see `adapting`."""
        self.model.drafter = None
        self.model.layers = [self._layer(layer, named) for layer in model.layers]
        install(self.model)

    @property
    def nbytes(self) -> int:
        """Of all stacks."""
        return sum(own.nbytes for own in self.stacks)

    def forward(self, rows: AdapterRows, batches: Sequence[ForwardBatch],
                pools: Sequence[KVPagePool], recurrent: RecurrentBatch | None = None) -> Tensor:
        """See `Decoder.forward`. rows: those of the step that have an adapter."""
        wanted = None if batches[0].all_rows else batches[0].logit_rows
        # The last layer, too, takes all rows of the step, as `rows` count them.
        for batch in batches:
            batch.all_rows = True
        with self.adapting(rows):
            hidden = self.model.forward(batches, pools, recurrent)
        return hidden if wanted is None else hidden.index_select(0, wanted)

    @contextmanager
    def adapting(self, rows: AdapterRows) -> Iterator[None]:
        """Meanwhile these are the rows of the step that have an adapter. All its rows must be
        wanted (`ForwardBatch.all_rows`)."""
        self._step.own = rows
        try:
            yield
        finally:
            self._step.own = None

    def warm_up(self) -> None:
        """Runs each kernel that adapters need in every form, on rows that count for nothing."""
        number = torch.zeros(1, dtype=torch.int32, device=self._device)
        rows = AdapterRows(number, torch.tensor([[0, 0, 1]], dtype=torch.int32,
                                                device=self._device))
        for stack in {len(own.widths): own for own in self.stacks}.values():
            x = torch.zeros((1, stack.ins), dtype=self._dtype, device=self._device)
            for dtype in {self._dtype, torch.float32}:
                y = torch.zeros((1, sum(stack.widths)), dtype=dtype, device=self._device)
                self._ops.adapt(x, y, rows, stack)

    def _layer(self, layer: Any, named: dict[int, NamedProduct]) -> Any:
        """A copy of the layer, with adapted products where it takes all rows of a step."""
        graph = PartGraph(layer, "", ("stream", "step"))
        products = [node.args[1] for node in graph.nodes(c.linear)]
        paths = dict.fromkeys(str(own.target) for own in products if isinstance(own, Node))
        for path in paths:
            own = graph.object_at(path)
            made = self._adapted(own, named)
            if made is not own:
                layer = _with(layer, path.split("."), made)
        return layer

    def _adapted(self, own: Any, named: dict[int, NamedProduct]) -> Any:
        """The product with adapters on it, or on the products that it is made of; itself, where
        nothing of it has a name."""
        def each(parts: Sequence[Linear]) -> list[Linear] | None:
            made = [self._adapted(part, named) for part in parts]
            kept = all(one is other for one, other in zip(made, parts, strict=True))
            return None if kept else made

        if (found := named.get(id(own))) is not None:
            return self._named(found)
        if isinstance(own, ConcatLinear | SideBySide):
            parts = each(own.parts)
            if parts is None:
                return own
            return (ConcatLinear(parts) if isinstance(own, ConcatLinear)
                    else SideBySide(parts, own.columns, own.factors))
        inner = getattr(own, "linear", None)
        made = None if inner is None else each([inner])
        if made is None:
            return own
        if isinstance(own, SummedLinear):  # the ranks' parts of what adapters add are summed, too
            return SummedLinear(made[0], own.group, own.columns)
        if isinstance(own, Multiplied):
            return Multiplied(made[0], own.factors, own.before)
        return Gated(made[0], own.gate, own.gate_quant) if type(own) is Gated else own

    def _named(self, own: NamedProduct) -> Linear | Gated:
        gated = own.product if isinstance(own.product, Gated) else None
        product = own.product if gated is None else Halves(gated)
        assert isinstance(product, Linear)
        ins = self._columns[own.modules[0].module]
        stack = self._filled.pop(0) if self._filled else AdapterStack(
            self.slots, self.rank, ins, [part.outs for part in own.modules], self._dtype,
            self._device)
        for module, part in enumerate(own.modules):
            place = ModulePlace(len(self.stacks), module, part.rows)
            self.places.setdefault(part.module, []).append(place)
        self.stacks.append(stack)
        made = Adapted(product, stack, self._step, self._ops.adapt)
        return made if gated is None else self._ops.gated_by(made, own.activation)


def _with(part: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of a part of a model, of which this attribute is replaced."""
    made = copy.copy(part)
    first, *rest = path
    setattr(made, first, _with(getattr(part, first), rest, value) if rest else value)
    return made
