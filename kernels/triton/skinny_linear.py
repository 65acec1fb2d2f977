"""Which products of a few rows run as `skinny` ones, with their norms and gates in the same launch,
and which as cuBLAS's: measured at start, on the model's own weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from actorium.kernels.inputs import Input, InputForm, Unnormed, plain
from actorium.kernels.linear import Gated, Linear
from actorium.kernels.triton.activation import gelu_mul, silu_mul
from actorium.kernels.triton.norm import rms_norm
from actorium.kernels.triton.skinny import CONFIGS, SkinnyConfig, configs_of, skinny

LOG = logging.getLogger(__name__)
BUCKETS = (1, 4, 16, 32, 64, 128, 256)
"""Rows that are measured; those between are as good as the next one. Decodes of more, and prompts,
are bound by their products, not by what is read for them."""
FEW = 16
"""Rows up to which a product that adds is measured too: it saves no launch, only time."""
AT_ONCE = 32
"""Weights of one kind that a measurement reads in turn, as a step does: a single one would stay in
the cache."""
GAIN = 0.98
"""Of the time of the launches apart, at most: what is hardly faster is not worth another path."""
TOLERANCE = 2e-2
"""Of the results, against the largest of them: both ways round at bf16's 2**-9 a few times."""
Timer = Callable[[Callable[[], object]], float]
"""Seconds that a device takes for some work."""


class Kind(NamedTuple):
    """Products that are measured together."""

    what: str
    """normed, added, silu or gelu; the last two are normed as well."""
    outs: int
    width: int
    biased: bool


class Products:
    """The products of a model, and how each kind is run. Apart, until `tune` or `assume`."""

    def __init__(self) -> None:
        self._met: dict[Kind, dict[int, SkinnyLinear]] = {}
        self._chosen: dict[Kind, list[tuple[int, SkinnyConfig | None]]] = {}
        self._assumed: Sequence[SkinnyConfig] = ()

    def config(self, kind: Kind, rows: int, product: SkinnyLinear) -> SkinnyConfig | None:
        """How so many rows of this product are run; None: apart. What is asked for is what `tune`
        measures: most products are run in one way only."""
        if not 0 < rows <= (FEW if kind.what == "added" else BUCKETS[-1]):
            return None
        chosen = self._chosen.get(kind)
        if chosen is None:
            self._met.setdefault(kind, {})[id(product)] = product
            return configs_of(rows, self._assumed)[0] if self._assumed else None
        return next(config for most, config in chosen if rows <= most)

    def assume(self, configs: Sequence[SkinnyConfig]) -> None:
        """All kinds are run by the first of these that suits their rows, without measuring; none:
        apart."""
        self._chosen, self._assumed = {}, configs

    def tune(self, seconds: Timer, configs: Sequence[SkinnyConfig] = CONFIGS) -> None:
        """Measure every kind that steps so far have asked for, at a few numbers of rows, and keep
        what is fastest and right."""
        for kind, met in self._met.items():
            self._chosen[kind] = best = _best(kind, met, seconds, configs)
            LOG.info("%s %d x %d: %s", kind.what, kind.outs, kind.width,
                     ", ".join(f"{rows} rows {config or 'apart'}" for rows, config in best))
        self._met = {}

    def rehearse(self) -> None:
        """Launch what `tune` would measure, once each, and forget that it was asked for."""
        for kind, met in self._met.items():
            _best(kind, met, lambda work: 0.0, CONFIGS)
        self._met = {}


