"""MLPs: dense, and mixtures of experts with or without an expert that all tokens share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from actorium.gpu.families.layer_shapes import GATED, ExpertShape, Routing
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.models.layer_weights import LayerWeights, RoutingTape
from actorium.gpu.parallel.rank_group import RankGroup
from actorium.gpu.parallel.split_layers import MixtureSum
from actorium.gpu.passes import canonical_ops as ops
from actorium.gpu.weights.loader import Fused
from actorium.kernels.fp4_weights import Fp4Weight, is_fp4, pack_fp4, stack_fp4
from actorium.kernels.grouped_rows import ROWS
from actorium.kernels.inputs import Input, InputForm, plain
from actorium.kernels.linear import Gated, Linear
from actorium.kernels.reference.activation import BETA, NO_ALPHAS
from actorium.kernels.reference.experts import ExpertChoice, ExpertExtras, Experts
from actorium.kernels.reference.torch_ops import TorchOps
from actorium.kernels.scaled_linear import has_products, is_packed


def mixture_fused(at: str, hidden: int, s: ExpertShape) -> list[Fused]:
    """How checkpoints stack all experts of the layer whose names begin with `at`; those of Qwen3-VL
    have each turned on its side."""
    if not s.names.stacked:
        return []
    at, (gate_up, down), (*two, one) = f"{at}{s.names.at}", s.names.stacked, s.names.expert
    hidden = s.latent or hidden
    own = ((gate_up, tuple(two), (s.number, len(two) * s.size, hidden)),
           (down, (one,), (s.number, hidden, s.size)))
    if not s.names.alternating:
        return [_stacked(at, *each, s.names.turned) for each in own]
    experts = f"{at}experts."
    return [fused for name, parts, (number, rows, columns) in own for fused in (
        Fused(f"{at}{name}", (number, columns, rows),
              partial(_cut_alternating, experts, parts, "weight")),
        Fused(f"{at}{name}_bias", (number, rows),
              partial(_cut_alternating, experts, parts, "bias")))]


def _stacked(at: str, name: str, parts: tuple[str, ...], shape: tuple[int, int, int],
             turned: bool) -> Fused:
    number, rows, columns = shape
    if turned:
        return Fused(f"{at}{name}", (number, columns, rows),
                     partial(_cut_turned, f"{at}experts.", parts))
    return Fused(f"{at}{name}", shape, partial(_cut_experts, f"{at}experts.", parts, rows),
                 (number, columns, rows))


def _cut_turned(at: str, names: tuple[str, ...],
                stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Each expert's tensors of all experts' stacked, [E, columns, rows]."""
    upright = stacked.transpose(1, 2).contiguous()
    return _cut_experts(at, names, upright.shape[1], upright)


def _cut_experts(at: str, names: tuple[str, ...], rows: int,
                 stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Each expert's tensors of all experts' stacked. stacked: [E, rows, columns]; its rows are
    shared out to `names`; or, where there are not as many of both, [E, columns, rows]."""
    upright = stacked if stacked.shape[1] == rows else stacked.transpose(1, 2).contiguous()
    for e, expert in enumerate(upright):
        for name, part in zip(names, expert.chunk(len(names)), strict=True):
            yield f"{at}{e}.{name}.weight", part


def _cut_alternating(at: str, names: tuple[str, ...], end: str,
                     stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same of [E, columns, rows], or of biases, [E, rows]: rows are dealt out to `names` by
    turns."""
    for e, expert in enumerate(stacked.mT.contiguous() if end == "weight" else stacked):
        for i, name in enumerate(names):
            yield f"{at}{e}.{name}.{end}", expert[i::len(names)]


@dataclass(slots=True)
class Dense:
    """An MLP, gated by SiLU or GELU."""

    gate_up: Gated
    down: Linear
    activation: str = "silu"
    """silu or gelu"""

    @property
    def waits(self) -> bool:
        return False

    @property
    def form(self) -> InputForm:
        return self.gate_up.form

    def forward(self, x: Tensor) -> Tensor:
        act = ops.gelu_mul if self.activation == "gelu" else ops.silu_mul
        return ops.linear(act(ops.linear(x, self.gate_up)), self.down)

    def __call__(self, x: Input) -> Tensor:
        """As one of many experts: [n, hidden] -> [n, hidden]."""
        return self.down(self.gate_up(x, self.down.form))


def dense(w: LayerWeights, bias: bool = False, activation: str = "silu",
          names: tuple[str, ...] = GATED) -> Dense:
    """The MLP of these weights."""
    gate, up, down = names
    return Dense(w.gated(bias, activation, gate, up), w.summed(bias, down), activation)


def expert(w: LayerWeights, s: ExpertShape) -> Dense:
    """The expert of these weights, of which each rank gives its part."""
    gate, up, down = s.names.expert
    if s.clamp is None:
        return dense(w, s.bias, s.activation, s.names.expert)
    return Dense(w.clamped(s.bias, s.clamp, gate, up), w.summed(s.bias, down))


@dataclass(slots=True)
class Ungated:
    """An MLP without a gate."""

    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]
    """See `TorchOps.activation`."""

    @property
    def waits(self) -> bool:
        return False

    @property
    def form(self) -> InputForm:
        return self.up.form

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(ops.activate(ops.linear(x, self.up), self.activation), self.down)

    def __call__(self, x: Input) -> Tensor:
        """As one of many experts: [n, hidden] -> [n, hidden]."""
        return self.down(self.activation(self.up(x)))


