"""The passes, in the order in which they run: each is one pattern."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from actorium.gpu.passes import canonical_ops as c
from actorium.gpu.passes.fusion_pass import (
    FusionPass,
    LayerFacts,
    only_user,
    takes_fp8,
    users,
    wanted_form,
)
from actorium.gpu.passes.layer_graph import PartGraph, Pending, is_item
from actorium.kernels.inputs import InputForm

ACTS = (c.silu_mul, c.gelu_mul)


class ReduceNorm(FusionPass):
    """linear of a product that ranks share, or all_reduce, then add, norm -> reduce_add_norm."""

    name, about, anchors = "reduce_norm", "all-reduce + add + RMSNorm", (c.all_reduce, c.norm)

    def expected(self, facts: LayerFacts) -> int:
        """The sums over the ranks of the layer before, and of the mixer, where the ranks can add to
        them, and no product behind the norm takes FP8: one that takes INT8 quantises by itself."""
        return (facts.given_as is Pending.REDUCE) + facts.mixer_reduced

    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        for node in g.nodes(c.norm):
            total, weight, eps = node.args
            if not (isinstance(total, Node) and total.target is c.add and users(total)[0] is node
                    and not takes_fp8(wanted_form(g, node))):
                continue
            found = g.rank_part(total, dtype)
            if found is not None:
                part, group = found
                y, residual = total.args
                own = g.replace(node, c.reduce_add_norm, (part, residual, weight, eps, group))
                g.share(own, total, normed=1, summed=0)
                g.erase(total, y)  # type: ignore[arg-type]
                yield own


class ProductAdd(FusionPass):
    """linear, add -> linear_add."""

    name, about, anchors = "product_add", "product + bias + residual", (c.add,)

    def expected(self, facts: LayerFacts) -> int:
        """The mixer's and the MLP's last product, unless they are normed; where experts are beside
        an MLP, that adds to what they give, unless it is gated."""
        if facts.shape.sandwich_norms:
            return 0
        mixer = [] if facts.mixer_reduced or facts.mixer_left else [facts.layer.mixer.o]
        mlp = [] if facts.mlp is None or facts.gates_shared or facts.mlp_left else [facts.mlp.down]
        return sum(map(facts.added, mixer + mlp))

    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        for node in g.nodes(c.add):
            y, residual = node.args
            if (isinstance(y, Node) and y.target is c.linear and only_user(y) is node
                    and isinstance(residual, Node) and users(residual)[-1] is node
                    and g.object(y.args[1]).sums(dtype)):
                yield g.replace(node, c.linear_add, (*y.args, residual), y)


class NormAdd(FusionPass):
    """norm, add -> norm_add."""

    name, about, anchors = "norm_add", "RMSNorm of what is added + add", (c.add,)

    def expected(self, facts: LayerFacts) -> int:
        """Where what the mixer and the MLP give is normed, and what experts beside it, and a
        token's own input, do."""
        if not facts.shape.sandwich_norms:
            return 0
        return 2 + (facts.beside is not None) + (facts.shape.token_inputs is not None)

    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        for node in g.nodes(c.add):
            y, residual = node.args
            if isinstance(y, Node) and y.target is c.norm and only_user(y) is node:
                yield g.replace(node, c.norm_add, (*y.args, residual), y)


class AddNorm(FusionPass):
    """add, norm -> add_norm."""

    name, about, anchors = "add_norm", "add + RMSNorm", (c.add,)

    def expected(self, facts: LayerFacts) -> int:
        """The sums that no product has made and that are normed: of the layer before, and of the
        mixer."""
        if not facts.mixer_normed:
            return 0
        mixer = (facts.layer.mlp is not None and not facts.mixer_added
                 and not facts.mixer_reduced)
        beside = facts.beside is not None and "norm_add" not in facts.on
        return (facts.given_as is Pending.SUM) + mixer + beside

    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        for node in g.nodes(c.norm):
            total, weight, eps = node.args
            if (isinstance(total, Node) and total.target is c.add
                    and users(total)[0] is node):
                own = g.replace(node, c.add_norm, (*total.args, weight, eps))
                g.share(own, total, normed=0, summed=1)
                g.erase(total)
                yield own


