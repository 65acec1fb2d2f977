"""The operations that layers are written in, and those that passes join them to.

A layer's `forward` calls them plainly, one after the other. It is never run as it stands: it is
traced once, its operations become nodes of a graph, and passes rewrite that graph. Called with
anything but proxies, an operation does what it means, by reference.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import Proxy

from actorium.kernels.inputs import Input, InputForm, Quantised, plain
from actorium.kernels.linear import Gated, Linear
from actorium.kernels.reference import activation
from actorium.kernels.reference.norm import add_rms_norm, rms_norm, rms_norm_add
from actorium.kernels.reference.norm import layer_norm as reference_layer_norm
from actorium.kernels.reference.rope import apply_rope
from actorium.kernels.scaled_linear import to_form

Meaning = TypeVar("Meaning", bound=Callable[..., Any])


def operation(meaning: Meaning) -> Meaning:
    """An operation: a node of the graph where a layer is traced."""
    @functools.wraps(meaning)
    def emit(*args: Any) -> Any:
        tracer = next((own.tracer for own in args if isinstance(own, Proxy)), None)
        if tracer is None:
            return meaning(*args)
        return tracer.create_proxy("call_function", emit, args, {})

    return cast(Meaning, emit)


# --- what models are written in ------------------------------------------------------------------

@operation
def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of x. x: [T, K]; weight: [K]."""
    return rms_norm(x, weight, eps)


@operation
def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The LayerNorm of x. x: [T, K]; weight: [2, K], weight and bias."""
    return reference_layer_norm(x, weight, eps)


@operation
def linear(x: Tensor, product: Any) -> Tensor:
    """x: [T, K] -> [T, N]. product: a `Linear`; or a `Gated`, whose gate is left out: gate's
    columns before those of up."""
    y: Tensor = product.halves(x) if isinstance(product, Gated) else product(x)
    return y


@operation
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, both [T, K]."""
    return x + y


@operation
def norm_qk(qkv: Tensor, mixer: Any) -> Tensor:
    """What a product gave, perhaps in its memory: queries and keys normed, and clipped."""
    normed: Tensor = mixer.norm_qk(qkv)
    return normed


@operation
def split(qkv: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, heads, dim], keys and values [T, kv_heads, dim] of what a product gave."""
    whole = qkv.view(len(qkv), -1, dim)
    kv = (whole.shape[1] - heads) // 2
    q, k, v = whole.split((heads, kv, kv), 1)
    return q, k, v


@operation
def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each head. x: [T, H, D]; weight: [H, D]."""
    return rms_norm(x, weight, eps)


@operation
def rope(x: Tensor, rows: Tensor) -> Tensor:
    """x, rotated. x: [T, H, D]; rows: [T, 2, 1, D], see `rope_rows`."""
    return apply_rope(x, rows)


@operation
def write_kv(k: Tensor, v: Tensor, mixer: Any, step: Any) -> None:
    """Write keys and values, [T, kv_heads, D], to the mixer's pages."""
    mixer.write_kv(k, v, step)


@operation
def write_latent(first: Tensor, mixer: Any, step: Any) -> None:
    """Norm, rotate and write the latent that the first product of latent attention gave."""
    mixer.write_latent(first, step)


@operation
def attend(p: Tensor, mixer: Any, step: Any) -> Tensor:
    """Attention over the mixer's pages, [T, inner]: here tokens of a sequence meet. p: [T, *],
    queries or what they are made of."""
    y: Tensor = mixer.between(p, step)
    return y


@operation
def recur(p: Tensor, mixer: Any, step: Any) -> Tensor:
    """A recurrent layer between its projections: [T, inner]; states go on. p: [T, projected]."""
    y: Tensor = mixer.between(p, step)
    return y


@operation
def expand_values(y: Tensor, mixer: Any) -> Tensor:
    """What attention over latents gave -> [T, heads * value]."""
    values: Tensor = mixer.expand(y)
    return values


@operation
def sigmoid_mul(y: Tensor, gate: Tensor) -> Tensor:
    """y * sigmoid(gate), perhaps in the gate's memory. gate: like y."""
    return y * gate.sigmoid()


@operation
def sigmoid_scale(y: Tensor, gate: Tensor) -> Tensor:
    """y * sigmoid(gate), a number a row. y: [T, K]; gate: [T, 1]."""
    return y * gate.sigmoid()


@operation
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [T, 2 * I], gate's columns first -> [T, I]."""
    return activation.silu_mul(gate_up)