def gated_apart(w: LayerWeights, s: ModelShape) -> Ungated:
    """The gated MLP of these weights, whose activation is none of `Gated`'s: it works on what the
    product of gate and up gives."""
    act = w.ops.activation(s.activation)

    def gate(y: Tensor) -> Tensor:
        own, up = y.chunk(2, 1)
        return act(own.contiguous()) * up

    return Ungated(w.linear(s.mlp_bias, *GATED[:2]),
                   w.summed(s.mlp_bias or s.down_bias, GATED[2]), gate)


def ungated(w: LayerWeights, s: ModelShape) -> Ungated:
    """The MLP of these weights."""
    (_, up, down), alphas = GATED, NO_ALPHAS
    if s.activation == "xielu":
        above, below = (F.softplus(w.pop(f"act_fn.alpha_{kind}").float()).item() for kind in "pn")
        alphas = above, BETA + below
    return Ungated(w.linear(s.mlp_bias, up), w.summed(s.mlp_bias, down),
                   w.ops.activation(s.activation, alphas))


def squared(w: LayerWeights, names: tuple[str, ...]) -> Ungated:
    """That of an expert without a gate, or one that all tokens go through."""
    up, down = names
    return Ungated(w.linear(False, up), w.summed(False, down), w.ops.activation("relu2"))


@dataclass(slots=True)
class Mixture:
    """Experts behind a router."""

    shape: ExpertShape
    router: Linear
    """To the experts, and, in the last row, to the gate of the shared expert."""
    experts: Experts
    shared: Dense | None
    total: RankGroup | MixtureSum | None
    """What sums the parts of each expert that ranks, or leaves, give."""
    tape: RoutingTape
    factors: Tensor | None = None
    """[E]: on the weights of the chosen."""

    @property
    def waits(self) -> bool:
        return self.experts.waits

    @property
    def form(self) -> InputForm:
        form = self.router.form.also(self.experts.form)
        return form if self.shared is None else form.also(self.shared.form)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """seen: what the router takes; None: x."""
        logits = ops.linear(x if seen is None else seen, self.router)
        out = ops.route(x, logits, self)
        if self.shared is not None:
            gate = ops.shared_gate(logits, self.shape.number)
            out = ops.add(ops.sigmoid_scale(self.shared.forward(x), gate), out)
        return out if self.total is None else ops.all_reduce(out, self.total)

    def route(self, x: Input, logits: Tensor) -> Tensor:
        """What the chosen experts give, weighted: [T, hidden]. logits: [T, E or more]."""
        s = self.shape
        weights, chosen = self.experts.choose(logits[:, :s.number], s.chosen, s.normalised)
        self.tape.add(chosen)
        if self.factors is not None:
            weights = weights * self.factors.index_select(0, chosen.flatten()).view_as(chosen)
        return self.experts(x, weights, chosen)


def experts(w: LayerWeights, s: ExpertShape) -> Experts:
    """Those of these weights; grouped on the device where the kernels can, and all of them are in
    the model's dtype, or in FP8 of which the device has products."""
    own, (*wide, down) = [w.under(f"experts.{e}.") for e in range(s.number)], s.names.expert
    kinds = {each.dtype(name) for each in own for name in s.names.expert}
    weight = own[0].tensors[f"{own[0].prefix}{down}.weight"]
    silu = s.activation == "silu"
    plain_gate = silu and not (s.bias or s.clamp)
    served = len(kinds) == 1 and ROWS not in kinds and (
        not isinstance(weight, Tensor) or not is_packed(weight)
        or plain_gate and has_products(weight.device))
    if s.bias and w.group.place.rank:  # the first rank adds those of down
        for each in own:
            each.put(f"{down}.bias", torch.zeros_like(each.pop(f"{down}.bias")))
    if len(wide) == 1:
        return _squared_experts(w, own, s.names.expert, served)
    if w.ops.groups_experts and silu and kinds == {ROWS} and _in_fp4(own[0], s):
        return w.ops.experts_fp4(_stacked_fp4(own, *wide), _stacked_fp4(own, down),
                                 _extras(own, s))
    if not w.ops.groups_experts or not served:
        return w.ops.experts_of([expert(each.parts(), s) for each in own])
    gate_up = torch.stack([each.pop(*(f"{name}.weight" for name in wide)) for each in own])
    return w.ops.experts(gate_up, torch.stack([each.pop(f"{down}.weight") for each in own]),
                         _extras(own, s))


def _in_fp4(own: LayerWeights, s: ExpertShape) -> bool:
    """Whether this expert's rows are all in MXFP4; they are read for it."""
    rows = {name: own.pop(name) for name in (f"{each}.weight" for each in s.names.expert)}
    for name, weight in rows.items():
        own.put(name, weight)
    return all(map(is_fp4, rows.values()))


