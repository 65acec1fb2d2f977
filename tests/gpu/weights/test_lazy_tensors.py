"""Weights that are made when a layer takes them: rows in different formats, and in an order of
their own, beside plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers_grouped import dequantised
from torch import Tensor

from actorium.gpu.families.tensor_specs import EMBED, HEAD, TensorSpec, held_format, linear_tensors
from actorium.gpu.families.weight_formats import ONLINE, GroupedShape, WeightFormat
from actorium.gpu.models.layer_weights import LayerWeights
from actorium.gpu.weights.lazy_tensors import (
    INPUT_ORDER,
    LazyTensor,
    WeightTensors,
    cut_lazily,
    held_rows,
    materialised,
)
from actorium.gpu.weights.online_quantisation import quantised_lazily, quantised_rows
from actorium.kernels.grouped_rows import ROWS
from actorium.kernels.linear import ConcatLinear, Linear, Reordered
from actorium.kernels.reference.torch_ops import TorchOps

CPU = torch.device("cpu")
Q4, Q8 = WeightFormat(4, 32, True), WeightFormat(8, 64, False)


def rows_of(weight: Tensor, form: WeightFormat) -> LazyTensor:
    return quantised_lazily(lambda: weight, form, CPU)


def layer(**own: Tensor | LazyTensor) -> LayerWeights:
    tensors: WeightTensors = {f"a.{name.replace('__', '.')}": each for name, each in own.items()}
    return LayerWeights(tensors, "a.", TorchOps(), False)


def test_parts_in_different_formats_lie_side_by_side() -> None:
    torch.manual_seed(1)
    q, k, v, x = (torch.randn(rows, 128) for rows in (8, 4, 4, 3))
    w = layer(q__weight=rows_of(q, Q4), k__weight=rows_of(k, Q4), v__weight=rows_of(v, Q8))
    got = w.linear(False, "q", "k", "v")
    assert isinstance(got, ConcatLinear) and len(got.parts) == 2 and not w.tensors
    want = torch.cat([dequantised(q, Q4), dequantised(k, Q4), dequantised(v, Q8)])
    torch.testing.assert_close(got(x), x @ want.t())
    torch.testing.assert_close(got.add(x, torch.ones(3, 16)), 1 + x @ want.t())
    mixed = layer(q__weight=rows_of(q, Q4), k__weight=k, v__weight=v).linear(False, "q", "k", "v")
    assert isinstance(mixed, ConcatLinear) and [type(part) for part in mixed.parts][1] is Linear
    torch.testing.assert_close(mixed(x), x @ torch.cat([dequantised(q, Q4), k, v]).t())


@pytest.mark.parametrize("up_form", [Q4, Q8])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gate_and_up_in_any_formats(up_form: WeightFormat, activation: str) -> None:
    torch.manual_seed(2)
    gate, up, x, bias = (torch.randn(*size) for size in ((6, 64), (6, 64), (3, 64), (6,)))
    w = layer(gate__weight=rows_of(gate, Q4), up__weight=rows_of(up, up_form), gate__bias=bias,
              up__bias=-bias)
    got = w.gated(True, activation, "gate", "up")(x)
    act: Callable[[Tensor], Tensor] = torch.nn.functional.silu
    if activation == "gelu":
        act = torch.nn.GELU("tanh")
    want = act(x @ dequantised(gate, Q4).t() + bias) * (x @ dequantised(up, up_form).t() - bias)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, want)


def test_columns_in_an_order_of_their_own() -> None:
    torch.manual_seed(3)
    weight, other, x = torch.randn(8, 64), torch.randn(8, 64), torch.randn(3, 64)
    order = torch.randperm(64)
    own = {"q__weight": rows_of(weight[:, order], Q4), "k__weight": rows_of(other, Q4)}
    w = layer(**own, **{f"q__{INPUT_ORDER[1:]}": order})
    got = w.linear(False, "q", "k")
    assert isinstance(got, ConcatLinear) and isinstance(got.parts[0], Reordered) and not w.tensors
    back = torch.empty(64, dtype=torch.long)
    back[order] = torch.arange(64)
    want = torch.cat([dequantised(weight[:, order], Q4)[:, back], dequantised(other, Q4)])
    torch.testing.assert_close(got(x), x @ want.t())
    w = layer(gate__weight=own["q__weight"], up__weight=own["q__weight"],
              **{f"{name}__{INPUT_ORDER[1:]}": order for name in ("gate", "up")})
    gated = w.gated(False, "silu", "gate", "up")
    assert isinstance(gated.linear, Reordered), "one product, of columns that are ordered once"
    y = x @ want[:8].t()
    torch.testing.assert_close(gated(x), torch.nn.functional.silu(y) * y)


def test_shared_tensors_are_read_once() -> None:
    torch.manual_seed(4)
    whole, reads = torch.randn(8, 64), []

    def read() -> Tensor:
        reads.append(1)
        return quantised_rows(whole, Q4, CPU)

    def halves(stacked: Tensor) -> list[tuple[str, Tensor]]:
        return [("one", stacked[::2]), ("two", stacked[1::2])]

    parts = dict(cut_lazily(LazyTensor(ROWS, read), (8, 64), halves))
    assert not reads and {part.dtype for part in parts.values()} == {ROWS}
    assert torch.equal(parts["two"].read(), quantised_rows(whole[1::2], Q4, CPU))
    assert torch.equal(parts["one"].read(), quantised_rows(whole[::2], Q4, CPU))
    assert len(reads) == 1


def test_other_formats_are_dequantised() -> None:
    torch.manual_seed(5)
    weight = torch.randn(8, 64)
    grouped = GroupedShape("gguf", Q4, (("a.v", None), ("a.k", Q8)))
    (spec,) = linear_tensors("a.q", 8, 64)
    assert held_rows(spec, rows_of(weight, Q4), grouped, torch.bfloat16).dtype is ROWS
    for other in (spec._replace(name="a.v.weight"), TensorSpec("a.router.weight", (8, 64))):
        plain = held_rows(other, rows_of(weight, Q4), grouped, torch.bfloat16)
        assert plain.dtype is torch.bfloat16
        assert torch.equal(materialised(plain), dequantised(weight, Q4).bfloat16())


def test_formats_of_tensors() -> None:
    """Head and embedding where they are named alone; groups that fit where they are made."""
    (spec,) = linear_tensors("a.q", 8, 96)
    wide = WeightFormat(4, 128, False)
    assert held_format(GroupedShape("gguf", wide), spec) is None
    assert held_format(GroupedShape(ONLINE, wide), spec) == WeightFormat(4, 32, False)
    (odd,) = linear_tensors("a.q", 8, 24)
    assert held_format(GroupedShape(ONLINE, wide), odd) is None is held_format(None, spec)
    for name in (EMBED, HEAD):
        outer = TensorSpec(name, (8, 128))
        assert held_format(GroupedShape("gguf", wide), outer) is None
        assert held_format(GroupedShape("gguf", None, ((outer.module, wide),)), outer) == wide
