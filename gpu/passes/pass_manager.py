"""Traces a model's layers, runs the passes, checks what they made, and gives it to the model.

Every layer is traced by itself; layers whose graphs are equal share what passes make of the first
of them. A pattern that is found more or less often than the model's shape says ends the start: it
would be a fusion lost in silence, or one that was not meant. What is made of a layer is run beside
what its graph means, both on random input, each with a cache of its own, up to the middle and on
from there: results that differ end the start as well."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from actorium.actors.errors import BadConfig, BadModel
from actorium.gpu.families.tensor_specs import layer_prefix
from actorium.gpu.models.decoder import Decoder, LayerRun, MtpDrafter
from actorium.gpu.models.forward_context import NO_ATTENTION, ForwardContext, GroupContext
from actorium.gpu.passes.fusion_pass import FusionPass, LayerFacts, head_form, takes_fp8
from actorium.gpu.passes.fusions import ALL
from actorium.gpu.passes.layer_graph import Lines, PartGraph, Pending, lowered, reduces
from actorium.gpu.step.pools import KVPagePool
from actorium.kernels.inputs import HiddenStream, InputForm, settled
from actorium.kernels.reference.kv import read_rows

LOG = logging.getLogger("actorium.passes")
Functions = tuple[FunctionType, ...]
STREAM, PIECE = ("stream", "step"), ("x",)
ROWS = 3
"""Of the random input."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of a difference, see `_apart`: joined operations leave out roundings, of 2**-9 in bfloat16."""
FP8_TOLERANCE = 6e-2
"""The same where products take FP8: an input that is rounded otherwise is off by 2**-4."""
WIDE_TOLERANCE = 4e-2
"""The same in bfloat16 where products take codes with a scale a row: a token's input is rounded to
8 bits by its largest number."""
PAGE_TOLERANCE = {torch.int8: 2e-2, torch.float8_e4m3fn: FP8_TOLERANCE,
                  torch.float8_e5m2: FP8_TOLERANCE}
"""Of what is kept in pages of 8 bits: a number next to a tie becomes another code."""


def keep_all(model: Decoder, on: tuple[str, ...]) -> tuple[str, ...]:
    """Every pass that is on; see `pass_choice.keep_winners`."""
    return on


@dataclass(slots=True)
class PassReport:
    """What the passes found, by name."""

    matches: Counter[str] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)
    structures: int = 0
    """Different graphs among the model's layers."""
    error: float = 0.0
    """The largest difference that the check found; see `difference`."""
    seconds: float = 0.0


@dataclass(slots=True)
class Rewritten:
    """What is made of a graph: functions of the part."""

    functions: Functions
    """`LayerRun`'s; of a piece, one."""
    matches: dict[str, int]
    given_as: Pending
    """How what it returns comes."""


