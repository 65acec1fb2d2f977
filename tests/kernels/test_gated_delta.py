"""Gated delta rule and its convolution, in chunks, against one token after the other."""

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
from torch import Tensor

from actorium.kernels.ragged import ExtendRun, Ragged, plan_ragged
from actorium.kernels.reference.causal_conv import conv_extend, conv_step
from actorium.kernels.reference.delta_rule import Heads, delta_extend, delta_gates, delta_step
from actorium.kernels.reference.experts import mix_experts, route
from actorium.kernels.reference.gated_norm import gated_norm

HEADS = (Heads(2, 6, 16, 8), Heads(1, 1, 8, 24), Heads(4, 4, 12, 12))


class Delta(Layer):
    atol = 2e-5

    def draw(self, tokens: int, sizes: Heads, width: int) -> None:
        self.heads = sizes
        self.x = self.normal(tokens, sizes.channels)
        self.g = -self.normal(tokens, sizes.values).square()
        self.beta = self.normal(tokens, sizes.values).sigmoid()
        self.weight = self.normal(width, sizes.channels)
        self.states = self.normal(ROWS, sizes.values, sizes.value_dim, sizes.key_dim)
        self.columns = self.normal(ROWS, width - 1, sizes.channels)

    def extend(self, states: Tensor, columns: Tensor, plan: Ragged) -> Tensor:
        qkv = conv_extend(self.x, columns, self.weight, plan)
        return delta_extend(qkv, self.g, self.beta, states, plan, self.heads)

    def step(self, at: Tensor, states: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        qkv = conv_step(self.x[at], columns, rows, self.weight)
        return delta_step(qkv, self.g[at], self.beta[at], states, rows, self.heads)

    def token(self, mixed: Tensor, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        h = self.heads
        q, k = mixed[:2 * h.keys * h.key_dim].view(2, h.keys, h.key_dim)
        q, k = (F.normalize(y, dim=-1).repeat_interleave(h.values // h.keys, 0) for y in (q, k))
        q = q * h.key_dim**-0.5
        v = mixed[2 * h.keys * h.key_dim:].view(h.values, h.value_dim)
        state = state * self.g[t].exp()[:, None, None]
        delta = (v - torch.einsum("hvk,hk->hv", state, k)) * self.beta[t][:, None]
        state = state + torch.einsum("hv,hk->hvk", delta, k)
        return state, torch.einsum("hvk,hk->hv", state, q)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("width", [2, 4])
def test_ragged_sequences(heads: Heads, width: int) -> None:
    check_extend(Delta, heads, RAGGED, width)


def test_states_kept_on_the_way() -> None:
    check_extend(Delta, HEADS[0], KEPT, 4)


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_any_layout(layout: Layout) -> None:
    check_extend(Delta, HEADS[0], *layout)


def test_keys_all_alike() -> None:
    """The triangular system is at its worst: nothing may grow."""
    heads, tokens = Heads(1, 1, 8, 8), 256
    layer = Delta(tokens, heads, 2)
    layer.x[:] = layer.x[0]
    layer.g.zero_()
    layer.beta.fill_(1.0)
    want, _, _ = layer.one_by_one(0, tokens, 1)
    got = layer.extend(layer.states, layer.columns, plan_ragged([ExtendRun(1, tokens)], 2, CPU))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", HEADS)
def test_steps_equal_an_extend(heads: Heads) -> None:
    check_steps(Delta(20, heads, 4))


def test_states_in_bf16() -> None:
    layer = Delta(100, HEADS[0], 4)
    states = layer.states.bfloat16()
    layer.states = states.float()
    plan = plan_ragged([ExtendRun(1, 100, ((50, 5),))], 4, CPU)
    want, state, _ = layer.one_by_one(0, 100, 1)
    out = layer.extend(states, layer.columns.clone(), plan)
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
