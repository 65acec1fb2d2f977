"""What every pass is: a rewriting that knows how often it must find its pattern."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch.fx import Node

from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.passes import canonical_ops as c
from actorium.gpu.passes.layer_graph import PartGraph, Pending, Target, reduces
from actorium.kernels.inputs import InputForm
from actorium.kernels.linear import Gated


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What says how often a pattern occurs in a layer: the model's shape, which passes are on, and
    what the backend's products can do; never the graph."""

    shape: ModelShape
    index: int
    layer: Any
    given_as: Pending
    """How its input comes."""
    parts: bool
    """Whether what it gives may be left for the next layer to sum over the ranks."""
    on: frozenset[str]
    """Names of the passes that are on."""
    dtype: torch.dtype

    @property
    def attends(self) -> bool:
        """Whether it attends over keys and values of its own, in pages."""
        return (not self.shape.bidirectional
                and self.index not in self.shape.recurrent and self.shape.latent is None
                and self.shape.owns_kv(self.index))

    @property
    def mixer_normed(self) -> bool:
        """Whether what goes into the mixer, and nowhere else, is normed by its RMS."""
        return self.rms_before and self.shape.altup is None

    @property
    def beside(self) -> Any:
        """The experts beside its MLP, if there are any."""
        return getattr(self.layer, "beside", None)

    @property
    def mlp(self) -> Any:
        """Its MLP for all tokens, if it has one."""
        if not self.shape.has_experts(self.index):
            return self.layer.mlp
        return getattr(self.layer.mlp, "shared", None)

    @property
    def gates_shared(self) -> bool:
        """Whether what the shared expert gives is gated."""
        s = self.shape
        return bool(s.has_experts(self.index) and s.routing is None and s.experts
                    and s.experts.shared and s.experts.shared_gate)

    def reduced(self, product: Any) -> bool:
        """Whether the sum of this product over the ranks waits for the norm behind it."""
        return "reduce_norm" in self.on and reduces(product, self.dtype)

    @property
    def mixer_reduced(self) -> bool:
        """Whether that is so of the mixer's."""
        mlp = self.layer.mlp
        return (mlp is not None and self.rms_before and not self.shape.sandwich_norms
                and not takes_fp8(mlp.form) and self.reduced(self.layer.mixer.o))

    @property
    def mixer_left(self) -> bool:
        """Whether the mixer's sum is left to the next layer, as there is no MLP."""
        return self.layer.mlp is None and self.parts and self.reduced(self.layer.mixer.o)

    @property
    def mlp_left(self) -> bool:
        """Whether the sum of the MLP's last product over the ranks is left to the next layer."""
        return (self.parts and self.mlp is not None and not self.shape.has_experts(self.index)
                and self.reduced(self.layer.mlp.down))

    @property
    def gate_up(self) -> Any:
        """The product of that MLP with its gate, if it has one."""
        return getattr(self.mlp, "gate_up", None)

    @property
    def rms_before(self) -> bool:
        """Whether what goes into the mixer, and into the MLP, is normed by its RMS."""
        return bool(self.shape.layer_norms.mixer) and not self.shape.layer_norm

    @property
    def mixer_norm_sums(self) -> bool:
        """Whether the mixer's norm is joined with a sum."""
        return (self.given_as is Pending.REDUCE
                or "add_norm" in self.on and self.given_as is Pending.SUM)

    @property
    def mlp_norm_sums(self) -> bool:
        """Whether the MLP's norm is."""
        return self.mixer_reduced or "add_norm" in self.on and not self.mixer_added

    def added(self, product: Any) -> bool:
        """Whether this product sums on its way."""
        return "product_add" in self.on and bool(product.sums(self.dtype))

    @property
    def mixer_added(self) -> bool:
        """Whether nothing is left to sum where the MLP's norm begins."""
        if self.shape.sandwich_norms:
            return "norm_add" in self.on
        return self.added(self.layer.mixer.o)

    def gates(self, gated: Gated | None) -> bool:
        """Whether this product is one with its gate."""
        return "gated_product" in self.on and gated is not None and gated.fuses


class FusionPass(ABC):
    """Rewrites one pattern of operations to one that does the same at once."""

    name: str
    about: str
    """What it joins, for people."""
    anchors: tuple[Target, ...]
    """What is shown of a graph in which the pattern was not found often enough."""

    @abstractmethod
    def expected(self, facts: LayerFacts) -> int:
        """How often the pattern must occur in this layer."""

    def expected_piece(self, form: InputForm) -> int:
        """The same of a norm and the product behind it, which takes it in this form: the head, or
        the queries of latent attention."""
        return 0

    @abstractmethod
    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        """Rewrites the graph and yields the new nodes. dtype: the model's."""


def users(node: Node) -> list[Node]:
    """The nodes that use this one."""
    return list(node.users)


def only_user(node: Node) -> Node | None:
    """The one node that uses this one; None where there are others."""
    found = users(node)
    return found[0] if len(found) == 1 else None


def wanted_form(g: PartGraph, node: Node) -> InputForm:
    """The form that serves all who take what a node gives."""
    first, *others = (_form(g, user, node) for user in users(node))
    return reduce(InputForm.also, others, first)


def takes_fp8(form: InputForm) -> bool:
    """Whether a product of this form takes FP8."""
    return form.columns > 0 and not form.int8


def head_form(product: Any, scale: Any, cap: Any) -> InputForm:
    """In which form a head is best given its input: it does not take 8 bits."""
    return InputForm(norms=product.form.norms) if scale == 1 and not cap else InputForm()


def _form(g: PartGraph, user: Node, node: Node) -> InputForm:
    if user.args[0] is not node:
        return InputForm()
    if user.target in (c.linear, c.linear_add, c.gated):
        product = g.object(user.args[1])
        form: InputForm = product.form
        if user.target is c.linear and isinstance(product, Gated):
            return form._replace(norms=None)  # one that norms by itself gates as well
        return form
    if user.target is c.logits:
        return head_form(g.object(user.args[1]), *user.args[2:])
    if user.target is c.route:
        experts_form: InputForm = g.object(user.args[2]).experts.form
        return experts_form
    if user.target is c.route_in_groups:  # its router takes it as it is
        return InputForm().also(g.object(user.args[1]).experts.form)
    return InputForm()
