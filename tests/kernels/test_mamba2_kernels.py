"""The recurrence of Mamba-2 and its convolution, in chunks, against one token after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers_recurrence import (
    CPU,
    KEPT,
    RAGGED,
    ROWS,
    Layer,
    Layout,
    check_extend,
    check_steps,
    layouts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actorium.kernels.cpu.delta_native import plan_runs
from actorium.kernels.cpu.mamba_native import NativeConv, NativeMamba
from actorium.kernels.cpu.native_library import library
from actorium.kernels.ragged import ExtendRun, Ragged, plan_ragged
from actorium.kernels.reference.causal_conv import conv_extend, conv_step, conv_tokens
from actorium.kernels.reference.gated_norm import norm_gated
from actorium.kernels.reference.ssd import SSDSizes, split_inputs, ssd_extend, ssd_step, time_steps

SIZES = (SSDSizes(6, 2, 8, 12), SSDSizes(4, 1, 16, 8), SSDSizes(3, 3, 5, 7))


class Mamba(Layer):
    bias: Tensor
    atol = 1e-4

    def draw(self, tokens: int, sizes: SSDSizes, width: int) -> None:
        self.sizes, heads = sizes, sizes.heads
        self.x = self.normal(tokens, sizes.channels)
        self.dt = time_steps(self.normal(tokens, heads), self.normal(heads), (0.0, torch.inf))
        self.a, self.skip = -self.normal(heads).exp(), self.normal(heads)
        self.weight, self.bias = self.normal(width, sizes.channels), self.normal(sizes.channels)
        self.states = self.normal(ROWS, heads, sizes.head_dim, sizes.state_dim)
        self.columns = self.normal(ROWS, width - 1, sizes.channels)

    def extend(self, states: Tensor, columns: Tensor, plan: Ragged) -> Tensor:
        xbc = conv_extend(self.x, columns, self.weight, plan, self.bias)
        return ssd_extend(xbc, self.dt, states, plan, self.sizes, self.a, self.skip)

    def step(self, at: Tensor, states: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        xbc = conv_step(self.x[at], columns, rows, self.weight, self.bias)
        inputs = split_inputs(xbc, self.dt[at], self.sizes)
        return ssd_step(inputs, states, rows, self.a, self.skip)

    def token(self, mixed: Tensor, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        s = self.sizes
        x = mixed[:s.inner].view(s.heads, s.head_dim)
        b, c = mixed[s.inner:].view(2, s.groups, s.state_dim).repeat_interleave(
            s.heads // s.groups, 1)
        dt = self.dt[t].double()
        state = state * (dt * self.a).exp()[:, None, None]
        state = state + torch.einsum("h,hp,hn->hpn", dt, x, b)
        return state, torch.einsum("hpn,hn->hp", state, c) + self.skip[:, None] * x


class InC(Mamba):
    """The same by the C kernel, whose inputs are bf16, and which makes the time steps itself."""

    def draw(self, tokens: int, sizes: SSDSizes, width: int) -> None:
        super().draw(tokens, sizes, width)
        lib = library()
        if lib is None:
            pytest.skip("no C kernels here")
        raw, bias = self.normal(tokens, sizes.heads).bfloat16(), self.normal(sizes.heads)
        self.x, self.columns = self.x.bfloat16(), self.columns.bfloat16()
        self.dt = time_steps(raw, bias, (0.01, 3.0))
        self.p = torch.cat((self.normal(tokens, 5).bfloat16(), self.x, raw), 1)[:, 5:]
        self.native = NativeMamba(lib, 2, sizes, self.weight, self.bias,
                                  (self.a, self.skip, bias), (0.01, 3.0), self.normal(sizes.inner),
                                  1e-5)

    def extend(self, states: Tensor, columns: Tensor, plan: Ragged) -> Tensor:
        return self.native.extend(self.p, columns, states, plan_runs(plan.runs))

    def step(self, at: Tensor, states: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        return self.native.step(self.p[at], columns, states, rows)

    def check(self, out: Tensor, state: Tensor, columns: Tensor, at: int, row: int) -> None:
        super().check(out, state, columns.float(), at, row)


@pytest.mark.parametrize(("width", "activate"), [(2, False), (4, True)])
def test_the_convolution_in_c(width: int, activate: bool) -> None:
    """As the reference; and its chunks, and single tokens, have the same bits."""
    lib = library()
    if lib is None:
        pytest.skip("no C kernels here")
    gen = torch.Generator().manual_seed(width)
    x = torch.randn((30, 37), generator=gen).bfloat16()[:, 4:]
    columns = torch.randn((9, width - 1, 33), generator=gen).bfloat16()
    weight, bias = torch.randn((width, 33), generator=gen), torch.randn(33, generator=gen)
    native = NativeConv(lib, 2, weight, bias if activate else None, activate)
    runs = [ExtendRun(1, 21, ((3, 5), (21, 6))), ExtendRun(4, 1), ExtendRun(2, 8)]
    plan, kept, own = plan_ragged(runs, width, CPU), columns.clone(), columns.clone()
    want = conv_tokens(x, kept, weight, plan, torch.float32, bias if activate else None, activate)
    got = native.extend(x, own, plan_runs(runs))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(own, kept)
    at, steps = 0, columns.clone()
    for run in runs:
        one = torch.cat([native.step(x[t:t + 1], steps, torch.tensor([run.row]))
                         for t in range(at, at + run.length)])
        assert torch.equal(one, got[at:at + run.length])
        assert torch.equal(steps[run.row], own[run.row])
        at += run.length
    before = steps.clone()
    assert not native.step(x[:1], steps, torch.tensor([-1])).any() and torch.equal(steps, before)


@pytest.mark.parametrize("sizes", [*SIZES, SSDSizes(2, 1, 6, 40)])
@pytest.mark.parametrize("width", [2, 4])
def test_the_c_kernel(sizes: SSDSizes, width: int) -> None:
    check_extend(InC, sizes, RAGGED, width)
    check_extend(InC, sizes, KEPT, width)
    check_steps(InC(20, sizes, width))


def test_padding_in_the_c_kernel_has_no_state() -> None:
    layer = InC(4, SIZES[0], 4)
    states, columns = layer.states.clone(), layer.columns.clone()
    out = layer.step(torch.arange(4), states, columns, torch.tensor([3, -1, 5, -1]))
    assert not out[[1, 3]].any()
    layer.check_others(states, columns, {3, 5})


@pytest.mark.parametrize("sizes", SIZES)
def test_the_gated_norm_in_c(sizes: SSDSizes) -> None:
    layer = InC(7, sizes, 4)
    y, z = layer.normal(7, sizes.heads, sizes.head_dim), layer.normal(7, 2 * sizes.inner).bfloat16()
    own = layer.native
    want = norm_gated(y.flatten(1), own.norm, z[:, :sizes.inner].float(), own.eps, sizes.groups)
    torch.testing.assert_close(own.gate(y, z[:, :sizes.inner]).float(), want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("width", [2, 4])
def test_ragged_sequences(sizes: SSDSizes, width: int) -> None:
    check_extend(Mamba, sizes, RAGGED, width)


def test_states_kept_on_the_way() -> None:
    check_extend(Mamba, SIZES[0], KEPT, 4)


@settings(max_examples=25, deadline=None)
@given(layouts(), st.sampled_from(SIZES))
def test_any_layout(layout: Layout, sizes: SSDSizes) -> None:
    check_extend(Mamba, sizes, *layout)


@pytest.mark.parametrize("sizes", SIZES)
def test_steps_equal_the_definition(sizes: SSDSizes) -> None:
    check_steps(Mamba(20, sizes, 4))


def test_the_same_inputs_again_give_the_same_bits() -> None:
    """From a kept state and its columns: so a rejected draft is undone, and a commit delayed."""
    layer, rows = Mamba(24, SIZES[0], 4), torch.tensor([5, 1, 8])
    states, columns = layer.states.clone(), layer.columns.clone()
    layer.steps(rows, range(5), states, columns)
    kept, kept_columns = states.clone(), columns.clone()
    first = layer.steps(rows, range(5, 8), states, columns)
    again = layer.steps(rows, range(5, 8), kept, kept_columns)
    assert torch.equal(first, again) and torch.equal(states, kept)
    assert torch.equal(columns, kept_columns)


def test_steps_large_and_small() -> None:
    """dt of 1e3 forgets all, one of 0 changes nothing: no NaN on the way."""
    layer = Mamba(96, SIZES[0], 2)
    layer.dt[:32], layer.dt[32:64] = 1e3, 0.0
    states = layer.states.clone()
    plan = plan_ragged([ExtendRun(4, 96)], 2, CPU)
    out = layer.extend(states, layer.columns.clone(), plan)
    want, state, _ = layer.one_by_one(0, 96, 4)
    torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(states[4], state, atol=1e-3, rtol=1e-4)


def test_time_steps() -> None:
    dt, bias = torch.tensor([[-30.0, 0.0, 50.0]]), torch.tensor([0.0, 1.0, 0.0])
    got = time_steps(dt.bfloat16(), bias, (0.25, 4.0))
    torch.testing.assert_close(got, torch.tensor([[0.25, F.softplus(bias[1]), 4.0]]))


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_norm_of_what_is_gated(groups: int) -> None:
    gen = torch.Generator().manual_seed(1)
    x, gate = torch.randn((5, 12), generator=gen), torch.randn((5, 30), generator=gen)[:, 6:18]
    weight = torch.randn(12, generator=gen)
    got = norm_gated(x, weight, gate, 1e-3, groups)
    gated = (x.double() * F.silu(gate.double())).view(5, groups, -1)
    want = gated / (gated.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(got, (want.view(5, 12) * weight).float())
    assert norm_gated(x, weight, gate.bfloat16(), 1e-3, groups).dtype is torch.bfloat16
