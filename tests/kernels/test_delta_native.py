"""The C kernels of GatedDeltaNet layers against the torch reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from actorium.kernels.cpu.delta_native import NativeDelta, plan_runs
from actorium.kernels.cpu.native_library import library
from actorium.kernels.ragged import ExtendRun, plan_ragged
from actorium.kernels.reference.causal_conv import conv_extend, conv_step
from actorium.kernels.reference.delta_rule import Heads, delta_extend, delta_gates, delta_step
from actorium.kernels.reference.gated_norm import gated_norm

pytestmark = pytest.mark.usefixtures("all_threads")
CPU, EPS, ROWS = torch.device("cpu"), 1e-6, 20
RUNS = [ExtendRun(3, 130, ((64, 10), (100, 11), (130, 12))), ExtendRun(1, 2, ((1, 13),)),
        ExtendRun(2, 33), ExtendRun(5, 1), ExtendRun(6, 16)]


class Layer:
    """Random bf16 inputs of a layer, and both ways to run it on copies of its states."""

    def __init__(self, heads: Heads, width: int, state_dtype: torch.dtype,
                 tiles: bool = False) -> None:
        lib = library()
        if lib is None:
            pytest.skip("no C compiler, or torch with another OpenMP")
        if tiles and not lib.tiles_ready():
            pytest.skip("this processor has no AMX, nor fast products of bf16")
        gen = torch.Generator().manual_seed(0)
        self.heads, hv = heads, heads.values
        tokens, edge = sum(run.length for run in RUNS), heads.channels + hv * heads.value_dim

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=gen)

        self.p = normal(tokens, edge + 2 * hv + 3).bfloat16()[:, :-3]  # rows that lie apart
        self.columns = normal(ROWS, width - 1, heads.channels).bfloat16()
        self.states = normal(ROWS, hv, heads.value_dim, heads.key_dim).to(state_dtype)
        self.conv, self.bias, self.norm = normal(width, heads.channels), normal(hv), normal(
            heads.value_dim)
        self.decay = normal(hv).square()
        self.native = NativeDelta(lib, 2, heads, self.conv, self.decay, self.bias, self.norm, EPS,
                                  tiles)

    def reference(self, rows: int, run: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
                  ) -> tuple[Tensor, Tensor, Tensor]:
        """(out, columns, states); run(columns, states, g, beta) -> f32[rows, HV, V]."""
        columns, states, hv = self.columns.clone(), self.states.clone(), self.heads.values
        p = self.p[:rows].float()
        g, beta = delta_gates(p[:, -2 * hv:-hv], p[:, -hv:], self.decay, self.bias)
        z = p[:, self.heads.channels:-2 * hv].unflatten(-1, (hv, self.heads.value_dim))
        out = gated_norm(run(columns, states, g, beta), self.norm, z, EPS).flatten(1)
        return out, columns, states

    def compare(self, want: tuple[Tensor, Tensor, Tensor],
                run: Callable[[Tensor, Tensor], Tensor]) -> None:
        columns, states = self.columns.clone(), self.states.clone()
        out = run(columns, states)
        torch.testing.assert_close(out.float(), want[0], atol=2e-3, rtol=2**-8)
        assert torch.equal(columns, want[1])
        rounding = 2**-7 if states.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(states.float(), want[2].float(), atol=1e-5, rtol=rounding)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def state_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


def in_extend(layer: Layer, width: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The reference of a layer's extend over all of RUNS."""
    channels, plan = layer.p[:, :layer.heads.channels].float(), plan_ragged(RUNS, width, CPU)

    def extend(columns: Tensor, states: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        wide = columns.float()
        qkv = conv_extend(channels, wide, layer.conv, plan)
        columns.copy_(wide)
        return delta_extend(qkv, g, beta, states, plan, layer.heads)

    return extend


@pytest.mark.parametrize("tiles", [False, True], ids=["vectors", "tiles"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("heads", [Heads(2, 4, 128, 128), Heads(2, 6, 64, 32),
                                   Heads(1, 2, 256, 20), Heads(3, 3, 12, 9)])
def test_c_equals_torch(heads: Heads, width: int, state_dtype: torch.dtype, tiles: bool) -> None:
    layer = Layer(heads, width, state_dtype, tiles)
    rows, runs = torch.tensor([7, 3, 9, 1]), plan_runs(RUNS)
    channels = layer.p[:, :heads.channels].float()

    def step(columns: Tensor, states: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        wide = columns.float()
        qkv = conv_step(channels[:4], wide, rows, layer.conv)
        columns.copy_(wide)
        return delta_step(qkv, g, beta, states, rows, heads)

    layer.compare(layer.reference(len(layer.p), in_extend(layer, width)),
                  lambda columns, states: layer.native.extend(layer.p, columns, states, runs))
    layer.compare(layer.reference(4, step),
                  lambda columns, states: layer.native.step(layer.p[:4], columns, states, rows))


@pytest.mark.parametrize("tiles", [False, True], ids=["vectors", "tiles"])
def test_gates_at_their_ends(tiles: bool) -> None:
    """States that are forgotten at once, and others never; inputs of zeros."""
    layer = Layer(Heads(2, 4, 64, 64), 4, torch.float32, tiles)
    layer.p[:, -8:] *= 40
    layer.p[20:60, :layer.heads.channels] = 0
    layer.decay[1::2] = 1e-6
    layer.compare(layer.reference(len(layer.p), in_extend(layer, 4)),
                  lambda columns, states: layer.native.extend(layer.p, columns, states,
                                                              plan_runs(RUNS)))


@pytest.mark.parametrize("tokens", [1, 3])
def test_padding_has_no_state(state_dtype: torch.dtype, tokens: int) -> None:
    """Whatever lies where its rows would be, before the pools, is neither read nor written; the
    others are, to the bit, as without it."""
    heads = Heads(2, 6, 64, 32)
    layer = Layer(heads, 4, state_dtype)
    width = heads.channels + 2 * heads.values
    mixed, real = torch.tensor([-1, 7, -1, 0, -3]), torch.tensor([7, 0])
    p = layer.p[:5 * tokens]
    own = (mixed >= 0).repeat_interleave(tokens)
    waiting = torch.randn(ROWS, 2, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for rows, part in ((mixed, p), (real, p[own])):
        whole = [torch.cat((torch.full_like(pool, torch.nan), pool))
                 for pool in (layer.columns, layer.states, waiting)]
        pools = [pool[ROWS:] for pool in whole]
        if tokens == 1:
            out = layer.native.step(part, *pools[:2], rows)
        else:
            out = layer.native.window(part, *pools, rows, torch.ones_like(rows))
        assert all(pool[:ROWS].isnan().all() for pool in whole)
        found.append((out, pools))
    (out, pools), (right, wanted) = found
    assert torch.equal(out[own], right) and not out[~own].any()
    assert all(map(torch.equal, pools, wanted))
    assert not torch.equal(pools[1], layer.states)