class PassManager:
    """Rewrites the parts of one model."""

    def __init__(self, model: Decoder, on: Sequence[str], dump: Path | None = None,
                 passes: Sequence[FusionPass] = ALL) -> None:
        """on: names of the passes to run; dump: where graphs are written before and after each."""
        self.model, self.on, self.dump = model, frozenset(on), dump
        self.passes = [own for own in passes if own.name in self.on]
        self.report = PassReport()
        self._known: dict[Any, Rewritten] = {}

    def install(self) -> PassReport:
        """Give the model its `runs` and `end`, and its drafter its own. Raises `BadModel` that
        names the layer and the operations where a pattern is not found as often as it must be."""
        began, model = perf_counter(), self.model
        for i, layer in enumerate(model.layers):
            self._pieces(layer.mixer, layer_prefix(i))
        model.runs = self.runs(len(model.layers))
        self.report.structures = len(self._known)
        if (head := model.end_part) is not None:
            form = head_form(head.product, head.scale, head.cap)
            model.end = self.piece(head, "head", InputForm() if head.layer_norm else form)
        drafter = model.drafter
        if isinstance(drafter, MtpDrafter):
            self._pieces(drafter.layer.mixer, "mtp.")
            made = self.layer(drafter.layer, model.shape.layers, "mtp", Pending.NOTHING, None)
            drafter.run = _bound(made.functions, drafter.layer)
        self.report.seconds = perf_counter() - began
        LOG.info("passes: %s; %d different layers, off by %.1g, %.0f ms", ", ".join(
            f"{name} {count}" for name, count in self.report.matches.items() if count) or "none",
            self.report.structures, self.report.error, 1e3 * self.report.seconds)
        return self.report

    def runs(self, count: int) -> list[LayerRun]:
        """The first layers of the model, rewritten; it goes on as it is."""
        found, given_as, layers = [], Pending.NOTHING, self.model.layers
        for i, layer in enumerate(layers[:count]):
            after = layers[i + 1] if i + 1 < len(layers) else None
            made = self.layer(layer, i, layer_prefix(i).rstrip("."), given_as, after)
            found.append(_bound(made.functions, layer))
            given_as = made.given_as
        return found

    def layer(self, layer: Any, index: int, name: str, given_as: Pending,
              after: Any) -> Rewritten:
        """A layer's functions; after: the next one; None: but the final norm nothing takes what it
        returns."""
        shape, head = self.model.shape, self.model.shape.eagle
        # What is taken between layers is the sum over the ranks.
        tapped = shape.gives_hidden or head is not None and index + 1 in head.taps
        parts = ("reduce_norm" in self.on and not shape.layer_norm and not tapped
                 and after is not None and not takes_fp8(after.mixer.form)
                 and reduces(after.mixer.o, self.model.dtype))
        facts = LayerFacts(self.model.shape, index, layer, given_as, parts, self.on,
                           self.model.dtype)
        expected = {own.name: own.expected(facts) for own in self.passes}

        def traced() -> PartGraph:
            return PartGraph(layer, name, STREAM, given_as)

        def apart(plain: Functions, fused: Functions) -> float:
            return difference(self.model, layer, _bound(plain, layer), _bound(fused, layer),
                              bool(given_as))

        return self._rewritten(traced, expected, (given_as, parts, after is None),
                               self._layer_functions, apart)

    def piece(self, part: Any, name: str, form: Any) -> Callable[..., Any]:
        """The function of a norm and the product behind it."""
        expected = {own.name: own.expected_piece(form) for own in self.passes}

        def traced() -> PartGraph:
            return PartGraph(part, name, PIECE)

        def apart(plain: Functions, fused: Functions) -> float:
            return piece_difference(self.model, part.norm.shape[-1], *(
                MethodType(own[0], part) for own in (plain, fused)))

        rewritten = self._rewritten(traced, expected, (Pending.NOTHING, False, True),
                                    self._piece_function, apart)
        return MethodType(rewritten.functions[0], part)

    def _pieces(self, mixer: Any, at: str) -> None:
        queries = getattr(mixer, "queries", None)
        if queries is not None:
            queries.run = self.piece(queries, f"{at}queries", queries.up.form)

    def _rewritten(self, traced: Callable[[], PartGraph], expected: dict[str, int],
                   ends: tuple[Pending, bool, bool],
                   functions: Callable[[PartGraph], Functions],
                   apart: Callable[[Functions, Functions], float]) -> Rewritten:
        """ends: how it is given its input, whether it may leave a sum over the ranks, and whether
        it must leave no sum."""
        g, dtype = traced(), self.model.dtype
        given_as, parts, last = ends
        key = (g.key(dtype), given_as, parts, tuple(expected.values()))
        made = self._known.get((key, False))
        if last and (made is None or made.given_as):
            made = self._known.get((key, True))
        if made is None:
            plain = functions(g)
            left = Pending.REDUCE if parts and g.leave_part(dtype) else Pending.NOTHING
            matches = self.rewrite(g, expected)
            if not (left or last) and "add_norm" in self.on and g.leave_sum():
                left = Pending.SUM
            made = self._known[key, last] = Rewritten(functions(g), matches, left)
            limit = tolerance(self.model)
            # Ranks that load at different speeds cannot wait for each other in a sum yet: each
            # compares what it does itself.
            with self.model.group.alone():
                found = apart(plain, made.functions)
            if not found <= limit:
                raise BadModel(f"{g.name}: {self._blamed(traced, functions, apart, plain, limit)}: "
                               f"results differ by {found:.2g}, more than {limit}",
                               "model")
            self.report.error = max(self.report.error, found)
        self.report.matches.update(made.matches)
        self.report.expected.update(expected)
        return made

    def _blamed(self, traced: Callable[[], PartGraph], functions: Callable[[PartGraph], Functions],
                apart: Callable[[Functions, Functions], float], plain: Functions,
                limit: float) -> str:
        """The first pass behind which the results are not what they were, and what it made."""
        g = traced()
        for own in self.passes:
            made = list(own.apply(g, self.model.dtype))
            g.prune()
            if not made:
                continue
            with self.model.group.alone():
                found = apart(plain, functions(g))
            if not found <= limit:
                return f"the pass {own.name} ({own.about}) made {made[0].format_node()}"
        return "the passes together"

    def rewrite(self, g: PartGraph, expected: dict[str, int]) -> dict[str, int]:
        """Run the passes over one graph; how often each matched. Raises `BadModel`."""
        matches: dict[str, int] = {}
        self._write(g, 0, "traced")
        for number, own in enumerate(self.passes, 1):
            made = list(own.apply(g, self.model.dtype))
            g.prune()
            if made:
                g.graph.lint()
            if len(made) != expected[own.name]:
                raise BadModel(_mismatch(g, own, made, expected[own.name]), "model")
            matches[own.name] = len(made)
            if made:
                self._write(g, number, own.name)
        return matches

    def _layer_functions(self, g: PartGraph) -> Functions:
        lines = Lines(lowered(g, self.model.ops))
        sources = lines.layer()
        return lines.compiled({name: sources[name] for name in LayerRun._fields},
                              f"<{g.name} {len(self._known)}>")

    def _piece_function(self, g: PartGraph) -> Functions:
        lines = Lines(lowered(g, self.model.ops))
        return lines.compiled({"run": lines.whole("run")}, f"<{g.name} {len(self._known)}>")

    def _write(self, g: PartGraph, number: int, what: str) -> None:
        if self.dump is None:
            return
        folder = self.dump / g.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}_{what}.py").write_text(g.readable())
        except OSError as error:
            raise BadConfig(f"dump_passes: {folder}: {error.strerror}",
                            "device.dump_passes") from error