class SkinnyLinear(Linear):
    """A product that sums in its epilogue, and rounds the sum once; of a few rows perhaps with the
    norm in front."""

    def __init__(self, weight: Tensor, bias: Tensor | None, products: Products,
                 gate: str = "") -> None:
        """gate: silu or gelu; the product of a `SkinnyGated`."""
        super().__init__(weight, bias)
        self.products, size = products, (*weight.shape, bias is not None)
        self.normed_kind = Kind(gate or "normed", *size)
        self.added_kind = Kind("added", *size)
        self.form = InputForm(norms=self._norms)

    def _norms(self, rows: int) -> bool:
        return self.products.config(self.normed_kind, rows, self) is not None

    def __call__(self, x: Input) -> Tensor:
        """See `Linear`; gated, where it has a gate and x is `Unnormed`."""
        if not isinstance(x, Unnormed):
            return F.linear(plain(x), self.weight, self.bias)
        config = self.products.config(self.normed_kind, len(x), self)
        if config is None:
            raise ValueError(f"{len(x)} rows are to be normed before this product")
        return self._run(self.normed_kind, x.x, config, x)

    def add(self, x: Input, residual: Tensor) -> Tensor:
        """residual + y, in the residual's memory where there is no bias."""
        if self.bias is not None or residual.dtype is not self.weight.dtype:
            return residual + self(x)
        x = plain(x)
        config = self.products.config(self.added_kind, len(x), self)
        if config is not None and residual.is_contiguous():
            return self._run(self.added_kind, x, config, residual=residual)
        return residual.addmm_(x, self.weight.t())

    def logits(self, x: Input) -> Tensor:
        """See `Linear.logits`: widened by whoever reads them."""
        return self(x)

    def fused(self, kind: Kind, x: Unnormed, config: SkinnyConfig, residual: Tensor) -> Tensor:
        """One launch: what `apart` gives."""
        if kind.what == "added":
            return self._run(kind, x.x, config, residual=residual)
        return self._run(kind, x.x, config, x)

    def _run(self, kind: Kind, x: Tensor, config: SkinnyConfig, norm: Unnormed | None = None,
             residual: Tensor | None = None) -> Tensor:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        gate = "" if kind.what in ("normed", "added") else kind.what
        return skinny(x.contiguous(), self.weight, config, self.bias, weight, eps, gate, residual)

    def apart(self, kind: Kind, x: Unnormed, residual: Tensor) -> Tensor:
        """The same in launches of their own."""
        if kind.what == "added":
            return residual.addmm_(x.x, self.weight.t())
        y = F.linear(rms_norm(x.x, x.weight, x.eps), self.weight, self.bias)
        if kind.what == "normed":
            return y
        return silu_mul(y) if kind.what == "silu" else gelu_mul(y)


class SkinnyGated(Gated):
    """silu(gate) * up in one launch where that is chosen; gate and up are not rounded in between
    then."""

    fuses = True

    def __call__(self, x: Input, form: InputForm = InputForm()) -> Input:
        if not isinstance(x, Unnormed):
            return super().__call__(x, form)
        if form.plain:
            return self.linear(x)
        return super().__call__(rms_norm(x.x, x.weight, x.eps), form)


def _best(kind: Kind, met: Mapping[int, SkinnyLinear], seconds: Timer,
          configs: Sequence[SkinnyConfig]) -> list[tuple[int, SkinnyConfig | None]]:
    """What each number of rows is best run with, beside it; None: apart."""
    products = list(met.values())[:AT_ONCE]
    return [(rows, _fastest(kind, products, rows, seconds, configs_of(rows, configs)))
            for rows in BUCKETS if rows <= FEW or kind.what != "added"]


def _fastest(kind: Kind, products: Sequence[SkinnyLinear], rows: int, seconds: Timer,
             configs: Sequence[SkinnyConfig]) -> SkinnyConfig | None:
    """What so many rows are best run with; None: apart."""
    weight = products[0].weight
    generator = torch.Generator(weight.device).manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        wide = torch.randn(shape, generator=generator, device=weight.device)
        return wide.to(weight.dtype)

    x = Unnormed(drawn(rows, kind.width), drawn(kind.width).abs() + 0.5, 1e-5)
    residual = drawn(rows, kind.outs)
    sums = residual.clone()  # each product adds to it: its values do not matter for the time
    want = products[0].apart(kind, x, residual.clone()).float()
    best: SkinnyConfig | None = None
    least = GAIN * seconds(lambda: [own.apart(kind, x, sums) for own in products])
    gated = kind.what in ("silu", "gelu")
    for config in configs:
        if gated and not config.gated:
            continue
        try:
            got = products[0].fused(kind, x, config, residual.clone()).float()
        except OutOfResources:  # a device with less shared memory than Hopper's
            continue
        if not float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max()):
            LOG.warning("%s with %s: not what it should be; not used", kind, config)
            continue
        taken = seconds(partial(_in_turn, products, kind, x, config, sums))
        if taken < least:
            best, least = config, taken
    return best


def _in_turn(products: Sequence[SkinnyLinear], kind: Kind, x: Unnormed, config: SkinnyConfig,
             sums: Tensor) -> None:
    for own in products:
        own.fused(kind, x, config, sums)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all that is measured: for each that there ever was cuBLAS keeps a workspace, on
    Hopper of 32 MiB."""
    return torch.cuda.Stream(device)


def replayed_seconds(work: Callable[[], object], times: int = 5) -> float:
    """Seconds of the work on the current CUDA device, replayed from a graph, as steps do it: what
    the host needs for its launches does not count. The least of so many."""
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(times + 1):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return min(found[1:])