def _stacked_fp4(own: Sequence[LayerWeights], *names: str) -> Fp4Weight:
    """These projections of all experts, one expert's rows at a time."""
    return stack_fp4([pack_fp4(each.pop(*(f"{name}.weight" for name in names))) for each in own])


def _extras(own: Sequence[LayerWeights], s: ExpertShape) -> ExpertExtras:
    if not s.bias:
        return ExpertExtras(clamp=s.clamp, activation=s.activation)
    *wide, down = (f"{name}.bias" for name in s.names.expert)
    return ExpertExtras(torch.stack([each.pop(*wide) for each in own]),
                        torch.stack([each.pop(down) for each in own]), s.clamp)


def _squared_experts(w: LayerWeights, own: list[LayerWeights], names: tuple[str, ...],
                     served: bool) -> Experts:
    """Those without a gate, which are grouped in the model's dtype alone."""
    if not w.ops.groups_experts or not served or own[0].dtype(names[0]).itemsize == 1:
        return w.ops.ungated_experts([squared(each.parts(), names) for each in own])
    return w.ops.squared_experts(*(torch.stack([each.pop(f"{name}.weight") for each in own])
                                   for name in names))


def mixture(w: LayerWeights, s: ExpertShape) -> Mixture:
    """The mixture of a layer's weights."""
    w = w.under(s.names.at)
    router = w.pop(f"{s.names.router}.weight")
    if s.shared:
        router = torch.cat((router, w.pop("shared_expert_gate.weight")))
    bias = w.pop(f"{s.names.router}.bias") if s.bias else None
    return Mixture(s, w.ops.linear(router, bias), experts(w, s),
                   dense(w.under(s.names.shared).parts()) if s.shared else None, w.mixture_sum(),
                   w.tape)


@dataclass(slots=True)
class GroupedMixture:
    """Experts that a router chooses in float32, which may look at groups of them first."""

    choice: ExpertChoice
    on_input: bool
    """The weights multiply what goes into the experts, not what they give."""
    ops: TorchOps
    router: Linear
    """To the experts, in f32."""
    bias: Tensor | None
    """f32[E]: on the scores, when experts are chosen."""
    experts: Experts
    shared: Dense | Ungated | None
    total: RankGroup | MixtureSum | None
    """See `Mixture`."""
    tape: RoutingTape
    latent: tuple[Linear, Linear] | None = None
    """To what the experts take, and back."""

    @property
    def waits(self) -> bool:
        return self.experts.waits

    @property
    def form(self) -> InputForm:
        """See `Mlp`: the router takes it as it is."""
        form = InputForm().also(self.experts.form)
        return form if self.shared is None else form.also(self.shared.form)

    def forward(self, x: Tensor) -> Tensor:
        out = ops.route_in_groups(x, self)
        if self.shared is not None:
            out = ops.add(self.shared.forward(x), out)
        return out if self.total is None else ops.all_reduce(out, self.total)

    def route(self, x: Input) -> Tensor:
        """What the chosen experts give, weighted: [T, hidden]."""
        weights, chosen = self.choose(plain(x))
        self.tape.add(chosen)
        if self.latent is not None:
            into, out_of = self.latent
            return out_of(self.experts(into(x), weights, chosen))
        if not self.on_input:
            return self.experts(x, weights, chosen)
        rows = (plain(x).unsqueeze(1) * weights.unsqueeze(2)).flatten(0, 1)
        out = self.experts(rows, torch.ones_like(rows[:, :1]), chosen.reshape(-1, 1))
        return out if chosen.shape[1] == 1 else out.unflatten(0, chosen.shape).sum(1)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, hidden] -> [T, chosen] weights, i64[T, chosen] experts."""
        return self.ops.choose_experts(self.router.wide(x), self.bias, self.choice, x.dtype)


def grouped_mixture(w: LayerWeights, s: ExpertShape, routing: Routing) -> GroupedMixture:
    """The mixture of a layer's weights."""
    w, names = w.under(s.names.at), s.names
    router = w.ops.float_linear(w.pop(f"{names.router}.weight"))
    bias, shared = w.pop(names.bias).flatten() if names.bias else None, None
    if s.shared:
        inner = w.under(names.shared).parts()
        shared = dense(inner) if len(names.expert) > 2 else squared(inner, names.expert)
    latent = (w.linear(False, "fc1_latent_proj"), w.linear(False, "fc2_latent_proj"))\
        if s.latent else None
    r = routing
    choice = ExpertChoice(s.chosen, s.normalised, r.groups, r.chosen_groups, r.best, r.softmax,
                          r.added, r.least, r.factor)
    return GroupedMixture(choice, r.on_input, w.ops, router, bias, experts(w, s), shared,
                          w.mixture_sum(), w.tape, latent)


def layer_mlp(w: LayerWeights, s: ModelShape, i: int) -> Dense | Mixture | GroupedMixture:
    """The MLP of these weights, in the i-th layer: dense or a mixture."""
    if s.experts is None or not s.has_experts(i):
        return dense(w.under(s.mlp_name))
    return grouped_mixture(w, s.experts, s.routing) if s.routing else mixture(w, s.experts)