def _bound(functions: Functions, layer: Any) -> LayerRun:
    return LayerRun(*(MethodType(own, layer) for own in functions))


def _mismatch(g: PartGraph, own: FusionPass, made: Sequence[Node], expected: int) -> str:
    left = [str(node.format_node()) for node in g.nodes(*own.anchors)]
    shown = "; ".join(left) if left else "none of its operations"
    return (f"{g.name}: the pass {own.name} ({own.about}) found its pattern {len(made)} times, not "
            f"{expected}: what is left of it: {shown}. --passes auto,-{own.name} "
            "starts without it.")


# --- Checks of what passes made ------------------------------------------------------------------

def tolerance(model: Decoder) -> float:
    """Of a model's differences."""
    known, grouped = TOLERANCE[model.dtype], model.shape.grouped
    if grouped is not None and grouped.default is not None and not grouped.default.group:
        known = max(known, WIDE_TOLERANCE * (model.dtype is torch.bfloat16))
    if model.shape.fp8 is None:
        return known
    # A norm behind a product gives what the product is off by to all that follows.
    return max(known, FP8_TOLERANCE * (2 if model.shape.sandwich_norms else 1))


@torch.inference_mode()
def difference(model: Decoder, layer: Any, plain: LayerRun, fused: LayerRun, pair: bool) -> float:
    """The largest difference between two ways to run a layer: of what goes into its middle, what is
    in its pages, what it returns. pair: it is given two numbers to add.

    Where the worker's pages are of another dtype, what is in such pages counts as well: as a
    tolerance of the model, where it is that of the pages."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(model.device, model.dtype)

    size = (ROWS, model.shape.stream_width)
    stream: HiddenStream = (drawn(*size), drawn(*size)) if pair else drawn(*size)
    y = drawn(ROWS, layer.mixer.inner)

    def both(pages: torch.dtype) -> list[float]:
        one, other = (_run(model, own, _copied(stream), y.clone(), pages) for own in (plain, fused))
        return [_apart(a, b) for a, b in zip(one, other, strict=True)]

    found, kept = max(both(model.dtype)), page_dtype(model)
    if kept is model.dtype:
        return found
    *_, in_pages = both(kept)
    return max(found, in_pages * tolerance(model) / (TOLERANCE | PAGE_TOLERANCE)[kept])


@torch.inference_mode()
def piece_difference(model: Decoder, width: int, plain: Callable[[Tensor], Tensor],
                     fused: Callable[[Tensor], Tensor]) -> float:
    """The same of a norm and the product behind it, [T, width] -> [T, *]."""
    x = torch.randn((ROWS, width), generator=torch.Generator().manual_seed(1))
    x = x.to(model.device, model.dtype)
    return _apart(plain(x), fused(x))


def page_dtype(model: Decoder) -> torch.dtype:
    """Of the worker's pages."""
    return model.attention.pages or model.dtype


