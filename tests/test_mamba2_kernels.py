"""The recurrence of Mamba-2 and its convolution, in chunks, against one token after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actorium.kernels.causal_conv import conv_extend, conv_step
from actorium.kernels.gated_norm import norm_gated
from actorium.kernels.mamba2 import Sizes, split_inputs, ssd_extend, ssd_step, time_steps
from actorium.kernels.ragged import Run, plan_ragged

CPU = torch.device("cpu")
ROWS = 24
SIZES = (Sizes(6, 2, 8, 12), Sizes(4, 1, 16, 8), Sizes(3, 3, 5, 7))


class Layer:
    """Random inputs of one layer."""

    def __init__(self, tokens: int, sizes: Sizes, width: int, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=gen)

        self.sizes = sizes
        self.x = normal(tokens, sizes.channels)
        self.dt = time_steps(normal(tokens, sizes.heads), normal(sizes.heads), (0.0, torch.inf))
        self.a, self.skip = -normal(sizes.heads).exp(), normal(sizes.heads)
        self.weight, self.bias = normal(width, sizes.channels), normal(sizes.channels)
        self.states = normal(ROWS, sizes.heads, sizes.head_dim, sizes.state_dim)
        self.columns = normal(ROWS, width - 1, sizes.channels)

    def one_by_one(self, at: int, count: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """(out, state, columns) of a sequence's tokens, in float64, by the definition."""
        s, width = self.sizes, len(self.weight)
        whole = torch.cat((self.columns[row], self.x[at:at + count])).double()
        state, outs = self.states[row].double(), []
        for t in range(count):
            xbc = F.silu((whole[t:t + width] * self.weight).sum(0) + self.bias)
            x = xbc[:s.inner].view(s.heads, s.head_dim)
            b, c = xbc[s.inner:].view(2, s.groups, s.state_dim).repeat_interleave(
                s.heads // s.groups, 1)
            dt = self.dt[at + t].double()
            state = state * (dt * self.a).exp()[:, None, None]
            state = state + torch.einsum("h,hp,hn->hpn", dt, x, b)
            outs.append(torch.einsum("hpn,hn->hp", state, c) + self.skip[:, None] * x)
        return torch.stack(outs).float(), state.float(), whole[count:].float()


def check(runs: list[Run], sizes: Sizes, width: int, chunk: int = 64) -> None:
    """Outputs, states and columns of the runs, those kept on the way too."""
    layer = Layer(sum(run.length for run in runs), sizes, width)
    states, columns = layer.states.clone(), layer.columns.clone()
    plan = plan_ragged(runs, width, CPU, chunk)
    xbc = conv_extend(layer.x, columns, layer.weight, plan, layer.bias)
    out = ssd_extend(xbc, layer.dt, states, plan, sizes, layer.a, layer.skip)
    touched, at = set(), 0
    for run in runs:
        for tokens, row in [*run.saves, (run.length, run.row)]:
            want, state, kept = layer.one_by_one(at, tokens, run.row)
            torch.testing.assert_close(out[at:at + tokens], want, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(states[row], state, atol=1e-4, rtol=1e-4)
            assert torch.equal(columns[row], kept)
            touched.add(row)
        at += run.length
    others = [row for row in range(ROWS) if row not in touched]
    assert torch.equal(states[others], layer.states[others])
    assert torch.equal(columns[others], layer.columns[others])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("width", [2, 4])
def test_ragged_sequences(sizes: Sizes, width: int) -> None:
    check([Run(3, 130), Run(1, 7), Run(9, 64), Run(2, 1)], sizes, width)


def test_states_kept_on_the_way() -> None:
    check([Run(1, 130, ((64, 11), (100, 12), (130, 13))), Run(2, 5, ((1, 14),)), Run(3, 200)],
          SIZES[0], 4)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_layout(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    rows = data.draw(st.permutations(range(ROWS)))
    runs = []
    for length in lengths:
        cuts = data.draw(st.lists(st.integers(1, length), max_size=2))
        runs.append(Run(rows.pop(), length, tuple((cut, rows.pop()) for cut in cuts)))
    check(runs, data.draw(st.sampled_from(SIZES)), data.draw(st.integers(2, 4)),
          data.draw(st.sampled_from([4, 16, 64])))


def steps(layer: Layer, rows: Tensor, tokens: range, states: Tensor, columns: Tensor) -> Tensor:
    """The tokens one after the other, at the same place of each row's share of the inputs."""
    out, each = [], len(layer.x) // len(rows)
    for t in tokens:
        at = torch.arange(len(rows)) * each + t
        xbc = conv_step(layer.x[at], columns, rows, layer.weight, layer.bias)
        inputs = split_inputs(xbc, layer.dt[at], layer.sizes)
        out.append(ssd_step(inputs, states, rows, layer.a, layer.skip))
    return torch.stack(out, 1)


@pytest.mark.parametrize("sizes", SIZES)
def test_steps_equal_the_definition(sizes: Sizes) -> None:
    """Two sequences token by token, in rows that do not follow one another."""
    layer, rows = Layer(20, sizes, 4), torch.tensor([7, 2])
    states, columns = layer.states.clone(), layer.columns.clone()
    out = steps(layer, rows, range(10), states, columns)
    for i, row in enumerate(rows.tolist()):
        want, state, kept = layer.one_by_one(i * 10, 10, row)
        torch.testing.assert_close(out[i], want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(states[row], state, atol=1e-4, rtol=1e-4)
        assert torch.equal(columns[row], kept)
    others = [row for row in range(ROWS) if row not in (7, 2)]
    assert torch.equal(states[others], layer.states[others])


def test_the_same_inputs_again_give_the_same_bits() -> None:
    """From a kept state and its columns: so a rejected draft is undone, and a commit delayed."""
    layer, rows = Layer(24, SIZES[0], 4), torch.tensor([5, 1, 8])
    states, columns = layer.states.clone(), layer.columns.clone()
    steps(layer, rows, range(5), states, columns)
    kept, kept_columns = states.clone(), columns.clone()
    first = steps(layer, rows, range(5, 8), states, columns)
    again = steps(layer, rows, range(5, 8), kept, kept_columns)
    assert torch.equal(first, again) and torch.equal(states, kept)
    assert torch.equal(columns, kept_columns)


def test_steps_large_and_small() -> None:
    """dt of 1e3 forgets all, one of 0 changes nothing: no NaN on the way."""
    layer = Layer(96, SIZES[0], 2)
    layer.dt[:32], layer.dt[32:64] = 1e3, 0.0
    states = layer.states.clone()
    plan = plan_ragged([Run(4, 96)], 2, CPU)
    xbc = conv_extend(layer.x, layer.columns.clone(), layer.weight, plan, layer.bias)
    out = ssd_extend(xbc, layer.dt, states, plan, SIZES[0], layer.a, layer.skip)
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