class QKRopeKV(FusionPass):
    """split, head_norm, rope, write_kv -> rotate_write."""

    name, about = "qk_rope_kv", "QK-norm + rope + write to pages"
    anchors = (c.split, c.head_norm, c.rope, c.write_kv)

    def expected(self, facts: LayerFacts) -> int:
        """Every layer that attends over keys and values."""
        return int(facts.attends)

    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        for write in g.nodes(c.write_kv):
            k, v, mixer, step = write.args
            chain = _turned(k)
            split = chain[-1].args[0] if chain and is_item(chain[-1], 1) else None
            if not isinstance(split, Node) or split.target is not c.split:
                continue
            parts = {own.args[1]: own for own in users(split)}
            turns = [own for own in g.nodes(c.rope) if parts.get(0) in _turned(own)[-1:]]
            attends = [own for own in g.nodes(c.attend) if own.args[1:] == (mixer, step)]
            if (v is not parts.get(2) or len(turns) != 1 or len(attends) != 1
                    or only_user(turns[0]) is not attends[0] or only_user(chain[0]) is not write
                    or not _alike(chain, _turned(turns[0]))
                    or only_user(_start(split)) is not split):
                continue
            queries, (attend,) = _turned(turns[0]), attends
            with g.graph.inserting_before(write):
                own = g.graph.call_function(c.rotate_write, (split.args[0], mixer, step))
            attend.args = (own, mixer, step)
            g.erase(write, *chain[:-1], *queries[:-1], *parts.values(), split)
            yield own


def _start(node: Node) -> Node:
    """What an operation is of."""
    first = node.args[0]
    assert isinstance(first, Node)
    return first


def _turned(node: object) -> list[Node]:
    """rope, perhaps head_norm, and what these are of; nothing where it is another chain."""
    chain: list[Node] = []
    for target in (c.rope, c.head_norm):
        if isinstance(node, Node) and node.target is target:
            chain.append(node)
            node = node.args[0]
    if not chain or chain[0].target is not c.rope or not isinstance(node, Node):
        return []
    return [*chain, node]


def _alike(keys: list[Node], queries: list[Node]) -> bool:
    """Whether both are normed and turned in one way."""
    if len(keys) != len(queries):
        return False
    normed = [(str(a.args[1]).endswith("k_norm"), str(b.args[1]).endswith("q_norm"))
              for a, b in zip(keys[1:-1], queries[1:-1], strict=True)]
    return keys[0].args[1] is queries[0].args[1] and all(both == (True, True) for both in normed)


class GatedProduct(FusionPass):
    """linear, silu_mul or gelu_mul -> gated."""

    name, about, anchors = "gated_product", "gate_up product + silu*mul or gelu*mul", ACTS

    def expected(self, facts: LayerFacts) -> int:
        """The MLP for all tokens, where its backend has a product with a gate."""
        return int(facts.gate_up is not None and facts.gate_up.fuses)

    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        for act in g.nodes(*ACTS):
            (y,) = act.args
            if (isinstance(y, Node) and y.target is c.linear and only_user(y) is act
                    and g.object(y.args[1]).fuses):
                yield g.replace(act, c.gated, y.args, y)


class GateAdd(FusionPass):
    """sigmoid_scale, add -> gate_add."""

    name, about, anchors = "gate_add", "sigmoid * shared expert + experts", (c.sigmoid_scale,)

    def expected(self, facts: LayerFacts) -> int:
        """Where what the shared expert gives is gated."""
        return int(facts.gates_shared)

    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        for node in g.nodes(c.add):
            y, out = node.args
            if (isinstance(y, Node) and y.target is c.sigmoid_scale and only_user(y) is node
                    and isinstance(out, Node) and out.target is c.route and only_user(out) is node):
                yield g.replace(node, c.gate_add, (out, *y.args), y)