def bare_step(model: Decoder, tokens: int, pages: torch.dtype) -> ForwardContext:
    """A step of so many tokens, one behind the other, that all layers leave in the same pages of
    this dtype; what meets over them is left out."""
    s, at = model.shape, torch.arange(1, tokens + 1, device=model.device)
    groups = []
    for own in s.groups:
        pool = KVPagePool(s.of_layer(own.layers[0]), tokens + 1, 1, pages, model.device, 1,
                          int(s.index is not None))
        count = max(1, s.layers)
        groups.append(GroupContext(at, pool.layers * count, NO_ATTENTION, pool.scales * count,
                                   pool.index_keys * count))
    ropes = model.ropes_at(at.clamp(max=s.max_model_len - 1))
    if s.token_width:
        nothing = torch.zeros((tokens, s.hidden), dtype=model.dtype, device=model.device)
        ropes += model.token_inputs(torch.zeros_like(at), nothing)
    return ForwardContext(ropes, groups, None, [])


def _run(model: Decoder, run: LayerRun, stream: HiddenStream, y: Tensor,
         dtype: torch.dtype) -> list[Tensor]:
    """What goes into the middle, what the layer returns, what is in pages of this dtype."""
    step = bare_step(model, ROWS, dtype)
    p, carried = run.enter(stream, step)
    out = settled(run.leave(y, carried))
    rows = torch.arange(ROWS + 1, device=model.device)
    kept = [read_rows(group.pages[0], rows, torch.float32, *group.scales[:1]).flatten(1)
            for group in step.groups]
    return [p.flatten(1), out, torch.cat(kept, 1)]


def _copied(stream: HiddenStream) -> HiddenStream:
    return stream.clone() if isinstance(stream, Tensor) else (stream[0].clone(), stream[1].clone())


def _apart(a: Tensor, b: Tensor) -> float:
    """The length of the difference, against that of a. 0 where a has numbers that are none: weights
    like that are found when the numbers are checked, and no pass is at fault."""
    # Behind the queries, in what goes into the middle, lies what is of no more use.
    width = min(a.shape[1], b.shape[1])
    a, b = a[:, :width].float(), b[:, :width].float()
    if not a.isfinite().all():
        return 0.0
    found = float((a - b).norm()) / (float(a.norm()) or 1.0)
    return found if found == found else float("inf")
