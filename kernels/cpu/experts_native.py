"""A mixture of experts in C: `experts.c`. A row has the same bits whatever other rows there are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actorium.kernels.cpu.grouped_native import LINE, NativeGrouped, NativeGroupedGated
from actorium.kernels.inputs import Input, plain
from actorium.kernels.linear import (
    OUT_BF16,
    OUT_SILU,
    Gated,
    NativeLinear,
    Reordered,
    TileGated,
    TileLinear,
    padded_columns,
)
from actorium.kernels.reference.experts import ExpertChoice, Experts

MAX_EXPERTS = 1024
"""Of `experts.c`."""
MOST_SCRATCH = 64 << 20
"""Bytes of quantised rows that are made at once."""


def choose_experts(lib: ctypes.CDLL, threads: int, logits: Tensor, bias: Tensor | None,
                   choice: ExpertChoice) -> tuple[Tensor, Tensor]:
    """See `reference.experts.choose`; weights in bf16. logits: [T, E], f32 or bf16."""
    rows, number = logits.shape
    weights = torch.empty((rows, choice.chosen), dtype=torch.bfloat16)
    experts = torch.empty((rows, choice.chosen), dtype=torch.int64)
    lib.choose_experts(
        logits.data_ptr(), logits.stride(0), logits.dtype is torch.float32, rows, number,
        choice.chosen, choice.groups, choice.chosen_groups, choice.best, choice.softmax,
        choice.normalised, 0 if bias is None else bias.data_ptr(), choice.added, choice.least,
        choice.factor, weights.data_ptr(), experts.data_ptr(), threads)
    return weights, experts


def combine_rows(lib: ctypes.CDLL, threads: int, weights: Tensor, outs: Tensor,
                 back: Tensor | None = None) -> Tensor:
    """bf16[T, H]: each row's results, weighted, one after the other in f32. weights: bf16[T,
    chosen]; outs: bf16[T * chosen, H]; back: i64[T * chosen], where each choice's lie; None: in
    their order."""
    weights, outs = weights.contiguous(), outs.contiguous()
    y = outs.new_empty((len(weights), outs.shape[1]))
    lib.expert_combine(weights.data_ptr(), outs.data_ptr(), 0 if back is None else back.data_ptr(),
                       y.data_ptr(), *weights.shape, outs.shape[1], threads)
    return y


class ProductOfEach:
    """The same product of all experts, each by its own weight: of codes, or in tiles."""

    def __init__(self, products: Sequence[TileLinear] | Sequence[NativeGrouped],
                 order: Tensor | None, kind: int) -> None:
        """order: of the columns of what is taken, see `Reordered`."""
        first = products[0]
        self.outs = first.outs // 2 if kind == OUT_SILU else first.outs
        self._held, self._first, self._order, self._kind = products, first, order, kind
        address = ctypes.c_void_p * len(products)
        self._weights = address(*(own.layout_at if isinstance(own, NativeGrouped)
                                  else own.packed_at for own in products))
        self._biases = None if first.bias is None else address(*(own.bias_at for own in products))

    def __call__(self, x: Tensor, starts: Tensor, active: Tensor) -> Tensor:
        """x: [N, K], the rows of one expert side by side -> [N, outs]. starts, active: see
        `group_rows`."""
        first, number = self._first, len(self._held)
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        y = x.new_empty((len(x), self.outs))
        own = (ctypes.addressof(self._weights), number, starts.data_ptr(), active.data_ptr())
        given = (x.data_ptr(), 0 if self._biases is None else ctypes.addressof(self._biases),
                 y.data_ptr(), self._kind)
        if isinstance(first, TileLinear):
            first.lib.expert_packed(*own, *given, first.threads)
            return y
        need = len(x) * (first.ins + 8 * first.ins // first.form.columns) + (number + 2) * LINE
        scratch = (first.scratch if not first.scratch.numel() < need <= MOST_SCRATCH
                   else torch.empty((need,), dtype=torch.uint8))
        plan = torch.empty((2, number), dtype=torch.int64)
        first.lib.expert_plan(*own, plan.data_ptr(), first.threads)
        first.lib.expert_grouped(*own, *given, scratch.data_ptr(), scratch.numel(),
                                 plan.data_ptr(), first.threads)
        return y


class NativeExperts(Experts):
    """All experts of a layer, grouped in C, with what lies between their two products."""

    waits = False

    def __init__(self, into: ProductOfEach, act: Callable[[Tensor], Tensor] | None,
                 out_of: ProductOfEach, lib: ctypes.CDLL, threads: int, number: int) -> None:
        """act: None: `into` has it."""
        self._into, self._act, self._out_of, self._number = into, act, out_of, number
        self._lib, self._threads = lib, threads

    def choose(self, logits: Tensor, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
        return choose_experts(self._lib, self._threads, logits, None,
                              ExpertChoice(chosen, normalised, softmax=True, added=0.0))

    def __call__(self, x: Input, weights: Tensor, chosen: Tensor) -> Tensor:
        x, (rows, each), places = plain(x).contiguous(), chosen.shape, chosen.numel()
        if not rows:
            return x.new_empty((0, self._out_of.outs))
        sources, back, starts, active = (
            torch.empty((size,), dtype=torch.int64)
            for size in (places, places, self._number + 1, self._number + 1))
        self._lib.group_rows(chosen.contiguous().data_ptr(), rows, each, self._number,
                             *(own.data_ptr() for own in (sources, back, starts, active)))
        inner = self._into(x.index_select(0, sources), starts, active)
        if self._act is not None:
            inner = self._act(inner)
        outs = self._out_of(inner, starts, active)
        return combine_rows(self._lib, self._threads, weights, outs, back)


def native_experts(into: Sequence[Any], out_of: Sequence[Any], acts: Sequence[Any],
                   lib: ctypes.CDLL, threads: int, scratch: Tensor | None) -> NativeExperts | None:
    """Experts of these products; None where they are not of one kind in C. into: `Gated`s, or with
    `acts`, which are alike, `Linear`s; scratch: see `TileLinear`; None: there are no tiles."""
    kind, act = OUT_BF16, acts[0] if acts else None
    if not acts:
        if all(isinstance(own, NativeGroupedGated) for own in into):
            kind, into = OUT_SILU, [own.product for own in into]
        elif all(isinstance(own, TileGated) for own in into):
            kind, into = OUT_SILU, [own.tiles for own in into]
        elif all(type(own) is Gated for own in into):
            act, into = into[0].gate, [own.linear for own in into]
    first, second = (_one_kind([_in_tiles(own, scratch) for own in each], of) for each, of in (
        (into, kind), (out_of, OUT_BF16)))
    if first is None or second is None or len(into) > MAX_EXPERTS:
        return None
    return NativeExperts(first, act, second, lib, threads, len(into))


def _in_tiles(product: Any, scratch: Tensor | None) -> Any:
    """The same in tiles, of a small weight whose columns are no multiple of theirs."""
    if not isinstance(product, NativeLinear) or scratch is None:
        return product
    wide, order = padded_columns(product.weight)
    return Reordered(TileLinear(wide, product.bias, product.lib, product.threads, scratch), order)


def _one_kind(products: Sequence[Any], kind: int) -> ProductOfEach | None:
    order = products[0].order if isinstance(products[0], Reordered) else None
    if order is not None:
        if not all(isinstance(own, Reordered) and torch.equal(own.order, order)
                   for own in products):
            return None
        products = [own.linear for own in products]
    for own in (TileLinear, NativeGrouped):
        if all(isinstance(product, own) for product in products):
            facts = {(product.outs, product.ins, product.bias is None,
                      getattr(product, "form", None)) for product in products}
            return ProductOfEach(products, order, kind) if len(facts) == 1 else None
    return None