@operation
def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, the tanh approximation."""
    return activation.gelu_mul(gate_up)


@operation
def gelu_by(gate: Tensor, by: Tensor) -> Tensor:
    """gelu(gate) * by, both [T, I]."""
    return activation.gelu_mul(torch.cat((gate, by), 1))


@operation
def scale(x: Tensor, by: Tensor) -> Tensor:
    """x * by. x: [T, K]; by: [K]."""
    return (x.unsqueeze(1) * by).squeeze(1)


@operation
def token_rows(step: Any, gate: Any) -> Tensor:
    """What the step's tokens give a layer by themselves: [T, I]."""
    rows: Tensor = gate.inputs(step)
    return rows


@operation
def shared_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm`, for several who take it as it is."""
    return rms_norm(x, weight, eps)


@operation
def predict(x: Tensor, altup: Any) -> Tensor:
    """What a layer's streams will be: [T, streams * K]."""
    y: Tensor = altup.predict(x)
    return y


@operation
def active(x: Tensor, altup: Any) -> Tensor:
    """The stream that a layer transforms: [T, K]. x: [T, streams * K]."""
    y: Tensor = altup.active(x)
    return y


@operation
def correct(predicted: Tensor, y: Tensor, altup: Any) -> Tensor:
    """The predicted streams, by what the active one became, y: [T, K]."""
    x: Tensor = altup.correct(predicted, y)
    return x


@operation
def add_to_others(x: Tensor, y: Tensor, altup: Any) -> Tensor:
    """x with y, [T, K], added to all streams but the first, perhaps in its memory."""
    total: Tensor = altup.add_to_others(x, y)
    return total


@operation
def merge(x: Tensor, streams: Any) -> Tensor:
    """One stream of several: [T, K]."""
    y: Tensor = streams.merge(x)
    return y


@operation
def cut_gelu_mul(gate_up: Tensor, mlp: Any) -> Tensor:
    """`gelu_mul`, but for gates that are cut off."""
    y: Tensor = mlp.cut_gelu_mul(gate_up)
    return y


@operation
def activate(x: Tensor, own: Any) -> Tensor:
    """The activation of an MLP without a gate, of each number of [T, I]; own: see
    `TorchOps.activation`."""
    y: Tensor = own(x)
    return y


@operation
def route(x: Tensor, logits: Tensor, mixture: Any) -> Tensor:
    """What the experts that `logits`, [T, *], choose give for x: [T, hidden]."""
    out: Tensor = mixture.route(x, logits)
    return out


@operation
def route_in_groups(x: Tensor, mixture: Any) -> Tensor:
    """What the experts give that the mixture's own router chooses for x, by groups."""
    out: Tensor = mixture.route(x)
    return out


@operation
def shared_gate(logits: Tensor, number: int) -> Tensor:
    """The last columns of a router's logits, behind those of so many experts: [T, 1]."""
    return logits[:, number:]


@operation
def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum of x, [T, K], over the ranks of a group."""
    total: Tensor = group.all_reduce(x)
    return total


@operation
def logits(x: Input, product: Linear, scale: float = 1.0, cap: float = 0.0) -> Tensor:
    """The head, its results times `scale` and, with a cap, cap * tanh(them / cap): see
    `Linear.logits`."""
    if scale == 1 and not cap:
        return product.logits(x)
    found = product.wide(plain(x)).mul_(scale / cap if cap else scale)
    return found.tanh_().mul_(cap) if cap else found


# --- what passes make of them --------------------------------------------------------------------

@operation
def linear_add(x: Tensor, product: Linear, residual: Tensor) -> Tensor:
    """residual + the product, perhaps in the residual's memory."""
    return product.add(x, residual)


@operation
def norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """residual + the norm of x."""
    return rms_norm_add(x, weight, eps, residual)


@operation
def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and this sum."""
    return add_rms_norm(x, residual, weight, eps)


@operation
def linear_part(x: Tensor, product: Any) -> Tensor:
    """What a rank adds to a product whose weight's columns the ranks share; see `SummedLinear`."""
    part: Tensor = product.part(x)
    return part


@operation
def reduce_add_norm(part: Tensor, residual: Tensor, weight: Tensor, eps: float,
                    group: Any) -> tuple[Tensor, Tensor]:
    """residual + the sum of the ranks' parts, and the norm of that."""
    both: tuple[Tensor, Tensor] = group.reduce_add_norm(part, residual, weight, eps)
    return both


@operation
def rotate_write(qkv: Tensor, mixer: Any, step: Any) -> Tensor:
    """Norm, rotate and write what a product gave; its queries, which lie in front, are rotated in
    its memory, and that is returned: [T, heads + 2 * kv_heads, D]."""
    p: Tensor = mixer.rotate_write(qkv, step)
    return p


@operation
def gated(x: Input, product: Gated, form: InputForm = InputForm()) -> Input:
    """The product with its gate, in this form."""
    return product(x, form)


@operation
def gate_add(out: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """out + y * sigmoid(gate), in the memory of `out`. out, y: [T, K]; gate: [T, 1]."""
    return out.addcmul_(gate.sigmoid(), y)


@operation
def norm_quant(x: Tensor, weight: Tensor, eps: float, form: InputForm) -> Quantised:
    """The norm, in FP8 or INT8."""
    return to_form(rms_norm(x, weight, eps), form)


@operation
def add_norm_quant(x: Tensor, residual: Tensor, weight: Tensor, eps: float,
                   form: InputForm) -> tuple[Quantised, Tensor]:
    """`add_norm`, the norm in FP8 or INT8."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return to_form(normed, form), total


@operation
def silu_mul_quant(gate_up: Tensor, form: InputForm) -> Quantised:
    """`silu_mul`, in FP8 or INT8."""
    return to_form(activation.silu_mul(gate_up), form)


@operation
def gelu_mul_quant(gate_up: Tensor, form: InputForm) -> Quantised:
    """`gelu_mul`, in FP8 or INT8."""
    return to_form(activation.gelu_mul(gate_up), form)


@operation
def norm_for(x: Tensor, weight: Tensor, eps: float, product: Any) -> Input:
    """The norm as its only product had better be given it: of some numbers of rows that product
    norms them itself."""
    return rms_norm(x, weight, eps)


def unmade(*_args: Any) -> Any:
    """Where a part's function comes once passes have made it."""
    raise RuntimeError("the model's layers were not traced: see `pass_manager.install`")


# --- by whom they are run ------------------------------------------------------------------------

MIDDLES = (attend, recur)
"""Where tokens of a sequence meet: the cut between segments."""
WRITES = (write_kv, write_latent, rotate_write)
"""What leaves something in the pages."""


def functions(ops: Any) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What runs each operation; ops: a `TorchOps`."""
    return {
        norm: ops.rms_norm, shared_norm: ops.rms_norm, layer_norm: ops.layer_norm,
        norm_add: ops.rms_norm_add, add_norm: ops.add_rms_norm,
        norm_quant: ops.rms_norm_quant, add_norm_quant: ops.add_rms_norm_quant,
        norm_for: ops.norm_for, silu_mul: ops.silu_mul, gelu_mul: ops.gelu_mul,
        silu_mul_quant: ops.silu_mul_quant, gelu_mul_quant: ops.gelu_mul_quant,
        sigmoid_mul: ops.sigmoid_mul, sigmoid_scale: ops.sigmoid_scale, gate_add: ops.gate_add,
        gelu_by: lambda gate, by: ops.gelu_mul(torch.cat((gate, by), 1)),
        **{own: meaning(own) for own in (split, head_norm, rope, scale, shared_gate, logits)},
        add: operator.add}


METHODS: dict[Callable[..., Any], tuple[str, int]] = {
    linear: ("__call__", 1), linear_add: ("add", 1), gated: ("__call__", 1),
    activate: ("__call__", 1), token_rows: ("inputs", 1),
    predict: ("predict", 1), active: ("active", 1), correct: ("correct", 2),
    add_to_others: ("add_to_others", 2), merge: ("merge", 1), cut_gelu_mul: ("cut_gelu_mul", 1),
    norm_qk: ("norm_qk", 1), write_kv: ("write_kv", 2), write_latent: ("write_latent", 1),
    rotate_write: ("rotate_write", 1),
    attend: ("between", 1), recur: ("between", 1), expand_values: ("expand", 1),
    route: ("route", 2), route_in_groups: ("route", 1), all_reduce: ("all_reduce", 1),
    linear_part: ("part", 1), reduce_add_norm: ("reduce_add_norm", 4)}
"""Operations that are a method of one of their arguments: its name, and the argument's place."""


def meaning(op: Callable[..., Any]) -> Callable[..., Any]:
    """What an operation does by reference."""
    reference: Callable[..., Any] = getattr(op, "__wrapped__", op)
    return reference
