"""Gated delta rule and its convolution, in chunks, against one token after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actorium.kernels.causal_conv import conv_extend, conv_step
from actorium.kernels.experts import mix_experts, route
from actorium.kernels.gated_delta import Heads, delta_extend, delta_gates, delta_step
from actorium.kernels.gated_norm import gated_norm
from actorium.kernels.ragged import Run, plan_ragged

CPU = torch.device("cpu")
ROWS = 24
HEADS = (Heads(2, 6, 16, 8), Heads(1, 1, 8, 24), Heads(4, 4, 12, 12))


class Layer:
    """Random inputs of one layer."""

    def __init__(self, tokens: int, heads: Heads, width: int, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=gen)

        self.heads = heads
        self.x = normal(tokens, heads.channels)
        self.g = -normal(tokens, heads.values).square()
        self.beta = normal(tokens, heads.values).sigmoid()
        self.weight = normal(width, heads.channels)
        self.states = normal(ROWS, heads.values, heads.value_dim, heads.key_dim)
        self.columns = normal(ROWS, width - 1, heads.channels)

    def one_by_one(self, at: int, count: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """(out, state, columns) of a sequence's tokens, in float64, by the definition."""
        h, width = self.heads, len(self.weight)
        whole = torch.cat((self.columns[row], self.x[at:at + count])).double()
        state, outs = self.states[row].double(), []
        for t in range(count):
            qkv = F.silu((whole[t:t + width] * self.weight).sum(0))
            q, k = qkv[:2 * h.keys * h.key_dim].view(2, h.keys, h.key_dim)
            q, k = (F.normalize(y, dim=-1).repeat_interleave(h.values // h.keys, 0)
                    for y in (q, k))
            q = q * h.key_dim**-0.5
            v = qkv[2 * h.keys * h.key_dim:].view(h.values, h.value_dim)
            state = state * self.g[at + t].exp()[:, None, None]
            delta = (v - torch.einsum("hvk,hk->hv", state, k)) * self.beta[at + t][:, None]
            state = state + torch.einsum("hv,hk->hvk", delta, k)
            outs.append(torch.einsum("hvk,hk->hv", state, q))
        return torch.stack(outs).float(), state.float(), whole[count:].float()


def check(runs: list[Run], heads: Heads, width: int, chunk: int = 64) -> None:
    """Outputs, states and columns of the runs, those kept on the way too."""
    layer = Layer(sum(run.length for run in runs), heads, width)
    states, columns = layer.states.clone(), layer.columns.clone()
    plan = plan_ragged(runs, width, CPU, chunk)
    qkv = conv_extend(layer.x, columns, layer.weight, plan)
    out = delta_extend(qkv, layer.g, layer.beta, states, plan, heads)
    touched, at = set(), 0
    for run in runs:
        for tokens, row in [*run.saves, (run.length, run.row)]:
            want, state, kept = layer.one_by_one(at, tokens, run.row)
            torch.testing.assert_close(out[at:at + tokens], want, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(states[row], state, atol=2e-5, rtol=1e-4)
            assert torch.equal(columns[row], kept)
            touched.add(row)
        at += run.length
    others = [row for row in range(ROWS) if row not in touched]
    assert torch.equal(states[others], layer.states[others])
    assert torch.equal(columns[others], layer.columns[others])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("width", [2, 4])
def test_ragged_sequences(heads: Heads, width: int) -> None:
    check([Run(3, 130), Run(1, 7), Run(9, 64), Run(2, 1)], heads, width)


def test_states_kept_on_the_way() -> None:
    check([Run(1, 130, ((64, 11), (100, 12), (130, 13))), Run(2, 5, ((1, 14),)), Run(3, 200)],
          HEADS[0], 4)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_layout(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    rows = data.draw(st.permutations(range(ROWS)))
    runs = []
    for length in lengths:
        cuts = data.draw(st.lists(st.integers(1, length), max_size=2))
        runs.append(Run(rows.pop(), length, tuple((cut, rows.pop()) for cut in cuts)))
    check(runs, HEADS[0], data.draw(st.integers(2, 4)), data.draw(st.sampled_from([4, 16, 64])))


def test_keys_all_alike() -> None:
    """The triangular system is at its worst: nothing may grow."""
    heads, tokens = Heads(1, 1, 8, 8), 256
    layer = Layer(tokens, heads, 2)
    layer.x[:] = layer.x[0]
    layer.g.zero_()
    layer.beta.fill_(1.0)
    want, _, _ = layer.one_by_one(0, tokens, 1)
    plan = plan_ragged([Run(1, tokens)], 2, CPU)
    qkv = conv_extend(layer.x, layer.columns, layer.weight, plan)
    got = delta_extend(qkv, layer.g, layer.beta, layer.states, plan, heads)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", HEADS)
def test_steps_equal_an_extend(heads: Heads) -> None:
    """Two sequences token by token, in rows that do not follow one another."""
    layer = Layer(20, heads, 4)
    states, columns = layer.states.clone(), layer.columns.clone()
    rows, outs = torch.tensor([7, 2]), []
    for t in range(10):
        both = [t, 10 + t]
        qkv = conv_step(layer.x[both], columns, rows, layer.weight)
        outs.append(delta_step(qkv, layer.g[both], layer.beta[both], states, rows, heads))
    for i, row in enumerate((7, 2)):
        want, state, kept = layer.one_by_one(10 * i, 10, row)
        got = torch.stack([out[i] for out in outs])
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(states[row], state, atol=2e-5, rtol=1e-4)
        assert torch.equal(columns[row], kept)


def test_states_in_bf16() -> None:
    heads = HEADS[0]
    layer = Layer(100, heads, 4)
    states = layer.states.bfloat16()
    layer.states = states.float()
    plan = plan_ragged([Run(1, 100, ((50, 5),))], 4, CPU)
    want, state, _ = layer.one_by_one(0, 100, 1)
    qkv = conv_extend(layer.x, layer.columns.clone(), layer.weight, plan)
    out = delta_extend(qkv, layer.g, layer.beta, states, plan, heads)
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)
    assert torch.equal(states[1], state.bfloat16()) or (
        (states[1].float() - state).abs().max() < 2**-7 * state.abs().max())


def test_gates_and_norm_as_transformers_has_them() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    gen = torch.Generator().manual_seed(1)
    a, b, bias = (torch.randn(5, 4, generator=gen) for _ in range(3))
    g, beta = delta_gates(b, a, torch.full((4,), 0.7), bias[0])
    torch.testing.assert_close(g, -0.7 * F.softplus(a + bias[0]))
    torch.testing.assert_close(beta, b.sigmoid())
    norm = Qwen3_5RMSNormGated(8, 1e-6)
    x, z = torch.randn(3, 2, 8, generator=gen), torch.randn(3, 20, generator=gen)[:, 2:18]
    gate = z.unflatten(-1, (2, 8))
    with torch.no_grad():
        norm.weight.normal_(generator=gen)
        torch.testing.assert_close(gated_norm(x, norm.weight, gate, 1e-6), norm(x, gate))


def test_experts_equal_their_definition() -> None:
    gen = torch.Generator().manual_seed(2)
    x, logits = torch.randn(9, 6, generator=gen), torch.randn(9, 5, generator=gen)
    matrices = torch.randn(5, 6, 6, generator=gen)
    weights, chosen = route(logits, 2, normalised=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))
    got = mix_experts(x, weights, chosen, [lambda y, m=m: y @ m for m in matrices])
    want = torch.zeros(9, 6)
    for t in range(9):
        for weight, e in zip(weights[t], chosen[t], strict=True):
            want[t] += weight * (x[t] @ matrices[e])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
