"""MLPs: dense, and mixtures of experts with or without an expert that all tokens share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from actorium.gpu.families.model_shape import ExpertShape
from actorium.gpu.models.layer_weights import LayerWeights, NormedLinear
from actorium.gpu.weights.loader import Fused
from actorium.kernels.inputs import HiddenStream, Input, InputForm, PendingSum
from actorium.kernels.linear import Gated, Linear
from actorium.kernels.reference.experts import EachExpert, Experts, route
from actorium.kernels.scaled_linear import has_products


def mixture_fused(at: str, hidden: int, s: ExpertShape) -> list[Fused]:
    """How Qwen3.5 checkpoints stack all experts of a layer."""
    return [Fused(f"{at}experts.gate_up_proj", (s.number, 2 * s.size, hidden),
                  partial(cut_experts, f"{at}experts.", ("gate_proj", "up_proj"))),
            Fused(f"{at}experts.down_proj", (s.number, hidden, s.size),
                  partial(cut_experts, f"{at}experts.", ("down_proj",)))]


def cut_experts(at: str, names: tuple[str, ...],
                stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Each expert's tensors of all experts' stacked. stacked: [E, rows, columns]; its rows are
    shared out to `names`."""
    for e, expert in enumerate(stacked):
        for name, part in zip(names, expert.chunk(len(names)), strict=True):
            yield f"{at}{e}.{name}.weight", part


@dataclass(slots=True)
class Dense:
    """An MLP, gated by SiLU or GELU."""

    gate_up: Gated
    down: Linear | NormedLinear

    @property
    def waits(self) -> bool:
        """See `Mlp`."""
        return False

    @property
    def form(self) -> InputForm:
        """See `Mlp`."""
        return self.gate_up.form

    def __call__(self, x: Input) -> Tensor:
        return self.down(self.gate_up(x, self.down.form))

    def add(self, x: Input, residual: Tensor) -> HiddenStream:
        """residual + the MLP of x."""
        return self.down.onto(self.gate_up(x, self.down.form), residual)


def dense(w: LayerWeights, bias: bool = False, activation: str = "silu") -> Dense:
    """The MLP of these weights."""
    return Dense(w.gated(bias, activation, "gate_proj", "up_proj"), w.linear(bias, "down_proj"))


@dataclass(slots=True)
class Mixture:
    """Experts behind a router."""

    shape: ExpertShape
    router: Linear
    """To the experts, and, in the last row, to the gate of the shared expert."""
    experts: Experts
    shared: Dense | None

    @property
    def waits(self) -> bool:
        """See `Mlp`."""
        return self.experts.waits

    @property
    def form(self) -> InputForm:
        """See `Mlp`."""
        form = self.router.form.also(self.experts.form)
        return form if self.shared is None else form.also(self.shared.form)

    def add(self, x: Input, residual: Tensor) -> HiddenStream:
        """residual + the mixture's output for x."""
        s, logits = self.shape, self.router(x)
        weights, chosen = route(logits[:, :s.number], s.chosen, s.normalised)
        out = self.experts(x, weights, chosen)
        if self.shared is not None:
            out.addcmul_(logits[:, s.number:].sigmoid(), self.shared(x))
        return PendingSum(out, residual)


def experts(w: LayerWeights, number: int) -> Experts:
    """So many of these weights; grouped on the device where the kernels can, and all of them are in
    FP8, of which the device has products, or none."""
    own = [w.under(f"experts.{e}.") for e in range(number)]
    kinds = {each.packed(name) for each in own for name in ("gate_proj", "up_proj", "down_proj")}
    weight = own[0].tensors[f"{own[0].prefix}down_proj.weight"]
    served = len(kinds) == 1 and (kinds == {False} or has_products(weight.device))
    if not w.ops.groups_experts or not served:
        return EachExpert([dense(each) for each in own])
    gate_up = torch.stack([each.pop("gate_proj.weight", "up_proj.weight") for each in own])
    return w.ops.experts(gate_up, torch.stack([each.pop("down_proj.weight") for each in own]))


def mixture(w: LayerWeights, s: ExpertShape) -> Mixture:
    """The mixture of these weights."""
    router = w.pop("gate.weight")
    if s.shared:
        router = torch.cat((router, w.pop("shared_expert_gate.weight")))
    return Mixture(s, w.ops.linear(router), experts(w, s.number),
                   dense(w.under("shared_expert.")) if s.shared else None)