class NormQuant(FusionPass):
    """norm, or add_norm, before products that take 8 bits -> norm_quant, add_norm_quant."""

    name, anchors = "norm_quant", (c.norm, c.add_norm)
    about = "RMSNorm (and add) + quantise to FP8 or INT8"

    def expected(self, facts: LayerFacts) -> int:
        """The mixer and the MLP, where their products take 8 bits, and no sum over the ranks is
        joined with the norm."""
        if not facts.rms_before:
            return 0
        mixer = (facts.mixer_normed and facts.layer.mixer.form.columns > 0
                 and facts.given_as is not Pending.REDUCE)
        if facts.layer.mlp is None:
            return int(mixer)
        beside = facts.beside is not None and facts.beside.mixture.experts.form.columns > 0
        return mixer + (facts.layer.mlp.form.columns > 0 and not facts.mixer_reduced) + beside

    def expected_piece(self, form: InputForm) -> int:
        return int(form.columns > 0)

    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        for node in g.nodes(c.norm, c.add_norm):
            adds = node.target is c.add_norm
            normed = next(own for own in users(node) if is_item(own, 0)) if adds else node
            form = wanted_form(g, normed)._replace(norms=None)
            if form.columns:
                target = c.add_norm_quant if adds else c.norm_quant
                yield g.replace(node, target, (*node.args, form))


class ActQuant(FusionPass):
    """silu_mul or gelu_mul, or the product with its gate, before a product that takes 8 bits."""

    name, anchors = "act_quant", (*ACTS, c.gated)
    about = "silu*mul or gelu*mul + quantise to FP8 or INT8"

    def expected(self, facts: LayerFacts) -> int:
        """The MLP for all tokens, where its last product takes 8 bits alone."""
        own = facts.gate_up
        return int(own is not None and not facts.mlp.down.form.plain
                   and (own.quantises or not facts.gates(own)))

    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        for node in g.nodes(*ACTS, c.gated):
            form = wanted_form(g, node)._replace(norms=None)
            if form.plain:
                continue
            if node.target is not c.gated:
                target = c.silu_mul_quant if node.target is c.silu_mul else c.gelu_mul_quant
                yield g.replace(node, target, (*node.args, form))
            elif g.object(node.args[1]).quantises:
                yield g.replace(node, c.gated, (*node.args, form))


class NormProduct(FusionPass):
    """norm, before the only product that takes it and that norms some numbers of rows itself."""

    name, about, anchors = "norm_product", "RMSNorm in the product behind it", (c.norm,)

    def expected(self, facts: LayerFacts) -> int:
        """The mixer and the MLP, where such a product is all that takes the norm, and no sum is
        joined with it."""
        layer = facts.layer
        if not facts.rms_before:
            return 0
        mixer = (facts.mixer_normed and layer.mixer.form.norms is not None
                 and not facts.mixer_norm_sums)
        if layer.mlp is None:
            return int(mixer)
        gated = facts.shape.has_experts(facts.index) or facts.gates(facts.gate_up)
        mlp = (layer.mlp.form.norms is not None and (gated or not facts.shape.gated)
               and not facts.mlp_norm_sums)
        router = facts.beside is not None and facts.beside.mixture.router.form.norms is not None
        return mixer + mlp + router

    def expected_piece(self, form: InputForm) -> int:
        return int(form.norms is not None)

    def apply(self, g: PartGraph, dtype: torch.dtype) -> Iterator[Node]:
        for node in g.nodes(c.norm):
            if wanted_form(g, node).norms is not None:
                product = users(node)[0].args[1]
                assert isinstance(product, Node)
                own = g.replace(node, c.norm_for, (*node.args, product))
                own.prepend(product)
                yield own


ALL: tuple[FusionPass, ...] = (
    ReduceNorm(), ProductAdd(), NormAdd(), AddNorm(), QKRopeKV(), GatedProduct(), GateAdd(),
    NormQuant(), ActQuant(), NormProduct())
"""In the order of `parsed_values.PASSES`."""
